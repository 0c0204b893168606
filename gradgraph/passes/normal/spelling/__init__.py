"""Rewrite equivalent spellings of a model in one canonical form, with one pass for each."""
