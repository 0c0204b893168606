"""Differentiation of ONNX graphs: reverse and forward mode, derivatives built from both, and recomputation.

Gradient rules are looked up by operator; this package refers to none of them by name.
"""
