"""Idempotent passes over a whole model, one file each: the normal form (``normal``), modes, randomness, precision.

Passes depend on operators and their forms, but not on gradients.
"""
