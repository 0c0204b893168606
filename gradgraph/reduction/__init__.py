"""Reduction: a model that shows a fault becomes a small one, without names and weights, that still shows it.

It knows models as messages, and faults by how they show; it must not know why they come about.
"""
