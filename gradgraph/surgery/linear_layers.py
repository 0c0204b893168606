"""Linear layers with a stored weight, as exporters and quantisers write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import as_names, matching
from gradgraph.graph.shapes import known_sizes, shape_of
from gradgraph.passes.normal.weights.places import module_of
from gradgraph.surgery.naming import is_anonymous
from gradgraph.surgery.operated import numbers_of

LINEAR = ("Conv", "Gather", "Gemm", "MatMul", "MatMulNBits")
INTEGER = ("MatMulInteger", "QLinearMatMul", "QLinearConv", "ConvInteger", "DynamicQuantizeMatMul", "QGemm",
           "QAttention", "DynamicQuantizeLSTM", "MatMulIntegerToFloat", "QLinearWhere", "QLinearSoftmax")  # fmt: skip
_REWRITES = ("Cast", "DequantizeLinear", "Identity", "Transpose")  # what only writes stored numbers another way


def stored(value: ir.Value | None) -> ir.Value | None:
    """The initializer or constant behind ``value``, seen through what only rewrites stored numbers."""
    while value is not None and numbers_of(value) is None:
        node = value.producer()
        if node is None or node.op_type not in _REWRITES or node.domain:
            return None
        value = node.inputs[0]
    return value


@dataclass(frozen=True)
class Layer:
    """One linear layer.

    Attributes:
        node: it.
        weight: the weight as ``node`` reads it; of a MatMulNBits, its packed numbers.
        name: the module's, as far as names tell: that of the weight without ``.weight``, or of the node.
    """

    node: ir.Node
    weight: ir.Value
    name: str

    @property
    def kind(self) -> str:
        return self.node.op_type

    @property
    def turned(self) -> bool:
        """Are its sizes (outputs, inputs), as PyTorch stores them?"""
        return self.kind == "Gemm" and "transB" in self.node.attributes and self.node.attributes["transB"].as_int() == 1

    @property
    def weighs(self) -> bool:
        """Is it a Gemm that multiplies its product or its bias by a number?"""
        attributes = self.node.attributes
        numbers = [attributes[k].as_float() for k in ("alpha", "beta") if self.kind == "Gemm" and k in attributes]
        return any(number != 1 for number in numbers)

    @property
    def groups(self) -> int:
        """Of a Conv; 1 for others."""
        return self.node.attributes["group"].as_int() if "group" in self.node.attributes else 1

    @property
    def kernel(self) -> tuple[int, ...]:
        """The sizes of a Conv's kernel; none for others."""
        return tuple(known_sizes(shape_of(self.weight))[2:]) if self.kind == "Conv" else ()

    @property
    def bias(self) -> ir.Value | None:
        """What the layer itself adds."""
        place = {"MatMulNBits": 5, "Gemm": 2, "Conv": 2}.get(self.kind, len(self.node.inputs))
        return self.node.inputs[place] if place < len(self.node.inputs) else None

    @property
    def sizes(self) -> tuple[int, int]:
        """How many numbers go in and come out; of a Conv, channels (in, those of a group); of an embedding, its rows
        and columns.
        """
        if self.kind == "MatMulNBits":
            return self.node.attributes["K"].as_int(), self.node.attributes["N"].as_int()
        sizes = known_sizes(shape_of(self.weight))
        if self.kind == "Conv":
            return sizes[1], sizes[0]
        return (sizes[1], sizes[0]) if self.turned else (sizes[0], sizes[1])

    @property
    def data(self) -> ir.Value:
        """What is multiplied; the row numbers of an embedding."""
        value = self.node.inputs[1 if self.kind == "Gather" else 0]
        assert value is not None
        return value

    @property
    def dtype(self) -> ir.DataType:
        return self.node.outputs[0].dtype or ir.DataType.FLOAT


def linear_layers(work: ir.Model, target: str | Sequence[str]) -> tuple[list[Layer], list[str]]:
    """The layers that names or globs match, by weight, module or node; and why others that match are none.

    An integer product that matches is among the latter: nothing says what its float result is.
    """
    named = list(_named(work))
    chosen: set[int] = set()
    for pattern in as_names(target):
        chosen |= {i for i, (names, _) in enumerate(named) if matching(pattern, names)}
    found = [named[i][1] for i in sorted(chosen)]
    return [one for one in found if isinstance(one, Layer)], [one for one in found if isinstance(one, str)]


def _named(work: ir.Model) -> Iterator[tuple[list[str], Layer | str]]:
    for place, node in enumerate(work.graph):
        if node.op_type in INTEGER:
            about = f"'{node.name or node.op_type}' is {node.op_type}, whose products are integers"
            yield [n for n in (node.name, module_of(node)) if n], about
            continue
        if node.op_type not in LINEAR or node.domain not in ("", "com.microsoft"):
            continue
        value = node.inputs[0 if node.op_type == "Gather" else 1]
        source = stored(value)
        if value is None or source is None or (tensor := numbers_of(source)) is None:
            continue
        floating = node.op_type == "MatMulNBits" or value.dtype is None or value.dtype.is_floating_point()
        rank = 2 if node.op_type == "MatMulNBits" else len(shape_of(value) or tensor.shape.numpy())
        if not floating or rank < 2 or (rank > 2 and node.op_type != "Conv"):
            continue
        name = _module_name(node, source, place)
        names = [n for n in (source.name, name, node.name) if n]
        yield names, _why_not(node, name) or Layer(node, value, name)


def _why_not(node: ir.Node, name: str) -> str:
    attributes = node.attributes
    if node.op_type == "Gemm" and "transA" in attributes and attributes["transA"].as_int():
        return f"'{name}' is a Gemm whose data are turned"
    if node.op_type == "Gather" and "axis" in attributes and attributes["axis"].as_int() not in (0, -2):
        return f"'{name}' is a Gather that takes no rows"
    return ""


def _module_name(node: ir.Node, weight: ir.Value, place: int) -> str:
    own = weight.name or ""
    for suffix in (
        ".MatMul.weight",
        ".weight",
        ".weight_quantized",
        ".qweight",
        ".MatMul.weight_Q4",
        "_quantized",
        "_Q4",
    ):
        if own.endswith(suffix) and not is_anonymous(own):
            return own.removesuffix(suffix)
    return module_of(node) or (own if own and not is_anonymous(own) else f"{node.op_type}_{place}")


def drawn(rng: np.random.Generator, sizes: Sequence[int], fan_in: int, dtype: ir.DataType) -> np.ndarray:
    """Numbers as PyTorch draws those of a new linear layer: uniform in ±1/√(fan in)."""
    bound = 1 / np.sqrt(max(fan_in, 1))
    return rng.uniform(-bound, bound, tuple(sizes)).astype(dtype.numpy())
