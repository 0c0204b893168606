"""Passes over a whole model, one file each and idempotent: the normal form (``normal``), modes, randomness, precision.

They know operators and their forms, but not gradients.
"""
