"""Train any ONNX model, anywhere ONNX runs."""
