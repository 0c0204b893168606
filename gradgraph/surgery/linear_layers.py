"""Recognition of linear layers with a stored weight, as exporters and quantisers write them.

A layer is identified by its node. Two layers may share a weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes, known_sizes
from gradgraph.graph.weight_layouts import layout_at
from gradgraph.passes.normal.edit import next_free
from gradgraph.passes.normal.weights.places import module_of
from gradgraph.surgery.matmul_nbits import Packing
from gradgraph.surgery.naming import is_anonymous
from gradgraph.surgery.operation import matched, numbers_of

LINEAR = ("Conv", "Gather", "Gemm", "MatMul", "MatMulNBits")
INTEGER = ("MatMulInteger", "QLinearMatMul", "QLinearConv", "ConvInteger", "DynamicQuantizeMatMul", "QGemm",
           "QAttention", "DynamicQuantizeLSTM", "MatMulIntegerToFloat", "QLinearWhere", "QLinearSoftmax")  # fmt: skip
DOMAINS = ("", "com.microsoft")  # domains of these operators, and of QuantizeLinear and DequantizeLinear
REWRITES = ("Cast", "DequantizeLinear", "Identity", "Transpose")  # nodes that only rewrite stored numbers


def rewritten(value: ir.Value | None) -> tuple[ir.Value | None, list[ir.Node]]:
    """Return the initializer or constant that ``value`` is derived from, and the nodes from it to ``value``.

    These nodes transpose, cast or dequantise stored numbers. Returns (None, []) for any other value.
    """
    chain: list[ir.Node] = []
    while value is not None and numbers_of(value) is None:
        node = value.producer()
        if node is None or node.op_type not in REWRITES or node.domain not in DOMAINS:
            return None, []
        chain.insert(0, node)
        value = node.inputs[0]
    return value, chain


def stored(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer or constant found by ``rewritten``; None if a node of com.microsoft rewrites it."""
    start, chain = rewritten(value)
    return None if any(node.domain for node in chain) else start


@dataclass(frozen=True)
class Layer:
    """One linear layer.

    Attributes:
        node: the MatMul, Gemm, Conv, Gather or MatMulNBits that reads the weight.
        name: name of the layer's module, derived from the name of the weight (without ``.weight``) or of the node.
            Unique within a model.
        repeats: if the layer is a second or later call of a module, the name of the layer of its first call; otherwise
            empty.
    """

    node: ir.Node
    name: str = ""
    repeats: str = ""

    @property
    def kind(self) -> str:
        return self.node.op_type

    @property
    def names(self) -> list[str]:
        """The names that a pattern can match: of the weight, the module, the module's first call, and the node."""
        weight = stored(self.weight)
        return [n for n in (None if weight is None else weight.name, self.name, self.repeats, self.node.name) if n]

    @property
    def place(self) -> int:
        """The index of the weight among the inputs of the node."""
        return 0 if self.kind == "Gather" else 1

    @property
    def weight(self) -> ir.Value:
        """The weight input of the node; for a MatMulNBits, the packed integers."""
        value = self.node.inputs[self.place]
        assert value is not None
        return value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight as the node reads it; for a MatMulNBits (inputs, outputs)."""
        if self.kind == "MatMulNBits":
            return Packing.of(self.node).K, Packing.of(self.node).N
        found = all_sizes(shape_of(self.weight))
        return tuple(found) if found is not None else _stored_sizes(self.weight)

    @property
    def axis(self) -> int:
        """The axis of the outputs in ``shape``; for an embedding, the axis of its columns."""
        layout = None if self.kind in ("Gather", "MatMulNBits") else layout_at(self.node, self.place, len(self.shape))
        return 1 if layout is None else layout.outputs[-1]

    @property
    def turned(self) -> bool:
        """Whether the weight is stored as (outputs, inputs), as in PyTorch; false for a Conv."""
        return self.kind != "Conv" and self.axis == 0

    @property
    def weighs(self) -> bool:
        """Whether the layer is a Gemm with an ``alpha`` or ``beta`` other than 1."""
        return self.kind == "Gemm" and any(self.node.attributes.get_float(k, 1.0) != 1 for k in ("alpha", "beta"))

    @property
    def groups(self) -> int:
        """The number of groups of a Conv; 1 for other layers."""
        return self.node.attributes.get_int("group", 1)

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel size of a Conv, per spatial axis; empty for other layers."""
        return self.shape[2:] if self.kind == "Conv" else ()

    @property
    def bias(self) -> ir.Value | None:
        """The bias input of the node, or None if it has no bias."""
        place = {"MatMulNBits": 5, "Gemm": 2, "Conv": 2}.get(self.kind, len(self.node.inputs))
        return self.node.inputs[place] if place < len(self.node.inputs) else None

    @property
    def added(self) -> tuple[ir.Node, ir.Value] | None:
        """The Add of a stored bias after the layer, and the bias; None unless the Add is the layer's only reader."""
        result = self.node.outputs[0]
        uses = list(result.uses())
        if len(uses) != 1 or result.is_graph_output() or uses[0].node.op_type != "Add" or uses[0].node.domain:
            return None
        other = uses[0].node.inputs[1 - uses[0].idx]
        numbers = numbers_of(other)
        return (
            (uses[0].node, other) if other is not None and numbers is not None and numbers.shape.rank() == 1 else None
        )

    @property
    def result(self) -> ir.Value:
        """The output of the layer, or of the Add of a bias after it (``added``)."""
        added = self.added
        return self.node.outputs[0] if added is None else added[0].outputs[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of inputs and outputs; for a Conv, channels (inputs per group, outputs); for an embedding, its
        rows and columns.
        """
        return self.shape[1 - self.axis], self.shape[self.axis]

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def fan_in(self) -> int:
        """The number of terms in each output, as PyTorch counts them."""
        return math.prod(self.shape[1:]) if self.kind.startswith("Conv") else self.sizes[0]

    @property
    def takes_rows(self) -> bool:
        """Whether the layer is an embedding lookup: a Gather of rows."""
        return self.kind == "Gather" and self.node.attributes.get_int("axis", 0) in (0, -2)

    @property
    def data(self) -> ir.Value:
        """The input that the weight multiplies; for an embedding, the row indices."""
        value = self.node.inputs[1 - self.place]
        assert value is not None
        return value

    @property
    def dtype(self) -> ir.DataType:
        """The type of the output; if the model does not declare it, the type of the weight or of its scales."""
        stored_so = self.node.inputs[2] if self.kind == "MatMulNBits" else self.weight
        return self.node.outputs[0].dtype or (stored_so and stored_so.dtype) or ir.DataType.FLOAT


def _stored_sizes(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of a stored weight after any Transpose before its reader."""
    start, chain = rewritten(value)
    sizes = known_sizes(shape_of(start))
    for node in chain:
        if node.op_type == "Transpose":
            order = node.attributes.get_ints("perm", range(len(sizes))[::-1])
            sizes = [sizes[i] for i in order]
    return tuple(sizes)


def layer_at(node: ir.Node, name: str = "") -> Layer | None:
    """Return the layer of ``node``, or None if it has no stored weight."""
    layer = Layer(node, name)
    known = node.op_type in LINEAR and node.domain in DOMAINS and len(node.inputs) > layer.place
    return layer if known and stored(node.inputs[layer.place]) is not None else None


def linear_layers(work: ir.Model, target: str | Sequence[str]) -> tuple[list[Layer], list[str]]:
    """Return the layers whose weight, module or node matches names or globs; and why other matches are not layers.

    Integer products are not layers, since their float result is unknown.
    """
    found = matched(target, _named(work))
    return [one for one in found if isinstance(one, Layer)], [one for one in found if isinstance(one, str)]


def _named(work: ir.Model) -> Iterator[tuple[list[str], Layer | str]]:
    weights = {node: weight for node in work.graph if (weight := _weight_of(node)) is not None}
    layers = _layers(work, weights)
    for node in work.graph:
        if node.op_type in INTEGER:
            about = f"'{node.name or node.op_type}' is {node.op_type}, whose products are integers"
            yield [n for n in (node.name, module_of(node)) if n], about
        elif node in layers:
            layer = layers[node]
            yield layer.names, _why_not(node, layer.name) or layer


def _weight_of(node: ir.Node) -> ir.Value | None:
    """Return the stored weight of ``node`` if it may be a linear layer, otherwise None."""
    layer = layer_at(node)
    source = None if layer is None else stored(layer.weight)
    tensor = numbers_of(source)
    if layer is None or tensor is None or layer.kind == "MatMulNBits":
        return source
    rank = len(shape_of(layer.weight) or tensor.shape.numpy())
    floating = layer.weight.dtype is None or layer.weight.dtype.is_floating_point()
    return source if floating and rank >= 2 and (rank == 2 or layer.kind == "Conv") else None


def _layers(work: ir.Model, weights: Mapping[ir.Node, ir.Value]) -> dict[ir.Node, Layer]:
    """Return the layer of each node in ``weights``, with unique names.

    If several layers share a name, the layer whose node belongs to the module of this name keeps it.
    """
    wanted = {n: _module_name(n, weights[n], place) for place, n in enumerate(work.graph) if n in weights}
    owners: dict[str, ir.Node] = {}
    for node, name in wanted.items():
        if name not in owners or (module_of(owners[name]) != name and module_of(node) == name):
            owners[name] = node
    layers: dict[ir.Node, Layer] = {}
    taken = set(owners)
    for node, name in wanted.items():
        own = name if owners[name] is node else module_of(node)
        again = owners[name] is not node and own in ("", name) and weights[node] is weights[owners[name]]
        if owners[name] is not node:
            own = next_free(own or name, taken)
            taken.add(own)
        layers[node] = Layer(node, own, name if again else "")
    return layers


def _why_not(node: ir.Node, name: str) -> str:
    if node.op_type == "Gemm" and node.attributes.get_int("transA", 0) != 0:
        return f"'{name}' is a Gemm with transposed data"
    if node.op_type == "Gather" and not Layer(node).takes_rows:
        return f"'{name}' is a Gather that is not an embedding lookup"
    return ""


_SUFFIXES = (".MatMul.weight", ".weight", ".weight_quantized", ".qweight", ".MatMul.weight_Q4", ".MatMul.weight_Q8",
             "_quantized", "_Q4")  # fmt: skip


_SHARED = re.compile(r"_merged_\d+$")  # optimum appends this to the names of weights that two decoders share


def _module_name(node: ir.Node, weight: ir.Value, place: int) -> str:
    own = "" if is_anonymous(weight.name or "") else _SHARED.sub("", weight.name or "")
    suffix = next((s for s in _SUFFIXES if own.endswith(s)), None)
    if suffix is not None:
        return own.removesuffix(suffix)
    return _named_by_bias(node) or module_of(node) or own or f"{node.op_type}_{place}"


def _named_by_bias(node: ir.Node) -> str:
    """Return a MatMul's full module name from its bias, as node names may lack the first part; empty if unknown."""
    module, added = module_of(node), Layer(node).added
    whole = "" if added is None else _SHARED.sub("", added[1].name or "").removesuffix(".bias")
    return whole if module and whole.endswith(f".{module}") else ""


def drawn(rng: np.random.Generator, sizes: Sequence[int], fan_in: int, dtype: ir.DataType) -> np.ndarray:
    """Return random initial values as in PyTorch's linear layers: uniform in ±1/√(fan in)."""
    bound = 1 / np.sqrt(max(fan_in, 1))
    return rng.uniform(-bound, bound, tuple(sizes)).astype(dtype.numpy())
