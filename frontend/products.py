"""Matrix products, linear maps, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradgraph.errors import ModelError, counted
from gradgraph.frontend import reductions
from gradgraph.frontend.dims import Dim, Extent
from gradgraph.frontend.pointwise import real
from gradgraph.frontend.reductions import norm
from gradgraph.frontend.trace import TensorLike, op, tensor, tensors

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "bilinear",
    "bmm",
    "cosine_similarity",
    "dot",
    "einsum",
    "linear",
    "matmul",
    "mm",
    "mv",
    "normalize",
    "outer",
]


def matmul(x: TensorLike, y: TensorLike) -> Tensor:
    """The matrix product over the last two dimensions; leading dimensions broadcast, and vectors work as in NumPy."""
    a, b = tensors(x, y)
    if a.ndim and b.ndim:
        inner, other = a.shape[-1], b.shape[-2 if b.ndim > 1 else 0]
        if isinstance(inner, int) and isinstance(other, int) and inner != other:
            raise ModelError(f"shapes {a.shape} and {b.shape} cannot be multiplied; {inner} and {other} must be equal")
    return op.MatMul(a, b)


bmm = mm = mv = matmul


def dot(x: TensorLike, y: TensorLike) -> Tensor:
    """The inner product of two vectors."""
    return matmul(x, y)


def outer(x: TensorLike, y: TensorLike) -> Tensor:
    """The outer product of two vectors: a matrix."""
    return tensor(x).unsqueeze(1) * tensor(y).unsqueeze(0)


def linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` of shape ``[..., in]`` and ``weight`` of shape ``[out, in]``."""
    x, weight = tensor(x), tensor(weight)
    if x.ndim == 0 or (isinstance(x.shape[-1], int) and x.shape[-1] != weight.shape[1]):
        raise ModelError(
            f"a linear map from {weight.shape[1]} features got an input of shape {x.shape}; its last dimension must "
            f"be {weight.shape[1]}"
        )
    if x.ndim == 2:
        return op.Gemm(x, weight, bias, transB=1, shape=[x.shape[0], weight.shape[0]])
    product = op.MatMul(x, op.Transpose(weight, perm=[1, 0]), shape=[*x.shape[:-1], weight.shape[0]])
    return product if bias is None else product + bias


def bilinear(x1: TensorLike, x2: TensorLike, weight: TensorLike, bias: TensorLike | None = None) -> Tensor:
    """``x1[..., i] * weight[o, i, j] * x2[..., j]``, summed over i and j, plus ``bias[o]``."""
    result = einsum("...i,oij,...j->...o", x1, weight, x2)
    return result if bias is None else result + bias


def einsum(equation: str, *operands: TensorLike | Sequence[TensorLike]) -> Tensor:
    """Einstein summation, in the common notation of NumPy, PyTorch and ONNX; operands may also be given as a list."""
    listed = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    xs = tensors(*listed)
    equation = equation.replace(" ", "")
    terms, arrow, output = equation.partition("->")
    if len(terms.split(",")) != len(xs):
        raise ModelError(
            f"einsum '{equation}' has {counted(len(terms.split(',')), 'operand')}, but got {len(xs)}; "
            "pass one tensor for each"
        )
    if len(set(output.replace("...", ""))) != len(output.replace("...", "")):
        raise ModelError(f"einsum '{equation}' repeats a letter in its output; name each output dimension once")
    dims = _einsum_shape(terms, output, xs) if arrow and "..." not in equation else None
    return op.Einsum(*xs, equation=equation, shape=dims)


def _einsum_shape(terms: str, output: str, xs: list[Tensor]) -> list[Extent]:
    sizes: dict[str, Extent] = {}
    for term, x in zip(terms.split(","), xs, strict=True):
        if len(term) != x.ndim:
            raise ModelError(
                f"einsum term '{term}' has {len(term)} letters, but its tensor has shape {x.shape}; use a letter per "
                "dimension"
            )
        for letter, size in zip(term, x.shape, strict=True):
            known = sizes.setdefault(letter, size)
            if isinstance(known, Dim) and isinstance(size, int):
                sizes[letter] = size
            elif isinstance(known, int) and isinstance(size, int) and known != size:
                raise ModelError(f"einsum letter '{letter}' stands for sizes {known} and {size}, which must be equal")
    if missing := set(output) - set(sizes):
        raise ModelError(f"einsum output letter '{min(missing)}' appears in no operand; add it to a term or remove it")
    return [sizes[letter] for letter in output]


def normalize(x: TensorLike, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """``x`` divided by its p-norm along ``dim``, or by ``eps`` if that is larger."""
    x = real(x)
    return x / norm(x, p, dim, keepdim=True).clamp(min=eps)


def cosine_similarity(x1: TensorLike, x2: TensorLike, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between vectors along ``dim``; norms below ``eps`` are replaced by ``eps``."""
    a, b = (real(x) for x in (x1, x2))
    a, b = (x / norm(x, 2.0, dim, keepdim=True).clamp(min=eps) for x in (a, b))
    return reductions.sum(a * b, dim)
