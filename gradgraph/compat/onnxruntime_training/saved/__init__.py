"""The checkpoint file of onnxruntime-training: a flatbuffer."""
