"""Decide which stored tensors are weights, with a reason for each."""
