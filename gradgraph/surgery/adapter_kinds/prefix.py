"""Prefix tuning (Li and Liang 2021, arXiv:2101.00190): ``rank`` trained keys and values precede those of the text.

Each layer has its own prefix. Attention is recognised in three forms:

1. GroupQueryAttention and MultiHeadAttention of com.microsoft, without a past: the prefix becomes their past.
2. Attention of ai.onnx, without a past: the prefix becomes its past.
3. Attention in several nodes, as PyTorch exports it: ``Softmax(f(Q·Kᵀ))·V`` in heads [batch, heads, tokens, size],
   where f scales and masks. The scores of the prefix come before the others, and no mask hides them. Key heads that
   several query heads share, and that are repeated before the products, have one prefix.

A generative model, whose attention has a key-value cache, needs no surgery: the prefix can be fed as its initial cache.

If all attentions of a model get a prefix, positions of the text start after it, as in PEFT: fed positions and rotary
positions inside a GroupQueryAttention are offset by its length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.files.model_metadata import Adapter, adapters_in
from gradgraph.graph.nodes import input_at
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.weights.places import module_of
from gradgraph.surgery.adapter_kinds.kind import KINDS, Kind, everything
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.operation import matched, numbers_of, value_named

STD = 0.02  # standard deviation of the initial prefix
POSITIONS = "position_ids"  # the name of the input in transformers, optimum and genai's builder


@dataclass(frozen=True)
class Attention:
    """An attention that can have a prefix.

    Attributes:
        node: its main node: a fused attention, or the Softmax of one in several nodes.
        name: name of its module.
        heads: number of key heads.
        size, value_size: sizes of a key and of a value per head.
        write: a function of writer, attention, keys and values that inserts a prefix and returns the name of the
            output.
    """

    node: ir.Node
    name: str
    heads: int
    size: int
    value_size: int
    write: Callable[[Writer, Attention, ir.Value, ir.Value], str]

    @property
    def kind(self) -> str:
        return self.node.op_type

    @property
    def names(self) -> list[str]:
        """The names that a pattern can match: of the attention's module and of its node."""
        return [n for n in (self.name, self.node.name) if n]


def found(work: ir.Model, target: str | Sequence[str]) -> tuple[list[Attention], list[str]]:
    """Return the attentions whose module or node matches names or globs; and why other matches cannot have a prefix."""
    every = matched(target, ((names, what) for _, names, what in _named(work)))
    return [one for one in every if isinstance(one, Attention)], [one for one in every if isinstance(one, str)]


def _named(work: ir.Model) -> Iterator[tuple[ir.Node, list[str], Attention | str]]:
    for place, node in enumerate(work.graph):
        reader = _FORMS.get((node.domain, node.op_type))
        if reader is None:
            continue
        what = reader(node)
        if what is None:
            continue
        module = module_of(node) or (node.name or "").rpartition("/")[0].strip("/").replace("/", ".")
        name = module or f"{node.op_type}_{place}"
        names = [n for n in (name, node.name) if n]
        yield node, names, f"'{name}' {what}" if isinstance(what, str) else Attention(node, name, *what)


Sizes = tuple[int, int, int, Callable[[Writer, Attention, ir.Value, ir.Value], str]]


def put(work: ir.Model, layer: Attention, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Prepend trained keys and values [heads, rank, size] to an attention's own; return the adapter."""
    kind = layer.node.outputs[0].dtype or ir.DataType.FLOAT
    writer = Writer(work, layer.node, wanted, kind)
    keys = writer.weight("prefix_key", rng.normal(0, STD, (layer.heads, wanted.rank, layer.size)))
    values = writer.weight("prefix_value", rng.normal(0, STD, (layer.heads, wanted.rank, layer.value_size)))
    return wanted.put_at(layer.write(writer, layer, keys, values), keys, values)


def rest(work: ir.Model, adapter: Adapter, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return keys and values of length 0, with which the prefix has no effect."""
    del work, adapter
    return [array[:, :0] for array in arrays]


def _length(writer: Writer, keys: ir.Value) -> ir.Value:
    """Write nodes that compute the length of the prefix, int64 [1], from the shape of its keys."""
    return writer.node("Slice", writer.node("Shape", keys), writer.whole(1), writer.whole(2))


def count_positions(work: ir.Model, layers: Sequence[Attention], made: list[Adapter]) -> list[Adapter]:
    """Offset the positions of the text by the length of the prefix, if all attentions have one.

    The returned adapters are marked as ``counted`` if positions are offset, either by a node written here or by the
    attentions themselves.
    """
    adapted = {layer.node for layer in layers}
    has_prefix = any(a.kind == "prefix" for a in adapters_in(work.metadata_props))
    if has_prefix or any(node not in adapted for node, _, _ in _named(work)):
        return made
    if not all(map(_counts_inside, adapted)):
        fed = next((v for v in work.graph.inputs if v.name == POSITIONS), None)
        if fed is None:
            return made
        readers = list(fed.uses())
        writer = Writer(work, layers[0].node, made[0], fed.dtype or ir.DataType.INT64)
        keys = value_named(work, made[0].weights[0])
        moved = writer.node("Add", fed, writer.cast(_length(writer, keys), writer.dtype))
        moved.type, moved.shape = fed.type, fed.shape
        for reader, place in readers:
            reader.replace_input_with(place, moved)
        writer.place_before(work.graph[0])
    return [replace(one, counted=True) for one in made]


def _counts_inside(node: ir.Node) -> bool:
    """Whether a GroupQueryAttention computes rotary positions itself, starting at the length of its KV cache."""
    rotates = node.op_type == "GroupQueryAttention" and node.attributes.get_int("do_rotary", 0) == 1
    return rotates and input_at(node, 9) is None


# --- fused attention ---------------------------------------------------------------------------------------------


def _shape(value: ir.Value | None) -> tuple[Any, ...]:
    return () if value is None else tuple(shape_of(value) or ())


def _fused(
    places: tuple[int, int], masks: tuple[int, ...], heads: str, kv_heads: str
) -> Callable[[ir.Node], Sizes | str]:
    def read(node: ir.Node) -> Sizes | str:
        if any(input_at(node, i) is not None for i in places):
            return "already has a cache; feed the prefix as an initial cache or train gg.surgery.language_model(model)"
        query, value = input_at(node, 0), input_at(node, 2)
        count = node.attributes.get_int(heads, 0)
        of_keys = node.attributes.get_int(kv_heads, count)
        shape = _shape(query)
        if len(shape) == 4:
            key_shape, value_shape = _shape(input_at(node, 1)) or (None,) * 4, _shape(value) or (None,) * 4
            sizes: Any = (key_shape[1], key_shape[3], value_shape[3])
        elif len(shape) == 3 and isinstance(shape[2], int) and count:
            size = shape[2] // (count if value is not None else count + 2 * of_keys)
            sizes = (of_keys, size, size)
        else:
            sizes = (None, None, None)
        if not all(isinstance(s, int) for s in sizes):
            return "does not declare the number and size of its heads"
        return *sizes, functools.partial(_as_past, places, masks)

    return read


def _as_past(
    places: tuple[int, int], masks: tuple[int, ...], writer: Writer, layer: Attention, keys: ir.Value, values: ir.Value
) -> str:  # fmt: skip
    node = layer.node
    query = node.inputs[0]
    assert query is not None
    batch = writer.node("Slice", writer.node("Shape", query), writer.whole(0), writer.whole(1))
    count = _length(writer, keys)
    for place, weight, size in zip(places, (keys, values), (layer.size, layer.value_size), strict=True):
        shape = writer.node("Concat", batch, writer.whole(layer.heads), count, writer.whole(size), axis=0)
        writer.before(node, place, writer.node("Expand", weight, shape))
    writer.declare(node, 3)  # onnxruntime ignores the past unless the present is an output
    for place in masks:
        mask = input_at(node, place)
        if mask is not None:
            writer.before(node, place, _wider(writer, mask, count))
    if node.op_type == "GroupQueryAttention":
        for place in (5, 6):  # the number of tokens
            held = node.inputs[place]
            assert held is not None
            one = writer.node("Squeeze", count, writer.whole(0))
            writer.before(node, place, writer.node("Add", held, writer.cast(one, held.dtype or ir.DataType.INT32)))
    return node.outputs[0].name or ""


def _wider(writer: Writer, mask: ir.Value, count: ir.Value) -> ir.Value:
    """Return a mask or an attention bias with ``count`` more columns in front, in which the prefix is visible."""
    rank = len(shape_of(mask) or ())
    before = [writer.whole(*[0] * (rank - 1))] if rank > 1 else []
    pads = writer.node("Concat", *before, count, writer.whole(*[0] * rank), axis=0)
    shows = mask.dtype is not None and not mask.dtype.is_floating_point()  # 1 or True: visible
    return writer.node("Pad", mask, pads, writer.constant(1 if shows else 0, mask.dtype or ir.DataType.FLOAT))


# --- written out -------------------------------------------------------------------------------------------------

_AROUND = ("Add", "Where", "Mul", "Div", "Sub", "Cast", "Clip", "Dropout", "Identity", "Max")


def _written_out(softmax: ir.Node) -> Sizes | str | None:
    """Return the sizes of the attention that a Softmax belongs to, or the reason why it cannot have a prefix.

    Returns None if the Softmax is not part of an attention.
    """
    scores = _product_before(softmax)
    mixed = _product_behind(softmax)
    if scores is None or mixed is None:
        return None
    query, value = scores.inputs[0], mixed.inputs[1]
    shapes = [_shape(query), _shape(value)]
    if any(len(shape) != 4 for shape in shapes):
        return "merges its heads into the batch axis, [batch · heads, tokens, size], where they cannot be separated"
    heads, sizes = shapes[1][1], [shape[3] for shape in shapes]
    if not all(isinstance(s, int) for s in (heads, *sizes)):
        return "does not declare the number and size of its heads"
    return _heads_before_repeating(value) or heads, sizes[0], sizes[1], _before_scores


def _heads_before_repeating(value: ir.Value | None) -> int | None:
    """Return the number of key heads before they are repeated for the query heads, or None if they are not repeated.

    If repeated, ``value`` is a Reshape of an Expand of x [batch, heads, 1, tokens, size].
    """
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Reshape", "Identity"):
        value = node.inputs[0]
        node = None if value is None else value.producer()
    if node is None or node.op_type != "Expand":
        return None
    shape = _shape(node.inputs[0])
    return shape[1] if len(shape) == 5 and shape[2] == 1 and isinstance(shape[1], int) else None


def _product_before(softmax: ir.Node) -> ir.Node | None:
    """Return the MatMul of queries and keys that computes the scores of a Softmax, or None if there is none."""
    waiting = [softmax.inputs[0]]
    for _ in range(16):
        value = waiting.pop(0) if waiting else None
        node = None if value is None else value.producer()
        if node is not None and node.op_type == "MatMul" and all(numbers_of(v) is None for v in node.inputs):
            return node
        if node is not None and node.op_type in _AROUND:
            waiting += [v for v in node.inputs if v is not None and numbers_of(v) is None]
    return None


def _product_behind(softmax: ir.Node) -> ir.Node | None:
    value = softmax.outputs[0]
    for _ in range(4):
        readers = [use.node for use in value.uses()]
        product = next((n for n in readers if n.op_type == "MatMul" and n.inputs[0] is value), None)
        if product is not None:
            return product
        passing = next((n for n in readers if n.op_type in ("Where", "Dropout", "Cast", "Identity")), None)
        if passing is None:
            return None
        value = passing.outputs[0]
    return None


def _before_scores(writer: Writer, layer: Attention, keys: ir.Value, values: ir.Value) -> str:
    softmax = layer.node
    scores, mixed = _product_before(softmax), _product_behind(softmax)
    assert scores is not None and mixed is not None and softmax.inputs[0] is not None
    query, masked, chances = scores.inputs[0], softmax.inputs[0], softmax.outputs[0]
    assert query is not None
    count = _length(writer, keys)
    keys, values = (_repeated(writer, layer, x, _shape(mixed.inputs[1])[1], count) for x in (keys, values))
    seen = writer.node(
        "MatMul", query, _weighed(writer, scores.inputs[1], writer.node("Transpose", keys, perm=[0, 2, 1]))
    )
    factor = _scale(scores.outputs[0], masked)
    if factor != 1:
        seen = writer.node("Mul", seen, writer.constant(factor))
    writer.before(softmax, 0, writer.node("Concat", seen, masked, axis=-1))
    readers = list(chances.uses())
    axis = writer.whole(-1)
    rest = writer.node("Slice", chances, count, writer.whole(2**31), axis)
    first = writer.node("Slice", chances, writer.whole(0), count, axis)
    for reader, position in readers:
        reader.replace_input_with(position, rest)
    chances.shape, masked_shape = None, masked.shape
    rest.type, rest.shape = chances.type, masked_shape
    writer.place_behind(softmax)
    product = writer.node("MatMul", first, values)
    return writer.instead(mixed.outputs[0], lambda y: writer.node("Add", y, product))


def _repeated(writer: Writer, layer: Attention, x: ir.Value, heads: int, count: ir.Value) -> ir.Value:
    """Write nodes that repeat the prefix keys or values ``x``, of ``count`` tokens, to ``heads`` heads, as for text."""
    if heads == layer.heads:
        return x
    size = _shape(x)[2]
    each = writer.node("Unsqueeze", x, writer.whole(1))
    wide = writer.node("Expand", each, writer.whole(1, heads // layer.heads, 1, 1))
    return writer.node("Reshape", wide, writer.node("Concat", writer.whole(heads), count, writer.whole(size), axis=0))


def _weighed(writer: Writer, own: ir.Value | None, keys: ir.Value) -> ir.Value:
    """Return prefix ``keys``, multiplied by the same constant as ``own``, the text's keys, if the model scales them."""
    node = None if own is None else own.producer()
    if node is None or node.op_type not in ("Mul", "Div"):
        return keys
    number = next((v for v in node.inputs if v is not None and v.shape is not None and _shape(v) in ((), (1,))), None)
    return keys if number is None else writer.node(node.op_type, keys, number)


def _scale(start: ir.Value, end: ir.Value) -> float:
    """Return the product of the constants that scale the scores from ``start`` to ``end``."""
    factor, value = 1.0, start
    for _ in range(8):
        if value is end:
            return factor
        uses = [use for use in value.uses() if use.node.op_type in _AROUND]
        if len(uses) != 1:
            return factor
        node, place = uses[0]
        other = numbers_of(node.inputs[1 - place]) if node.op_type in ("Mul", "Div") and len(node.inputs) == 2 else None
        if other is not None and other.size == 1:
            number = float(other.numpy().reshape(()))
            factor = factor * number if node.op_type == "Mul" else factor / number
        value = node.outputs[0]
    return factor


def _packed(node: ir.Node) -> str:
    return "computes its keys and values inside, from one packed weight"


_FORMS: dict[tuple[str, str], Callable[[ir.Node], Sizes | str | None]] = {
    ("com.microsoft", "GroupQueryAttention"): _fused((3, 4), (10,), "num_heads", "kv_num_heads"),
    ("com.microsoft", "MultiHeadAttention"): _fused((6, 7), (4, 5), "num_heads", "num_heads"),
    ("com.microsoft", "Attention"): _packed,
    ("com.microsoft", "PackedMultiHeadAttention"): _packed,
    ("", "Attention"): _fused((4, 5), (3,), "q_num_heads", "kv_num_heads"),
    ("", "Softmax"): _written_out,
}


KINDS.add(
    "prefix",
    Kind("trained keys and values before those of the text, in an attention", put, ("key", "value"), rest,
         ((1, 1), (1, 1)), layers=found, finish=count_positions, what="attentions", default=everything),
)  # fmt: skip
