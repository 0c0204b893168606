"""Pass: rename dimensions of outputs that share an input's dimension name but differ from it in size.

For example, SegFormer's scores have a quarter of the image's height, and exporters call both ``height``. Later checks
trust names when they compare sizes, so labels of the scores' size would be rejected. Inferring shapes with numbers in
place of the inputs' names reveals the difference.

Another example: a Squeeze without axes, traced with a batch of one, removes the batch axis, and its remaining axis of
two scores is called ``batch``. That is revealed at batch size 1; otherwise a single target would broadcast.
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from gradgraph.errors import GradgraphError
from gradgraph.graph.nodes import input_at
from gradgraph.graph.shapes import as_dims
from gradgraph.passes.normal.sizes.fixed import fix_sizes
from gradgraph.passes.normal.sizes.infer import infer_shapes

_LEAST_RANK = 3  # minimum rank of inputs whose sizes layers may change: images, sound
_SEVERAL = 3  # a batch size above 1
_FIRST, _STEP = 192, 64  # the numbers that replace names: divisible by powers of two, for layers that halve sizes


def rename_wrong_dims(model: ir.Model) -> bool:
    """Rename wrong dimensions of outputs to ``<output>.<axis>``, or set their number; return True if there were any.

    The pass costs one inference if an output shares a dimension name that layers may change, and two more if the model
    has a Squeeze without axes whose rank depends on the batch size.
    """
    symbols = {d for v in model.graph.inputs if v.shape is not None for d in as_dims(v.shape) if isinstance(d, str)}
    changing = {
        d
        for v in model.graph.inputs
        if v.shape is not None and len(v.shape) >= _LEAST_RANK and v.dtype is not None and v.dtype.is_floating_point()
        for d in as_dims(v.shape)[1:]
        if isinstance(d, str)
    }
    sizes = dict(zip(sorted(symbols), itertools.count(_FIRST, _STEP), strict=False))
    changed = _rename(model, changing, sizes, first=1)
    if any(_squeezes_unit_axes(node) for node in model.graph):
        one = dict.fromkeys(symbols - changing, 1)
        changed |= _rename(model, set(one), one, others=dict.fromkeys(one, _SEVERAL))
    return changed


def _squeezes_unit_axes(node: ir.Node) -> bool:
    """Whether ``node`` is a Squeeze without axes whose output rank is unknown, because it depends on the batch size."""
    return node.op_type == "Squeeze" and input_at(node, 1) is None and node.outputs[0].shape is None


def _rename(
    model: ir.Model, names: set[str], sizes: dict[str, int], first: int = 0, others: dict[str, int] | None = None
) -> bool:
    """Give wrongly named dimensions of the model's outputs new names; return True if there were any.

    A dimension, from axis ``first`` on, is wrongly named if its name is in ``names``, but its inferred size differs
    from ``sizes[name]``. If the rank of the output differs for the input sizes ``others``, it gets the size instead of
    a name.
    """
    doubtful = [v for v in model.graph.outputs if v.shape is not None and names & set(as_dims(v.shape)[first:])]
    true = _with_numbers(model, sizes) if doubtful else {}
    several = _with_numbers(model, others) if others and true else {}
    changed = False
    for value in doubtful:
        found = true.get(value.name or "")
        assert value.shape is not None
        if found is None or len(found) != len(value.shape):
            continue
        is_only = others is not None and len(several.get(value.name or "", ())) != len(found)
        for axis, (said, size) in enumerate(zip(as_dims(value.shape), found, strict=True)):
            if said in names and isinstance(size, int) and size != sizes[str(said)]:
                own = size if is_only else f"{value.name}.{axis}"
                value.shape = ir.Shape([*value.shape[:axis], own, *value.shape[axis + 1 :]])
                changed = True
    return changed


def _with_numbers(model: ir.Model, sizes: dict[str, int]) -> dict[str, tuple[int | str | None, ...]]:
    """Return the shapes of the outputs, by name, for these sizes of the inputs; empty if the model rejects them."""
    copy = model.clone()
    for value in (*copy.graph.outputs, *(v for node in copy.graph for v in node.outputs)):
        value.shape = None
    try:
        fix_sizes(copy, sizes)
        infer_shapes(copy)
    except GradgraphError:
        return {}
    return {v.name or "": as_dims(v.shape) for v in copy.graph.outputs if v.shape is not None}
