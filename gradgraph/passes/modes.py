"""Training mode and evaluation mode: the two forms in which one model's graph is used.

``training_mode``:

1. BatchNormalization normalises with the statistics of the batch, whatever mode it was exported in, and each running
   statistic gets an updated value ``running·momentum + batch·(1 − momentum)`` (ONNX's formula; the batch variance is
   the biased one). A layer whose scale and bias are both frozen stays in evaluation mode, so that a frozen backbone
   keeps its statistics.
2. Dropout draws its mask from a counter-based generator written in the graph (see ``gradgraph.passes.randomness``).

``evaluation_mode``:

1. BatchNormalization normalises with its running statistics and has one output.
2. Dropout passes its input on.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.prune import prune

Mask = Callable[[Builder, Var, Var], Var]


def training_mode(model: ir.Model, op: Builder, keep_mask: Mask, frozen: set[ir.Value]) -> dict[ir.Value, Var]:
    """Put ``model`` in training mode, in place.

    Args:
        model: in normal form.
        op: writes the nodes; they are inserted where they belong.
        keep_mask: ``keep_mask(op, x, ratio)`` gives a boolean mask, shaped like ``x``, true with probability
            ``1 − ratio``.
        frozen: the initializers that do not change.

    Returns:
        The updated value of each running statistic.
    """
    statistics: dict[ir.Value, Var] = {}
    for node in list(model.graph):
        if node.domain == "" and node.op_type == "Dropout":
            _draw_mask(op, node, keep_mask)
        elif node.domain == "" and node.op_type == "BatchNormalization" and not _is_frozen(node, frozen):
            statistics.update(_normalise_by_batch(op, node))
    return statistics


def evaluation_mode(model: ir.Model) -> ir.Model:
    """Put ``model`` (in normal form) in evaluation mode, in place, and return it."""
    op = Builder()
    for node in list(model.graph):
        if node.domain == "" and node.op_type == "Dropout":
            x, mask = node.inputs[0], node.outputs[1] if len(node.outputs) > 1 else None
            assert x is not None
            _replace(op, node, 0, op.wrap(x))
            if mask is not None and (mask.uses() or mask.is_graph_output()):
                everything = op.full(op.shape(op.wrap(x)), True, ir.DataType.BOOL)
                _insert_before(op, node)
                _replace(op, node, 1, everything)
        elif node.domain == "" and node.op_type == "BatchNormalization" and _flag(node, "training_mode"):
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
            for i, statistic in enumerate(node.inputs[3:5], start=1):
                if i < len(node.outputs) and statistic is not None:
                    _replace(op, node, i, op.wrap(statistic))
            node.resize_outputs(1)
    return prune(model)


def _is_frozen(node: ir.Node, frozen: set[ir.Value]) -> bool:
    return all(v in frozen for v in node.inputs[1:3])


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _normalise_by_batch(op: Builder, node: ir.Node) -> dict[ir.Value, Var]:
    """Training form; momentum 0 makes the outputs the batch's own statistics, which the gradient needs anyway.

    onnxruntime writes those outputs over the buffers of inputs 3 and 4, even where they are graph inputs. So the
    node gets scratch tensors of its own there, and the running statistics are updated beside it.
    """
    x, scale, bias, *running = node.inputs
    momentum = node.attributes["momentum"].as_float() if "momentum" in node.attributes else 0.9
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    assert x is not None and scale is not None and bias is not None
    kept = [op.wrap(v) for v in running if v is not None]
    op.scope = node.name or ""
    y, *batch = op.BatchNormalization(
        op.wrap(x),
        op.wrap(scale),
        op.wrap(bias),
        *(-k for k in kept),
        outputs=3,
        training_mode=1,
        momentum=0.0,
        epsilon=epsilon,
    )
    updated = [k * momentum + b * (1.0 - momentum) for k, b in zip(kept, batch, strict=True)]
    y.value.shape = node.outputs[0].shape
    _insert_before(op, node)
    for i, var in enumerate([y, *updated][: len(node.outputs)]):
        _replace(op, node, i, var)
    node.graph.remove(node, safe=True)  # type: ignore[union-attr]
    return {k.value: u for k, u in zip(kept, updated, strict=True)}


def _draw_mask(op: Builder, node: ir.Node, keep_mask: Mask) -> None:
    """``y = x · mask / (1 − ratio)``."""
    x = op.wrap(node.inputs[0])  # type: ignore[arg-type]
    given = node.inputs[1] if len(node.inputs) > 1 else None
    ratio = op.const(0.5, x.dtype) if given is None else op.wrap(given)
    if ratio.const is not None and float(ratio.const) == 0.0:
        mask = op.full(op.shape(x), True, ir.DataType.BOOL)
        y = x
    else:
        op.scope = node.name or ""
        mask = keep_mask(op, x, ratio)
        y = x * op.cast(mask, x.dtype) * op.cast(1.0 / (1.0 - ratio), x.dtype)
    y = op.like(y, x)
    _insert_before(op, node)
    for i, var in enumerate([y, mask][: len(node.outputs)]):
        _replace(op, node, i, var)
    node.graph.remove(node, safe=True)  # type: ignore[union-attr]


def _insert_before(op: Builder, node: ir.Node) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    op.finish(graph, before=node)


def _replace(op: Builder, node: ir.Node, index: int, new: Var) -> None:
    """``new`` instead of an output of ``node``; a graph output keeps its name."""
    old = node.outputs[index]
    if old.is_graph_output():
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        name = old.name
        old.name = f"{name}/before"
        new = op.Identity(new)
        new.value.name = name
        new.value.type, new.value.shape = old.type, old.shape
        _insert_before(op, node)
        graph.outputs[:] = [new.value if v is old else v for v in graph.outputs]
    old.replace_all_uses_with(new.value)
