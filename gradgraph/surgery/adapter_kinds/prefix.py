"""Prefix tuning (Li and Liang 2021, arXiv:2101.00190): every query sees ``rank`` more keys and values, which train.

They stand before those of the text, in each layer. Attention is recognised in three forms:

1. GroupQueryAttention and MultiHeadAttention of com.microsoft, without a past: the prefix is their past;
2. Attention of ai.onnx, without a past, likewise;
3. written out, as PyTorch exports it: ``Softmax(f(Q·Kᵀ))·V`` in heads [batch, heads, tokens, size], where f scales and
   masks. The scores of the prefix come before the others, and no mask hides them.

A model whose attention has a past (one that generates) takes the prefix as its first past, and needs no surgery.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.named import as_names, matching
from gradgraph.shapes import shape_of
from gradgraph.surgery.adapter_kinds.adapter import Adapter
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.naming import module_of
from gradgraph.surgery.operated import numbers_of

STD = 0.02  # of the numbers that a prefix begins with


@dataclass(frozen=True)
class Attention:
    """One attention: the node that stands for it, and the sizes of its keys."""

    node: ir.Node
    name: str
    heads: int
    size: int
    value_size: int
    write: Callable[[Writer, Attention, ir.Value, ir.Value, int], str]

    @property
    def kind(self) -> str:
        return self.node.op_type


def found(work: ir.Model, target: str | Sequence[str]) -> tuple[list[Attention], list[str]]:
    """Attentions that names or globs match, by module or node; and why others that match cannot have a prefix."""
    named = list(_named(work))
    chosen = {i for p in as_names(target) for i, (names, _) in enumerate(named) if matching(p, names)}
    every = [named[i][1] for i in sorted(chosen)]
    return [one for one in every if isinstance(one, Attention)], [one for one in every if isinstance(one, str)]


def _named(work: ir.Model) -> Iterator[tuple[list[str], Attention | str]]:
    for place, node in enumerate(work.graph):
        reader = _FORMS.get((node.domain, node.op_type))
        if reader is None:
            continue
        what = reader(node)
        if what is None:
            continue
        name = _module(node) or f"{node.op_type}_{place}"
        names = [n for n in (name, node.name) if n]
        yield names, f"'{name}' {what}" if isinstance(what, str) else Attention(node, name, *what)


def _module(node: ir.Node) -> str:
    return module_of(node) or (node.name or "").rpartition("/")[0].strip("/").replace("/", ".")


Sizes = tuple[int, int, int, Callable[[Writer, Attention, ir.Value, ir.Value, int], str]]


def put(work: ir.Model, layer: Attention, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Write keys [heads, rank, size] and values before those of an attention."""
    kind = layer.node.outputs[0].dtype or ir.DataType.FLOAT
    writer = Writer(work, layer.node, wanted, kind)
    keys = writer.weight("prefix_key", rng.normal(0, STD, (layer.heads, wanted.rank, layer.size)))
    values = writer.weight("prefix_value", rng.normal(0, STD, (layer.heads, wanted.rank, layer.value_size)))
    return wanted.put_at(layer.write(writer, layer, keys, values, wanted.rank), keys, values)


# --- fused attention ---------------------------------------------------------------------------------------------


def _shape(value: ir.Value | None) -> tuple[Any, ...]:
    return () if value is None else tuple(shape_of(value) or ())


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _fused(
    places: tuple[int, int], masks: tuple[int, ...], heads: str, kv_heads: str
) -> Callable[[ir.Node], Sizes | str]:
    def read(node: ir.Node) -> Sizes | str:
        if any(_input(node, i) is not None for i in places):
            return "has a past already; feed the prefix as its first past, or train gg.surgery.language_model(model)"
        query, value = _input(node, 0), _input(node, 2)
        count = node.attributes[heads].as_int() if heads in node.attributes else 0
        of_keys = node.attributes[kv_heads].as_int() if kv_heads in node.attributes else count
        shape = _shape(query)
        if len(shape) == 4:
            key_shape, value_shape = _shape(_input(node, 1)) or (None,) * 4, _shape(value) or (None,) * 4
            sizes: Any = (key_shape[1], key_shape[3], value_shape[3])
        elif len(shape) == 3 and isinstance(shape[2], int) and count:
            size = shape[2] // (count if value is not None else count + 2 * of_keys)
            sizes = (of_keys, size, size)
        else:
            sizes = (None, None, None)
        if not all(isinstance(s, int) for s in sizes):
            return "does not tell the number and size of its heads"
        return *sizes, functools.partial(_as_past, places, masks)

    return read


def _as_past(
    places: tuple[int, int], masks: tuple[int, ...], writer: Writer, layer: Attention, keys: ir.Value, values: ir.Value,
    count: int,
) -> str:  # fmt: skip
    node = layer.node
    query = node.inputs[0]
    assert query is not None
    batch = writer.node("Slice", writer.node("Shape", query), writer.whole(0), writer.whole(1))
    for place, weight, size in zip(places, (keys, values), (layer.size, layer.value_size), strict=True):
        shape = writer.node("Concat", batch, writer.whole(layer.heads, count, size), axis=0)
        writer.before(node, place, writer.node("Expand", weight, shape))
    writer.declare(node, 3)  # onnxruntime reads no past where nobody asks what comes after it
    for place in masks:
        mask = _input(node, place)
        if mask is not None:
            writer.before(node, place, _wider(writer, mask, count))
    if node.op_type == "GroupQueryAttention":
        for place in (5, 6):  # how many tokens there are
            held = node.inputs[place]
            assert held is not None
            more = writer.constant(count, held.dtype or ir.DataType.INT32)
            writer.before(node, place, writer.node("Add", held, more))
    return node.outputs[0].name or ""


def _wider(writer: Writer, mask: ir.Value, count: int) -> ir.Value:
    """A mask, or what is added to scores, with ``count`` columns in front that hide nothing."""
    rank = len(shape_of(mask) or ())
    pads = writer.whole(*[0] * (rank - 1), count, *[0] * rank)
    shows = mask.dtype is not None and not mask.dtype.is_floating_point()  # 1 or True: it is seen
    return writer.node("Pad", mask, pads, writer.constant(1 if shows else 0, mask.dtype or ir.DataType.FLOAT))


# --- written out -------------------------------------------------------------------------------------------------

_AROUND = ("Add", "Where", "Mul", "Div", "Sub", "Cast", "Clip", "Dropout", "Identity", "Max")


def _written_out(softmax: ir.Node) -> Sizes | str | None:
    """Of a Softmax: the products before and behind it; None, if it belongs to no attention."""
    scores = _product_before(softmax)
    mixed = _product_behind(softmax)
    if scores is None or mixed is None:
        return None
    query, value = scores.inputs[0], mixed.inputs[1]
    shapes = [_shape(query), _shape(value)]
    if any(len(shape) != 4 for shape in shapes):
        return "has its heads among the samples, [batch · heads, tokens, size], where they cannot be told apart"
    heads, sizes = shapes[1][1], [shape[3] for shape in shapes]
    if not all(isinstance(s, int) for s in (heads, *sizes)):
        return "does not tell the number and size of its heads"
    return heads, sizes[0], sizes[1], _before_scores


def _product_before(softmax: ir.Node) -> ir.Node | None:
    """The product of queries and keys that scores come from: two computed factors."""
    waiting = [softmax.inputs[0]]
    for _ in range(16):
        node = None if not waiting or waiting[0] is None else waiting[0].producer()
        if not waiting:
            return None
        waiting.pop(0)
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


def _before_scores(writer: Writer, layer: Attention, keys: ir.Value, values: ir.Value, count: int) -> str:
    softmax = layer.node
    scores, mixed = _product_before(softmax), _product_behind(softmax)
    assert scores is not None and mixed is not None and softmax.inputs[0] is not None
    query, masked, chances = scores.inputs[0], softmax.inputs[0], softmax.outputs[0]
    assert query is not None
    seen = writer.node(
        "MatMul", query, _weighed(writer, scores.inputs[1], writer.node("Transpose", keys, perm=[0, 2, 1]))
    )
    factor = _scale(scores.outputs[0], masked)
    if factor != 1:
        seen = writer.node("Mul", seen, writer.constant(factor))
    writer.before(softmax, 0, writer.node("Concat", seen, masked, axis=-1))
    readers = list(chances.uses())
    axis = writer.whole(-1)
    rest = writer.node("Slice", chances, writer.whole(count), writer.whole(2**31), axis)
    first = writer.node("Slice", chances, writer.whole(0), writer.whole(count), axis)
    for reader, position in readers:
        reader.replace_input_with(position, rest)
    chances.shape, masked_shape = None, masked.shape
    rest.type, rest.shape = chances.type, masked_shape
    writer.place_behind(softmax)
    product = writer.node("MatMul", first, values)
    return writer.instead(mixed.outputs[0], lambda y: writer.node("Add", y, product))


def _weighed(writer: Writer, own: ir.Value | None, keys: ir.Value) -> ir.Value:
    """Keys, multiplied by a number as those of the text are: PyTorch gives half of the scale to them."""
    node = None if own is None else own.producer()
    if node is None or node.op_type not in ("Mul", "Div"):
        return keys
    number = next((v for v in node.inputs if _is_number(v)), None)
    return keys if number is None else writer.node(node.op_type, keys, number)


def _is_number(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and _shape(value) in ((), (1,))


def _scale(start: ir.Value, end: ir.Value) -> float:
    """What numbers scores are multiplied by between the product and the Softmax."""
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
