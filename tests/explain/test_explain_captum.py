"""Every method that captum also has, on ten small networks: within 1e-5 of the largest attribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from tests.kit.running import run

torch = pytest.importorskip("torch", reason="compares with captum, which needs PyTorch")
attr = pytest.importorskip("captum.attr", reason="compares with captum")
robust = pytest.importorskip("captum.robust", reason="compares with captum")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


from tests.explain.small_networks import NETWORKS, Tokens, UNet, made  # noqa: E402  (needs PyTorch)


class Pair:
    """A network in captum and as a file."""

    def __init__(self, kind: Any) -> None:
        self.net, self.file, self.data, self.rows = made(kind)
        self.base: Any = None
        self.target: Any = (1, None, None) if kind is UNet else 2
        tail = self.net.tail if kind is Tokens else self.net
        self.model = Scored(self.net, tail, kind is UNet)
        self.classes: Any = None if kind is UNet else 2
        values = [v for n in self.file.graph.node for v in n.output if f"/{kind.layer}/" in v and "Constant" not in v]
        self.layer, self.value = getattr(self.net, kind.layer), values[-1]
        gradient = gg.vjp(self.file, wrt=self.value)
        (info,) = (o for o in gradient.graph.output if o.name.endswith(".grad"))
        self.layer_rank = len(info.type.tensor_type.shape.dim)

    def ours(self, method: str, name: str = "x.attribution", **options: Any) -> np.ndarray:
        model = gg.explain(self.file, method, target=self.target, **options)
        return run(model, {"x": self.data} | {i.name: self.base for i in model.graph.input[1:]})[name]

    def agrees(self, theirs: Any, method: str, name: str = "x.attribution", **options: Any) -> None:
        theirs, ours = theirs.detach().numpy(), self.ours(method, name, **options)
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max(), (method, options)
        assert np.abs(theirs).max() > 0


class Scored(torch.nn.Module):
    """The network; a U-Net's scores are added up over pixels."""

    def __init__(self, net: Any, tail: Any, over_pixels: bool) -> None:
        super().__init__()
        self.net, self.tail, self.over_pixels = net, tail, over_pixels

    def forward(self, x: Any) -> Any:
        return self.tail(x)[:, 1].sum((1, 2)) if self.over_pixels else self.tail(x)


@pytest.fixture(params=NETWORKS, ids=lambda kind: kind.__name__)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_gradients(pair: Pair) -> None:
    x, t = pair.rows, pair.classes
    pair.agrees(attr.Saliency(pair.model).attribute(x.clone(), t, abs=False), "gradient")
    pair.agrees(attr.Saliency(pair.model).attribute(x.clone(), t), "gradient", absolute=True)
    pair.agrees(attr.InputXGradient(pair.model).attribute(x.clone(), t), "input-x-gradient")


@pytest.mark.parametrize("rule", ["gausslegendre", "riemann_left", "riemann_middle", "riemann_right"])
def test_integrated_gradients(pair: Pair, rule: str) -> None:
    base = torch.linspace(-0.2, 0.3, pair.rows[0].numel()).reshape(1, *pair.rows.shape[1:])
    theirs = attr.IntegratedGradients(pair.model).attribute(pair.rows, base, pair.classes, n_steps=7, method=rule)
    pair.agrees(theirs, "integrated-gradients", n=7, rule=rule, baseline=base.numpy())
    pair.agrees(theirs, "integrated-gradients", n=7, rule=rule, baseline=base[0].numpy(), unroll=True)
    if not isinstance(pair.net, UNet | Tokens):
        pair.agrees(theirs, "integrated-gradients", n=7, rule=rule, baseline=base.numpy(), chunk=3)


def identity(shape: tuple[int, ...]) -> onnx.ModelProto:
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g",
                                   [info("x", 1, ["batch", *shape])], [info("y", 1, ["batch", *shape])])  # fmt: skip
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def test_smoothgrad(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    x = pair.rows
    draws = gg.along(identity(tuple(x.shape[1:])), 6, noise=0.2, reduce="stack", seed=5)
    noise = run(draws, {"x": x.numpy()})["y.stack"] - x.numpy()
    assert 0.1 < noise.std() < 0.3
    monkeypatch.setattr(torch, "normal", lambda *_: torch.tensor(noise.swapaxes(0, 1).reshape(-1, *x.shape[1:])))
    tunnel = attr.NoiseTunnel(attr.Saliency(pair.model))
    theirs = tunnel.attribute(x, nt_samples=6, stdevs=0.2, target=pair.classes, abs=False)
    pair.agrees(theirs, "smoothgrad", n=6, noise=0.2, seed=5)


def test_expected_gradients(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    x, data = pair.rows, torch.randn(4, *pair.rows.shape[1:])
    flat = identity((1,))
    rows = np.arange(4, dtype=np.float32)[:, None]
    zero = np.full((len(x), 1), 10, np.float32)
    chosen = (
        zero - run(gg.explain(flat, "expected-gradients", baselines=rows, n=1, seed=3), {"x": zero})["x.attribution"]
    )
    square = onnx.helper.make_node("Mul", ["x", "x"], ["y"])
    flat.graph.node[0].CopyFrom(square)
    twice = run(gg.explain(flat, "expected-gradients", baselines=rows, n=1, seed=3), {"x": zero})["x.attribution"]
    places = (twice / (zero - chosen) / 2 - chosen) / (zero - chosen)
    monkeypatch.setattr(np.random, "choice", lambda *_: np.rint(chosen[:, 0]).astype(int))
    monkeypatch.setattr(np.random, "uniform", lambda *_: places[:, 0])
    theirs = attr.GradientShap(pair.model).attribute(x, data, n_samples=1, stdevs=0.0, target=pair.classes)
    ours = pair.ours("expected-gradients", baselines=data.numpy(), n=1, seed=3)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=2e-5 * float(theirs.abs().max()))


def test_layers(pair: Pair) -> None:
    whole, t = Scored(pair.net, pair.net, isinstance(pair.net, UNet)), pair.classes
    data = torch.tensor(pair.data)
    if pair.layer_rank > 2:
        theirs = attr.LayerGradCam(whole, pair.layer).attribute(data, t)
        pair.agrees(theirs, "grad-cam", layer=pair.value, relu=False, resize=False)
    elsewhere = Scored(pair.net, pair.model.tail, isinstance(pair.net, UNet))
    base = torch.zeros_like(pair.rows)
    for rule in ("gausslegendre", "riemann_trapezoid"):
        theirs = attr.LayerConductance(elsewhere, pair.layer).attribute(pair.rows, base, t, n_steps=5, method=rule)
        pair.agrees(theirs, "layer-conductance", f"{pair.value}.attribution", layer=pair.value, n=5, rule=rule)


def test_backpropagation_rules(pair: Pair) -> None:
    x, t = pair.rows, pair.classes
    pair.agrees(attr.GuidedBackprop(pair.model).attribute(x.clone(), t), "guided-backpropagation")
    base = torch.randn_like(x)
    pair.base = base.numpy()
    pair.agrees(attr.DeepLift(pair.model).attribute(x.clone(), base, t), "deeplift", baseline="input")


def test_without_gradients(pair: Pair) -> None:
    x, t = pair.rows, pair.classes
    window = (2,) if x.dim() == 2 else tuple(min(3, d) for d in x.shape[1:])
    stride = tuple(max(1, w - 1) for w in window)
    theirs = attr.Occlusion(pair.model).attribute(x, window, stride, baselines=0.1, target=t)
    pair.agrees(theirs, "occlusion", window=window, stride=stride, baseline=0.1)
    groups = np.arange(x[0].numel()).reshape(x[0].shape) % 7
    sampling = attr.ShapleyValueSampling(pair.model)
    generator = np.random.default_rng(4)
    orders = [generator.permutation(int(groups.max()) + 1).tolist() for _ in range(3)]
    sampling.permutation_generator = lambda *_: iter(orders)
    theirs = sampling.attribute(x, 0.1, t, feature_mask=torch.tensor(groups)[None], n_samples=3)
    pair.agrees(theirs, "shapley", features=groups, n=3, seed=4, baseline=0.1)


@pytest.mark.parametrize("targeted", [False, True])
def test_attacks(pair: Pair, targeted: bool) -> None:
    if isinstance(pair.net, Tokens | UNet):
        pytest.skip("captum's attacks change inputs, and need an output of classes")
    x, labels = pair.rows, torch.full((len(pair.rows),), 2)
    losses = torch.nn.CrossEntropyLoss(reduction="none")
    step = robust.FGSM(pair.model, losses, -1.0, 1.0)
    step.zero_thresh = 0.0
    theirs = step.perturb(x.clone(), 0.1, labels, targeted=targeted)
    pair.agrees(theirs, "fgsm", "x.adversarial", epsilon=0.1, bounds=(-1, 1), targeted=targeted)
    many = robust.PGD(pair.model, losses, -1.0, 1.0)
    many.fgsm.zero_thresh = 0.0
    theirs = many.perturb(x.clone(), 0.2, 0.07, 5, labels, targeted=targeted)
    pair.agrees(theirs, "pgd", "x.adversarial", epsilon=0.2, step=0.07, n=5, bounds=(-1, 1), targeted=targeted)
