"""Initialisers, under PyTorch's names: each fills a parameter (or array) in place and returns it.

All random numbers come from one generator, seeded by ``manual_seed``. Its default seed is 0, so a script that builds
the same networks in the same order gets equal numbers on every run.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend.activations import gain as calculate_gain
from gradgraph.frontend.module import Stored

_GENERATOR = np.random.default_rng(0)

T = TypeVar("T", bound="Stored | np.ndarray")

__all__ = [
    "calculate_gain",
    "constant_",
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "manual_seed",
    "normal_",
    "ones_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]


def manual_seed(seed: int) -> None:
    """Seed the generator of all initialisers; equal seeds result in equal numbers."""
    global _GENERATOR
    _GENERATOR = np.random.default_rng(seed)


def _fill(x: T, numbers: np.ndarray | float) -> T:
    _array(x)[...] = numbers
    return x


def _array(x: Stored | np.ndarray) -> np.ndarray:
    return x.data if isinstance(x, Stored) else x


def uniform_(x: T, a: float = 0.0, b: float = 1.0) -> T:
    """Fill a parameter with uniform random numbers between ``a`` and ``b``."""
    return _fill(x, _GENERATOR.uniform(a, b, _array(x).shape))


def normal_(x: T, mean: float = 0.0, std: float = 1.0) -> T:
    """Fill a parameter with normal random numbers."""
    return _fill(x, _GENERATOR.normal(mean, std, _array(x).shape))


def trunc_normal_(x: T, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> T:
    """Fill a parameter with normal random numbers truncated to ``[a, b]``, by inversion of the normal CDF."""
    law = NormalDist(mean, std)
    quantiles = _GENERATOR.uniform(law.cdf(a), law.cdf(b), int(np.prod(_array(x).shape)))
    numbers = np.array([law.inv_cdf(min(max(q, 1e-16), 1.0 - 1e-16)) for q in quantiles])
    return _fill(x, np.clip(numbers, a, b).reshape(_array(x).shape))


def constant_(x: T, val: float) -> T:
    """Fill a parameter with one number."""
    return _fill(x, val)


def zeros_(x: T) -> T:
    """Fill a parameter with zeros."""
    return _fill(x, 0.0)


def ones_(x: T) -> T:
    """Fill a parameter with ones."""
    return _fill(x, 1.0)


def eye_(x: T) -> T:
    """Fill a parameter with the identity matrix."""
    rows, columns = _array(x).shape
    return _fill(x, np.eye(rows, columns))


def dirac_(x: T, groups: int = 1) -> T:
    """Fill a convolution weight so that the convolution returns its input channels unchanged."""
    kernel = np.zeros(_array(x).shape)
    per_group = _array(x).shape[0] // groups
    centre = tuple(k // 2 for k in _array(x).shape[2:])
    for channel in range(_array(x).shape[0]):
        if channel % per_group < _array(x).shape[1]:
            kernel[(channel, channel % per_group, *centre)] = 1.0
    return _fill(x, kernel)


def xavier_uniform_(x: T, gain: float = 1.0) -> T:
    """Fill a parameter with uniform random numbers of variance ``2 gain² / (fan_in + fan_out)``."""
    bound = gain * math.sqrt(6.0 / sum(fans(_array(x).shape)))
    return uniform_(x, -bound, bound)


def xavier_normal_(x: T, gain: float = 1.0) -> T:
    """Fill a parameter with normal random numbers of variance ``2 gain² / (fan_in + fan_out)``."""
    return normal_(x, 0.0, gain * math.sqrt(2.0 / sum(fans(_array(x).shape))))


def kaiming_uniform_(x: T, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> T:
    """Fill a parameter with uniform random numbers of variance ``gain² / fan``.

    ``fan`` is ``fan_in`` or ``fan_out``, as ``mode`` selects; the gain is that of ``nonlinearity``, with slope ``a``.
    """
    bound = math.sqrt(3.0) * _kaiming_std(_array(x).shape, a, mode, nonlinearity)
    return uniform_(x, -bound, bound)


def kaiming_normal_(x: T, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> T:
    """Fill a parameter with normal random numbers of variance ``gain² / fan``.

    ``fan`` is ``fan_in`` or ``fan_out``, as ``mode`` selects; the gain is that of ``nonlinearity``, with slope ``a``.
    """
    return normal_(x, 0.0, _kaiming_std(_array(x).shape, a, mode, nonlinearity))


def _kaiming_std(shape: tuple[int, ...], a: float, mode: str, nonlinearity: str) -> float:
    modes = ("fan_in", "fan_out")
    if mode not in modes:
        raise ModelError(f"kaiming initialisation has no mode {mode!r}; use 'fan_in' or 'fan_out'")
    return calculate_gain(nonlinearity, a) / math.sqrt(fans(shape)[modes.index(mode)])


def orthogonal_(x: T, gain: float = 1.0) -> T:
    """Fill a parameter with a random (semi-)orthogonal matrix; dimensions after the first are flattened to columns."""
    rows, columns = _array(x).shape[0], int(np.prod(_array(x).shape[1:]))
    q, r = np.linalg.qr(_GENERATOR.normal(size=(max(rows, columns), min(rows, columns))))
    q = q * np.sign(np.diag(r))  # makes the distribution uniform
    return _fill(x, gain * (q if rows >= columns else q.T).reshape(_array(x).shape))


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (fan-in, fan-out) of a weight: the inputs per output element, and the outputs per input element."""
    if len(shape) < 2:
        raise ModelError(f"fan-in and fan-out require a weight of at least 2 dimensions, but got shape {shape}")
    field = int(np.prod(shape[2:]))
    return shape[1] * field, shape[0] * field
