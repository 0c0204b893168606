"""Do the sizes of a node's inputs fit? A rule for each operator, exact where dimensions are numbers.

A rule gets the node's inputs (shape and, of a small constant, data) and its attributes, and returns what is wrong in
words that follow the node's name, or ``None``. An unknown rank, or a dimension with a name, agrees with
everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import shown
from gradgraph.graph.node_forms import WIDEST
from gradgraph.graph.schemas import signature
from gradgraph.graph.shapes import REDUCTIONS, Dim, Shape, differ, is_number, is_static, known_sizes, small_constant
from gradgraph.passes.normal.edit import attributes
from gradgraph.passes.normal.sizes import ranks


@dataclass(frozen=True)
class Operand:
    """An input: ``shape`` is None where not even the rank is known."""

    value: ir.Value
    shape: Shape | None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def data(self) -> np.ndarray | None:
        """The numbers of a small constant; None for any other value, which is not read."""
        return small_constant(self.value)

    def __getitem__(self, axis: int) -> Dim:
        return None if self.shape is None or not -len(self.shape) <= axis < len(self.shape) else self.shape[axis]

    def __str__(self) -> str:
        return f"'{shown(self.value.name)}'" + ("" if self.shape is None else f" of shape {words_of(self.shape)}")


Rule = Callable[..., "str | None"]
_RULES: dict[str, Rule] = {}
EXPORT = "correct the sizes, or export the model again"


def has_rule(op_type: str) -> bool:
    return op_type in _RULES or ranks.is_ranked(op_type)


def complaint(node: ir.Node, shapes: Sequence[Shape | None], opset: int) -> str | None:
    """Say what is wrong with the sizes of ``node`` if its inputs have these ``shapes``; None if nothing is."""
    operands = [None if v is None else Operand(v, s) for v, s in zip(node.inputs, shapes, strict=True)]
    rule = _RULES.get(node.op_type)
    words = rule and rule(*operands, opset=opset, outputs=len(node.outputs), **attributes(node))
    return words or _ranks(node.op_type, operands, opset)


def _ranks(op_type: str, operands: Sequence[Operand | None], opset: int) -> str | None:
    for i, operand in enumerate(operands):
        if operand is not None and (axes := ranks.misses(op_type, i, operand.shape)) is not None:
            schema = signature(op_type, opset)
            role = "" if schema is None else f" as its {schema.formal(i, False).name}"
            return f"reads {operand}{role}, which must {axes}"
    return None


def _for(*op_types: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return register


def _clash(*operands: Operand | None) -> str | None:
    """Say which shapes do not broadcast against each other."""
    known = [o for o in operands if o is not None and o.shape is not None]
    if len({o.shape for o in known}) < 2:
        return None
    for place in range(1, 1 + max(o.rank or 0 for o in known)):
        sizes = [(o, o[-place]) for o in known if isinstance(o[-place], int) and o[-place] != 1]
        for operand, size in sizes[1:]:
            if size != sizes[0][1]:
                return f"reads {sizes[0][0]} and {operand}, which do not broadcast: {sizes[0][1]} against {size}"
    return None


def _beyond(x: Operand | None, axes: Iterable[int], more: int = 0) -> str | None:
    """Say which axis ``x``, with ``more`` axes, does not have."""
    if x is None or x.rank is None:
        return None
    rank = x.rank + more
    axis = next((a for a in axes if not -rank <= a < rank), None)
    return None if axis is None else f"is to work on axis {axis}, and reads {x}"


def _ints(operand: Operand | None) -> list[int] | None:
    data = None if operand is None else operand.data
    return None if data is None or data.dtype.kind not in "iu" or data.ndim > 1 else [int(d) for d in data.ravel()]


def _vectors(x: Operand, channels: Dim, *vectors: Operand | None) -> str | None:
    for v in vectors:
        if v is not None and v.rank == 1 and differ(v[0], channels):
            return f"reads {v}, which must have {channels} elements, the channels of {x}"
    return None


# --- element by element -----------------------------------------------------------------------------------


@_for("Add", "Sub", "Mul", "Div", "Mod", "Pow", "Max", "Min", "Mean", "Sum")
@_for("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Where", "And", "Or", "Xor")
@_for("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift")
def _broadcast(*operands: Operand | None, **_: Any) -> str | None:
    return _clash(*operands)


@_for("PRelu")
def _prelu(x: Operand, slope: Operand, **_: Any) -> str | None:
    wide = x.rank is not None and slope.rank is not None and slope.rank > x.rank
    return f"reads {x} and the slope {slope}, which has more axes" if wide else _clash(x, slope)


@_for("Clip")
def _clip(x: Operand, *bounds: Operand | None, **_: Any) -> str | None:
    wrong = next(
        (b for b in bounds if b is not None and b.shape is not None and any(differ(d, 1) for d in b.shape)), None
    )
    return None if wrong is None else f"reads the bound {wrong}, which must be one number"


@_for("QuantizeLinear", "DequantizeLinear")
def _quantized(
    x: Operand, scale: Operand, zero: Operand | None = None, *, axis: int = 1, block_size: int = 0, **_: Any
) -> str | None:
    """One scale, one for each index along an axis, or, in blocks, as many axes as there are."""
    if x.rank is None or scale.rank is None:
        return None
    if block_size and scale.rank != x.rank:
        return f"reads {x} in blocks and the scale {scale}, which must have as many axes"
    if x.rank and is_number(scale.shape, 1):
        return None
    if scale.rank > 1 and (not block_size or scale.rank != x.rank):
        return f"reads {x} and the scale {scale}, which must have one axis at most"
    if scale.rank != 1:
        return None
    if words := _beyond(x, [axis]):
        return words
    return (
        f"reads {x} and the scale {scale}, one for each of {x[axis]} along axis {axis}"
        if differ(scale[0], x[axis])
        else None
    )


@_for("Expand")
def _expand(x: Operand, target: Operand, **_: Any) -> str | None:
    sizes = _ints(target)
    return _too_small(target, 0) or (None if sizes is None else _clash(x, Operand(target.value, tuple(sizes))))


# --- products ---------------------------------------------------------------------------------------------


@_for("MatMul")
def _matmul(a: Operand, b: Operand, **_: Any) -> str | None:
    if a.rank == 0 or b.rank == 0:
        return f"reads {a} and {b}, and multiplies nothing without an axis"
    inner = b[-2] if b.rank is not None and b.rank > 1 else b[-1]
    if b.shape is not None and differ(a[-1], inner):
        return f"multiplies {a} and {b}, whose inner sizes are {a[-1]} and {inner}"
    stacks = [Operand(o.value, o.shape[:-2]) for o in (a, b) if o.shape is not None and len(o.shape) > 2]
    return None if _clash(*stacks) is None else f"multiplies {a} and {b}, whose leading axes do not broadcast"


@_for("Gemm")
def _gemm(
    a: Operand, b: Operand, c: Operand | None = None, *, transA: int = 0, transB: int = 0, **_: Any
) -> str | None:
    for operand in (a, b):
        if operand.rank not in (None, 2):
            return f"multiplies matrices, and reads {operand}"
    inner = a[0 if transA else 1], b[1 if transB else 0]
    if differ(*inner):
        turned = " (transposed)" if transA or transB else ""
        return f"multiplies {a} and {b}{turned}, whose inner sizes are {inner[0]} and {inner[1]}"
    product = a[1 if transA else 0], b[0 if transB else 1]
    if c is None or c.shape is None:
        return None
    wide = len(c.shape) > 2 or any(differ(c[-i], product[-i]) and c[-i] != 1 for i in (1, 2)[: len(c.shape)])
    return f"adds {c} to a product of shape {words_of(product)}" if wide else None


@_for("Einsum")
def _einsum(*operands: Operand, equation: str, **_: Any) -> str | None:
    """Each input has an axis for every letter of its term, and more of them only with "...". Axes of 1 are repeated."""
    sizes: dict[str, int] = {}
    for operand, term in zip(operands, equation.partition("->")[0].replace(" ", "").split(","), strict=False):
        letters, rest = term.replace("...", ""), "..." in term
        if operand.rank is not None and (operand.rank < len(letters) if rest else operand.rank != len(letters)):
            least = " or more" if rest else ""
            return f"reads {operand}, which its equation '{shown(equation)}' gives {len(letters)}{least} axes"
        for letter, size in zip(letters, () if rest else operand.shape or (), strict=False):
            if isinstance(size, int) and size != 1 and sizes.setdefault(letter, size) != size:
                return f"reads {operand}, whose axis '{letter}' has {sizes[letter]} elements in an input before it"
    return None


def words_of(shape: Shape) -> str:
    """``[n, 3, ?]``: the last is unknown."""
    return f"[{', '.join('?' if d is None else shown(d) for d in shape)}]"


# --- convolution, pooling, normalization ------------------------------------------------------------------


@_for("Conv")
def _conv(x: Operand, w: Operand, b: Operand | None = None, *, group: int = 1, **rest: Any) -> str | None:
    channels = w[1]
    if isinstance(channels, int) and differ(x[1], channels * group):
        return f"reads {x}, and its weights {w} in {group} group(s) take {channels * group} channels"
    if isinstance(w[0], int) and group > 0 and w[0] % group:
        return f"has weights {w}, whose {w[0]} kernels do not divide into {group} groups"
    return _kernels(x, w, w[0], b, **rest) or _window(x, () if w.shape is None else w.shape[2:], **rest)


@_for("ConvTranspose")
def _conv_transpose(x: Operand, w: Operand, b: Operand | None = None, *, group: int = 1, **rest: Any) -> str | None:
    if w.rank is not None and w.rank > 1 and differ(x[1], w[0]):
        return f"reads {x}, and its weights {w} take {w[0]} channels"
    return _kernels(x, w, w[1] * group if isinstance(w[1], int) else None, b, **rest)


def _kernels(
    x: Operand, w: Operand, channels: Dim, b: Operand | None, kernel_shape: Sequence[int] | None = None, **rest: Any
) -> str | None:
    if differ(x.rank, w.rank) or (x.rank or 3) < 3:
        return f"reads {x} and weights {w}, which must have the same number of axes, three or more"
    spatial = () if w.shape is None else w.shape[2:]
    if wide := next((d for d in known_sizes(spatial) if d > WIDEST), None):
        return f"has weights {w}, whose windows reach over {wide} elements, and {WIDEST:,} is the most"
    if kernel_shape and spatial and (len(kernel_shape) != len(spatial) or any(map(differ, kernel_shape, spatial))):
        return f"declares kernels of shape {kernel_shape}, and reads weights {w}"
    if b is not None and b.rank == 1 and differ(b[0], channels):
        return f"adds {b} to {channels} channels"
    return _lists(x, w.rank if x.rank is None else x.rank, kernel_shape=kernel_shape, **rest)


_PER_AXIS = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 1, "pads": 2}


def _lists(x: Operand, rank: int | None, auto_pad: str = "NOTSET", **given: Any) -> str | None:
    """Say which attribute does not have a number for each axis along which windows move."""
    lists = {name: given[name] for name in _PER_AXIS if given.get(name) and (name != "pads" or auto_pad == "NOTSET")}
    counts = {name: len(numbers) / _PER_AXIS[name] for name, numbers in lists.items()}
    axes = next(iter(counts.values()), 0) if rank is None else rank - 2
    wrong = next((name for name, count in counts.items() if count != axes), None)
    return None if wrong is None else f"has {wrong}={shown(lists[wrong])}, and reads {x}"


def _window(
    x: Operand,
    kernel: Sequence[Dim],
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    **_: Any,
) -> str | None:
    """Say which window is larger than the axis that it moves along."""
    axes = len(kernel)
    if auto_pad not in ("NOTSET", "VALID") or (pads and len(pads) != 2 * axes):
        return None
    for axis, size in enumerate(kernel):
        length, reach = x[2 + axis], dilations[axis] if dilations and len(dilations) == axes else 1
        around = 0 if not pads or auto_pad == "VALID" else pads[axis] + pads[axes + axis]
        if isinstance(size, int) and isinstance(length, int) and 0 < length + around < (size - 1) * reach + 1:
            padded = f" and {around} of padding" if around else ""
            return f"has a window of {(size - 1) * reach + 1} elements along axis {2 + axis} of {x}{padded}"
    return None


@_for("Col2Im")
def _col2im(x: Operand, image: Operand, block: Operand, **lists: Any) -> str | None:
    if differ(image[0], block[0]):
        return f"reads the sizes of an image {image} and those of a block {block}, which must be as many"
    axes = next((d for d in (image[0], block[0]) if isinstance(d, int)), None)
    return None if axes is None else _lists(x, 2 + axes, **lists)


@_for("MaxPool", "AveragePool", "LpPool")
def _pool(x: Operand, *, kernel_shape: list[int], ceil_mode: int = 0, **rest: Any) -> str | None:
    axes = len(kernel_shape)
    if differ(x.rank, 2 + axes):
        return f"has windows of {axes} axes, and reads {x}"
    wrong = _lists(x, 2 + axes, **rest)
    return wrong if wrong or ceil_mode else _window(x, kernel_shape, **rest)


@_for("GridSample")
def _grid_sample(x: Operand, grid: Operand, **_: Any) -> str | None:
    if (x.rank or 3) < 3 or differ(x.rank, grid.rank):
        return f"samples {x} at {grid}, which must have the same number of axes, three or more"
    if x.rank is not None and differ(grid[-1], x.rank - 2):
        return f"samples {x} at {grid}, whose last axis must hold {x.rank - 2} coordinates"
    return None


@_for("BatchNormalization")
def _batch_norm(x: Operand, *vectors: Operand, spatial: int = 1, **_: Any) -> str | None:
    return _vectors(x, x[1], *vectors) if spatial and x.rank not in (0, 1) else None


@_for("InstanceNormalization")
def _instance_norm(x: Operand, *vectors: Operand, **_: Any) -> str | None:
    return _vectors(x, x[1], *vectors)


@_for("LayerNormalization", "RMSNormalization")
def _layer_norm(x: Operand, *vectors: Operand, axis: int = -1, **_: Any) -> str | None:
    """Only the vectors of one axis are compared; for several axes runtimes take flattened ones."""
    larger = next((v for v in vectors if v.rank is not None and x.rank is not None and v.rank > x.rank), None)
    if larger is not None:
        return f"reads {x} and {larger}, which has more axes"
    last = axis == -1 or axis + 1 == x.rank
    wrong = next((v for v in vectors if last and v.rank == 1 and v[0] != 1 and differ(v[0], x[-1])), None)
    return None if wrong is None else f"reads {x} and {wrong}, which must have {x[-1]} elements"


@_for("RotaryEmbedding")
def _rotary(x: Operand, *_operands: Any, num_heads: int = 0, **_: Any) -> str | None:
    if x.rank != 3 or (num_heads > 0 and not (isinstance(x[2], int) and x[2] % num_heads)):
        return None
    return f"has {num_heads} heads, and reads {x}, whose last axis must hold as many"


# --- shapes -----------------------------------------------------------------------------------------------


@_for("ConstantOfShape")
def _constant_of_shape(sizes: Operand, **_: Any) -> str | None:
    return _too_small(sizes, 0)


def _too_small(sizes: Operand, least: int) -> str | None:
    wrong = next((d for d in _ints(sizes) or () if d < least), None)
    return None if wrong is None else f"reads {sizes}, which holds {wrong} and must hold numbers from {least} on"


@_for("Reshape")
def _reshape(x: Operand, target: Operand, *, allowzero: int = 0, **_: Any) -> str | None:
    sizes = _ints(target)
    if words := _too_small(target, -1):
        return words
    if sizes is None or target.rank != 1 or x.shape is None:
        return None
    copied = [x[i] if d == 0 and not allowzero and i < len(x.shape) else d for i, d in enumerate(sizes)]
    known = [d for d in known_sizes(copied) if d != -1]
    if not is_static(x.shape) or len(known) + copied.count(-1) < len(copied) or copied.count(-1) > 1:
        return None
    count, asked = math.prod(known_sizes(x.shape)), math.prod(known)
    fits = (asked != 0 and count % asked == 0) or (asked == 0 and count == 0) if -1 in copied else count == asked
    return None if fits else f"reads {x}, {count} elements, which do not fill {words_of(tuple(copied))}"


@_for("Concat")
def _concat(*parts: Operand, axis: int = 1, **_: Any) -> str | None:
    known = [p for p in parts if p.shape is not None and 0 not in p.shape]  # runtimes pass over empty ones
    for part in known:
        first = known[0]
        if part.rank != first.rank:
            return f"joins {first} and {part}, which have different numbers of axes"
        if words := _beyond(part, [axis]):
            return words
        along = axis % (part.rank or 1)
        clash = next((i for i in range(part.rank or 0) if i != along and differ(first[i], part[i])), None)
        if clash is not None:
            return f"joins {first} and {part} along axis {axis}, which differ on axis {clash}"
    return None


@_for("Split")
def _split(
    x: Operand, lengths: Operand | None = None, *, axis: int = 0, split: list[int] | None = None, outputs: int, **_: Any
) -> str | None:
    parts = split or (_ints(lengths) if lengths is not None and lengths.rank == 1 else None)
    if words := _beyond(x, [axis]):
        return words
    if parts is None:
        return None
    if len(parts) < outputs:
        return f"has {outputs} outputs, and {len(parts)} lengths"
    return (
        f"splits axis {axis} of {x} into {parts}, which add up to {sum(parts)}" if differ(x[axis], sum(parts)) else None
    )


@_for("Transpose")
def _transpose(x: Operand, *, perm: list[int] | None = None, **_: Any) -> str | None:
    if perm is None or x.rank is None or sorted(perm) == list(range(x.rank)):
        return None
    return f"orders axes as {perm}, and reads {x}"


@_for("Flatten")
def _flatten(x: Operand, *, axis: int = 1, **_: Any) -> str | None:
    return _beyond(x, [axis] if axis < 0 else [axis - 1] if axis else [])


@_for("Squeeze")
def _squeeze(x: Operand, given: Operand | None = None, *, axes: list[int] | None = None, **_: Any) -> str | None:
    places = axes or _ints(given) or []
    if words := _beyond(x, places):
        return words
    thick = next((a for a in places if differ(x[a], 1)), None)
    return None if thick is None else f"drops axis {thick} of {x}, which has {x[thick]} elements"


@_for("Unsqueeze")
def _unsqueeze(x: Operand, given: Operand | None = None, *, axes: list[int] | None = None, **_: Any) -> str | None:
    places = axes or _ints(given) or []
    return _beyond(x, places, len(places))


@_for("Tile")
def _tile(x: Operand, repeats: Operand, **_: Any) -> str | None:
    return _too_small(repeats, 0) or _one_for_each(x, repeats, "repeats")


@_for("Pad")
def _pad(
    x: Operand, given: Operand | None = None, _value: Any = None, axes: Operand | None = None, **_: Any
) -> str | None:
    if given is None:
        return None
    if axes is None:
        return _one_for_each(x, given, "pads", 2)
    wrong = given.rank == axes.rank == 1 and isinstance(axes[0], int) and differ(given[0], 2 * axes[0])
    return f"has {given[0]} pads, and axes {axes}" if wrong else None


def _one_for_each(x: Operand, vector: Operand, what: str, times: int = 1) -> str | None:
    count = vector[0] if vector.rank == 1 else None
    odd = isinstance(count, int) and count % times != 0
    return (
        f"has {count} {what}, and reads {x}" if odd or (x.rank is not None and differ(count, times * x.rank)) else None
    )


# --- along axes -------------------------------------------------------------------------------------------


@_for("Softmax", "LogSoftmax", "Hardmax")
def _softmax(x: Operand, *, axis: int | None = None, opset: int, **_: Any) -> str | None:
    return _beyond(x, [] if axis is None or opset < 13 else [axis])


@_for("ArgMax", "ArgMin", "CumSum", "SplitToSequence", "TopK")
def _along(x: Operand, *_operands: Any, axis: int | None = None, **_: Any) -> str | None:
    return _beyond(x, [] if axis is None else [axis])


@_for(*REDUCTIONS)
def _reduce(x: Operand, given: Operand | None = None, *, axes: list[int] | None = None, **_: Any) -> str | None:
    return _beyond(x, axes or _ints(given) or [])


@_for("LpNormalization")
def _lp_normalization(x: Operand, *, axis: int = -1, **_: Any) -> str | None:
    return _beyond(x, [axis])


@_for("Gather")
def _gather(x: Operand, places: Operand, *, axis: int = 0, **_: Any) -> str | None:
    if words := _beyond(x, [axis]):
        return words
    size, data = x[axis], _ints(places)
    outside = next((i for i in data or () if isinstance(size, int) and not -size <= i < size), None)
    return None if outside is None else f"takes element {outside} along axis {axis} of {x}"


@_for("GatherElements", "ScatterElements")
def _elements(x: Operand, places: Operand, updates: Operand | None = None, *, axis: int = 0, **_: Any) -> str | None:
    for other in (places, updates):
        if other is not None and differ(x.rank, other.rank):
            return f"reads {x} and {other}, which must have the same number of axes"
    if updates is not None and places.shape and updates.shape and any(map(differ, places.shape, updates.shape)):
        return f"reads {places} and {updates}, which must have one shape"
    return _beyond(x, [axis])


# --- recurrent layers -------------------------------------------------------------------------------------


@_for("RNN", "GRU", "LSTM")
def _recurrent(
    x: Operand, w: Operand, r: Operand, b: Operand | None = None, *_more: Any, hidden_size: int | None = None, **_: Any
) -> str | None:
    if differ(x.rank, 3):
        return f"reads {x}, which must have three axes: time, batch, features"
    if differ(w.rank, 3) or differ(r.rank, 3):
        return f"has weights {w} and {r}, which must have three axes: directions, rows, features"
    if differ(x[2], w[2]):
        return f"reads {x}, and its weights {w} take {w[2]} features"
    if differ(w[1], r[1]):
        return f"has weights {w} and {r}, which must have as many rows"
    if hidden_size and differ(r[2], hidden_size):
        return f"has recurrent weights {r}, and hidden_size is {hidden_size}"
    rows = w[1]
    return (
        f"adds {b} to {rows} rows of {w}"
        if b is not None and isinstance(rows, int) and differ(b[1], 2 * rows)
        else None
    )
