"""Random inputs for a model: floats, valid indices, sizes that the model accepts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, listed, shown, suggestion
from gradgraph.graph.shapes import sizes_or

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]

BATCHES = (2, 1)  # batch sizes to try; a model with states for one row accepts only 1
# sizes to try for symbolic dimensions: small first, then larger ones for models of images, and of sounds
SIZES = (4, 7, 16, 32, 64, 128, 224, 1024, 16_000)
LARGEST = 4_000_000  # elements of one input; larger sizes than the first are skipped beyond this
# operators that copy indices to their output, so that the bound depends on an operator that reads this output
_PASS_ON = frozenset(
    ["Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"]
)
_INDEXED = {"Gather": "axis", "GatherElements": "axis", "ScatterElements": "axis"}
# ranks of inputs by position: onnxruntime crashes if a value of unknown shape has a different rank
_RANKS = {"RoiAlign": {0: 4, 1: 2, 2: 1}, "MaxRoiPool": {0: 4, 1: 2}}
MOST_DRAWN = 1 << 28  # elements of an input
_LABELLED = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})


def candidates(graph: ir.Graph, rng: np.random.Generator) -> Iterator[Feeds]:
    """Yield feeds to try: normally distributed numbers, then positive ones, with growing symbolic dimensions.

    Integer inputs that are recognised as indices get random valid indices. Other integers are 1, which suits masks,
    counts and axes. Booleans are true.

    Raises:
        DataError: if an input has more than MOST_DRAWN elements.
    """
    inputs = _inputs(graph)
    bounds = {name: index_bound(v) for name, v in inputs.items()}
    dynamic = any(v.shape is None or not v.shape.is_static() for v in inputs.values())
    for positive, batch in itertools.product((False, True), BATCHES if dynamic else BATCHES[:1]):
        for size in SIZES if dynamic else SIZES[:1]:
            sizes = _sizes(inputs.values(), size, batch)
            shapes = {name: _shape(v, sizes, batch) for name, v in inputs.items()}
            if huge := [name for name, shape in shapes.items() if math.prod(shape) > MOST_DRAWN and size == SIZES[0]]:
                raise DataError(f"the input '{shown(huge[0])}' of shape {shapes[huge[0]]} has too many elements to be "
                                "drawn at random; pass your own check data, or smaller sizes")  # fmt: skip
            if size == SIZES[0] or max(map(math.prod, shapes.values()), default=0) <= LARGEST:
                yield {name: _draw(v, shapes[name], bounds[name], positive, rng) for name, v in inputs.items()}


def given(graph: ir.Graph, feeds: Mapping[str, Any]) -> Feeds:
    """Return the arrays in ``feeds`` that are inputs of the model, converted to the model's element types.

    Raises:
        DataError: if an input is missing, or its rank or sizes differ from those that the model declares.
    """
    inputs = _inputs(graph)
    missing = [name for name in inputs if name not in feeds]
    if missing:
        what = "an input" if len(missing) == 1 else "inputs"
        hint = suggestion(missing[0], [n for n in feeds if n not in inputs])
        raise DataError(f"the data have no array {listed(missing)}, {what} of the model{hint}")
    return {name: _fitting(name, value, feeds[name]) for name, value in inputs.items()}


def _inputs(graph: ir.Graph) -> dict[str, ir.Value]:
    return {v.name: v for v in graph.inputs if v.name and not v.is_initializer()}


def _fitting(name: str, value: ir.Value, given: Any) -> Array:
    array = np.asarray(given)
    wanted = array.dtype if value.dtype is None else value.dtype.numpy()
    number = array.dtype.kind in "fiubV" and array.dtype.names is None  # V: bfloat16 and smaller ones
    if array.dtype.kind != wanted.kind and not (number and wanted.kind != "O"):
        raise DataError(f"'{shown(name)}' has dtype {array.dtype}, but the model expects {wanted}; convert it")
    if value.shape is not None:
        dims = list(value.shape)
        pairs = zip(dims, array.shape, strict=False)
        if array.ndim != len(dims) or any(isinstance(d, int) and d != n for d, n in pairs):
            sizes = ", ".join(shown(d if isinstance(d, int) else d.value or "?") for d in dims)
            raise DataError(
                f"'{shown(name)}' has shape {list(array.shape)}, but the model expects [{sizes}]; reshape it"
            )
    return array.astype(wanted, copy=False)


def index_bound(value: ir.Value) -> int | None:
    """Return the number of valid index values for an integer input; None if it is unknown."""
    if value.dtype is None or not value.dtype.is_integer():
        return None
    bounds: list[int] = []
    seen, stack = {value}, [value]
    while stack:
        current = stack.pop()
        for use in current.uses():
            bounds += _bound(use.node, use.idx)
            handed = [y for y in use.node.outputs if use.node.op_type in _PASS_ON and y not in seen]
            seen.update(handed)
            stack.extend(handed)
    return min(bounds, default=None)


def _bound(node: ir.Node, position: int) -> list[int]:
    """Return the number of valid indices at input ``position`` of ``node`` as a list; empty if there is no bound.

    If the indexed size is symbolic, only index 0 is surely valid, so the bound is 1.
    """
    if not node.domain and node.op_type in ("Equal", "OneHot"):
        return _compared(node, position)
    if node.domain or position != 1:
        return []
    data = node.inputs[0]
    shape = None if data is None or data.shape is None else list(data.shape)
    if node.op_type in _INDEXED:
        attribute = node.attributes.get(_INDEXED[node.op_type])
        axis = attribute.as_int() if attribute is not None else 0
    elif node.op_type in _LABELLED:
        axis = 1
    elif node.op_type in ("GatherND", "ScatterND"):
        return [min(sizes_or(shape or [1], 1))]
    else:
        return []
    size = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
    return [size if isinstance(size, int) else 1]


def _compared(node: ir.Node, position: int) -> list[int]:
    """Return [depth] for a OneHot, [n] for an Equal that compares with 0, …, n − 1; otherwise an empty list."""
    other = node.inputs[1 - position if node.op_type == "Equal" else 1]
    numbers = None if other is None or other.const_value is None else other.const_value.numpy()
    if numbers is None or (node.op_type == "OneHot" and position != 0):
        return []
    if node.op_type == "OneHot":
        return [int(numbers.reshape(-1)[0])]
    return [numbers.size] if numbers.size > 1 and np.array_equal(numbers.reshape(-1), np.arange(numbers.size)) else []


def _sizes(inputs: Iterable[ir.Value], size: int, batch: int) -> dict[str | None, int]:
    """Return the size of each symbolic dimension by name: ``batch`` for the first axis of an input, else ``size``."""
    sizes: dict[str | None, int] = {}
    for value in inputs:
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                sizes[dim.value] = batch if axis == 0 else sizes.get(dim.value, size)
    return {**sizes, None: size}


def _shape(value: ir.Value, sizes: Mapping[str | None, int], batch: int) -> list[int]:
    if value.shape is None:
        return [batch] * max((_RANKS.get(use.node.op_type, {}).get(use.idx, 1) for use in value.uses()), default=1)
    dims = list(value.shape)
    leading = {0, 1} if _is_state(dims) else {0}
    return [d if isinstance(d, int) else batch if axis in leading else sizes[d.value] for axis, d in enumerate(dims)]


def _is_state(dims: Sequence[int | ir.SymbolicDim]) -> bool:
    """Whether ``dims`` look like the state of a recurrent layer: [layers, batch, features] with an unnamed batch."""
    sizes = [d if isinstance(d, int) else d.value for d in dims]
    return len(sizes) == 3 and [isinstance(d, int) for d in sizes] == [True, False, True] and sizes[1] is None


def _draw(value: ir.Value, shape: list[int], bound: int | None, positive: bool, rng: np.random.Generator) -> Array:
    dtype = np.dtype(np.float64 if value.dtype is None else value.dtype.numpy())
    if value.dtype is None or value.dtype.is_floating_point():
        numbers = rng.uniform(0.5, 1.5, shape) if positive else rng.normal(size=shape)
        return np.asarray(numbers).astype(dtype)
    if bound is not None:
        return np.asarray(rng.integers(0, bound, shape)).astype(dtype)
    return np.ones(shape, dtype)
