"""The traced tensor: what ``forward`` computes with.

Operators and methods are those of ``torch.Tensor``, each one the function of the same name in ``functional``.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any, NoReturn

import onnx_ir as ir

from gradgraph.builder import Var
from gradgraph.errors import ModelError
from gradgraph.frontend import activations, elementwise, indexing, products, reductions, shaping
from gradgraph.frontend.dims import Extent, product
from gradgraph.frontend.trace import TensorLike, Value, as_dtype, current


class Size(tuple[Extent, ...]):
    """A shape: numbers, and ``Dim`` objects where a size is known only at run time."""

    def numel(self) -> Extent:
        return product(self)

    def __repr__(self) -> str:
        return f"({', '.join(str(d) for d in self)}{',' if len(self) == 1 else ''})"

    __str__ = __repr__


class TensorMethods(Value):
    """Operators and methods shared by traced tensors, parameters and buffers."""

    # --- what is known of it ---

    @property
    def dtype(self) -> ir.DataType:
        return self.traced.dtype

    @property
    def shape(self) -> Size:
        return Size(current().shape(self.traced))

    @property
    def ndim(self) -> builtins.int:
        return len(self.shape)

    def size(self, dim: builtins.int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[reductions.axis_of(self, dim)]  # type: ignore[arg-type]

    def dim(self) -> builtins.int:
        return self.ndim

    def numel(self) -> Extent:
        return self.shape.numel()

    def is_floating_point(self) -> builtins.bool:
        return self.dtype.is_floating_point()

    def is_bool(self) -> builtins.bool:
        return self.dtype == ir.DataType.BOOL

    def __len__(self) -> builtins.int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Tensor]:
        return iter(shaping.unbind(self))

    # --- what a traced tensor cannot do ---

    def __bool__(self) -> builtins.bool:
        self._no_number("decide an if or a while; choose between tensors with where(condition, a, b)")

    def __float__(self) -> builtins.float:
        self._no_number("become a Python number; compute with the tensor itself")

    def __int__(self) -> builtins.int:
        self._no_number("become a Python number; compute with the tensor itself")

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._no_number("become a NumPy array; use the functions of gradgraph.frontend.functional")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._no_number("be changed in place; build the new tensor with where, cat or scatter")

    def _no_number(self, use: str) -> NoReturn:
        raise ModelError(f"a traced tensor has no numbers yet and cannot {use}")

    # --- operators ---

    __add__ = elementwise.add
    __sub__ = elementwise.sub
    __mul__ = elementwise.mul
    __truediv__ = elementwise.div
    __floordiv__ = elementwise.floor_divide
    __mod__ = elementwise.remainder
    __pow__ = elementwise.pow
    __matmul__ = products.matmul
    __neg__ = elementwise.neg
    __abs__ = elementwise.abs
    __invert__ = elementwise.invert
    __lt__ = elementwise.lt
    __le__ = elementwise.le
    __gt__ = elementwise.gt
    __ge__ = elementwise.ge
    __getitem__ = indexing.index
    __array_ufunc__ = None  # numpy leaves array + tensor to __radd__
    __hash__ = Value.__hash__

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return elementwise.eq(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return elementwise.ne(self, other)  # type: ignore[arg-type]

    def __radd__(self, other: TensorLike) -> Tensor:
        return elementwise.add(other, self)

    def __rsub__(self, other: TensorLike) -> Tensor:
        return elementwise.sub(other, self)

    def __rmul__(self, other: TensorLike) -> Tensor:
        return elementwise.mul(other, self)

    def __rtruediv__(self, other: TensorLike) -> Tensor:
        return elementwise.div(other, self)

    def __rfloordiv__(self, other: TensorLike) -> Tensor:
        return elementwise.floor_divide(other, self)

    def __rmod__(self, other: TensorLike) -> Tensor:
        return elementwise.remainder(other, self)

    def __rpow__(self, other: TensorLike) -> Tensor:
        return elementwise.pow(other, self)

    def __rmatmul__(self, other: TensorLike) -> Tensor:
        return products.matmul(other, self)

    def __and__(self, other: TensorLike) -> Tensor:
        return elementwise.bitwise("And", self, other)

    def __or__(self, other: TensorLike) -> Tensor:
        return elementwise.bitwise("Or", self, other)

    def __xor__(self, other: TensorLike) -> Tensor:
        return elementwise.bitwise("Xor", self, other)

    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__

    # --- types ---

    def to(self, dtype: Any) -> Tensor:
        return elementwise.cast(self, as_dtype(dtype))

    def type_as(self, other: Value) -> Tensor:
        return elementwise.cast(self, other.traced.dtype)

    def float(self) -> Tensor:
        return self.to("float32")

    def double(self) -> Tensor:
        return self.to("float64")

    def half(self) -> Tensor:
        return self.to("float16")

    def long(self) -> Tensor:
        return self.to("int64")

    def int(self) -> Tensor:
        return self.to("int32")

    def bool(self) -> Tensor:
        return self.to("bool")

    astype = to

    def where(self, condition: TensorLike, other: TensorLike) -> Tensor:
        return elementwise.where(condition, self, other)

    def contiguous(self) -> Tensor:
        return self.clone()

    def clone(self) -> Tensor:
        return Tensor(self.traced)

    # --- shapes ---

    reshape = shaping.reshape
    view = shaping.reshape
    flatten = shaping.flatten
    unflatten = shaping.unflatten
    squeeze = shaping.squeeze
    unsqueeze = shaping.unsqueeze
    permute = shaping.permute
    transpose = shaping.transpose
    swapaxes = shaping.transpose
    movedim = shaping.movedim
    flip = shaping.flip
    roll = shaping.roll
    expand = shaping.expand
    repeat = shaping.repeat
    tile = shaping.tile
    repeat_interleave = shaping.repeat_interleave
    split = shaping.split
    chunk = shaping.chunk
    unbind = shaping.unbind

    @property
    def T(self) -> Tensor:  # noqa: N802
        """The dimensions in reverse order."""
        return shaping.permute(self, list(range(self.ndim))[::-1])

    @property
    def mT(self) -> Tensor:  # noqa: N802
        """The last two dimensions exchanged."""
        return shaping.transpose(self, -2, -1)

    def t(self) -> Tensor:
        return self.T

    def view_as(self, other: TensorMethods) -> Tensor:
        return shaping.reshape(self, other.shape)

    def expand_as(self, other: TensorMethods) -> Tensor:
        return shaping.expand(self, other.shape)

    # --- parts ---

    gather = indexing.gather
    index_select = indexing.index_select
    scatter = indexing.scatter
    scatter_add = indexing.scatter_add
    nonzero = indexing.nonzero
    tril = indexing.tril
    triu = indexing.triu

    # --- reductions ---

    sum = reductions.sum
    mean = reductions.mean
    prod = reductions.prod
    var = reductions.var
    std = reductions.std
    max = reductions.max
    min = reductions.min
    amax = reductions.amax
    amin = reductions.amin
    argmax = reductions.argmax
    argmin = reductions.argmin
    logsumexp = reductions.logsumexp
    norm = reductions.norm
    any = reductions.any
    all = reductions.all
    cumsum = reductions.cumsum
    topk = reductions.topk
    sort = reductions.sort
    argsort = reductions.argsort

    # --- elementwise ---

    add = elementwise.add
    sub = elementwise.sub
    mul = elementwise.mul
    div = elementwise.div
    neg = elementwise.neg
    pow = elementwise.pow
    square = elementwise.square
    sqrt = elementwise.sqrt
    rsqrt = elementwise.rsqrt
    reciprocal = elementwise.reciprocal
    abs = elementwise.abs
    sign = elementwise.sign
    floor = elementwise.floor
    ceil = elementwise.ceil
    round = elementwise.round
    trunc = elementwise.trunc
    exp = elementwise.exp
    expm1 = elementwise.expm1
    log = elementwise.log
    log2 = elementwise.log2
    log10 = elementwise.log10
    log1p = elementwise.log1p
    sin = elementwise.sin
    cos = elementwise.cos
    tan = elementwise.tan
    tanh = elementwise.tanh
    erf = elementwise.erf
    clamp = elementwise.clamp
    clip = elementwise.clip
    maximum = elementwise.maximum
    minimum = elementwise.minimum
    masked_fill = elementwise.masked_fill
    eq = elementwise.eq
    ne = elementwise.ne
    lt = elementwise.lt
    le = elementwise.le
    gt = elementwise.gt
    ge = elementwise.ge
    isnan = elementwise.isnan
    isinf = elementwise.isinf
    logical_and = elementwise.logical_and
    logical_or = elementwise.logical_or
    logical_not = elementwise.logical_not

    # --- activations and products ---

    relu = activations.relu
    sigmoid = activations.sigmoid
    softmax = activations.softmax
    log_softmax = activations.log_softmax
    matmul = products.matmul
    mm = products.matmul
    bmm = products.matmul
    dot = products.dot


class Tensor(TensorMethods):
    """A value of the graph under construction."""

    def __init__(self, var: Var) -> None:
        self._var = var

    @property
    def traced(self) -> Var:
        return self._var

    def __repr__(self) -> str:
        return f"Tensor({self._var.value.name}: {self.dtype.name.lower()}{list(self.shape)})"
