"""Methods that captum does not have, and PGD step by step, beside loops in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from tests.kit.running import run

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

from tests.explain.small_networks import Convolutional, Perceptron, Residual, Transformer, made  # noqa: E402


@pytest.mark.parametrize("kind", [Convolutional, Residual])
def test_maps(kind: Any) -> None:
    net, file, data, x = made(kind)
    layer = getattr(net, kind.layer)
    kept: list[Any] = []
    layer.register_forward_hook(lambda _, __, y: (y.retain_grad(), kept.append(y))[1])
    net(x.requires_grad_())[:, 2].sum().backward()
    a, g = kept[0].detach(), kept[0].grad
    name = [v for n in file.graph.node for v in n.output if f"/{kind.layer}/" in v][-1]
    for method in ("grad-cam", "grad-cam-plus-plus"):
        if method == "grad-cam":
            weights = g.mean((2, 3), keepdim=True)
        else:
            alpha = g**2 / (2 * g**2 + g**3 * a.sum((2, 3), keepdim=True))
            weights = (alpha.nan_to_num(0.0) * g.relu()).sum((2, 3), keepdim=True)
        expected = (weights * a).sum(1, keepdim=True).relu()
        whole = torch.nn.functional.interpolate(expected, size=x.shape[2:], mode="bilinear", align_corners=False)
        for wanted, resize in ((expected, False), (whole, True)):
            model = gg.explain(file, method, target=2, layer=name, resize=resize)
            found = run(model, {"x": data})["x.attribution"]
            np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5 * float(wanted.abs().max()))


def test_rollout() -> None:
    net, file, data, x = made(Transformer)
    shares = net.attention(x)[0].mean(1).detach()
    expected = (shares + torch.eye(5)) / 2
    for position in (0, -1):
        model = gg.explain(file, "attention-rollout", target=0, position=position)
        np.testing.assert_allclose(run(model, {"x": data})["x.attribution"], expected[:, position].numpy(), atol=1e-6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_pgd_step_by_step(norm: str, steps: int) -> None:
    net, file, data, x = made(Convolutional)
    labels, current = torch.tensor([1, 0, 3]), x.clone()
    for _ in range(steps):
        current = current.clone().requires_grad_()
        torch.nn.functional.cross_entropy(net(current), labels, reduction="sum").backward()
        g = current.grad
        assert g is not None
        step = g.sign() if norm == "linf" else g / g.flatten(1).norm(dim=1)[:, None, None, None]
        change = current.detach() + 0.2 * step - x
        if norm == "linf":
            change = change.clamp(-0.3, 0.3)
        else:
            change = change * (0.3 / change.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None, None]
        current = (x + change).clamp(-2, 2)
    model = gg.explain(file, "pgd", epsilon=0.3, n=steps, step=0.2, norm=norm, bounds=(-2, 2))
    found = run(model, {"x": data, "target": labels.numpy()})
    np.testing.assert_allclose(found["x.adversarial"], current.numpy(), atol=1e-5)
    np.testing.assert_allclose(found["y.adversarial"], net(current).detach().numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", [Perceptron, Convolutional])
def test_deepfool(kind: Any) -> None:
    net, file, data, x = made(kind)
    expected = torch.stack([_nearest(net, row) for row in x])
    found = run(gg.explain(file, "deepfool", target="predicted", n=20), {"x": data})
    np.testing.assert_allclose(found["x.adversarial"], expected.numpy(), atol=1e-4)
    assert (found["y.adversarial"].argmax(1) != found["y"].argmax(1)).all()


def _nearest(net: Any, x: Any) -> Any:
    """The algorithm of the paper for one sample, as in its authors' code."""
    own, total = int(net(x[None]).argmax()), torch.zeros_like(x)
    for _ in range(20):
        point = (x + 1.02 * total).requires_grad_()
        y = net(point[None])[0]
        if int(y.argmax()) != own:
            break
        slopes = [torch.autograd.grad(v, point, retain_graph=True)[0] for v in y]
        others = [k for k in range(len(y)) if k != own]
        reach = [float((y[k] - y[own]).detach().abs() / (slopes[k] - slopes[own]).norm()) for k in others]
        best = int(np.argmin(reach))
        w = slopes[others[best]] - slopes[own]
        total = total + (reach[best] + 1e-4) * w / w.norm()
    return (x + 1.02 * total).detach()
