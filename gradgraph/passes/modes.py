"""Training mode and evaluation mode: the two forms in which one model's graph is used.

``training_mode``:

1. BatchNormalization normalises with the statistics of the batch, regardless of the mode in which it was exported, and
   each running statistic gets an updated value ``running·momentum + batch·(1 − momentum)`` (ONNX's formula; the batch
   variance is the biased one). A layer whose scale and bias are both frozen stays in evaluation mode, so that a frozen
   backbone keeps its statistics. A layer whose statistics the graph computes (PyTorch's ``track_running_stats=False``)
   stays in evaluation mode, too.
2. Dropout draws its mask from a counter-based generator written in the graph (see ``gradgraph.passes.randomness``).

``evaluation_mode``:

1. BatchNormalization normalises with its running statistics and has one output.
2. Dropout returns its input.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from gradgraph.errors import BuildError
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.graph.nodes import input_at, inputs_of, is_standard
from gradgraph.graph.prune import prune
from gradgraph.graph.shapes import constant_of
from gradgraph.passes.normal.edit import Editor, attributes, graphs_of

Mask = Callable[[Builder, Var, Var], Var]


def training_mode(model: ir.Model, op: Builder, keep_mask: Mask, frozen: set[ir.Value]) -> dict[ir.Value, Var]:
    """Put ``model`` in training mode, in place.

    Args:
        keep_mask: ``keep_mask(op, x, ratio)`` returns a boolean mask, shaped like ``x``, true with probability
            ``1 − ratio``.
        frozen: the initializers that do not change.

    Returns:
        The updated value of each running statistic.
    """
    _refuse_inside_bodies(model, frozen)
    editor = Editor(model, op)
    statistics: dict[ir.Value, Var] = {}
    for node in list(model.graph):
        if is_standard(node, "Dropout"):
            editor.replace(node, *_drop(op, node, keep_mask))
        elif moves_statistics(node, frozen):
            y, updated = _normalise_by_batch(op, node, statistics)
            editor.replace(node, *[y, *updated.values()][: len(node.outputs)])
            statistics.update(updated)
        elif all(v is not None and v.is_initializer() for v in node.inputs[3:5]):
            _normalise_by_running(editor, node)
    return statistics


def drop_in_loss(model: ir.Model, op: Builder, keep_mask: Mask) -> None:
    """Put the Dropouts that a loss adds to a model in training mode, in place."""
    editor = Editor(model, op)
    for node in [n for n in model.graph if is_standard(n, "Dropout")]:
        editor.replace(node, *_drop(op, node, keep_mask))


def evaluation_mode(model: ir.Model) -> ir.Model:
    """Put ``model`` (in normal form) in evaluation mode, in place, and return it."""
    editor = Editor(model)
    for node in list(model.graph):
        if is_standard(node, "Dropout"):
            editor.replace(node, *_keep_all(editor.op, node))
        else:
            _normalise_by_running(editor, node)
    return prune(model)


def _normalise_by_running(editor: Editor, node: ir.Node) -> None:
    """Replace ``node`` by its evaluation mode, if it is a BatchNormalization exported in training mode."""
    if not is_standard(node, "BatchNormalization") or not node.attributes["training_mode"].as_int():
        return
    inputs, kept = [editor.op.wrap(v) for v in node.inputs], attributes(node)
    epsilon, momentum = kept["epsilon"], kept["momentum"]
    y = editor.op.BatchNormalization(*inputs, epsilon=epsilon, momentum=momentum, training_mode=0)
    editor.replace(node, *[y, *inputs[3:5]][: len(node.outputs)])


def _refuse_inside_bodies(model: ir.Model, frozen: set[ir.Value]) -> None:
    """Raise BuildError if a body draws masks or updates statistics, which would differ in each iteration."""
    for graph in graphs_of(model):
        for node in graph if graph is not model.graph else ():
            drops = is_standard(node, "Dropout") and not _never_drops(node)
            if drops or moves_statistics(node, frozen):
                raise BuildError(
                    f"{describe(node)} is in the body of an If, Loop or Scan, where it "
                    "cannot be put in training mode; set its ratio to 0, freeze its scale and bias, or move it out"
                )


def _never_drops(node: ir.Node) -> bool:
    ratio = constant_of(input_at(node, 1))
    return ratio is not None and float(ratio) == 0.0


def moves_statistics(node: ir.Node, frozen: set[ir.Value]) -> bool:
    """Whether ``node`` is a BatchNormalization whose running statistics training updates.

    The statistics must be initializers, and scale and bias must not both be frozen.
    """
    if not is_standard(node, "BatchNormalization") or all(v in frozen for v in node.inputs[1:3]):
        return False
    return all(v is not None and v.is_initializer() for v in node.inputs[3:5])


def _normalise_by_batch(op: Builder, node: ir.Node, so_far: dict[ir.Value, Var]) -> tuple[Var, dict[ir.Value, Var]]:
    """Emit a BatchNormalization in training mode; return its output and the updated running statistics.

    Its momentum is 0, so that its other outputs are the batch statistics, which the gradient needs. ``so_far`` contains
    the statistics as updated by earlier nodes: a layer that is applied several times updates them each time, as in
    PyTorch. onnxruntime writes statistics into the buffers of inputs 3 and 4, even of graph inputs. Each node therefore
    gets its own scratch tensors as these inputs, which also prevents nodes from being merged.
    """
    op.scope = node.name or ""
    x, scale, bias, *running = (op.wrap(v) for v in node.inputs if v is not None)
    kept, current = attributes(node), [so_far.get(r.value, r) for r in running]
    scratch = [-r for r in current]
    y, *batch = op.BatchNormalization(
        x, scale, bias, *scratch, outputs=3, training_mode=1, momentum=0.0, epsilon=kept["epsilon"]
    )
    keep = kept["momentum"]
    updated = {r.value: c * keep + b * (1.0 - keep) for r, c, b in zip(running, current, batch, strict=True)}
    return op.like(y, op.wrap(node.outputs[0])), updated


def _drop(op: Builder, node: ir.Node, keep_mask: Mask) -> list[Var]:
    """Return ``x · mask / (1 − ratio)``, and the mask if the node has this output."""
    if _never_drops(node):
        return _keep_all(op, node)
    x = op.wrap(inputs_of(node)[0])
    ratio = op.wrap(input_at(node, 1)) or op.const(0.5, x.dtype)
    op.scope = node.name or ""
    mask = keep_mask(op, x, ratio)
    y = x * op.cast(mask, x.dtype) * op.cast(1.0 / (1.0 - ratio), x.dtype)
    return [op.like(y, x), mask][: len(node.outputs)]


def _keep_all(op: Builder, node: ir.Node) -> list[Var]:
    """Return the input of a Dropout unchanged, and an all-true mask if the node has a mask output."""
    x = op.wrap(inputs_of(node)[0])
    masks = [op.full(op.shape(x), True, ir.DataType.BOOL) for _ in node.outputs[1:]]
    return [x, *masks]
