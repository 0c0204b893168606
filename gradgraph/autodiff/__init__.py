"""Differentiation of ONNX graphs: reverse and forward mode, what is made of both, and what is computed again.

It calls rules, and knows none of them by name.
"""
