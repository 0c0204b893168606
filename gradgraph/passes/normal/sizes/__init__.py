"""Types and shapes: ONNX's inference, completed where it loses sizes and corrected where it is wrong."""
