"""Infer types and shapes with ONNX's inference, complete sizes that it loses, and correct its mistakes."""
