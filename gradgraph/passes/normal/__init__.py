"""The normal form: every model is brought to it before it is differentiated.

One opset, no functions, all attributes written, explicit pads, one kind of constant, shapes inferred: a rule or a pass
handles one form of each operator only. ``order.py`` lists the passes, which are grouped in folders:

- ``functions``, ``opsets``, ``dialects``: rewrite other operators with those of opset 21;
- ``spelling``: choose one of several equivalent spellings;
- ``sizes``: infer types and shapes;
- ``validating``: reject invalid models, without changes;
- ``weights``: decide which tensors are weights, and why;
- ``simplifying``: remove waste; its ``clean.py`` lists the passes that run after differentiation.
"""

from __future__ import annotations

from gradgraph.passes.normal.functions.function_bodies import has_body
from gradgraph.passes.normal.normal_form import blaming, expand, load_plain, normalise, pass_quantization

__all__ = ["blaming", "expand", "has_body", "load_plain", "normalise", "pass_quantization"]
