"""Differentiation of ONNX graphs: reverse and forward mode, derivatives built from both, and recomputation.

It looks up gradient rules by operator and refers to none of them by name.
"""
