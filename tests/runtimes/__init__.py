"""Four small networks, trained in every runtime that is installed here, and held against onnxruntime."""
