"""Explanation of NaN gradients by Where nodes that discard non-finite values.

If a Where discards a value, the operator that computed it receives a cotangent of 0; and 0 times the infinite or
undefined slope at that value is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import Finding
from gradgraph.graph.checks import describe

Array = np.ndarray[Any, Any]
_REMEDY = (
    "feed the operator that computes them a harmless input there, with another Where before it: Sqrt(Where(x > 0, x, "
    "1)) in place of Sqrt(x)"
)


def discarded_lanes(
    model: ir.Model, feeds: Mapping[str, Array], start: Callable[[ir.Model], Callable[..., Mapping[str, Array]]]
) -> Iterator[Finding]:
    """Yield findings about the Where nodes of the main graph that discard non-finite values.

    Args:
        model: the model in normal form; it is not changed.
        feeds: the inputs at which a gradient is NaN.
        start: returns, for a model, a function that runs it.
    """
    work = model.clone()
    wheres = [n for n in work.graph if n.domain == "" and n.op_type == "Where"]
    read = dict.fromkeys(v for n in wheres for v in n.inputs if v is not None and v.producer() is not None)
    if not wheres:
        return
    work.graph.outputs.extend(v for v in read if not v.is_graph_output())
    stored = {v.name or "": v.const_value for n in wheres for v in n.inputs if v is not None}
    known = {name: tensor.numpy() for name, tensor in stored.items() if tensor is not None}
    known.update(feeds)
    known.update(start(work)(feeds))
    for node in wheres:
        condition, taken, other = (known[v.name or ""] for v in node.inputs if v is not None)
        lost = np.where(condition, other, taken)
        if lost.dtype.kind == "f" and not np.isfinite(lost).all():
            count = int((~np.isfinite(lost)).sum())
            words = f"discards {count} of {lost.size} non-finite values; computing them has a NaN slope"
            yield Finding(describe(node), words, "", _REMEDY, "warning")
