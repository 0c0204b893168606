"""Where onnxruntime-gpu places the nodes of a step, seen without a GPU: real kernels, on stand-ins for CUDA."""
