"""Differentiation of ONNX graphs: reverse and forward mode, derivatives built from both, and recomputation.

It calls rules, but knows none of them by name.
"""
