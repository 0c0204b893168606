"""The normal form: every model is brought to it before it is differentiated.

One opset, no functions, all attributes written, explicit pads, one kind of constant, shapes inferred: whoever writes a
rule or a pass needs to think of one form of each operator only. ``order.py`` lists the passes; they live in folders:

- ``functions``, ``opsets``, ``dialects``: operators of other kinds are written with operators of opset 21;
- ``spelling``: one way to write what a file may write in several;
- ``sizes``: types and shapes;
- ``validating``: refusals; nothing is changed;
- ``weights``: which tensors are weights, and why;
- ``simplifying``: nothing wasteful stays; its ``clean.py`` lists the passes that run after gradients are written.
"""

from __future__ import annotations

from gradgraph.passes.normal.functions.function_bodies import has_body
from gradgraph.passes.normal.normal_form import blaming, expand, load_plain, normalise, pass_quantization

__all__ = ["blaming", "expand", "has_body", "load_plain", "normalise", "pass_quantization"]
