"""Which stored tensors are weights, and why."""
