"""The kinds of faults by name."""

from __future__ import annotations

# how each shows, in the order in which "auto" looks for them: each needs what the one before does
FAULTS = {
    "build": "the model's gradients cannot be written",
    "run": "onnxruntime refuses the model, ends, or computes something else than the reference implementation",
    "gradient-run": "onnxruntime does so with the model's gradients",
    "gradient": "a gradient differs from central differences",
}
