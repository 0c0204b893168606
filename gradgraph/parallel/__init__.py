"""Many processes that train one model together over MPI: ``gg.DataParallel``, the door.

Each rank takes every N-th sample of a batch and runs gradient.onnx; gradients, loss and counts lie in one buffer, which
is added up over all ranks in one message a step; then every rank runs apply.onnx and has the same weights, to the bit.
It fills ``gradgraph.runtime.execution.team``; the trainer, its loop and its data know nothing of MPI.
"""
