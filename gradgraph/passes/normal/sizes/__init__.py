"""Types and shapes are inferred by ONNX; we add sizes that it loses and correct those that it gets wrong."""
