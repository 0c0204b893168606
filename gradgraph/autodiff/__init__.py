"""Reverse-mode differentiation of ONNX graphs."""
