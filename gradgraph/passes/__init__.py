"""Passes over a whole model, one file each and idempotent: the normal form (``normal``), modes, randomness, precision.

Passes refer to operators and their forms, but not to gradients.
"""
