"""IA3: one trained vector per layer multiplies its output (Liu et al. 2022, arXiv:2205.05638).

In a feed-forward layer it multiplies the input. It merges into the weight and the bias.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.files.model_metadata import Adapter
from gradgraph.surgery.adapter_kinds.kind import KINDS, NO_RANK, Kind, ones
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operation import Array


def put(work: ir.Model, layer: Layer, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Insert a Mul by the trained vector l after a layer and its bias, or before a feed-forward layer."""
    del rng
    writer = Writer(work, layer.node, wanted, layer.dtype)
    ahead = wanted.side == "in"
    if ahead and (layer.kind == "Gather" or layer.groups > 1):
        raise BuildError(
            f"'{shown(layer.name)}' is an embedding or a Conv with groups, whose input cannot be multiplied by a "
            "vector; use kind lora for it"
        )
    vector = writer.weight("ia3_l", np.ones([layer.sizes[0 if ahead else 1], *[1] * len(layer.kernel)]))
    if ahead:
        writer.before(layer.node, 0, writer.node("Mul", layer.data, vector))
        return wanted.put_at(layer.node.outputs[0].name or "", vector)
    return wanted.put_at(writer.instead(layer.result, lambda y: writer.node("Mul", y, vector)), vector)


def merge(adapter: Adapter, weight: Array, factors: list[Array]) -> Array:
    """Return the merged weight ``W·l`` with its output axis first; l is the trained vector."""
    vector = factors[0].reshape(-1)
    sizes = (1, -1) if adapter.side == "in" else (-1, 1)
    return np.asarray(weight * vector.reshape(*sizes, *[1] * (weight.ndim - 2)))


def bias(adapter: Adapter, bias: Array, factors: list[Array]) -> Array:
    """Return ``b·l`` for the bias b and the trained vector l."""
    return bias if adapter.side == "in" else np.asarray(bias * factors[0].reshape(-1))


KINDS.add(
    "ia3",
    Kind("one vector that multiplies the output of a layer", put, ("ia3_l",), ones, NO_RANK, merge=merge, bias=bias,
         peft="IA3"),
)  # fmt: skip
