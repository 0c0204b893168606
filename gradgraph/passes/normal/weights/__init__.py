"""Decides which stored tensors are weights, and says why."""
