"""Placement of a step's nodes by onnxruntime-gpu, without a GPU: its real kernels, with stand-ins for CUDA."""
