"""Pass: set every attribute that has a default and is absent.

onnx-ir's own pass is not used: it omits defaults that depend on the rank, and writes ``auto_pad``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import onnx_ir as ir

from gradgraph.errors import ModelError, shown, suggestion
from gradgraph.graph import shapes
from gradgraph.graph.checks import describe
from gradgraph.graph.nodes import input_at
from gradgraph.graph.schemas import default_attributes, schema_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import OPSET

_WINDOWED = frozenset({"ConvInteger", "DeformConv", "MaxPool", "AveragePool", "LpPool", "MaxUnpool", "Col2Im"})
_WITH_WEIGHT = frozenset({"Conv", "ConvTranspose", "ConvInteger", "DeformConv"})  # input 1 is [M, C, *kernel]


def write_defaults(nodes: Iterable[ir.Node]) -> None:
    """Set absent attributes of ai.onnx nodes to their defaults, so that a rule can read each attribute by keyword.

    1. Defaults of the schema (numbers, lists, strings) are set, except auto_pad, which ``explicit_pads`` converts.
    2. For convolutions and pools, the defaults that depend on the rank are set: kernel_shape (from the shape of the
       weight, if known), strides, dilations, pads, output_padding.
    3. An attribute without a default stays absent.

    Raises:
        ModelError: a node has an attribute that its operator does not have.
    """
    for node in nodes:
        schema = None if node.domain else schema_of(node.op_type, OPSET)
        if schema is None:
            continue
        for name in node.attributes:
            if name not in schema.attributes:
                raise ModelError(
                    f"{describe(node)} has an attribute '{shown(name)}', which the operator does "
                    f"not have at opset {OPSET}{suggestion(name, schema.attributes)}"
                )
        for name, attr in default_attributes(node.op_type, OPSET).items():
            if name != "auto_pad":
                node.attributes.setdefault(name, attr)
        if node.op_type in _WINDOWED or node.op_type in _WITH_WEIGHT:
            _write_window(node, schema.attributes)


def _write_window(node: ir.Node, known: Container[str]) -> None:
    kernel = _kernel(node)
    if kernel is not None and node.op_type in _WITH_WEIGHT:
        node.attributes.setdefault("kernel_shape", ir.AttrInt64s("kernel_shape", kernel))
    rank = len(kernel) if kernel is not None else spatial_rank(node)
    if node.op_type == "Col2Im":
        axes = (shape_of(node.inputs[1]) or (None,))[0]
        rank = axes if isinstance(axes, int) else None
    if rank is None:
        return
    for name, value in (("strides", [1]), ("dilations", [1]), ("pads", [0, 0]), ("output_padding", [0])):
        if name in known and not (name == "pads" and {"auto_pad", "output_shape"} & set(node.attributes)):
            node.attributes.setdefault(name, ir.AttrInt64s(name, value * rank))


def _kernel(node: ir.Node) -> list[int] | None:
    given = node.attributes.get_ints("kernel_shape")
    if given is not None or node.op_type not in _WITH_WEIGHT:
        return None if given is None else list(given)
    shape = shape_of(input_at(node, 1))
    return None if shape is None or len(shape) < 2 else shapes.all_sizes(shape[2:])


def spatial_rank(node: ir.Node) -> int | None:
    """Return the number of spatial axes of a convolution or pool; None if the ranks of inputs 0 and 1 are unknown."""
    return next((len(shape) - 2 for v in node.inputs[:2] if (shape := shape_of(v)) is not None), None)
