"""Reduction of a model with a fault to a small model, without names and weights, that has the same fault.

It handles models as protobuf messages, and faults by their symptoms, regardless of the cause.
"""
