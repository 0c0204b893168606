"""Selection of the layers of a decoder that get adapters; by default derived from what their nodes compute."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.chat.chat_recipe import MERGE_NONE, REQUANTISED, Recipe
from gradgraph.errors import listed
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.gptq import WIDEST, gram_bytes
from gradgraph.surgery.layer_kinds import Kinds, default_layers, layers_and_kinds, other_layers
from gradgraph.surgery.linear_layers import Layer, linear_layers

MERGING = 48  # bytes per weight of a layer while it is merged in float64 and requantised (45 were measured)
LEAST_PRODUCTS = 64 << 20  # bytes of the products of the inputs of layers that are held at a time, at least
QUANTISED = frozenset({"MatMulNBits", "DequantizeLinear", "QMoE"})  # operators of quantised models


def adapted_layers(decoder: ir.Model, recipe: Recipe) -> list[str]:
    """Return the names or globs of the layers that get adapters: the recipe's target, or the default of their kind.

    For most kinds, the default is every linear layer except the head (it computes next-token scores), the routers of
    mixtures of experts, embeddings and convolutions. It includes attention, MLP, and the mixers of hybrid models,
    regardless of their names.
    """
    return list(recipe.target) or KINDS[recipe.kind].default(decoder)


def reached(decoder: ir.Model, recipe: Recipe) -> str:
    """Return a sentence with the number of parts that get adapters; for linear layers, also the others."""
    kind, names = KINDS[recipe.kind], adapted_layers(decoder, recipe)
    if kind.layers is not linear_layers:
        count, of = (len(kind.layers(decoder, one)[0]) for one in (names, "*"))
        return f"{count} of {of} {kind.what} get adapters"
    every, kinds = layers_and_kinds(decoder)
    chosen = {layer.node for layer in linear_layers(decoder, names)[0]}
    adapted = _by_kind([layer for layer in every if layer.node in chosen], kinds)
    missing = _by_kind([layer for layer in every if layer.node not in chosen], kinds)
    others = [f"{count} {what}{'s' * (count > 1)}" for what, count in other_layers(decoder).items()]
    count = sum(map(len, adapted.values()))
    told = f"{count} of {len(every)} {kind.what} get adapters"
    told += f" ({', '.join(f'{len(layers)} {what}' for what, layers in adapted.items())})" if adapted else ""
    rest = [f"{len(layers)} {what} ({listed(layers)})" for what, layers in missing.items()] + others
    return f"{told}; not adapted: {', '.join(rest)}" if rest else told


def merging_memory(decoder: ir.Model, recipe: Recipe) -> int:
    """Return the memory in bytes that merging adapters requires, one layer at a time; 0 if none is merged."""
    kind = KINDS[recipe.kind]
    if recipe.merge == MERGE_NONE or (kind.merge is None and kind.merge_into is None):
        return 0
    parts = kind.layers(decoder, adapted_layers(decoder, recipe))[0]
    if recipe.merge != REQUANTISED or not any(node.op_type in QUANTISED for node in decoder.graph):
        return max((MERGING * part.size for part in parts), default=0)
    products = min(LEAST_PRODUCTS, sum(gram_bytes(part.sizes[0]) for part in parts))
    largest = max((MERGING * part.size + _rounding(part.sizes[0]) for part in parts), default=0)
    return largest + 2 * products  # inputs of layers, from which they are computed, take no more memory


def _rounding(inputs: int) -> int:
    """Return the bytes for rounding a layer by GPTQ: 5 float64 matrices, and one in float32 for each part."""
    return 40 * min(inputs, WIDEST) ** 2 + gram_bytes(inputs)


def products(model: ir.Model, below_head: bool) -> list[Layer]:
    """Return all linear layers of a model other than embeddings and convolutions; or the default ones for adapters."""
    return default_layers(model) if below_head else layers_and_kinds(model)[0]


def _by_kind(layers: Sequence[Layer], kinds: Kinds) -> dict[str, list[str]]:
    """Return the names of layers by their kind, in the order of the model."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(kinds[layer.node], []).append(layer.name)
    return found
