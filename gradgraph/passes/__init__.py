"""Passes over a whole model, a file each and idempotent: the normal form (``normal``), modes, randomness, precision.

They know operators and their forms, and nothing of gradients.
"""
