"""Functions expanded into nodes: a model's own functions, and ONNX's function bodies of operators."""
