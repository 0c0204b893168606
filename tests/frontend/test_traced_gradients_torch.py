"""Gradients inside traced functions are PyTorch's, and so is what a step makes of them: autograd with create_graph."""

from __future__ import annotations

import types

import numpy as np
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import Input, export, nn
from gradgraph.frontend import functional as F
from gradgraph.verify.reference import Oracle
from tests.kit.frontend_parity import drawn, run_model

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

OURS = types.SimpleNamespace(
    F=F, grad=frontend.grad, vjp=frontend.vjp, jvp=frontend.jvp, detach=frontend.detach, where=F.where, cat=F.cat
)


def _grad(y, x, v=None):
    found = torch.autograd.grad(y, x, v, create_graph=True)
    return found if isinstance(x, list) else found[0]


def _jvp(y, x, t):
    v = torch.ones_like(y, requires_grad=True)
    return _grad(_grad(y, x, v), v, t)


THEIRS = types.SimpleNamespace(F=torch.nn.functional, grad=_grad, vjp=_grad, jvp=_jvp, detach=torch.Tensor.detach,
                               where=torch.where, cat=torch.cat)  # fmt: skip
MLP = {"x": (6, 2), "w": (8, 2), "v": (1, 8)}
IMAGES = {"x": (2, 3, 6, 6), "w": (4, 3, 3, 3), "v": (1, 4)}
TOKENS = {"x": (2, 5, 4), "w": (4, 4), "v": (4, 4)}


def burgers(m, x, w, v):
    u = m.F.linear(m.F.linear(x, w).tanh(), v)
    du = m.grad(u.sum(), x)
    second = m.grad(du[:, :1].sum(), x)[:, :1]
    return (du[:, 1:] + u * du[:, :1] - 0.3 * second).square().mean()


def third_order(m, x, w, v):
    u = m.F.linear(m.F.linear(x, w).sin(), v).sum()
    for _ in range(3):
        u = m.grad(u, x)[:, 0].sum()
    return u.square()


def penalty(m, x, w, v):
    score = m.F.linear(m.F.silu(m.F.linear(x, w)), v)
    slope = m.grad(score.sum(), x)
    return ((slope.norm(dim=1) - 1) ** 2).mean() + score.mean()


def penalty_of_a_convolution(m, x, w, v):
    hidden = m.F.avg_pool2d(m.F.silu(m.F.conv2d(x, w, padding=1)), 2)
    score = m.F.linear(m.F.max_pool2d(hidden, 3).flatten(1), v)
    slope = m.grad(score.sum(), x).flatten(1)
    return ((slope.square().sum(1) + 1e-6).sqrt() - 1).square().mean()


def norms(m, x, w, v):
    hidden = m.F.gelu(m.F.layer_norm(m.F.group_norm(m.F.conv2d(x, w, stride=2), 2), (2, 2)))
    score = m.F.linear(hidden.mean((2, 3)), v).sum()
    return m.grad(score, x).square().sum() + score


def attention(m, x, w, v):
    query = m.F.linear(x, w)
    energy = m.F.scaled_dot_product_attention(query, x, m.F.linear(x, v)).square().sum()
    return m.grad(energy, x).square().mean() + 0.1 * energy


def forces(m, x, w, v):
    """Of pairs of points: the energy and its forces, both in the loss."""
    distance = ((x.unsqueeze(1) - x.unsqueeze(0)).square().sum(-1) + 0.1).sqrt().unsqueeze(-1)
    energy = m.F.linear(m.F.silu(m.F.linear(m.cat([distance, 1 / distance], -1), w)), v).sum()
    return m.grad(energy, x).square().mean() + (energy * 0.01 - 1) ** 2


def by_parameters(m, x, w, v):
    """One step of gradient descent inside the loss, differentiated through."""
    inner = m.F.linear(m.F.linear(x, w).tanh(), v).square().mean()
    dw, dv = m.grad(inner, [w, v])
    return m.F.linear(m.F.linear(x, w - 0.1 * dw).tanh(), v - 0.1 * dv).exp().mean()


def first_order_only(m, x, w, v):
    """MAML without second derivatives."""
    inner = m.F.linear(m.F.linear(x, w).tanh(), v).square().mean()
    return m.F.linear(m.F.linear(x, w - 0.1 * m.detach(m.grad(inner, w))).tanh(), v).exp().mean()


def pulled_and_pushed(m, x, w, v):
    hidden = m.F.linear(x, w).tanh()
    pulled = m.vjp(hidden, x, hidden * 0.5)
    pushed = m.jvp(hidden, x, x.cos())
    return m.F.linear(pushed, v).square().mean() + pulled.square().mean()


def straight_through(m, x, w, v):
    hidden = m.F.linear(x, w)
    rounded = hidden + m.detach(hidden.round() - hidden)
    return m.F.linear(rounded, v).square().mean()


def quantized(m, x, w, v):
    """VQ-VAE: the nearest row of a codebook, a loss for either side, and a gradient straight through."""
    distance = (x.unsqueeze(1) - w.unsqueeze(0)).square().sum(-1)
    nearest = w[distance.argmin(1)]
    passed = x + m.detach(nearest - x)
    return (m.detach(x) - nearest).square().mean() + 0.25 * (x - m.detach(nearest)).square().mean() + passed.exp().sum()


def bootstrapped(m, x, w, v):
    """A target computed by the same weights."""
    score = m.F.linear(m.F.linear(x, w).tanh(), v)
    return (score - m.detach(score * 0.9 + 1)).square().mean() + m.detach(w).square().sum() * w.sum()


CASES = [(burgers, MLP), (third_order, MLP), (penalty, MLP), (penalty_of_a_convolution, IMAGES), (norms, IMAGES),
         (attention, TOKENS), (forces, MLP), (by_parameters, MLP), (first_order_only, MLP), (pulled_and_pushed, MLP),
         (straight_through, MLP), (quantized, MLP), (bootstrapped, MLP)]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("loss", "sizes"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_values_and_gradients(loss, sizes, dtype) -> None:
    arrays = {name: drawn(shape, i).astype(dtype) for i, (name, shape) in enumerate(sizes.items())}
    specs = {name: Input(("rows", *shape[1:]) if name == "x" else shape, dtype) for name, shape in sizes.items()}
    model = export(lambda x, w, v: loss(OURS, x, w, v), specs, outputs=["loss"])
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    expected = loss(THEIRS, **tensors)
    expected.backward()
    tolerance = {"rtol": 2e-4, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-11}
    gradients = gg.value_and_grad(model, wrt=list(sizes), allow_unused=True)
    # onnxruntime has no convolution in float64
    results = Oracle(gradients)(arrays) if dtype == "float64" else run_model(gradients, arrays)
    np.testing.assert_allclose(results["loss"], expected.detach(), **tolerance)
    for name, t in tensors.items():
        slope = torch.zeros_like(t) if t.grad is None else t.grad
        scale = max(1.0, float(slope.abs().max()))
        np.testing.assert_allclose(results[f"{name}.grad"] / scale, slope / scale, err_msg=name, **tolerance)


class Network(nn.Module):
    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


def _residual(m, u, x):
    du = m.grad(u.sum(), x)
    return (m.grad(du[:, :1].sum(), x)[:, 1:] + u.sin() - du[:, :1] * x[:, 1:]).square().mean()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fifty_steps_of_a_loss_of_derivatives(dtype) -> None:
    frontend.manual_seed(1)
    net = Network(nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.SiLU(), nn.Linear(12, 1)))
    twin = torch.nn.Sequential(torch.nn.Linear(2, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12), torch.nn.SiLU(),
                               torch.nn.Linear(12, 1)).to(getattr(torch, dtype))  # fmt: skip
    weights = {name: value.astype(dtype) for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        parameter.data = weights[name]
    twin.load_state_dict({n.removeprefix("layers."): torch.tensor(v) for n, v in weights.items()})
    model = export(net, {"x": Input(("rows", 2), dtype)}, outputs=["u"])
    step = gg.build(model, lambda out, batch: _residual(OURS, out["u"], batch["x"]), gg.optim.adam(1e-2))
    trainer = gg.Trainer(step)
    optimizer = torch.optim.Adam(twin.parameters(), 1e-2)
    for i in range(50):
        x = drawn((16, 2), i).astype(dtype)
        ours = float(trainer.step({"x": x})["loss"])
        t = torch.tensor(x, requires_grad=True)
        theirs = _residual(THEIRS, twin(t), t)
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        np.testing.assert_allclose(ours, theirs.item(), rtol=1e-4 if dtype == "float32" else 1e-6)
