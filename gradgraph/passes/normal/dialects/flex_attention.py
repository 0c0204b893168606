"""FlexAttention of ai.onnx.preview: attention whose scores and probabilities pass through user-defined subgraphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import infer_nodes
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal.dialects.contrib import fused
from gradgraph.passes.normal.edit import graph_of
from gradgraph.passes.normal.functions.inline import applied
from gradgraph.passes.normal.opsets.attention_formula import Masks, attend


@fused("FlexAttention", domain="ai.onnx.preview")
def flex_attention(
    op: Builder,
    node: ir.Node,
    q: Var,
    k: Var,
    v: Var,
    *,
    scale: float = 0.0,
    softmax_precision: int = 0,
    score_mod: ir.Graph | None = None,
    prob_mod: ir.Graph | None = None,
) -> Any:
    default = q.dtype if q.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    precision = ir.DataType(softmax_precision) if softmax_precision else default
    mods: dict[str, Any] = {"score_mod": _applying(op, node, score_mod), "prob_mod": _applying(op, node, prob_mod)}
    return attend(op, q, k, v, Masks(), scale=scale, precision=precision, **mods).y


def _applying(op: Builder, node: ir.Node, graph: ir.Graph | None) -> Callable[[Var], Var] | None:
    """Return a function that applies ``graph`` to a value by inlining its nodes; None if ``graph`` is None."""
    if graph is None:
        return None
    body, opset = graph, node.version or graph_of(node).opset_imports.get("", OPSET)

    def call(x: Var) -> Var:
        for value in list(body.initializers.values()):
            if value.const_value is not None:
                value.replace_all_uses_with(op.const(value.const_value.numpy()).value)
        nodes, copies = applied(body, [x.value], functools.partial(op.fresh_in, node.name or ""))
        for new in nodes:
            new.version = new.version or opset
        infer_nodes(nodes, opset)
        op.nodes.extend(nodes)
        result = op.wrap(copies[body.outputs[0]])
        if result.value.type is None:
            result.value.type = x.value.type
        return op.like(result, x)

    return call
