"""Random numbers, under PyTorch's names: they write ONNX's random operators, which a training step replaces.

In a step, the numbers come from the step's counter-based generator, so that a resumed run draws the same numbers
(``passes/draws.py``); in an exported model, the runtime draws them. They have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend.activations import softmax
from gradgraph.frontend.dims import Dim, Extent
from gradgraph.frontend.gradients import detach
from gradgraph.frontend.pointwise import cast, clamp, floor, log
from gradgraph.frontend.reductions import argmax, axis_of, topk
from gradgraph.frontend.shaping import movedim
from gradgraph.frontend.trace import TensorLike, as_dtype, current, op, shaped, tensor, wrap
from gradgraph.graph.shapes import is_static

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["bernoulli", "gumbel_softmax", "multinomial", "rand", "rand_like", "randint", "randn", "randn_like"]

_UNIFORM: dict[str, Any] = {"low": 0.0, "high": 1.0}
_NORMAL: dict[str, Any] = {"mean": 0.0, "scale": 1.0}
_MOST = 1 << 24  # distinct values of 24 random bits


def rand(*size: Extent | Sequence[Extent], dtype: Any = "float32") -> Tensor:
    """Uniform numbers in [0, 1) of shape ``size``, which may be dynamic: ``rand(x.shape[0], 1)``."""
    return _drawn("RandomUniform", size, dtype, _UNIFORM)


def randn(*size: Extent | Sequence[Extent], dtype: Any = "float32") -> Tensor:
    """Standard normal numbers of shape ``size``, which may be dynamic."""
    return _drawn("RandomNormal", size, dtype, _NORMAL)


def rand_like(x: TensorLike, dtype: Any = None) -> Tensor:
    """Uniform numbers in [0, 1) of the shape of ``x``, and of its element type by default."""
    return _drawn_like("RandomUniformLike", tensor(x), dtype, _UNIFORM)


def randn_like(x: TensorLike, dtype: Any = None) -> Tensor:
    """Standard normal numbers of the shape of ``x``, and of its element type by default."""
    return _drawn_like("RandomNormalLike", tensor(x), dtype, _NORMAL)


def randint(low: int, high: Any, size: Sequence[Extent] | None = None, dtype: Any = "int64") -> Tensor:
    """Integers from ``low`` to ``high - 1``, such as the time steps of a diffusion model.

    ``randint(high, size)`` starts at 0; sizes may be dynamic.
    """
    first, end, sizes = (low, high, size) if size is not None else (0, low, high)
    if not isinstance(end, int) or not 0 < end - first <= _MOST:
        raise ModelError(
            f"the range of randint is {first} to {end!r}, but must have at least 1 and at most 2**24 integers"
        )
    return cast(floor(rand(*_sizes(sizes)) * (end - first)), as_dtype(dtype)) + first


def bernoulli(p: TensorLike) -> Tensor:
    """1 with probability ``p``, else 0, with the shape and element type of ``p``.

    ONNX's Bernoulli is not used: its function body in the ONNX standard, which onnxruntime runs, returns 1 with
    probability ``1 - p``.
    """
    p = tensor(p)
    _check_floating(p.dtype, "bernoulli")
    return cast(rand_like(p) < p, p.dtype)


def multinomial(weights: TensorLike, num_samples: int, replacement: bool = False) -> Tensor:
    """Class indices, drawn with probabilities proportional to ``weights``.

    Args:
        weights: non-negative, ``[classes]`` or ``[rows, classes]``. Without replacement, at least ``num_samples`` of
            each row must be positive.
        num_samples: the number of samples per row.
        replacement: whether a class may be drawn more than once.

    Returns:
        int64 ``[num_samples]`` or ``[rows, num_samples]``.
    """
    weights = tensor(weights)
    _check_floating(weights.dtype, "multinomial")
    if weights.ndim not in (1, 2) or not isinstance(num_samples, int) or num_samples < 1:
        raise ModelError(
            f"multinomial got num_samples={num_samples!r} and weights of shape {weights.shape}; use at least one "
            "sample, and weights with one or two dimensions"
        )
    logits = log(cast(weights, ir.DataType.FLOAT))
    if not replacement and num_samples > 1:  # the Gumbel-max trick
        return topk(logits + _gumbel_noise(logits), num_samples)[1]
    rows = logits if logits.ndim == 2 else logits.unsqueeze(0)
    found = op.Multinomial(rows, sample_size=num_samples, dtype=int(ir.DataType.INT64))
    found = shaped(found, (rows.shape[0], num_samples))
    return found if logits.ndim == 2 else found.squeeze(0)


def gumbel_softmax(logits: TensorLike, tau: float = 1.0, hard: bool = False, dim: int = -1) -> Tensor:
    """A relaxed one-hot sample along ``dim``; if ``hard``, it is exactly one-hot, but has the gradient of the relaxed
    sample.
    """
    logits = tensor(logits)
    soft = softmax((logits + _gumbel_noise(logits)) / tau, dim)
    if not hard:
        return soft
    axis = axis_of(soft, dim)
    count = soft.shape[axis]
    places = tensor(np.arange(count)) if isinstance(count, int) else op.Range(0, tensor(count), 1)
    chosen = cast(argmax(soft, axis, keepdim=True).movedim(axis, -1) == places, soft.dtype)
    return movedim(chosen, -1, axis) + soft - detach(soft)


def _gumbel_noise(like: Tensor) -> Tensor:
    """Return Gumbel noise with the shape and type of ``like``, computed in float32 or wider."""
    wide = like.dtype if like.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    return cast(-log(-log(clamp(rand_like(like, wide), 2.0**-25))), like.dtype)


def _drawn(op_type: str, size: Sequence[Any], dtype: Any, attributes: dict[str, Any]) -> Tensor:
    sizes, kind = _sizes(size), as_dtype(dtype)
    _check_floating(kind, "a random tensor")
    trace = current()
    if is_static(sizes):
        found = trace.builder.emit(op_type, outputs=1, shape=list(sizes), dtype=int(kind), **attributes)
        return shaped(wrap(found), sizes)
    zeros = wrap(trace.builder.full(trace.sizes(sizes), 0, kind))
    return _drawn_like(f"{op_type}Like", shaped(zeros, sizes), None, attributes)


def _drawn_like(op_type: str, x: Tensor, dtype: Any, attributes: dict[str, Any]) -> Tensor:
    kind = x.dtype if dtype is None else as_dtype(dtype)
    _check_floating(kind, "a random tensor")
    return op.emit(op_type, x, shape=x.shape, dtype=int(kind), **attributes)


def _sizes(size: Sequence[Any]) -> tuple[Extent, ...]:
    given = size[0] if len(size) == 1 and not isinstance(size[0], int | Dim) else size
    return tuple(given)


def _check_floating(dtype: ir.DataType, what: str) -> None:
    if not dtype.is_floating_point():
        raise ModelError(
            f"{what} has the element type {dtype.name.lower()}, but requires a floating-point type, such as 'float32'"
        )
