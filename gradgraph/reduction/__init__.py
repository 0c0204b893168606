"""Reduction: shrink a model that shows a fault to a small one, without names and weights, that still shows it.

It knows models as messages and the symptoms of faults, but not their causes.
"""
