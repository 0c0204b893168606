"""Data-parallel training in several processes (ranks) over MPI: ``gg.DataParallel``.

Each rank gets every N-th sample of a batch and runs gradient.onnx. Gradients, loss and counts are in one buffer, which
one all-reduce per step sums over all ranks; then every rank runs apply.onnx, so that all have the same weights, bit for
bit. This package implements ``gradgraph.runtime.execution.team``; nothing else depends on MPI.
"""
