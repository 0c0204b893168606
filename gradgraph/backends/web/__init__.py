"""The backend ``web``: onnxruntime's JavaScript packages, which run the same file as every onnxruntime."""

from gradgraph.backends.backend import Backend, lowering_in

WEB = Backend(
    name="web",
    about="the same file as auto, with less memory for large weights of 4 or 8 bits",
    load=lowering_in(f"{__name__}.web_lowering"),
    keeps_functions=True,
)
