"""Passes over a whole model, a file each: training and evaluation form, random numbers, precision; idempotent."""
