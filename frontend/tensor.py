"""The traced tensor: the values with which ``forward`` computes.

Its operators and methods are those of ``torch.Tensor``; most call the function of that name in ``functional``.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend import activations, gradients, pointwise, products, reductions, shaping, subscripts
from gradgraph.frontend.dims import Extent, product
from gradgraph.frontend.trace import TensorLike, Value, as_dtype, current
from gradgraph.graph.builder import Var


class Size(tuple[Extent, ...]):
    """A shape: integers, and ``Dim`` objects for sizes that are known only at run time."""

    def numel(self) -> Extent:
        return product(self)

    def __repr__(self) -> str:
        return f"({', '.join(str(d) for d in self)}{',' if len(self) == 1 else ''})"

    __str__ = __repr__


def _reflected(
    function: Callable[[TensorLike, TensorLike], Tensor],
) -> Callable[[TensorMethods, TensorLike], Tensor]:
    """Return the reflected operator of ``function``, for a tensor to the right of a number or an array."""

    def operator(self: TensorMethods, other: TensorLike) -> Tensor:
        return function(other, self)

    return operator


class TensorMethods(Value):
    """Operators and methods shared by traced tensors, parameters and buffers."""

    # --- properties ---

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
        """Return the shape, or the size of one dimension."""
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

    # --- not supported by traced tensors ---

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
        raise ModelError(f"a traced tensor has no value yet and cannot {use}")

    # --- operators ---

    __add__ = pointwise.add
    __sub__ = pointwise.sub
    __mul__ = pointwise.mul
    __truediv__ = pointwise.div
    __floordiv__ = pointwise.floor_divide
    __mod__ = pointwise.remainder
    __pow__ = pointwise.pow
    __matmul__ = products.matmul
    __neg__ = pointwise.neg
    __abs__ = pointwise.abs
    __invert__ = pointwise.invert
    __lt__ = pointwise.lt
    __le__ = pointwise.le
    __gt__ = pointwise.gt
    __ge__ = pointwise.ge
    __getitem__ = subscripts.index
    __array_ufunc__ = None  # numpy leaves array + tensor to __radd__
    __hash__ = Value.__hash__

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return pointwise.eq(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return pointwise.ne(self, other)  # type: ignore[arg-type]

    __radd__ = _reflected(pointwise.add)
    __rsub__ = _reflected(pointwise.sub)
    __rmul__ = _reflected(pointwise.mul)
    __rtruediv__ = _reflected(pointwise.div)
    __rfloordiv__ = _reflected(pointwise.floor_divide)
    __rmod__ = _reflected(pointwise.remainder)
    __rpow__ = _reflected(pointwise.pow)
    __rmatmul__ = _reflected(products.matmul)
    __and__ = pointwise.bitwise("And")
    __or__ = pointwise.bitwise("Or")
    __xor__ = pointwise.bitwise("Xor")
    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__

    # --- types ---

    def to(self, dtype: Any) -> Tensor:
        return pointwise.cast(self, as_dtype(dtype))

    def type_as(self, other: Value) -> Tensor:
        return pointwise.cast(self, other.traced.dtype)

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
        return pointwise.where(condition, self, other)

    def contiguous(self) -> Tensor:
        return self.clone()

    detach = gradients.detach

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
        """The tensor with its dimensions in reverse order."""
        return shaping.permute(self, list(range(self.ndim))[::-1])

    @property
    def mT(self) -> Tensor:  # noqa: N802
        """The tensor with its last two dimensions exchanged."""
        return shaping.transpose(self, -2, -1)

    def t(self) -> Tensor:
        return self.T

    def view_as(self, other: TensorMethods) -> Tensor:
        return shaping.reshape(self, other.shape)

    def expand_as(self, other: TensorMethods) -> Tensor:
        return shaping.expand(self, other.shape)

    # --- indexing ---

    gather = subscripts.gather
    index_select = subscripts.index_select
    scatter = subscripts.scatter
    scatter_add = subscripts.scatter_add
    nonzero = subscripts.nonzero
    tril = subscripts.tril
    triu = subscripts.triu

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

    add = pointwise.add
    sub = pointwise.sub
    mul = pointwise.mul
    div = pointwise.div
    neg = pointwise.neg
    pow = pointwise.pow
    square = pointwise.square
    sqrt = pointwise.sqrt
    rsqrt = pointwise.rsqrt
    reciprocal = pointwise.reciprocal
    abs = pointwise.abs
    sign = pointwise.sign
    floor = pointwise.floor
    ceil = pointwise.ceil
    round = pointwise.round
    trunc = pointwise.trunc
    exp = pointwise.exp
    expm1 = pointwise.expm1
    log = pointwise.log
    log2 = pointwise.log2
    log10 = pointwise.log10
    log1p = pointwise.log1p
    sin = pointwise.sin
    cos = pointwise.cos
    tan = pointwise.tan
    tanh = pointwise.tanh
    erf = pointwise.erf
    clamp = pointwise.clamp
    clip = pointwise.clip
    maximum = pointwise.maximum
    minimum = pointwise.minimum
    masked_fill = pointwise.masked_fill
    eq = pointwise.eq
    ne = pointwise.ne
    lt = pointwise.lt
    le = pointwise.le
    gt = pointwise.gt
    ge = pointwise.ge
    isnan = pointwise.isnan
    isinf = pointwise.isinf
    logical_and = pointwise.logical_and
    logical_or = pointwise.logical_or
    logical_not = pointwise.logical_not

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
