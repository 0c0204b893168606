"""Shape, indexing, padding and resizing operators against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.rules.registry import RULES, Case, case, distinct, integers, real
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle

torch = pytest.importorskip("torch", reason="compares with PyTorch")
F = torch.nn.functional
pytestmark = pytest.mark.torch


def scatter_reduce(how: str) -> Callable[..., Any]:
    return lambda x, i, u: x.scatter_reduce(1, i, u, how)


def interpolate(**how: Any) -> Callable[..., Any]:
    return lambda x, *_: F.interpolate(x, **how)


IMAGE = real(2, 3, 5, 4)
REPEATS = integers(0, 3, 2, 6)
TABLE: list[tuple[str, Case, Callable[..., Any]]] = [
    ("Transpose", case(real(2, 3, 4), perm=[2, 0, 1]), lambda x: x.permute(2, 0, 1)),
    ("Tile", case(real(2, 3), [2, 3]), lambda x, r: x.repeat(2, 3)),
    ("Expand", case(real(3, 1), [2, 3, 4]), lambda x, s: x.expand(2, 3, 4)),
    ("Slice", case(real(7, 6), [1, 2], [7, 6], [0, 1], [2, 3]), lambda x, *_: x[1::2, 2::3]),
    ("Gather", case(real(5, 3), integers(0, 5, 4, 2)), lambda w, i: F.embedding(i, w)),
    ("Gather", case(real(2, 5, 3), integers(0, 5, 7), axis=1), lambda x, i: x.index_select(1, i)),
    ("GatherElements", case(real(2, 5), integers(0, 5, 2, 6), axis=1), lambda x, i: x.gather(1, i)),
    ("GatherND", case(real(4, 3, 2), integers(0, 3, 5, 2)), lambda x, i: x[i[:, 0], i[:, 1]]),
    ("ScatterElements", case(real(2, 3), REPEATS, real(2, 6), axis=1, reduction="add"), scatter_reduce("sum")),
    ("ScatterElements", case(real(2, 3), REPEATS, real(2, 6), axis=1, reduction="mul"), scatter_reduce("prod")),
    ("ScatterElements", case(distinct(2, 3), REPEATS, real(2, 6), axis=1, reduction="max"), scatter_reduce("amax")),
    ("ScatterElements", case(distinct(2, 3), REPEATS, real(2, 6), axis=1, reduction="min"), scatter_reduce("amin")),
    ("ScatterElements", case(real(2, 3), [[2, 0], [1, 2]], real(2, 2), axis=1), lambda x, i, u: x.scatter(1, i, u)),
    (
        "ScatterND",
        case(real(4, 3), [[1], [3], [1]], real(3, 3), reduction="add"),
        lambda x, i, u: x.index_put((i[:, 0],), u, accumulate=True),
    ),
    ("TopK", case(distinct(3, 6), [2], outputs=2), lambda x, k: x.topk(2).values),
    ("CumSum", case(real(2, 3), 1), lambda x, a: x.cumsum(1)),
    ("Trilu", case(real(2, 4, 3), -1, upper=0), lambda x, k: x.tril(-1)),
    ("DepthToSpace", case(real(1, 18, 2, 2), blocksize=3, mode="CRD"), lambda x: F.pixel_shuffle(x, 3)),
    ("Pad", case(IMAGE, [0, 0, 1, 2, 0, 0, 3, 1], mode="reflect"), lambda x, p: F.pad(x, (2, 1, 1, 3), "reflect")),
    ("Pad", case(IMAGE, [0, 0, 1, 2, 0, 0, 3, 1], mode="edge"), lambda x, p: F.pad(x, (2, 1, 1, 3), "replicate")),
    ("Pad", case(IMAGE, [0, 0, 1, 2, 0, 0, 3, 1], mode="wrap"), lambda x, p: F.pad(x, (2, 1, 1, 3), "circular")),
    ("Pad", case(IMAGE, [0, 0, -1, 2, 0, 0, 3, -2]), lambda x, p: F.pad(x, (2, -2, -1, 3))),
    (
        "Resize",
        case(IMAGE, None, [1.0, 1.0, 2.0, 3.0], coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        interpolate(scale_factor=(2, 3)),
    ),
    (
        "Resize",
        case(IMAGE, None, None, [2, 3, 3, 7], coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        interpolate(size=(3, 7)),
    ),
    (
        "Resize",
        case(IMAGE, None, None, [2, 3, 8, 3], mode="linear", coordinate_transformation_mode="pytorch_half_pixel"),
        interpolate(size=(8, 3), mode="bilinear"),
    ),
    (
        "Resize",
        case(IMAGE, None, None, [2, 3, 8, 3], mode="linear", coordinate_transformation_mode="align_corners"),
        interpolate(size=(8, 3), mode="bilinear", align_corners=True),
    ),
    (
        "Resize",
        case(IMAGE, None, None, [2, 3, 10, 2], mode="cubic"),  # exact factors: PyTorch has coordinates in float32
        interpolate(size=(10, 2), mode="bicubic"),
    ),
    (
        "Resize",
        case(real(1, 2, 2, 3, 4), None, None, [1, 2, 4, 5, 3], mode="linear"),
        interpolate(size=(4, 5, 3), mode="trilinear"),
    ),
]


@pytest.mark.parametrize(("op_type", "call", "f"), TABLE, ids=[f"{t[0]}-{i}" for i, t in enumerate(TABLE)])
def test_gradients_are_pytorchs(op_type: str, call: Case, f: Callable[..., Any]) -> None:
    t = cases.trial(RULES["", op_type], call, fed=True)
    got = cases.run_gradient(t, lambda m, feeds: list(Oracle(m)(feeds).values()))
    cotangent = np.random.default_rng(0).uniform(-1, 1, Oracle(t.model)(t.feeds)["y0"].shape)
    tensors = {k: torch.tensor(v, requires_grad=v.dtype.kind == "f") for k, v in t.feeds.items()}
    f(*tensors.values()).backward(torch.tensor(cotangent))
    for name, g in zip(t.wrt, got, strict=True):
        np.testing.assert_allclose(g, tensors[name].grad, rtol=1e-9, atol=1e-9)
