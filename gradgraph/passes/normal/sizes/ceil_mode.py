"""Rewrite pools whose windows ONNX's shape inference miscounts.

With ``ceil_mode=1`` the inference counts a last window that starts beyond the end of the axis. Runtimes drop that
window, as the specification does since opset 22. A pool with such a window is rewritten so that no window is dropped:

1. If all sizes are known, ``ceil_mode=0`` is set: for an axis whose last window is dropped, rounding down gives the
   correct number of windows, and any other axis gets the end padding that its last window needs.
2. If a size is unknown, or padding counts in an average, the axis is shortened to the end of its last window: the end
   padding is reduced, or elements that no window reads are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from gradgraph.graph.shapes import POOLS, as_dims, recorded_shape, sizes_or, window_count, windows_of
from gradgraph.passes.normal.edit import Editor, calls_of, is_wanted


def settle_windows(model: ir.Model) -> dict[ir.Node, bool]:
    """Rewrite the miscounted pools of ``model`` in place.

    Returns:
        For each rewritten pool, whether the wrong number of windows is recorded in the shape of its output.
    """
    ceiled = [node for node in calls_of(model, *POOLS) if node.attributes.get_int("ceil_mode", 0)]
    if not ceiled:
        return {}
    editor = Editor(model)
    settled = {node: _settle(editor, node) for node in ceiled}
    return {node: wrong for node, wrong in settled.items() if wrong is not None}


class _Axis(NamedTuple):
    """An axis of known size, and the windows along it: their extent, stride, and the padding at both ends."""

    size: int
    reach: int
    stride: int
    begin: int
    end: int

    @property
    def exact_end(self) -> int:
        """The end padding for which the last window ends with the axis; negative if elements are cut off."""
        return (window_count(*self) - 1) * self.stride + self.reach - self.size - self.begin

    @property
    def drops(self) -> bool:
        """Whether ONNX shape inference counts a window that starts beyond the end."""
        return 1 - (self.reach - self.size - self.begin - self.end) // self.stride > window_count(*self)


def _settle(editor: Editor, node: ir.Node) -> bool | None:
    x = node.inputs[0]
    sizes = sizes_or((recorded_shape(x) or ())[2:], None)
    rank, (reaches, strides, pads) = len(sizes), windows_of(node)
    fits = len(reaches) == len(strides) == rank and len(pads) == 2 * rank  # size checks report pools that do not
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or not fits:
        return None
    each = zip(sizes, reaches, strides, pads[:rank], pads[rank:], strict=True)
    axes = [None if size is None else _Axis(size, *others) for size, *others in each]
    if not any(axis is not None and axis.drops for axis in axes):
        return None
    recorded = [as_dims(y.shape)[2:] for y in node.outputs if y.shape is not None]
    pairs = (pair for dims in recorded for pair in zip(dims, axes, strict=False))
    wrong = any(axis is not None and isinstance(dim, int) and dim != window_count(*axis) for dim, axis in pairs)
    return wrong if _round_down(node, axes, pads) or _end_exactly(editor, node, axes, pads) else None


def _round_down(node: ir.Node, axes: Sequence[_Axis | None], pads: list[int]) -> bool:
    """Rewrite a pool by case 1 of the module's docstring; return False if that is impossible."""
    ends = [None if a is None else a.end if a.drops else max(a.end, a.exact_end) for a in axes]
    counts_padding = node.attributes.get_int("count_include_pad", 0)
    if None in ends or (counts_padding and ends != pads[len(axes) :]):
        return False
    node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
    node.attributes["pads"] = ir.AttrInt64s("pads", [*pads[: len(axes)], *(end for end in ends if end is not None)])
    return True


def _end_exactly(editor: Editor, node: ir.Node, axes: Sequence[_Axis | None], pads: list[int]) -> bool:
    """Rewrite a pool by case 2 of the module's docstring; return False if cutting would change indices of maxima."""
    dropping = {i: axis for i, axis in enumerate(axes) if axis is not None and axis.drops}
    cut = {i: axis.size + axis.exact_end for i, axis in dropping.items() if axis.exact_end < 0}
    if cut and any(map(is_wanted, node.outputs[1:])):
        return False
    for i, axis in dropping.items():
        pads[len(axes) + i] = max(axis.exact_end, 0)
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    x = editor.op.wrap(node.inputs[0])
    if cut and x is not None:
        seen = editor.op.Slice(x, [0] * len(cut), list(cut.values()), [2 + i for i in cut])
        editor.place(node)
        node.replace_input_with(0, seen.value)
    return True
