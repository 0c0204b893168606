"""DoRA (Liu et al. 2024, arXiv:2402.09353): a weight's direction is adapted by low rank, its length by itself.

``y = (x·(W + s·A·B))·m/n + b`` with one ``m`` and one ``n = ‖W + s·A·B‖`` for each output; m begins as ‖W‖, so that
nothing changes. No gradient passes through n (section 4.3 there; PEFT does so, too). It becomes part of the weight:
``(W + s·A·B)·m/n``.

W is never written out as floats: with outputs as columns, ``n² = ‖W‖² + 2s·Σ B∘(Aᵀ·W) + s²·Σ B∘(Aᵀ·A·B)``, where
``Aᵀ·W`` is the layer itself, applied to the columns of A.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.marks import mark_detached
from gradgraph.shapes import known_sizes
from gradgraph.surgery.adapter_kinds import low_rank
from gradgraph.surgery.adapter_kinds.adapter import Adapter
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.stored_weights import canonical

Array = np.ndarray[Any, Any]


def put(work: ir.Model, layer: Layer, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Write the two factors and the lengths beside a layer."""
    if layer.kind == "Gather" or layer.groups > 1:
        what = "an embedding" if layer.kind == "Gather" else "a Conv with groups"
        raise BuildError(f"'{shown(layer.name)}' is {what}, for which there is no DoRA; choose kind lora for it")
    writer = Writer(work, layer.node, wanted, layer.dtype)
    squares = (canonical(layer) ** 2).reshape(layer.sizes[1], -1).sum(1)
    a, b = (
        writer.weight(f"lora_{part}", numbers)
        for part, numbers in zip("AB", low_rank.begun(layer, wanted, rng), strict=True)
    )
    lengths = np.sqrt(squares)
    m = writer.weight("lora_magnitude_vector", lengths)
    share = writer.node("Div", m, _norm(writer, layer, wanted.scale, a, b, squares))
    if layer.kind == "Conv":
        share = writer.node("Reshape", share, writer.whole(1, -1, *[1] * len(layer.kernel)))
    product = low_rank.product_of(writer, layer, wanted, a, b)
    bias = _bias(writer, layer)

    def formula(y: ir.Value) -> ir.Value:
        plain = y if bias is None else writer.node("Sub", y, bias)
        turned = writer.node("Mul", writer.node("Add", plain, product), share)
        return turned if bias is None else writer.node("Add", turned, bias)

    return wanted.put_at(writer.instead(layer.node.outputs[0], formula), a, b, m)


def _norm(writer: Writer, layer: Layer, scale: float, a: ir.Value, b: ir.Value, squares: Array) -> ir.Value:
    """n, [outputs]."""
    rank = known_sizes(a.shape)[0 if layer.kind == "Conv" else 1]
    if layer.kind == "Conv":
        rows = writer.node("Reshape", a, writer.whole(rank, -1))
        flat = writer.node("Reshape", layer.weight, writer.whole(layer.sizes[1], -1))
        crossed = writer.node("MatMul", rows, writer.node("Transpose", flat, perm=[1, 0]))
        b = writer.node("Transpose", writer.node("Reshape", b, writer.whole(layer.sizes[1], rank)), perm=[1, 0])
    else:
        rows = writer.node("Transpose", a, perm=[1, 0])
        crossed = _through(writer, layer, rows)
    own = writer.node("MatMul", writer.node("MatMul", rows, writer.node("Transpose", rows, perm=[1, 0])), b)
    crossed = writer.node("Mul", crossed, writer.constant(2 * scale))
    both = writer.node("Mul", b, writer.node("Add", crossed, writer.node("Mul", own, writer.constant(scale**2))))
    total = writer.node(
        "Add", writer.node("MatMul", writer.constant(np.ones((1, rank))), both), writer.constant(squares)
    )
    norm = writer.node("Reshape", writer.node("Sqrt", total), writer.whole(-1))
    detached = writer.node("Identity", norm)
    producer = detached.producer()
    assert producer is not None
    mark_detached(producer)
    return detached


def _through(writer: Writer, layer: Layer, rows: ir.Value) -> ir.Value:
    """``rows·W``, by a copy of the layer without its bias."""
    if layer.kind != "MatMulNBits":
        weight = writer.node("Transpose", layer.weight, perm=[1, 0]) if layer.turned else layer.weight
        return writer.node("MatMul", rows, weight)
    product = writer.node("MatMulNBits", rows, *[v for v in layer.node.inputs[1:4] if v is not None],
                          **dict(layer.node.attributes))  # fmt: skip
    producer = product.producer()
    assert producer is not None
    producer.domain = layer.node.domain
    return product


def _bias(writer: Writer, layer: Layer) -> ir.Value | None:
    bias = layer.bias
    if bias is None or layer.kind != "Conv":
        return bias
    return writer.node("Reshape", bias, writer.whole(1, -1, *[1] * len(layer.kernel)))


def merge(adapter: Adapter, weight: Array, factors: list[Array]) -> Array:
    """``(W + s·A·B)·m/n``, with outputs first."""
    total = weight + low_rank.delta(adapter, factors)
    norm = np.sqrt((total.reshape(len(total), -1) ** 2).sum(1))
    return np.asarray(total * (factors[2].reshape(-1) / norm).reshape(-1, *[1] * (total.ndim - 1)))
