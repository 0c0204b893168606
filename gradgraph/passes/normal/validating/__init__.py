"""Whether a model can be computed at all; if not, one sentence says why. Nothing is changed."""
