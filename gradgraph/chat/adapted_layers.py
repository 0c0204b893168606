"""Selection of the layers of a decoder that get adapters; by default derived from what their nodes compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.chat.chat_recipe import MERGE_NONE, Recipe
from gradgraph.errors import listed
from gradgraph.surgery.adapter_kinds import lora_experts
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.layer_kinds import HEAD, ROUTER, Kinds, layers_and_kinds, other_layers
from gradgraph.surgery.linear_layers import Layer, linear_layers


def adapted_layers(decoder: ir.Model, recipe: Recipe) -> list[str]:
    """Return the names or globs of the layers that get adapters: the recipe's target, or every linear layer by default.

    The default excludes the head (it computes next-token scores), the routers of mixtures of experts,
    embeddings and convolutions. It includes attention, MLP, and the mixers of hybrid models, regardless of their names.
    """
    if recipe.kind == lora_experts.NAME:
        return list(recipe.target) or ["*"]
    return list(recipe.target) or [layer.name for layer in _by_default(*layers_and_kinds(decoder))]


def reached(decoder: ir.Model, recipe: Recipe) -> str:
    """Return a sentence with the number of linear layers (or tensors of experts) that get adapters, and the others."""
    if recipe.kind == lora_experts.NAME:
        count, of = (len(lora_experts.found(decoder, one)[0]) for one in (adapted_layers(decoder, recipe), "*"))
        return f"{count} of {of} tensors of experts get adapters"
    every, kinds = layers_and_kinds(decoder)
    names = list(recipe.target) or [layer.name for layer in _by_default(every, kinds)]
    chosen = {layer.node for layer in linear_layers(decoder, names)[0]}
    adapted = _by_kind([layer for layer in every if layer.node in chosen], kinds)
    missing = _by_kind([layer for layer in every if layer.node not in chosen], kinds)
    others = [f"{count} {what}{'s' * (count > 1)}" for what, count in other_layers(decoder).items()]
    count = sum(map(len, adapted.values()))
    told = f"{count} of {len(every)} linear layers get adapters"
    told += f" ({', '.join(f'{len(layers)} {kind}' for kind, layers in adapted.items())})" if adapted else ""
    rest = [f"{len(layers)} {kind} ({listed(layers)})" for kind, layers in missing.items()] + others
    return f"{told}; not adapted: {', '.join(rest)}" if rest else told


def largest_merged(decoder: ir.Model, recipe: Recipe) -> int:
    """Return the number of weights of the largest layer whose adapter will be merged, or 0."""
    if recipe.merge == MERGE_NONE:
        return 0
    if recipe.kind == lora_experts.NAME:
        experts = lora_experts.found(decoder, adapted_layers(decoder, recipe))[0]
        return max((one.count * math.prod(one.sizes) for one in experts), default=0)
    if KINDS[recipe.kind].merge is None:
        return 0
    layers = linear_layers(decoder, adapted_layers(decoder, recipe))[0]
    return max((math.prod(layer.sizes) * math.prod(layer.kernel) for layer in layers), default=0)


def products(model: ir.Model, below_head: bool) -> list[Layer]:
    """Return all linear layers of a model other than embeddings and convolutions; or the default ones for adapters."""
    every, kinds = layers_and_kinds(model)
    return _by_default(every, kinds) if below_head else every


def _by_default(layers: list[Layer], kinds: Kinds) -> list[Layer]:
    return [layer for layer in layers if kinds[layer.node] not in (HEAD, ROUTER)] or layers


def _by_kind(layers: Sequence[Layer], kinds: Kinds) -> dict[str, list[str]]:
    """Return the names of layers by their kind, in the order of the model."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(kinds[layer.node], []).append(layer.name)
    return found
