"""Validation: checks whether a model can be computed, and reports why not in one sentence. Nothing is changed."""
