"""Validation: check that a model can be computed, and report what is wrong in one sentence, without changing it."""
