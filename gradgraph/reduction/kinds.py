"""The kinds of faults by name."""

# by name, in the order in which "auto" checks for them: a model that has one fault cannot be checked for later ones
FAULTS = {
    "build": "the model's gradients cannot be written",
    "run": "onnxruntime rejects the model, crashes, or differs from the reference implementation",
    "gradient-run": "the same for the model's gradients",
    "gradient": "a gradient differs from central differences",
}
