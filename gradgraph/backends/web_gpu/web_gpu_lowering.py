"""Forms and rewrites for WebGPU."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.backends.backend import Lowering
from gradgraph.backends.shared_forms import TRAINING
from gradgraph.backends.shared_rewrites import NARROW_NUMBERS
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, attributes, calls_of
from gradgraph.passes.rewrites import Rewrite


def fill_fours(model: ir.Model) -> None:
    """Pad the input channels of convolutions with zeros to a multiple of 4, in place.

    Only convolutions that the provider may compute incorrectly are padded. In convolutions that compute weight
    gradients, the samples of the batch are the input channels, so their number may be unknown.
    """
    editor = Editor(model)
    for node in filter(_may_be_wrong, calls_of(model, "Conv")):
        _fill(editor, node)


def _may_be_wrong(node: ir.Node) -> bool:
    """Return whether the result of a Conv may be wrong: for 6, 9, 15, … input channels and 4, 8, … filters."""
    weight = shape_of(node.inputs[1])
    if weight is None or attributes(node).get("group", 1) != 1:
        return False
    into, channels = weight[:2]
    if isinstance(into, int) and into % 4:
        return False
    return not isinstance(channels, int) or (channels > 3 and channels % 3 == 0 and channels % 4 > 0)


def _fill(editor: Editor, node: ir.Node) -> None:
    """Append zero channels to x and the weight, up to a multiple of four."""
    op = editor.op
    op.scope = node.name or ""
    x, weight, *bias = (editor.op.wrap(v) for v in node.inputs)
    assert x is not None and weight is not None
    known = None if weight.shape is None else weight.shape[1]
    lacking = op.const([-known % 4]) if isinstance(known, int) else op.Mod(op.Neg(op.dim(weight, 1)), op.const([4]))
    pads = op.Concat(op.const([0] * (weight.rank + 1)), lacking, op.const([0] * (weight.rank - 2)), axis=0)
    editor.replace(node, op.Conv(*(op.Pad(v, pads) for v in (x, weight)), *bias, **attributes(node)))


FILL_FOURS = Rewrite(fill_fours, "convolutions that the provider computes wrong are padded with zero channels")

LOWERING = Lowering(forms=TRAINING, after=(NARROW_NUMBERS, FILL_FOURS))
