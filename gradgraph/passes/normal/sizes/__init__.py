"""Infer types and shapes with ONNX shape inference, complete sizes that it loses, and correct its mistakes."""
