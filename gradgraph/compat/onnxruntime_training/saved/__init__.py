"""The checkpoint file of onnxruntime-training: a flatbuffer, read and written without its library."""
