"""Sampling, columns and spectra against PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.rules.registry import RULES, Case, case, real, uniform
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle

torch = pytest.importorskip("torch", reason="compares with PyTorch")
F = torch.nn.functional
pytestmark = pytest.mark.torch

EXACT = {0: (4, 2), 1: (5, 3)}  # sizes whose pixels have binary fractions as coordinates
MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}


def sampled(mode: str, padding: str, aligned: int) -> Callable[..., Any]:
    return lambda x, g: F.grid_sample(x, g, MODES[mode], padding, bool(aligned))


def complex_(x: Any) -> Any:
    return torch.view_as_complex(x.contiguous())


def stft(x: Any, step: Any, window: Any, length: Any) -> Any:
    y = torch.stft(x[..., 0], 6, 4, window=window, center=False, return_complex=True)
    return torch.view_as_real(y.transpose(1, 2))


def grids(x: Any, grid: Any, modes: list[str]) -> list[tuple[str, Case, Callable[..., Any]]]:
    ways = itertools.product(modes, ("zeros", "border", "reflection"), (0, 1))
    return [
        ("GridSample", case(x, grid, mode=m, padding_mode=p, align_corners=a), sampled(m, p, a)) for m, p, a in ways
    ]


def on_pixels(aligned: int) -> np.ndarray:
    """Every point exactly on a pixel, the first and the last included: where linear weights have their kinks."""
    return np.asarray(F.affine_grid(torch.eye(2, 3, dtype=torch.float64)[None], [1, 1, *EXACT[aligned]], bool(aligned)))


TABLE: list[tuple[str, Case, Callable[..., Any]]] = [
    *grids(real(2, 3, 5, 4), uniform(-1.7, 1.7, 2, 3, 4, 2), ["linear", "nearest", "cubic"]),
    *grids(real(1, 2, 3, 4, 5), uniform(-1.7, 1.7, 1, 2, 3, 2, 3), ["linear", "nearest"]),
    *(
        (
            "AffineGrid",
            case(real(2, 2, 3), [2, 3, 4, 5], align_corners=a),
            lambda t, s, a=a: F.affine_grid(t, s.tolist(), bool(a)),
        )
        for a in (0, 1)
    ),
    *(
        (
            "AffineGrid",
            case(real(2, 3, 4), [2, 3, 2, 4, 5], align_corners=a),
            lambda t, s, a=a: F.affine_grid(t, s.tolist(), bool(a)),
        )
        for a in (0, 1)
    ),
    (
        "Col2Im",
        case(real(2, 12, 9), [5, 4], [2, 2], strides=[2, 1], pads=[1, 0, 1, 0], dilations=[2, 1]),
        lambda x, i, b: F.fold(x, (5, 4), 2, (2, 1), (1, 0), (2, 1)),
    ),
    ("DFT", case(real(2, 5, 3, 2), None, 1), lambda x, a: torch.view_as_real(torch.fft.fft(complex_(x), dim=1))),
    (
        "DFT",
        case(real(2, 5, 3, 2), 7, 1, inverse=1),
        lambda x, n, a: torch.view_as_real(torch.fft.ifft(complex_(x), 7, dim=1)),
    ),
    (
        "DFT",
        case(real(2, 6, 1), 5, 1, onesided=1),
        lambda x, n, a: torch.view_as_real(torch.fft.rfft(x[..., 0], 5, dim=1)),
    ),
    (
        "DFT",
        case(real(2, 5, 2), 7, 1, inverse=1, onesided=1),
        lambda x, n, a: torch.fft.irfft(complex_(x), 7, dim=1)[..., None],
    ),
    (
        "DFT",
        case(real(2, 3, 2), 8, 1, inverse=1, onesided=1),
        lambda x, n, a: torch.fft.irfft(complex_(x), 8, dim=1)[..., None],
    ),
    ("STFT", case(real(2, 17, 1), 4, real(6), 6), stft),
]


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_slopes_on_pixels_are_pytorchs(padding: str, aligned: int) -> None:
    call = case(real(1, 2, *EXACT[aligned]), on_pixels(aligned), padding_mode=padding, align_corners=aligned)
    t = cases.trial(RULES["", "GridSample"], call, fed=True)
    t.wrt.append("x1")
    check(t, sampled("linear", padding, aligned))


@pytest.mark.parametrize(("op_type", "call", "f"), TABLE, ids=[f"{t[0]}-{i}" for i, t in enumerate(TABLE)])
def test_gradients_are_pytorchs(op_type: str, call: Case, f: Callable[..., Any]) -> None:
    check(cases.trial(RULES["", op_type], call, fed=True), f)


def check(t: cases.Trial, f: Callable[..., Any]) -> None:
    got = cases.run_gradient(t, lambda m, feeds: list(Oracle(m)(feeds).values()))
    y = Oracle(t.model)(t.feeds)["y0"]
    cotangent = np.random.default_rng(0).uniform(-1, 1, y.shape)
    tensors = {k: torch.tensor(v, requires_grad=v.dtype.kind == "f") for k, v in t.feeds.items()}
    expected = f(*tensors.values())
    np.testing.assert_allclose(y, expected.detach(), rtol=1e-9, atol=1e-9)
    expected.backward(torch.tensor(cotangent))
    for name, g in zip(t.wrt, got, strict=True):
        np.testing.assert_allclose(g, tensors[name].grad, rtol=1e-9, atol=1e-9)
