"""Expand functions into nodes: a model's own functions, and the function bodies that ONNX defines for operators."""
