"""LoRA and rsLoRA: ``y = x·W + b + s·(x·A)·B`` with A of (inputs, rank) and B of (rank, outputs).

``s = alpha/rank`` in LoRA (Hu et al. 2021, arXiv:2106.09685), ``alpha/√rank`` in rsLoRA (Kalajdzievski 2023,
arXiv:2312.03732). A Conv has a factor with the layer's own kernel and one of 1×1, both in the layer's groups; an
embedding looks up rows of A. The adapter merges into the weight: ``W + s·A·B``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.files.model_metadata import Adapter
from gradgraph.passes.normal.edit import discard, replace_value
from gradgraph.surgery.adapter_kinds.kind import KINDS, Kind, zeros
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.linear_layers import Layer, drawn
from gradgraph.surgery.operation import Array, numbers_of, value_named


def put(work: ir.Model, layer: Layer, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Add two trained factors A and B to a layer; return the adapter with the names of its tensors."""
    writer = Writer(work, layer.node, wanted, layer.dtype)
    a, b = begin(writer, layer, wanted, rng)
    return put_beside(writer, layer, wanted, (a, b), a)


def put_beside(
    writer: Writer, layer: Layer, wanted: Adapter, factors: tuple[ir.Value, ir.Value], wide: ir.Value
) -> Adapter:
    """Write nodes that add ``s·(x·A)·B`` to the output of a layer; return the adapter.

    ``factors`` are the trained A and B. ``wide`` is A as multiplied: A itself, or in QA-LoRA with repeated rows.
    """
    a, b = factors
    product = product_of(writer, layer, wanted, wide, masked(writer, wanted, b))
    product = writer.node("Mul", product, writer.constant(wanted.scale * wanted.weight))
    output = writer.instead(layer.node.outputs[0], lambda y: writer.node("Add", y, product))
    return wanted.put_at(output, a, b)


def factor(work: ir.Model, adapter: Adapter) -> ir.Value | None:
    """Return the graph value that contains the scale s, or None if the adapter's nodes were changed."""
    added = value_named(work, adapter.output).producer()
    scaled = None if added is None or added.inputs[1] is None else added.inputs[1].producer()
    return None if scaled is None or scaled.op_type != "Mul" else scaled.inputs[1]


def product_of(writer: Writer, layer: Layer, wanted: Adapter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Write nodes that compute ``(x·A)·B`` for the layer's input x, with dropout of x if requested."""
    x = layer.data
    if wanted.dropout and layer.kind != "Gather":
        x = writer.node("Dropout", x, writer.constant(wanted.dropout))
    if layer.kind == "Gather":
        return writer.node("MatMul", writer.node("Gather", a, x), b)
    if layer.kind == "Conv":
        attributes: dict[str, Any] = dict(layer.node.attributes)
        inner = writer.node("Conv", x, a, **attributes)
        return writer.node("Conv", inner, b, group=layer.groups)
    return writer.node("MatMul", writer.node("MatMul", x, a), b)


def masked(writer: Writer, wanted: Adapter, b: ir.Value) -> ir.Value:
    """Return B multiplied by the mask of ``blocks``, if any, so that it has no effect outside of them in training."""
    return b if not wanted.blocks else writer.node("Mul", b, writer.constant(mask_of(wanted)))


def mask_of(adapter: Adapter) -> Array | float:
    """Return the factor of B (rank, outputs) of an adapter with ``blocks``: the share of each, and zero elsewhere.

    Returns 1 for other adapters.
    """
    if not adapter.blocks:
        return 1.0
    count = len(adapter.blocks)
    outputs, ranks = (np.repeat(np.arange(count), sizes) for sizes in zip(*adapter.blocks, strict=True))
    shares = np.array(adapter.shares or [1.0] * count)
    return np.asarray((ranks[:, None] == outputs) * shares[ranks, None])


def let_blocks_go(work: ir.Model, adapter: Adapter) -> None:
    """Remove the mask of B (see ``masked``), if any."""
    if not adapter.blocks:
        return
    value = value_named(work, adapter.weights[1])
    for _ in range(2):  # DoRA multiplies B by s before the mask
        node = next(use.node for use in value.uses())
        mask = numbers_of(node.inputs[1]) if node.op_type == "Mul" else None
        if mask is not None and len(mask.shape) == 2:
            replace_value(node.outputs[0], value)
            discard(node)
            break
        value = node.outputs[0]


def begin(writer: Writer, layer: Layer, wanted: Adapter, rng: np.random.Generator) -> tuple[ir.Value, ir.Value]:
    """Add the trained A and B, with the initial values of PEFT.

    A is uniform in ±1/√(inputs), and B is zero. For an embedding, A is zero and B normally distributed. The rank of a
    grouped Conv is rounded up to a multiple of the number of groups.
    """
    inputs, outputs = layer.sizes
    rank = -(-wanted.rank // layer.groups) * layer.groups
    kernel = layer.kernel
    if layer.kind == "Conv":
        shapes = [(rank, inputs, *kernel), (outputs, rank // layer.groups, *[1] * len(kernel))]
    else:
        shapes = [(inputs, rank), (rank, outputs)]
    if layer.kind == "Gather":
        a, b = np.zeros(shapes[0]), rng.normal(size=shapes[1])
    else:
        a, b = drawn(rng, shapes[0], layer.fan_in, layer.dtype), np.zeros(shapes[1])
    return writer.weight("lora_A", a), writer.weight("lora_B", b)


def merge(adapter: Adapter, weight: Array, factors: list[Array]) -> Array:
    """Return the merged weight ``W + s·A·B`` with its output axis first; s is the adapter's scale."""
    return np.asarray(weight + delta(adapter, factors))


def delta(adapter: Adapter, factors: list[Array]) -> Array:
    """Return the update ``s·A·B`` of the weight, with its output axis first; s is the adapter's scale."""
    a, b = factors[:2]
    if adapter.operator != "Conv":
        return np.asarray(adapter.scale * adapter.weight * (a @ (b * mask_of(adapter))).T)
    groups = len(a) // b.shape[1]
    parts = a.reshape(groups, -1, *a.shape[1:])
    rows = b.reshape(groups, len(b) // groups, b.shape[1])
    product = np.einsum("gor,gr...->go...", rows, parts)
    return np.asarray(adapter.scale * adapter.weight * product.reshape(len(b), *a.shape[1:]))


FACTORS = ("lora_A.weight", "lora_B.weight")
LORA = KINDS.add(
    "lora",
    Kind("two low-rank factors added to a weight", put, FACTORS, zeros, ((1, 0), (0, 1)), factor, merge, drops=True,
         adds=True, of_embeddings=("lora_embedding_A", "lora_embedding_B"), peft="LORA"),
)  # fmt: skip
KINDS.add("rslora", replace(LORA, about="the same as lora, scaled by alpha/√rank", spread=math.sqrt))
