"""The normal form, to which every model is converted before differentiation.

A model in normal form has opset 21, no functions, all attributes set, explicit pads, initializers as its only
constants, and inferred shapes. A rule or a pass therefore handles only one form of each operator. ``order.py`` lists
the passes, which are grouped in folders:

- ``functions``, ``opsets``, ``dialects``: rewrite functions, other opsets and other domains with operators of opset 21;
- ``spelling``: choose one of several equivalent spellings;
- ``sizes``: infer types and shapes;
- ``validating``: reject invalid models, without changes;
- ``weights``: decide which tensors are weights, and why;
- ``simplifying``: remove redundant nodes; its ``clean.py`` lists the passes that run after differentiation.
"""

from gradgraph.passes.normal.functions.function_bodies import has_body
from gradgraph.passes.normal.normal_form import blaming, expand, load_plain, load_runnable, normalise, pass_quantization

__all__ = ["blaming", "expand", "has_body", "load_plain", "load_runnable", "normalise", "pass_quantization"]
