"""Functions are read as the nodes that they consist of: those of a model, and those that ONNX defines operators by."""
