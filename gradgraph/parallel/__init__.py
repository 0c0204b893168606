"""Data-parallel training in several processes over MPI: ``gg.DataParallel``.

Each rank gets every N-th sample of a batch and runs gradient.onnx; gradients, loss and counts are in one buffer, which
one all-reduce per step sums over all ranks; then every rank runs apply.onnx and has the same weights, bit for bit. It
implements ``gradgraph.runtime.execution.team``; the trainer, its loop and its data do not depend on MPI.
"""
