"""Find weights that look like a norm with fixed statistics, such as torchvision's FrozenBatchNorm2d: ``conv(x)·s + t``.

Such a norm computes the scale s and the shift t from four untrained buffers. An exporter with constant folding stores
only s and t, which look like a learned scale and shift, except that learned ones keep their parameter names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from gradgraph.graph.nodes import input_at, only_reader
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes

_CONVOLUTIONS = ("Conv", "ConvTranspose")


def find_frozen_norms(weights: Iterable[ir.Value]) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield pairs (scale, shift) of ``weights`` that are applied per channel after a convolution without a bias."""
    known = set(weights)
    for scale in known:
        mul = only_reader(scale, "Mul")
        conv = None if mul is None else _other(mul, scale).producer()
        if mul is None or conv is None or conv.op_type not in _CONVOLUTIONS or input_at(conv, 2) is not None:
            continue
        add = only_reader(mul.outputs[0], "Add")
        shift = None if add is None else _other(add, mul.outputs[0])
        spatial = len(shape_of(conv.inputs[1]) or ()) - 2
        by_channel = shift is not None and _is_by_channel(scale, spatial) and _is_by_channel(shift, spatial)
        if shift in known and by_channel and only_reader(shift, "Add") is add:
            yield scale, shift


def _is_by_channel(value: ir.Value, spatial: int) -> bool:
    """Whether ``value`` varies along channels only: ``[C, 1, 1]`` or ``[1, C, 1, 1]`` for two ``spatial`` axes."""
    shape = all_sizes(shape_of(value)) or []
    axes = [len(shape) - i for i, d in enumerate(shape) if d != 1]
    return axes == [spatial + 1]


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    a, b = node.inputs
    other = b if a is value else a
    assert other is not None
    return other
