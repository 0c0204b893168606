"""What is known of types and shapes: ONNX's inference, what it loses, and what it gets wrong."""
