"""Products, softmax, losses and normalization against PyTorch's autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.rules.registry import RULES, Case, case, integers, positive, real, uniform
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle

torch = pytest.importorskip("torch", reason="compares with PyTorch")
F = torch.nn.functional
pytestmark = pytest.mark.torch


def weighted_mean(losses: Any, target: Any, weights: Any, ignored: int) -> Any:
    """What PyTorch computes for a class-weighted mean; its own has no derivative by the weights."""
    w = weights[target] * (target != ignored)
    return (losses * w).sum() / w.sum()


# one line a configuration: the case, and the same in PyTorch (of the tensors in the case's order)
TABLE: list[tuple[str, Case, Callable[..., Any]]] = [
    ("MatMul", case(real(3), real(2, 3, 4)), torch.matmul),
    ("MatMul", case(real(2, 1, 5, 3), real(4, 3, 2)), torch.matmul),
    (
        "Gemm",
        case(real(3, 2), real(4, 3), real(4), transA=1, transB=1, alpha=0.5, beta=2.0),
        lambda a, b, c: torch.addmm(c, a.T, b.T, alpha=0.5, beta=2.0),
    ),
    (
        "Einsum",
        case(real(3, 3, 2), real(3, 2), equation="iij,ij->j"),
        lambda x, y: torch.einsum("iij,ij->j", x, y),
    ),
    (
        "Einsum",
        case(real(2, 1, 3), real(1, 4, 3), equation="...i,...i->..."),
        lambda x, y: torch.einsum("...i,...i->...", x, y),
    ),
    ("Det", case(real(2, 3, 3)), torch.linalg.det),
    ("Softmax", case(uniform(-200, 200, 3, 4), axis=0), lambda x: F.softmax(x, 0)),
    ("LogSoftmax", case(uniform(-200, 200, 3, 4)), lambda x: F.log_softmax(x, -1)),
    (
        "SoftmaxCrossEntropyLoss",
        case(uniform(-200, 200, 5, 4), integers(0, 4, 5), positive(4), ignore_index=2),
        lambda x, t, w: weighted_mean(F.cross_entropy(x, t, ignore_index=2, reduction="none"), t, w, 2),
    ),
    (
        "SoftmaxCrossEntropyLoss",
        case(real(2, 3, 2), [[7, 7], [7, 7]], ignore_index=7),
        lambda x, t: F.cross_entropy(x, t, ignore_index=7),
    ),
    (
        "NegativeLogLikelihoodLoss",
        case(real(2, 4, 3), integers(0, 4, 2, 3), positive(4), reduction="none"),
        lambda x, t, w: F.nll_loss(x, t, reduction="none") * w[t],
    ),
    (
        "BatchNormalization",
        case(real(4, 3, 2), real(3), real(3), real(3), positive(3), outputs=3, read=[0], training_mode=1),
        lambda x, s, b, m, v: F.batch_norm(x, m.detach().clone(), v.detach().clone(), s, b, training=True),
    ),
    (
        "BatchNormalization",
        case(real(4, 3, 2), real(3), real(3), real(3), positive(3)),
        lambda x, s, b, m, v: (x - m[:, None]) / torch.sqrt(v[:, None] + 1e-5) * s[:, None] + b[:, None],
    ),
    (
        "LayerNormalization",
        case(real(2, 3, 4), real(3, 4), real(3, 4), axis=1, epsilon=0.1),
        lambda x, s, b: F.layer_norm(x, (3, 4), s, b, 0.1),
    ),
    (
        "GroupNormalization",
        case(real(2, 6, 3, 2), real(6), real(6), num_groups=3),
        lambda x, s, b: F.group_norm(x, 3, s, b),
    ),
    (
        "InstanceNormalization",
        case(real(2, 3, 4), real(3), real(3)),
        lambda x, s, b: F.instance_norm(x, None, None, s, b),
    ),
    ("LpNormalization", case(real(2, 3), p=1), lambda x: F.normalize(x, 1, -1)),
    ("LpNormalization", case(real(2, 3), axis=0), lambda x: F.normalize(x, 2, 0)),
    (
        "LRN",
        case(real(2, 6, 2, 2), size=5, alpha=0.5, beta=1.5, bias=2.0),
        lambda x: F.local_response_norm(x, 5, 0.5, 1.5, 2.0),
    ),
]


@pytest.mark.parametrize(("op_type", "trial", "f"), TABLE, ids=[f"{t[0]}-{i}" for i, t in enumerate(TABLE)])
def test_gradients_are_those_of_pytorch(op_type: str, trial: Case, f: Callable[..., Any]) -> None:
    t = cases.trial(RULES["", op_type], trial, fed=True)
    xs = {name: torch.tensor(x, requires_grad=name in t.wrt) for name, x in t.feeds.items()}
    y = f(*xs.values())
    dy = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, y.shape))
    expected = torch.autograd.grad(y, [xs[n] for n in t.wrt], dy, allow_unused=True)
    got = Oracle(cases._vjp(t.model, t.read, t.wrt))({**t.feeds, f"{t.read[0]}.cotangent": dy.numpy()})
    np.testing.assert_allclose(got[t.read[0]], y.detach(), rtol=1e-6, atol=1e-9)
    for name, e in zip(t.wrt, expected, strict=True):
        zero = torch.zeros_like(xs[name])
        np.testing.assert_allclose(got[f"{name}.grad"], zero if e is None else e, rtol=1e-6, atol=1e-9)
