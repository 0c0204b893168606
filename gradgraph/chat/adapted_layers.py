"""Selection of the layers of a decoder that get adapters; by default derived from what their nodes compute."""

from __future__ import annotations

import math

import onnx_ir as ir

from gradgraph.chat.chat_recipe import MERGE_NONE, Recipe
from gradgraph.errors import listed
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.language_models import score_outputs
from gradgraph.surgery.linear_layers import Layer, linear_layers

# operators between a router and the node that reads its scores
_ON_THE_WAY = frozenset({"Add", "Cast", "Div", "Mul", "Reshape", "Sigmoid", "Softmax", "Squeeze", "Unsqueeze"})
_CHOOSES_BY = {("", "TopK"): 0, ("com.microsoft", "MoE"): 1, ("com.microsoft", "QMoE"): 1}  # input: expert scores


def adapted_layers(decoder: ir.Model, recipe: Recipe) -> list[str]:
    """Return the names or globs of the layers that get adapters: the recipe's target, or every linear layer by default.

    The default excludes the head (it computes next-token scores), the routers of mixtures of experts,
    embeddings and convolutions. It includes attention, MLP, and the mixers of hybrid models, regardless of their names.
    """
    return list(recipe.target) or [layer.name for layer in _by_default(decoder)]


def reached(decoder: ir.Model, recipe: Recipe) -> str:
    """Return a sentence with the number of linear layers that get adapters and the names of the others."""
    every = _products(decoder)
    chosen = {layer.node for layer in linear_layers(decoder, adapted_layers(decoder, recipe))[0]}
    missing = [layer.name for layer in every if layer.node not in chosen]
    count = f"{len(every) - len(missing)} of {len(every)} linear layers get adapters"
    return f"{count}, all but {listed(missing)}" if missing else count


def largest_merged(decoder: ir.Model, recipe: Recipe) -> int:
    """Return the number of weights of the largest layer whose adapter will be merged, or 0."""
    if recipe.merge == MERGE_NONE or KINDS[recipe.kind].merge is None:
        return 0
    layers = linear_layers(decoder, adapted_layers(decoder, recipe))[0]
    return max((math.prod(layer.sizes) * math.prod(layer.kernel) for layer in layers), default=0)


def _by_default(decoder: ir.Model) -> list[Layer]:
    layers = _products(decoder)
    heads = _heads(decoder, {layer.node for layer in layers})
    return [layer for layer in layers if layer.node not in heads and not _routes(layer.result)] or layers


def _products(decoder: ir.Model) -> list[Layer]:
    return [layer for layer in linear_layers(decoder, "*")[0] if layer.kind not in ("Gather", "Conv")]


def _heads(decoder: ir.Model, layers: set[ir.Node]) -> set[ir.Node]:
    """Return the layers that compute next-token scores: the first layers on each path back from the scores."""
    found, seen = set[ir.Node](), set[ir.Value]()
    waiting: list[ir.Value | None] = list(score_outputs(decoder.graph))
    while waiting:
        value = waiting.pop()
        node = None if value is None or value in seen else value.producer()
        if value is not None:
            seen.add(value)
        if node in layers:
            found.add(node)
        elif node is not None:
            waiting.extend(node.inputs)
    return found


def _routes(value: ir.Value) -> bool:
    """Whether ``value`` contains the scores by which a router selects experts."""
    seen, waiting = set[ir.Value](), [value]
    while waiting:
        for node, place in waiting.pop().uses():
            if _CHOOSES_BY.get((node.domain, node.op_type)) == place:
                return True
            if node.op_type in _ON_THE_WAY and not node.domain and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return False
