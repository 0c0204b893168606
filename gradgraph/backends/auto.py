"""The backend ``auto``: one file for every onnxruntime, with named operators as model-local functions."""

from gradgraph.backends.backend import Backend

AUTO = Backend(
    name="auto",
    about="runs in every onnxruntime; a Trainer replaces functions with the fastest forms for its machine",
    keeps_functions=True,
)
