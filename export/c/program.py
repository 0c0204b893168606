"""Tensors, views and operations: the intermediate representation between ONNX nodes and C source.

A value of the model is a :class:`View` of a :class:`Tensor`. Operators that only move elements (Transpose, Slice,
Reshape, …) change strides instead of writing a tensor. All other operators are one of the operations below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "int64": "int64_t",
    "int32": "int32_t",
    "int16": "int16_t",
    "int8": "int8_t",
    "uint64": "uint64_t",
    "uint32": "uint32_t",
    "uint16": "uint16_t",
    "uint8": "uint8_t",
    "bool": "uint8_t",
    "int4": "uint8_t",
    "uint4": "uint8_t",
}
PACKED = {"int4": "int8", "uint4": "uint8"}  # constants with two elements per byte, low bits first

Shape: TypeAlias = tuple[int, ...]


@dataclass(eq=False)
class Tensor:
    """A row-major array in memory.

    Attributes:
        dtype: the name of a NumPy type, a key of ``C_TYPES``.
        name: the name of the value in the model, for comments and messages.
        role: where it is stored: ``temporary`` (in the arena), ``input``, ``output``, ``state`` or ``constant``.
        data: the elements of a constant.
    """

    shape: Shape
    dtype: str
    name: str
    role: str = "temporary"
    data: np.ndarray | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return -(-self.size // 2) if self.dtype in PACKED else self.size * np.dtype(self.dtype).itemsize

    @property
    def length(self) -> int:
        """The number of elements of the C array."""
        return max(-(-self.size // 2) if self.dtype in PACKED else self.size, 1)

    @property
    def c_type(self) -> str:
        return C_TYPES[self.dtype]

    def whole(self) -> View:
        return View(self, self.shape, row_major(self.shape))


def row_major(shape: Shape) -> Shape:
    """Return the strides, in elements, of a contiguous array."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


@dataclass(frozen=True)
class View:
    """A strided view of a tensor: the element with indices i is at ``offset`` + Σ i·stride, in elements."""

    tensor: Tensor
    shape: Shape
    strides: Shape
    offset: int = 0

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the view contains all elements of its tensor in memory order."""
        return self.offset == 0 and self.size == self.tensor.size and self.is_contiguous

    @property
    def is_contiguous(self) -> bool:
        return self.size <= 1 or squeezed(self.shape, self.strides) == squeezed(self.shape, row_major(self.shape))

    def permuted(self, order: Sequence[int]) -> View:
        return replace(self, shape=tuple(self.shape[i] for i in order), strides=tuple(self.strides[i] for i in order))

    def expanded(self, shape: Shape) -> View:
        """Return the view broadcast to ``shape``."""
        missing = len(shape) - len(self.shape)
        strides = (0,) * missing + tuple(0 if n == 1 else s for n, s in zip(self.shape, self.strides, strict=True))
        return replace(self, shape=shape, strides=strides)

    def sliced(self, axis: int, start: int, size: int, step: int = 1) -> View:
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + (start * strides[axis] if size else 0)
        shape[axis], strides[axis] = size, strides[axis] * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def reshaped(self, shape: Shape) -> View | None:
        """Return the view in another shape, or None if that requires a copy."""
        if self.size == 0 or self.size == 1:
            return replace(self, shape=shape, strides=row_major(shape))
        strides: list[int] = []
        runs = _runs(self)
        for n in reversed(shape):
            if n == 1:
                strides.append(0)
                continue
            while runs and runs[-1][0] == 1:
                runs.pop()
            size, stride = runs.pop()
            if size % n:
                return None
            strides.append(stride)
            runs.append((size // n, stride * n))
        return replace(self, shape=shape, strides=tuple(reversed(strides)))


def _runs(view: View) -> list[tuple[int, int]]:
    """Return the (size, stride) pairs of ``view`` after merging as many axes as possible."""
    runs: list[tuple[int, int]] = []
    for n, stride in zip(view.shape, view.strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * stride:
            runs[-1] = (runs[-1][0] * n, stride)
        else:
            runs.append((n, stride))
    return runs


def squeezed(shape: Shape, strides: Shape) -> Shape:
    """Return the strides of the axes that are longer than 1."""
    return tuple(s for n, s in zip(shape, strides, strict=True) if n != 1)


# --- operations ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Operation:
    """A computation that writes tensors; ``node`` describes its ONNX node in comments and messages."""

    node: str = field(kw_only=True, default="")

    @property
    def outputs(self) -> list[Tensor]:
        raise NotImplementedError

    @property
    def views(self) -> list[View]:
        """The views that the operation reads, in argument order."""
        raise NotImplementedError


@dataclass(eq=False)
class Element(Operation):
    """An operation with one output that is computed element by element, so that several can share one loop.

    If ``again`` is set, it recomputes the result of another one for late readers.
    """

    out: Tensor
    again: bool = field(kw_only=True, default=False)

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out]


@dataclass(eq=False)
class Map(Element):
    """An elementwise operation: ``template`` is a C expression of the ``operands``, which have the shape of ``out``."""

    template: str
    operands: list[View]

    @property
    def views(self) -> list[View]:
        return self.operands


@dataclass(eq=False)
class Reduction:
    """The steps of a reduction as C text, with {a} the accumulator, {v} the value, {r} its index, {n} the count.

    Attributes:
        before: a declaration before the loop; {t} is the C type of the values.
        c_type: the C type of the accumulator; by default, that of the result.
    """

    start: str
    step: str
    finish: str = "{a}"
    before: str = ""
    c_type: str = ""


@dataclass(eq=False)
class Reduce(Element):
    """A reduction of ``operand`` along ``axes``.

    ``inner`` are the Maps fused into its loop, in order; they have the shape of ``operand``.
    """

    how: Reduction
    operand: View
    axes: tuple[int, ...]
    inner: list[Map] = field(default_factory=list)

    @property
    def views(self) -> list[View]:
        own = {m.out for m in self.inner}
        found = [v for m in self.inner for v in m.operands if v.tensor not in own]
        return found if self.operand.tensor in own else [*found, self.operand]


FLAT = "flat"  # an argument of Rows: the row-major index of the first element
FAULT = "fault"  # an argument of Call: where the kernel sets 1 for an index that is out of range
Argument: TypeAlias = "View | Tensor | int | str | tuple[int, ...]"


@dataclass(eq=False)
class Rows(Element):
    """A sum of products, such as a convolution: a kernel computes several consecutive elements of a row at once.

    ``function`` is called with the tile, its length and ``arguments``. A View of the shape of ``out`` is passed as the
    address of the element at the tile's start, a Tensor as its base address, a number as a literal, and a tuple as a
    constant array of ints.
    """

    function: str
    arguments: list[Argument]

    @property
    def views(self) -> list[View]:
        return [a if isinstance(a, View) else a.whole() for a in self.arguments if isinstance(a, View | Tensor)]


@dataclass(eq=False)
class Call(Operation):
    """A kernel call with base addresses of tensors; ``out`` contains None for outputs that nothing reads.

    Attributes:
        in_place: the input that the output may overwrite.
    """

    out: list[Tensor | None]
    function: str
    arguments: list[Argument | None]
    in_place: Tensor | None = None

    @property
    def checks(self) -> bool:
        """Whether the kernel checks indices and may fail."""
        return FAULT in self.arguments

    @property
    def outputs(self) -> list[Tensor]:
        return [t for t in self.out if t is not None]

    @property
    def views(self) -> list[View]:
        return [a.whole() for a in self.arguments if isinstance(a, Tensor) and a not in self.outputs]


@dataclass(eq=False)
class Assemble(Operation):
    """A tensor assembled from parts: ``out`` is filled with ``fill``, then each part is copied into a range of it."""

    out: Tensor
    parts: list[tuple[View, View]]  # source, destination
    fill: str | None = None

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out]

    @property
    def views(self) -> list[View]:
        return [source for source, _ in self.parts]


@dataclass(eq=False)
class Nested(Operation):
    """An operation that runs programs of its own.

    Attributes:
        captured: outer tensors that its programs read.
        workspace: the working memory of its programs, if they need any.
    """

    captured: list[Tensor] = field(kw_only=True)
    workspace: Tensor | None = field(kw_only=True, default=None)

    @property
    def bodies(self) -> list[Program]:
        raise NotImplementedError

    @property
    def room(self) -> list[Tensor]:
        return [] if self.workspace is None else [self.workspace]


@dataclass(eq=False)
class Repeat(Nested):
    """A Scan or a Loop: ``body`` runs once per step.

    Attributes:
        steps: the number of steps, or a tensor with it; None for a Loop without a limit.
        carried: for each state, the initial value, the body's input and the body's result.
        slices: for each scan input, the whole tensor, the body's input, and whether to read backwards.
        stacked: for each scan output, the whole tensor, the body's result, and whether to write backwards.
        last: the final states.
        counter: the body's input with the number of the step, for a Loop.
        condition: the body's input that ends a Loop when it is false; it is one of the states.
    """

    steps: int | Tensor | None
    body: Program
    carried: list[tuple[Tensor, Tensor, Tensor]]
    slices: list[tuple[Tensor, Tensor, bool]]
    stacked: list[tuple[Tensor, Tensor, bool]]
    last: list[Tensor]
    counter: Tensor | None = None
    condition: Tensor | None = None

    @property
    def bodies(self) -> list[Program]:
        return [self.body]

    @property
    def outputs(self) -> list[Tensor]:
        return [*self.last, *(t for t, _, _ in self.stacked), *self.room]

    @property
    def views(self) -> list[View]:
        limit = [self.steps] if isinstance(self.steps, Tensor) else []
        read = [*(t for t, _, _ in self.carried), *(t for t, _, _ in self.slices), *self.captured, *limit]
        return [t.whole() for t in read]


@dataclass(eq=False)
class Branch(Nested):
    """An If: runs the first of its two programs if ``condition`` is true, otherwise the second."""

    condition: Tensor
    branches: list[Program]
    out: list[Tensor]

    @property
    def bodies(self) -> list[Program]:
        return self.branches

    @property
    def outputs(self) -> list[Tensor]:
        return [*self.out, *self.room]

    @property
    def views(self) -> list[View]:
        return [t.whole() for t in (self.condition, *self.captured)]


@dataclass
class Program:
    """Operations in topological order, with their inputs and outputs."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
