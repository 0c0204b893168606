"""Check the sizes of a node's inputs: one rule per operator, exact for numeric dimensions.

A rule is called with the node's inputs (``Operand``) and attributes, and yields complaints: phrases that follow the
node's name in a sentence. Only the first is used. An unknown rank, or a symbolic dimension, matches everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import counted, shown
from gradgraph.graph import ranks
from gradgraph.graph.node_forms import WIDEST
from gradgraph.graph.operator_table import OperatorTable
from gradgraph.graph.schemas import signature
from gradgraph.graph.shapes import Dim, Shape, differ, is_number, is_static, known_sizes, small_constant
from gradgraph.passes.normal.edit import attributes


@dataclass(frozen=True)
class Operand:
    """An input of a node; ``shape`` is None if even the rank is unknown."""

    value: ir.Value
    shape: Shape | None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def data(self) -> np.ndarray | None:
        """The numbers of a small constant; None for other values, whose data are not read."""
        return small_constant(self.value)

    def __getitem__(self, axis: int) -> Dim:
        return None if self.shape is None or not -len(self.shape) <= axis < len(self.shape) else self.shape[axis]

    def __str__(self) -> str:
        return f"'{shown(self.value.name)}'" + ("" if self.shape is None else f" of shape {words_of(self.shape)}")


Words = Iterator[str]
Rule = Callable[..., Words]
_RULES = OperatorTable[Rule]()
EXPORT = "correct the sizes, or export the model again"


def complaint(node: ir.Node, shapes: Sequence[Shape | None], opset: int) -> str | None:
    """Return a description of the wrong sizes of ``node`` for inputs of these ``shapes``; None if the sizes match."""
    rule = _RULES.get(node.op_type)
    if rule is None and not ranks.is_ranked(node.op_type):
        return None
    operands = [None if v is None else Operand(v, s) for v, s in zip(node.inputs, shapes, strict=True)]
    told = () if rule is None else rule(*operands, opset=opset, outputs=len(node.outputs), **attributes(node))
    return next(itertools.chain(told, _rank_complaints(node.op_type, operands, opset)), None)


def _rank_complaints(op_type: str, operands: Sequence[Operand | None], opset: int) -> Words:
    for i, operand in enumerate(operands):
        if operand is not None and (axes := ranks.misses(op_type, i, operand.shape)) is not None:
            schema = signature(op_type, opset)
            role = "" if schema is None else f" as its {schema.formal(i, False).name}"
            yield f"reads {operand}{role}, which must {axes}"


def _clash(*operands: Operand | None) -> Words:
    """Yield complaints about shapes that do not broadcast against each other."""
    known = [o for o in operands if o is not None and o.shape is not None]
    if len({o.shape for o in known}) < 2:
        return
    for place in range(1, 1 + max(o.rank or 0 for o in known)):
        sizes = [(o, o[-place]) for o in known if isinstance(o[-place], int) and o[-place] != 1]
        for operand, size in sizes[1:]:
            if size != sizes[0][1]:
                yield f"reads {sizes[0][0]} and {operand}, which do not broadcast: {sizes[0][1]} against {size}"


def _beyond(x: Operand | None, axes: Iterable[int], more: int = 0) -> Words:
    """Yield a complaint about each of ``axes`` that ``x``, with ``more`` axes added, does not have."""
    if x is not None and x.rank is not None:
        rank = x.rank + more
        yield from (f"has axis {a}, but reads {x}" for a in axes if not -rank <= a < rank)


def _ints(operand: Operand | None) -> list[int] | None:
    data = None if operand is None else operand.data
    return None if data is None or data.dtype.kind not in "iu" or data.ndim > 1 else [int(d) for d in data.ravel()]


def _too_small(sizes: Operand, least: int) -> Words:
    for size in _ints(sizes) or ():
        if size < least:
            yield f"reads {sizes}, which contains {size}; its numbers must be at least {least}"


# --- elementwise -----------------------------------------------------------------------------------


@_RULES("Add", "Sub", "Mul", "Div", "Mod", "Pow", "Max", "Min", "Mean", "Sum")
@_RULES("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Where", "And", "Or", "Xor")
@_RULES("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift")
def _broadcast(*operands: Operand | None, **_: Any) -> Words:
    return _clash(*operands)


@_RULES("PRelu")
def _prelu(x: Operand, slope: Operand, **_: Any) -> Words:
    if x.rank is not None and slope.rank is not None and slope.rank > x.rank:
        yield f"reads {x} and the slope {slope}, which has more axes"
    yield from _clash(x, slope)


@_RULES("Clip")
def _clip(x: Operand, *bounds: Operand | None, **_: Any) -> Words:
    for bound in bounds:
        if bound is not None and any(differ(d, 1) for d in bound.shape or ()):
            yield f"reads the bound {bound}, which must be one number"


@_RULES("QuantizeLinear", "DequantizeLinear")
def _quantized(
    x: Operand, scale: Operand, zero: Operand | None = None, *, axis: int = 1, block_size: int = 0, **_: Any
) -> Words:
    """Yield a complaint unless scales are per tensor, per index of ``axis``, or per block (with the rank of ``x``)."""
    if x.rank is None or scale.rank is None:
        return
    if block_size and scale.rank != x.rank:
        yield f"reads {x} in blocks, and the scale {scale} must have the same rank"
    if x.rank and is_number(scale.shape, 1):
        return
    if scale.rank > 1 and not block_size:
        yield f"reads {x} and the scale {scale}, which must have at most one axis"
    if scale.rank == 1:
        yield from _beyond(x, [axis])
        if differ(scale[0], x[axis]):
            yield f"reads {x} and the scale {scale}, which must have {x[axis]} elements, one per index of axis {axis}"


@_RULES("Expand")
def _expand(x: Operand, target: Operand, **_: Any) -> Words:
    yield from _too_small(target, 0)
    if (sizes := _ints(target)) is not None:
        yield from _clash(x, Operand(target.value, tuple(sizes)))


# --- products ---------------------------------------------------------------------------------------------


@_RULES("MatMul")
def _matmul(a: Operand, b: Operand, **_: Any) -> Words:
    if a.rank == 0 or b.rank == 0:
        yield f"reads {a} and {b}, and MatMul needs inputs with at least one axis"
    inner = b[-2] if b.rank is not None and b.rank > 1 else b[-1]
    if b.shape is not None and differ(a[-1], inner):
        yield f"multiplies {a} and {b}, whose inner sizes are {a[-1]} and {inner}"
    stacks = [Operand(o.value, o.shape[:-2]) for o in (a, b) if o.shape is not None and len(o.shape) > 2]
    if any(_clash(*stacks)):
        yield f"multiplies {a} and {b}, whose leading axes do not broadcast"


@_RULES("Gemm")
def _gemm(a: Operand, b: Operand, c: Operand | None = None, *, transA: int = 0, transB: int = 0, **_: Any) -> Words:
    for operand in (a, b):
        if operand.rank not in (None, 2):
            yield f"multiplies matrices, but reads {operand}"
    inner = a[0 if transA else 1], b[1 if transB else 0]
    if differ(*inner):
        turned = " (transposed)" if transA or transB else ""
        yield f"multiplies {a} and {b}{turned}, whose inner sizes are {inner[0]} and {inner[1]}"
    product = a[1 if transA else 0], b[0 if transB else 1]
    if c is None or c.shape is None:
        return
    if len(c.shape) > 2 or any(differ(c[-i], product[-i]) and c[-i] != 1 for i in (1, 2)[: len(c.shape)]):
        yield f"adds {c} to a product of shape {words_of(product)}"


@_RULES("Einsum")
def _einsum(*operands: Operand, equation: str, **_: Any) -> Words:
    """Yield a complaint unless each input has one axis per letter of its term, or at least as many with "..."."""
    sizes: dict[str, int] = {}
    for operand, term in zip(operands, equation.partition("->")[0].replace(" ", "").split(","), strict=False):
        letters, rest = term.replace("...", ""), "..." in term
        if operand.rank is not None and (operand.rank < len(letters) if rest else operand.rank != len(letters)):
            least = " or more" if rest else ""
            yield f"reads {operand}, but its equation '{shown(equation)}' requires {len(letters)}{least} axes"
        for letter, size in zip(letters, () if rest else operand.shape or (), strict=False):
            if isinstance(size, int) and size != 1 and sizes.setdefault(letter, size) != size:
                yield f"reads {operand}, but an earlier input has {sizes[letter]} elements along axis '{letter}'"


def words_of(shape: Shape) -> str:
    """Return a shape as text such as ``[n, 3, ?]``, where ``?`` is an unknown size."""
    return f"[{', '.join('?' if d is None else shown(d) for d in shape)}]"


# --- convolution, pooling, normalization ------------------------------------------------------------------


@_RULES("Conv")
def _conv(x: Operand, w: Operand, b: Operand | None = None, *, group: int = 1, **rest: Any) -> Words:
    kernels, channels = w[0], w[1]
    if isinstance(channels, int) and differ(x[1], channels * group):
        yield f"reads {x}, but its weights {w} in {group} group(s) expect {channels * group} channels"
    if isinstance(kernels, int) and group > 0 and kernels % group:
        yield f"has weights {w}, whose {kernels} kernels do not divide into {group} groups"
    yield from _kernels(x, w, kernels, b, **rest)
    yield from _window(x, () if w.shape is None else w.shape[2:], **rest)


@_RULES("ConvTranspose")
def _conv_transpose(x: Operand, w: Operand, b: Operand | None = None, *, group: int = 1, **rest: Any) -> Words:
    if w.rank is not None and w.rank > 1 and differ(x[1], w[0]):
        yield f"reads {x}, but its weights {w} expect {w[0]} channels"
    channels = w[1]
    yield from _kernels(x, w, channels * group if isinstance(channels, int) else None, b, **rest)


def _kernels(
    x: Operand, w: Operand, channels: Dim, b: Operand | None, kernel_shape: Sequence[int] | None = None, **rest: Any
) -> Words:
    if differ(x.rank, w.rank) or (x.rank or 3) < 3:
        yield f"reads {x} and weights {w}, which must have the same number of axes, three or more"
    spatial = () if w.shape is None else w.shape[2:]
    if wide := next((d for d in known_sizes(spatial) if d > WIDEST), None):
        yield f"has weights {w}, whose windows have {wide} elements along an axis; the limit is {WIDEST:,}"
    if kernel_shape and spatial and (len(kernel_shape) != len(spatial) or any(map(differ, kernel_shape, spatial))):
        yield f"declares kernels of shape {kernel_shape}, but reads weights {w}"
    if b is not None and b.rank == 1 and differ(b[0], channels):
        yield f"adds {b} to {channels} channels"
    yield from _lists(x, w.rank if x.rank is None else x.rank, kernel_shape=kernel_shape, **rest)


_PER_AXIS = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 1, "pads": 2}


def _lists(x: Operand, rank: int | None, auto_pad: str = "NOTSET", **given: Any) -> Words:
    """Yield a complaint about each attribute that does not have one entry (two for pads) per spatial axis."""
    lists = {name: given[name] for name in _PER_AXIS if given.get(name) and (name != "pads" or auto_pad == "NOTSET")}
    counts = {name: len(numbers) / _PER_AXIS[name] for name, numbers in lists.items()}
    axes = next(iter(counts.values()), 0) if rank is None else rank - 2
    yield from (f"has {n}={shown(lists[n])}, but reads {x}" for n, count in counts.items() if count != axes)


def _window(
    x: Operand,
    kernel: Sequence[Dim],
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    **_: Any,
) -> Words:
    """Yield a complaint about each axis that is shorter than its window, padding included."""
    axes = len(kernel)
    if auto_pad not in ("NOTSET", "VALID") or (pads and len(pads) != 2 * axes):
        return
    for axis, size in enumerate(kernel):
        length, reach = x[2 + axis], dilations[axis] if dilations and len(dilations) == axes else 1
        around = 0 if not pads or auto_pad == "VALID" else pads[axis] + pads[axes + axis]
        if isinstance(size, int) and isinstance(length, int) and 0 < length + around < (size - 1) * reach + 1:
            padded = f" and {around} of padding" if around else ""
            yield f"has a window of {(size - 1) * reach + 1} elements, more than axis {2 + axis} of {x}{padded}"


@_RULES("Col2Im")
def _col2im(x: Operand, image: Operand, block: Operand, **lists: Any) -> Words:
    if differ(image[0], block[0]):
        yield f"reads the sizes of an image {image} and of a block {block}, which must have equal length"
    for axes in known_sizes((image[0], block[0]))[:1]:
        yield from _lists(x, 2 + axes, **lists)


@_RULES("MaxPool", "AveragePool", "LpPool")
def _pool(x: Operand, *, kernel_shape: list[int], ceil_mode: int = 0, **rest: Any) -> Words:
    axes = len(kernel_shape)
    if differ(x.rank, 2 + axes):
        yield f"has windows of {axes} axes, but reads {x}"
    yield from _lists(x, 2 + axes, **rest)
    if not ceil_mode:
        yield from _window(x, kernel_shape, **rest)


@_RULES("GridSample")
def _grid_sample(x: Operand, grid: Operand, **_: Any) -> Words:
    if (x.rank or 3) < 3 or differ(x.rank, grid.rank):
        yield f"samples {x} at {grid}, which must have the same number of axes, three or more"
    if x.rank is not None and differ(grid[-1], x.rank - 2):
        yield f"samples {x} at {grid}, whose last axis must have {x.rank - 2} elements, the coordinates"


@_RULES("BatchNormalization", "InstanceNormalization")
def _norm_of_channels(x: Operand, *vectors: Operand, spatial: int = 1, **_: Any) -> Words:
    for v in vectors if spatial else ():
        if v.rank == 1 and differ(v[0], x[1]):
            yield f"reads {v}, which must have {x[1]} elements, the channels of {x}"


@_RULES("LayerNormalization", "RMSNormalization")
def _layer_norm(x: Operand, *vectors: Operand, axis: int = -1, **_: Any) -> Words:
    """Yield a complaint about the parameters of a norm of one axis; flattened ones for several axes are accepted."""
    for v in vectors:
        if v.rank is not None and x.rank is not None and v.rank > x.rank:
            yield f"reads {x} and {v}, which has more axes"
    for v in vectors if axis == -1 or axis + 1 == x.rank else ():
        if v.rank == 1 and v[0] != 1 and differ(v[0], x[-1]):
            yield f"reads {x} and {v}, which must have {x[-1]} elements"


@_RULES("RotaryEmbedding")
def _rotary(x: Operand, *_operands: Any, num_heads: int = 0, **_: Any) -> Words:
    width = x[2]
    if x.rank == 3 and (num_heads <= 0 or (isinstance(width, int) and width % num_heads)):
        yield f"has {num_heads} heads, but reads {x}, whose last axis must be a multiple of that"


# --- shapes -----------------------------------------------------------------------------------------------


@_RULES("ConstantOfShape")
def _constant_of_shape(sizes: Operand, **_: Any) -> Words:
    return _too_small(sizes, 0)


@_RULES("Reshape")
def _reshape(x: Operand, target: Operand, *, allowzero: int = 0, **_: Any) -> Words:
    yield from _too_small(target, -1)
    sizes = _ints(target)
    if sizes is None or target.rank != 1 or x.shape is None:
        return
    copied = [x[i] if d == 0 and not allowzero and i < len(x.shape) else d for i, d in enumerate(sizes)]
    known = [d for d in known_sizes(copied) if d != -1]
    if not is_static(x.shape) or len(known) + copied.count(-1) < len(copied) or copied.count(-1) > 1:
        return
    count, asked = math.prod(known_sizes(x.shape)), math.prod(known)
    fits = (asked != 0 and count % asked == 0) or (asked == 0 and count == 0) if -1 in copied else count == asked
    if not fits:
        yield f"reads {x}, whose {count} elements cannot have the shape {words_of(tuple(copied))}"


@_RULES("Concat")
def _concat(*parts: Operand, axis: int = 1, **_: Any) -> Words:
    known = [p for p in parts if p.shape is not None and 0 not in p.shape]  # runtimes ignore empty inputs
    for part in known:
        first = known[0]
        if part.rank != first.rank:
            yield f"joins {first} and {part}, which have different numbers of axes"
        yield from _beyond(part, [axis])
        along = axis % (part.rank or 1)
        for i in range(part.rank or 0):
            if i != along and differ(first[i], part[i]):
                yield f"joins {first} and {part} along axis {axis}, which differ on axis {i}"


@_RULES("Split")
def _split(
    x: Operand, lengths: Operand | None = None, *, axis: int = 0, split: list[int] | None = None, outputs: int, **_: Any
) -> Words:
    parts = split or (_ints(lengths) if lengths is not None and lengths.rank == 1 else None)
    yield from _beyond(x, [axis])
    if parts is None:
        return
    if len(parts) < outputs:
        yield f"has {counted(outputs, 'output')}, but {counted(len(parts), 'length')}"
    if differ(x[axis], sum(parts)):
        yield f"splits axis {axis} of {x} into {parts}, which add up to {sum(parts)}"


@_RULES("Transpose")
def _transpose(x: Operand, *, perm: list[int] | None = None, **_: Any) -> Words:
    if perm is not None and x.rank is not None and sorted(perm) != list(range(x.rank)):
        yield f"permutes axes by {perm}, but reads {x}"


@_RULES("Flatten")
def _flatten(x: Operand, *, axis: int = 1, **_: Any) -> Words:
    return _beyond(x, [axis] if axis < 0 else [axis - 1] if axis else [])


@_RULES("Squeeze")
def _squeeze(x: Operand, given: Operand | None = None, *, axes: list[int] | None = None, **_: Any) -> Words:
    places = axes or _ints(given) or []
    yield from _beyond(x, places)
    yield from (f"drops axis {a} of {x}, which has {x[a]} elements" for a in places if differ(x[a], 1))


@_RULES("Unsqueeze")
def _unsqueeze(x: Operand, given: Operand | None = None, *, axes: list[int] | None = None, **_: Any) -> Words:
    places = axes or _ints(given) or []
    return _beyond(x, places, len(places))


@_RULES("Tile")
def _tile(x: Operand, repeats: Operand, **_: Any) -> Words:
    yield from _too_small(repeats, 0)
    yield from _one_for_each(x, repeats, "repeats")


@_RULES("Pad")
def _pad(x: Operand, given: Operand | None = None, _value: Any = None, axes: Operand | None = None, **_: Any) -> Words:
    if given is None:
        return
    if axes is None:
        yield from _one_for_each(x, given, "pads", 2)
    elif given.rank == axes.rank == 1 and isinstance(count := axes[0], int) and differ(given[0], 2 * count):
        yield f"has {given[0]} pads, but axes {axes}"


def _one_for_each(x: Operand, vector: Operand, what: str, times: int = 1) -> Words:
    count = vector[0] if vector.rank == 1 else None
    odd = isinstance(count, int) and count % times != 0
    if odd or (x.rank is not None and differ(count, times * x.rank)):
        yield f"has {count} {what}, but reads {x}"


# --- along axes -------------------------------------------------------------------------------------------


@_RULES("Softmax", "LogSoftmax", "Hardmax")
def _softmax(x: Operand, *, axis: int | None = None, opset: int, **_: Any) -> Words:
    return _beyond(x, [] if axis is None or opset < 13 else [axis])


@_RULES("ArgMax", "ArgMin", "CumSum", "SplitToSequence", "TopK")
def _along(x: Operand, *_operands: Any, axis: int | None = None, **_: Any) -> Words:
    return _beyond(x, [] if axis is None else [axis])


@_RULES("LpNormalization")
def _lp_normalization(x: Operand, *, axis: int = -1, **_: Any) -> Words:
    return _beyond(x, [axis])


@_RULES(*ranks.REDUCTIONS)
def _reduce(x: Operand, given: Operand | None = None, *, axes: list[int] | None = None, **_: Any) -> Words:
    return _beyond(x, axes or _ints(given) or [])


@_RULES("Gather")
def _gather(x: Operand, places: Operand, *, axis: int = 0, **_: Any) -> Words:
    yield from _beyond(x, [axis])
    size = x[axis]
    for i in _ints(places) or ():
        if isinstance(size, int) and not -size <= i < size:
            yield f"reads element {i} along axis {axis} of {x}, which does not exist"


@_RULES("GatherElements", "ScatterElements")
def _elements(x: Operand, places: Operand, updates: Operand | None = None, *, axis: int = 0, **_: Any) -> Words:
    for other in (places, updates):
        if other is not None and differ(x.rank, other.rank):
            yield f"reads {x} and {other}, which must have the same number of axes"
    if updates is not None and places.shape and updates.shape and any(map(differ, places.shape, updates.shape)):
        yield f"reads {places} and {updates}, which must have the same shape"
    yield from _beyond(x, [axis])


# --- recurrent layers -------------------------------------------------------------------------------------


@_RULES("RNN", "GRU", "LSTM")
def _recurrent(
    x: Operand, w: Operand, r: Operand, b: Operand | None = None, *_more: Any, hidden_size: int | None = None, **_: Any
) -> Words:
    if differ(x.rank, 3):
        yield f"reads {x}, which must have three axes: time, batch, features"
    if differ(w.rank, 3) or differ(r.rank, 3):
        yield f"has weights {w} and {r}, which must have three axes: directions, rows, features"
    if differ(x[2], w[2]):
        yield f"reads {x}, but its weights {w} expect {w[2]} features"
    if differ(w[1], r[1]):
        yield f"has weights {w} and {r}, which must have the same number of rows"
    if hidden_size and differ(r[2], hidden_size):
        yield f"has recurrent weights {r}, but hidden_size is {hidden_size}"
    rows = w[1]
    if b is not None and isinstance(rows, int) and differ(b[1], 2 * rows):
        yield f"adds {b} to {rows} rows of {w}"
