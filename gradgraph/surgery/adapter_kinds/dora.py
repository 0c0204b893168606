"""DoRA (Liu et al. 2024, arXiv:2402.09353): a low-rank update of a weight's direction, and a trained magnitude.

``y = (x·(W + s·A·B))·m/n + b`` with one ``m`` and one ``n = ‖W + s·A·B‖`` for each output; m is initialised to ‖W‖, so
that the output is unchanged at first. No gradient passes through n (section 4.3 there, and PEFT). DoRA
merges into the weight as ``(W + s·A·B)·m/n``.

W is never materialised as floats: with outputs as columns and ``C = s·B``, ``n² = ‖W‖² + Σ C∘(2·Aᵀ·W + Aᵀ·A·C)``, where
``Aᵀ·W`` is the layer itself, applied to the columns of A.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.files.model_metadata import Adapter
from gradgraph.graph.marks import mark_detached
from gradgraph.surgery.adapter_kinds import low_rank
from gradgraph.surgery.adapter_kinds.kind import KINDS, Kind
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operation import Array, numbers_of, value_named
from gradgraph.surgery.stored_weights import canonical


def put(work: ir.Model, layer: Layer, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Add trained factors and magnitudes to a layer; return the adapter with the names of its tensors."""
    if layer.kind == "Gather" or layer.groups > 1:
        what = "an embedding" if layer.kind == "Gather" else "a Conv with groups"
        raise BuildError(f"'{shown(layer.name)}' is {what}, which DoRA does not support; use kind lora for it")
    writer = Writer(work, layer.node, wanted, layer.dtype)
    squares = lengths(canonical(layer)) ** 2
    a, b = low_rank.begin(writer, layer, wanted, rng)
    m = writer.weight("lora_magnitude_vector", np.sqrt(squares))
    scaled = low_rank.masked(writer, wanted, writer.node("Mul", b, writer.constant(wanted.scale)))
    share = writer.node("Div", m, _norm(writer, layer, a, scaled, squares))
    if layer.kind == "Conv":
        share = writer.node("Reshape", share, writer.whole(1, -1, *[1] * len(layer.kernel)))
    product = low_rank.product_of(writer, layer, wanted, a, scaled)
    bias = _bias(writer, layer)

    def formula(y: ir.Value) -> ir.Value:
        plain = y if bias is None else writer.node("Sub", y, bias)
        turned = writer.node("Mul", writer.node("Add", plain, product), share)
        return turned if bias is None else writer.node("Add", turned, bias)

    return wanted.put_at(writer.instead(layer.node.outputs[0], formula), a, b, m)


def _norm(writer: Writer, layer: Layer, a: ir.Value, b: ir.Value, squares: Array) -> ir.Value:
    """Write nodes for ``n = ‖W + s·A·B‖`` [outputs], without gradient, from A, ``b`` = s·B and ``squares`` = ‖W‖²."""
    if layer.kind == "Conv":
        rows = writer.node("Reshape", a, writer.whole(0, -1))
        flat = writer.node("Reshape", layer.weight, writer.whole(layer.sizes[1], -1))
        crossed = writer.node("MatMul", rows, writer.node("Transpose", flat, perm=[1, 0]))
        b = writer.node("Transpose", writer.node("Reshape", b, writer.whole(layer.sizes[1], -1)), perm=[1, 0])
    else:
        rows = writer.node("Transpose", a, perm=[1, 0])
        crossed = _through(writer, layer, rows)
    own = writer.node("MatMul", writer.node("MatMul", rows, writer.node("Transpose", rows, perm=[1, 0])), b)
    twice = writer.node("Add", crossed, crossed)
    changes = writer.node("Mul", b, writer.node("Add", twice, own))
    total = writer.node("Add", writer.reduced("ReduceSum", changes, [0], since=13), writer.constant(squares))
    norm = writer.node("Reshape", writer.node("Sqrt", total), writer.whole(-1))
    detached = writer.node("Identity", norm)
    producer = detached.producer()
    assert producer is not None
    mark_detached(producer)
    return detached


def _through(writer: Writer, layer: Layer, rows: ir.Value) -> ir.Value:
    """Write nodes that compute ``rows·W``, with the layer's operator but without its bias."""
    if layer.kind != "MatMulNBits":
        weight = writer.node("Transpose", layer.weight, perm=[1, 0]) if layer.turned else layer.weight
        return writer.node("MatMul", rows, weight)
    packed = [v for v in layer.node.inputs[1:4] if v is not None]
    return writer.node("MatMulNBits", rows, *packed, domain=layer.node.domain, **dict(layer.node.attributes))


def _bias(writer: Writer, layer: Layer) -> ir.Value | None:
    bias = layer.bias
    if bias is None or layer.kind != "Conv":
        return bias
    return writer.node("Reshape", bias, writer.whole(1, -1, *[1] * len(layer.kernel)))


def factor(work: ir.Model, adapter: Adapter) -> ir.Value | None:
    """Return the graph value that contains the scale s, or None if the adapter's nodes were changed."""
    scaled = next((use.node for use in value_named(work, adapter.weights[1]).uses()), None)
    return None if scaled is None or scaled.op_type != "Mul" else scaled.inputs[1]


def rest(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """Return neutral tensors: zero factors, and the magnitude ‖W‖, computed from a constant in the adapter's nodes."""
    node = next(use.node for use in value_named(work, adapter.weights[2]).uses())
    while node.op_type != "Add":
        before = node.inputs[1 if node.op_type == "Div" else 0]
        producer = None if before is None else before.producer()
        assert producer is not None
        node = producer
    squares = numbers_of(node.inputs[1])
    assert squares is not None
    return [np.zeros_like(arrays[0]), np.zeros_like(arrays[1]), np.sqrt(squares.numpy()).astype(arrays[2].dtype)]


def lengths(weight: Array) -> Array:
    """Return the norm of each output's weights, the initial m; ``weight`` has outputs first."""
    return np.asarray(np.sqrt((weight.reshape(len(weight), -1) ** 2).sum(1)))


def merge(adapter: Adapter, weight: Array, factors: list[Array]) -> Array:
    """Return the merged weight ``(W + s·A·B)·m/n`` with its output axis first."""
    total = weight + low_rank.delta(adapter, factors)
    return np.asarray(total * (factors[2].reshape(-1) / lengths(total)).reshape(-1, *[1] * (total.ndim - 1)))


KINDS.add(
    "dora",
    Kind("a low-rank update of a weight's direction, and a trained magnitude", put,
         (*low_rank.FACTORS, "lora_magnitude_vector"), rest, ((1, 0, None), (0, 1, None)), factor, merge,
         drops=True, peft="LORA"),
)  # fmt: skip
