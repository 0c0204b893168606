"""Networks with constants, as PyTorch's older exporter writes them: the parameters are trained, and nothing else is."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import pytest

from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.weights.verdicts import verdicts

torch = pytest.importorskip("torch", reason="exports from PyTorch")
pytestmark = pytest.mark.torch
nn = torch.nn
ANCHORS, CLASSES = 6 * 6 * 2, 3


class Network(nn.Module):
    """A module of a function and the parts that it reads by name."""

    def __init__(self, function: Callable[..., Any], buffers: dict[str, Any] | None = None, **parts: Any) -> None:
        super().__init__()
        self.function, self.parts = (
            function,
            nn.ModuleDict({n: p for n, p in parts.items() if isinstance(p, nn.Module)}),
        )
        for name, part in parts.items():
            if not isinstance(part, nn.Module):
                setattr(self, name, nn.Parameter(part))
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)

    def forward(self, x: Any) -> Any:
        return self.function(self, x, **self.parts)


def pixels() -> dict[str, Any]:
    return {
        "mean": torch.tensor([0.485, 0.456, 0.406])[None, :, None, None],
        "std": torch.tensor([0.229, 0.224, 0.225])[None, :, None, None],
    }


def ssd(self: Any, x: Any, body: Any, where: Any, which: Any) -> Any:
    features = torch.relu(body((x / 255 - self.mean) / self.std))
    deltas, scores = (
        h(features).permute(0, 2, 3, 1).reshape(x.shape[0], -1, n) for h, n in ((where, 4), (which, CLASSES))
    )
    centres = self.priors[:, :2] + deltas[..., :2] * 0.1 * self.priors[:, 2:]
    sizes = self.priors[:, 2:] * torch.exp(deltas[..., 2:] * 0.2)
    low = centres - sizes / 2
    return torch.cat([low, low + sizes, scores.softmax(-1)], -1)


def retinanet(self: Any, x: Any, body: Any, where: Any) -> Any:
    deltas = where(torch.relu(body(x))).permute(0, 2, 3, 1).reshape(-1, 4)
    widths, heights = self.boxes[:, 2] - self.boxes[:, 0], self.boxes[:, 3] - self.boxes[:, 1]
    across, down = self.boxes[:, 0] + 0.5 * widths, self.boxes[:, 1] + 0.5 * heights
    dx, dy, dw, dh = (deltas[:, i::4] for i in range(4))
    dw, dh = dw.clamp(max=4.1), dh.clamp(max=4.1)
    x0, y0 = dx * widths[:, None] + across[:, None], dy * heights[:, None] + down[:, None]
    w, h = dw.exp() * widths[:, None], dh.exp() * heights[:, None]
    return torch.stack([x0 - w / 2, y0 - h / 2, x0 + w / 2, y0 + h / 2], 2).flatten(1)


def yolo(self: Any, x: Any, body: Any, where: Any) -> Any:
    y = where(torch.relu(body(x))).view(1, 2, 4, 6, 6).permute(0, 1, 3, 4, 2).sigmoid()
    xy, wh = y.split((2, 2), 4)
    return torch.cat([(xy * 2 + self.grid) * 8, (wh * 2) ** 2 * self.anchors], 4).view(1, -1, 4)


def yolo_of_bins(self: Any, x: Any, body: Any, where: Any) -> Any:
    y = where(torch.relu(body(x))).flatten(2).view(1, 4, 8, 36).transpose(2, 1).softmax(1)
    low, high = nn.functional.conv2d(y, self.bins).view(1, 4, 36).chunk(2, 1)
    begin, end = self.points - low, self.points + high
    return torch.cat(((begin + end) / 2, end - begin), 1) * self.strides


def super_resolution(self: Any, x: Any, first: Any, last: Any) -> Any:
    x = (x - self.mean) * 255.0
    x = x + last(torch.relu(first(x)))
    return x / 255.0 + self.mean


def scaled_regression(self: Any, x: Any, first: Any, last: Any) -> Any:
    x = ((x - self.x_mean) / torch.sqrt(self.x_variance + 1e-8)).clamp(-5, 5)
    return last(torch.relu(first(x))) * self.y_scale + self.y_mean


def actor(self: Any, x: Any, first: Any, last: Any) -> Any:
    return torch.tanh(last(torch.relu(first(x)))) * self.scale + self.bias


def causal(self: Any, x: Any, mix: Any) -> Any:
    q, k, v = mix(x).chunk(3, -1)
    scores = q @ k.transpose(1, 2) * self.ones + (1 - self.ones) * -1e4
    return scores.softmax(-1) @ v


def actnorm(self: Any, x: Any, first: Any, norm: Any, last: Any) -> Any:
    x = norm(torch.relu(first(x) + self.positions)) * self.gamma
    return x + last(x) * self.layer_scale + self.shift


def tanh_norm(self: Any, x: Any, first: Any) -> Any:
    x = x + first(x)
    return self.gamma * torch.tanh(self.alpha * x) + self.beta


def clip(self: Any, x: Any, first: Any, last: Any) -> Any:
    a, b = first(x).mean(1), last(x).mean(1)
    return self.logit_scale.exp() * nn.functional.normalize(a) @ nn.functional.normalize(b).T + self.logit_bias


def positions(self: Any, x: Any, layer: Any) -> Any:
    return layer(x + self.table)


def sparse(self: Any, x: Any, first: Any, back: Any) -> Any:
    return back(torch.relu(first(x - self.bias))) + self.bias


def conv(n: int, size: int = 3, **options: Any) -> Any:
    return nn.Conv2d(n, n * 2 if n == 3 else 8, size, padding=size // 2, **options)


def head(n: int) -> Any:
    return nn.Conv2d(6, n, 1)


def line(a: int, b: int, **options: Any) -> Any:
    return nn.Linear(a, b, **options)


def drawn(*sizes: int) -> Any:
    return torch.rand(sizes) + 0.5


PICTURE, ROWS, TOKENS = (1, 3, 6, 6), (2, 8), (2, 5, 8)
NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "ssd": (
        lambda: Network(ssd, {**pixels(), "priors": drawn(ANCHORS, 4)}, body=conv(3), where=head(8),
                        which=head(2 * CLASSES)), PICTURE),
    "retinanet": (
        lambda: Network(retinanet, {"boxes": torch.cat([t := drawn(ANCHORS, 2), t + drawn(ANCHORS, 2)], 1)},
                        body=conv(3), where=head(8)), PICTURE),
    "yolo": (
        lambda: Network(yolo, {"grid": drawn(1, 2, 6, 6, 2) - 0.5, "anchors": drawn(1, 2, 1, 1, 2)}, body=conv(3),
                        where=head(8)), PICTURE),
    "yolo of bins": (
        lambda: Network(yolo_of_bins, {"bins": torch.arange(8.0).view(1, 8, 1, 1), "points": drawn(1, 2, 36),
                                       "strides": drawn(1, 36) * 8}, body=conv(3), where=head(32)), PICTURE),
    "super-resolution": (
        lambda: Network(super_resolution, {"mean": pixels()["mean"]}, first=conv(3), last=head(3)), PICTURE),
    "scaled regression": (
        lambda: Network(scaled_regression, {"x_mean": drawn(8), "x_variance": drawn(8), "y_scale": drawn(4),
                                            "y_mean": drawn(4)}, first=line(8, 6), last=line(6, 4)), ROWS),
    "actor": (
        lambda: Network(actor, {"scale": drawn(4), "bias": drawn(4)}, first=line(8, 6), last=line(6, 4)), ROWS),
    "causal": (lambda: Network(causal, {"ones": torch.ones(5, 5).tril()}, mix=line(8, 24)), TOKENS),
    "positions, scales": (
        lambda: Network(actnorm, positions=drawn(1, 5, 8), gamma=drawn(8), layer_scale=drawn(8), shift=drawn(8),
                        first=line(8, 8), norm=nn.LayerNorm(8), last=line(8, 8)), TOKENS),
    "a norm of tanh": (
        lambda: Network(tanh_norm, gamma=drawn(8), alpha=drawn(8), beta=drawn(8), first=line(8, 8)), TOKENS),
    "clip": (
        lambda: Network(clip, logit_scale=torch.tensor(2.6), logit_bias=drawn(2), first=line(8, 4), last=line(8, 4)),
        TOKENS),
    "positions of embeddings that go in": (
        lambda: Network(positions, table=drawn(1, 5, 8),
                        layer=nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)), TOKENS),
    "a sparse autoencoder": (
        lambda: Network(sparse, bias=drawn(8), first=line(8, 6), back=line(6, 8, bias=False)), ROWS),
    "a norm at the end": (lambda: nn.Sequential(line(8, 6), nn.LayerNorm(6)), ROWS),
    "a batch norm at the end": (lambda: nn.Sequential(line(8, 6), nn.BatchNorm1d(6)), ROWS),
    "a batch norm at the beginning": (lambda: nn.Sequential(nn.BatchNorm1d(8), line(8, 6)), ROWS),
    "a norm at the beginning": (lambda: nn.Sequential(nn.LayerNorm(8), line(8, 6)), TOKENS),
}  # fmt: skip


def exported(network: Any, sizes: tuple[int, ...], **options: Any) -> onnx.ModelProto:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), (torch.rand(sizes),), file, input_names=["x"], output_names=["y"], dynamo=False, **options
        )
    return onnx.load_model_from_string(file.getvalue())


@pytest.mark.parametrize("folds", [True, False], ids=["folded", "as written"])
@pytest.mark.parametrize("what", NETWORKS)
def test_parameters_are_trained_and_constants_are_not(what: str, folds: bool) -> None:
    torch.manual_seed(0)
    made, sizes = NETWORKS[what]
    network = made()
    for p in network.parameters():  # equal ones would be stored once
        if p.ndim == 1:
            nn.init.uniform_(p, 0.5, 1.5)
    proto = exported(network, sizes, do_constant_folding=folds, opset_version=17 if folds else 14)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    statistics = {n for n, _ in network.named_buffers() if "running" in n}
    found = [stored[n] for n, v in verdicts(normalise(proto).graph).items() if v.is_weight and n not in statistics]
    wanted = [p.detach().numpy() for p in network.parameters()]
    assert sorted(float(a.sum()) for a in found) == pytest.approx(sorted(float(a.sum()) for a in wanted), rel=1e-4)
