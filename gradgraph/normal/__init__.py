"""The normal form: what every model is brought to before it is differentiated.

One opset, no functions, all attributes written, explicit pads, one kind of constant, shapes inferred: whoever writes a
rule or a pass needs to think of one form of each operator only. Each file here is one pass; ``normalise`` runs them.
"""

from __future__ import annotations

from gradgraph.normal.bodies import has_body
from gradgraph.normal.pipeline import blaming, expand, normalise, pass_quantization

__all__ = ["blaming", "expand", "has_body", "normalise", "pass_quantization"]
