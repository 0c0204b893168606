"""Decides which stored tensors are weights, and gives the reason."""
