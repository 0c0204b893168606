"""Kinds of the linear layers of a decoder, by what the nodes around them compute.

A block of a decoder adds its result to the hidden states (the residual stream). Its layers are of one kind:

1. attention: the block has an attention operator, or a Softmax.
2. convolution mixer: a causal convolution along the tokens (LFM2).
3. recurrent mixer: linear attention or another recurrence (Qwen3-Next, Mamba), also with a convolution before it. In
   standard operators, it has a cumulative sum of decays, multiplies by exp(x) (a decay, in unrolled steps), has a Loop
   or Scan, or multiplies a state.
4. expert: tokens are selected for it by a router. Experts inside one MoE operator are not linear layers of their own.
5. MLP: none of these.

The head computes next-token scores; a router computes scores by which experts are selected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.surgery.experts import experts_of
from gradgraph.surgery.language_models import model_states, score_outputs
from gradgraph.surgery.linear_layers import Layer, linear_layers
from gradgraph.surgery.operation import reached

HEAD, ROUTER, EXPERT, MLP = "head", "router", "expert", "MLP"
ATTENTION, CONVOLUTION, RECURRENCE = "attention", "convolution mixer", "recurrent mixer"
# kinds of blocks by their operators; the first that is found counts
_MIXERS: dict[str, frozenset[str]] = {
    RECURRENCE: frozenset({"CumSum", "GRU", "GatedDeltaNet", "LSTM", "LinearAttention", "Loop", "RNN", "Scan"}),
    ATTENTION: frozenset({"Attention", "DecoderMaskedMultiHeadAttention", "GroupQueryAttention", "MultiHeadAttention",
                          "PagedAttention", "PackedAttention", "PackedMultiHeadAttention", "Softmax",
                          "SparseAttention"}),
    CONVOLUTION: frozenset({"CausalConvWithState", "Conv", "VarlenCausalConvWithState"}),
    EXPERT: frozenset({"Compress", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"}),
}  # fmt: skip
_PRODUCTS = frozenset({"Einsum", "MatMul", "Mul"})
_SUMS = frozenset({"Add", "Sum"})
_PARTS = frozenset({"Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})  # of one step
_SKIPS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
# operators between a router and the node that reads its scores
_ON_THE_WAY = frozenset({"Add", "Cast", "Div", "Mul", "Reshape", "Sigmoid", "Softmax", "Squeeze", "Unsqueeze"})
_CHOOSES_BY = {("", "TopK"): 0, ("com.microsoft", "MoE"): 1, ("com.microsoft", "QMoE"): 1}  # input: expert scores
Kinds: TypeAlias = dict[ir.Node, str]


def layers_and_kinds(decoder: ir.Model) -> tuple[list[Layer], Kinds]:
    """Return the linear layers of a decoder except embeddings and convolutions, and the kind of each by its node."""
    layers = [layer for layer in linear_layers(decoder, "*")[0] if layer.kind not in ("Gather", "Conv")]
    return layers, _Blocks(decoder, layers).kinds()


def default_layers(decoder: ir.Model) -> list[Layer]:
    """Return the layers of ``layers_and_kinds`` other than the head and routers; all if there are no others."""
    layers, kinds = layers_and_kinds(decoder)
    return [layer for layer in layers if kinds[layer.node] not in (HEAD, ROUTER)] or layers


def other_layers(decoder: ir.Model) -> Counter[str]:
    """Count the nodes with weights that are not linear layers: convolutions, and mixtures of experts."""
    found = Counter[str]()
    tensors = {one.stored for one in experts_of(decoder)}
    for node in nodes_of(decoder):
        if node.op_type in _MIXERS[CONVOLUTION]:
            found["convolution"] += 1
        elif node.domain and (node.domain, node.op_type) in _CHOOSES_BY:
            found["MoE operator with its experts"] += 1
        elif tensors.intersection(node.inputs):
            found["tensor of experts"] += 1
    return found


class _Blocks:
    """The surroundings of layers, up to the next layers and the residual stream."""

    def __init__(self, decoder: ir.Model, layers: Sequence[Layer]) -> None:
        self._decoder, self._layers = decoder, layers
        self._nodes = {layer.node for layer in layers}
        self._widths = {size for layer in layers for size in layer.sizes}
        fixed = [state.past for state in model_states(decoder) if state.axis is None]
        self._decays = {node for past in fixed for node in past.consumers() if node.op_type in _PRODUCTS}
        self._decays |= {node for node in nodes_of(decoder) if node.op_type == "Exp" and _decays(node)}

    def kinds(self) -> Kinds:
        heads, found = self._heads(), Kinds()
        for layer in reversed(self._layers):  # a layer's kind may follow from that of the next one
            if layer.node in heads:
                found[layer.node] = HEAD
            elif _routes(layer.result):
                found[layer.node] = ROUTER
            else:
                found[layer.node] = self._kind(layer, found)
        return found

    def _kind(self, layer: Layer, known: Kinds) -> str:
        behind, following = self._behind(layer)
        there = [*self._before(layer), *behind]
        kinds = {kind for kind, names in _MIXERS.items() if any(_is_of(node, names) for node in there)}
        kinds |= {known.get(node, MLP) for node in following}
        kinds |= {RECURRENCE} if self._decays.intersection(there) else set()
        return next((kind for kind in _MIXERS if kind in kinds), MLP)

    def _before(self, layer: Layer) -> list[ir.Node]:
        """Return the nodes that compute the data of a layer from other layers or the residual stream."""
        found, waiting, seen = list[ir.Node](), [layer.data], set[ir.Value]()
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if value in seen or node is None or node in self._nodes or self._is_residual(node):
                continue
            seen.add(value)
            found.append(node)
            waiting += [v for v in node.inputs if v is not None and _is_floating(v)]
        return found

    def _behind(self, layer: Layer) -> tuple[list[ir.Node], list[ir.Node]]:
        """Return the nodes that read a layer's result, up to other layers or the residual stream; and these layers."""
        found, following, waiting, seen = list[ir.Node](), list[ir.Node](), [layer.node.outputs[0]], set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            for node in value.consumers():
                if node in self._nodes:
                    following.append(node)
                elif not self._is_residual(node):
                    found.append(node)
                    waiting += [v for v in node.outputs if _is_floating(v)]
        return found, following

    def _is_residual(self, node: ir.Node) -> bool:
        """Whether ``node`` adds the result of a block to the hidden states, which other nodes read, too."""
        if node.op_type in _SKIPS:
            return True
        if node.domain or node.op_type not in _SUMS:
            return False
        added = [v for v in node.inputs if v is not None and v.producer() is not None]
        return len(added) > 1 and any(len(v.uses()) > 1 and self._is_hidden(v) for v in added)

    def _is_hidden(self, value: ir.Value) -> bool:
        shape = shape_of(value)
        widths = () if shape is None else shape[-1:]
        known = [n for n in widths if isinstance(n, int)]
        return shape is None or (len(shape) <= 3 and all(n in self._widths for n in known))

    def _heads(self) -> set[ir.Node]:
        """Return the layers that compute next-token scores: the first layers on each path back from the scores."""

        def onward(value: ir.Value) -> Sequence[ir.Value | None]:
            node = value.producer()
            return () if node is None or node in self._nodes else node.inputs

        values = reached(score_outputs(self._decoder), onward)
        return {node for value in values if (node := value.producer()) is not None and node in self._nodes}


def _is_of(node: ir.Node, names: Iterable[str]) -> bool:
    """Whether ``node`` is an operator of these; a Gather only if it selects from computed values at computed places."""
    if node.op_type not in names:
        return False
    if node.op_type in _MIXERS[EXPERT]:
        return all(v is not None and v.producer() is not None for v in node.inputs[:2]) and _is_floating(
            node.outputs[0]
        )
    return node.op_type != "CumSum" or _is_floating(node.outputs[0])


def _decays(exp: ir.Node) -> bool:
    """Whether the result of an Exp, or a part of it, is a factor; that of a softmax is also summed."""
    kinds = {node.op_type for value in reached(exp.outputs, _results(_PARTS)) for node in value.consumers()}
    return "Mul" in kinds and "ReduceSum" not in kinds


def _is_floating(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()


def _routes(value: ir.Value) -> bool:
    """Whether ``value`` contains the scores by which a router selects experts."""
    uses = (use for value in reached([value], _results(_ON_THE_WAY)) for use in value.uses())
    return any(_CHOOSES_BY.get((node.domain, node.op_type)) == place for node, place in uses)


def _results(names: frozenset[str]) -> Callable[[ir.Value], list[ir.Value]]:
    """Return a function of a value that returns what standard operators of these names compute from it."""
    return lambda value: [
        v for node in value.consumers() if node.op_type in names and not node.domain for v in node.outputs
    ]
