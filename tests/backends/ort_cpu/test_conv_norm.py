"""BatchNormalization folded into the convolution below it: the portable numbers, and where it must not be done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from gradgraph.autodiff.append import append_vjp
from gradgraph.backends.engine import lower
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_cpu.conv import conv_norm
from gradgraph.backends.ort_cpu.conv.conv_norm import fold_norms
from gradgraph.files.models import to_proto
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.edit import nodes_of
from tests.kit.form_kit import differences, portable
from tests.kit.running import run

Feeds = dict[str, np.ndarray]
EPSILON = 1e-5
LEAST_CHANNELS = conv_norm.LEAST_CHANNELS
WRT = ["x", "w", "scale", "bias"]


@pytest.fixture(autouse=True)
def few_channels_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas hold for any number of channels; small ones are hard enough."""
    monkeypatch.setattr(conv_norm, "LEAST_CHANNELS", 1)


def numbers(x: tuple[int, ...], w: tuple[int, ...], conv_bias: bool = False) -> Feeds:
    rng = np.random.default_rng(0)
    m = w[0]
    shapes = {"x": x, "w": w, "scale": (m,), "bias": (m,)} | ({"b": (m,)} if conv_bias else {})
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def with_gradients(
    feeds: Feeds,
    wrt: list[str] = WRT,
    read: tuple[str, ...] = ("y", "mean", "var"),
    norm: Mapping[str, Any] | None = None,
    conv: Mapping[str, Any] | None = None,
    batch: int | str | None = None,
) -> ir.Model:
    """Conv, BatchNormalization and the gradients of y by ``wrt``, with gradient operators as single nodes."""
    m = len(feeds["scale"])
    norm = {"training_mode": 1, "momentum": 0.0, "epsilon": EPSILON, **(norm or {})}
    outputs = ["y", "mean", "var"] if norm["training_mode"] else ["y"]
    nodes = [
        helper.make_node("Conv", [n for n in ("x", "w", "b") if n in feeds], ["v"], **(conv or {})),
        helper.make_node("BatchNormalization", ["v", "scale", "bias", "m0", "v0"], outputs, **norm),
    ]
    infos = [helper.make_tensor_value_info(n, 1, a.shape) for n, a in feeds.items()]
    if batch is not None:
        infos[0] = helper.make_tensor_value_info("x", 1, [batch, *feeds["x"].shape[1:]])
    results = [helper.make_value_info(n, onnx.TypeProto()) for n in read]
    # two different tensors: onnxruntime writes the statistics of the batch over them
    start = [onnx.numpy_helper.from_array(np.full(m, v, np.float32), n) for n, v in (("m0", 0.5), ("v0", 2.0))]
    graph = helper.make_graph(nodes, "layer", infos, results, start)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return append_vjp(normalise(model, parameters=wrt), ["y"], wrt, named_operators=True)


def cotangent(feeds: Feeds, size: tuple[int, ...]) -> Feeds:
    shape = (len(feeds["x"]), len(feeds["scale"]), *size)
    return feeds | {"y.cotangent": np.random.default_rng(1).normal(size=shape).astype(np.float32)}


def kinds(model: ir.Model) -> list[str]:
    return [n.op_type for n in model.graph]


def folded(model: ir.Model) -> bool:
    """Is nothing left of BatchNormalization after the pass?"""
    return not {*kinds(fold_norms(model.clone()))} & {"BatchNormalization", "BatchNormalizationGrad"}


def lowered(model: ir.Model) -> onnx.ModelProto:
    return to_proto(lower(model.clone(), ORT_CPU))


@pytest.mark.sweep(0.53)
@pytest.mark.parametrize("wrt", [WRT, ["w"], ["x"], ["scale"], ["bias"]], ids=" ".join)
@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((2, 3, 5, 7), (11, 3, 1, 1)),
        ((3, 16, 12, 12), (96, 16, 1, 1)),
        ((8, 32, 6, 6), (64, 32, 1, 1)),
        ((1, 1, 5, 5), (2, 1, 1, 1)),
        ((2, 4, 40), (8, 4, 1)),
        ((2, 2, 3, 3, 3), (7, 2, 1, 1, 1)),
    ],
    ids=str,
)
def test_expansions_without_their_output(x: tuple[int, ...], w: tuple[int, ...], wrt: list[str]) -> None:
    feeds = numbers(x, w)
    model = with_gradients(feeds, wrt)
    assert folded(model)
    assert differences(portable(model), lowered(model), cotangent(feeds, x[2:])) == []


def test_what_has_a_shape_has_a_type() -> None:
    """onnx-ir warns of others and leaves them out when it writes the model."""
    model = lower(with_gradients(numbers((2, 3, 5, 7), (11, 3, 1, 1))), ORT_CPU)
    assert "If" in kinds(model)
    assert not [v.name for n in nodes_of(model) for v in n.outputs if v.shape is not None and v.type is None]


@pytest.mark.parametrize("channels", [LEAST_CHANNELS - 1, LEAST_CHANNELS])
def test_few_channels_are_left_to_passes_over_the_output(monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    monkeypatch.setattr(conv_norm, "LEAST_CHANNELS", LEAST_CHANNELS)
    model = with_gradients(numbers((2, channels, 5, 5), (48, channels, 1, 1)))
    assert folded(model) == (channels == LEAST_CHANNELS)


@pytest.mark.parametrize("w", [(11, 3, 1, 1), (3, 3, 1, 1)], ids=["expansion", "other"])
@pytest.mark.parametrize("wrt", [WRT, [*WRT, "b"], ["b"]], ids=" ".join)
def test_the_bias_of_a_convolution_moves_only_the_mean(wrt: list[str], w: tuple[int, ...]) -> None:
    feeds = numbers((2, 3, 5, 7), w, conv_bias=True)
    model = with_gradients(feeds, wrt)
    assert "BatchNormalizationGrad" not in kinds(fold_norms(model.clone()))
    given = cotangent(feeds, (5, 7))
    assert differences(portable(model), lowered(model), given) == []
    if "b" in wrt:
        assert not run(lowered(model), given)["b.grad"].any()


def expected(feeds: Feeds) -> Feeds:
    """What the layer and its gradients are, in float64."""
    x, w, scale, bias, g = (feeds[n].astype(np.float64) for n in (*WRT, "y.cotangent"))
    over, column = (0, 2, 3), (slice(None), None, None)
    v = np.einsum("mc,nchw->nmhw", w[..., 0, 0], x)
    mean, var = v.mean(over), v.var(over)
    inv = 1 / np.sqrt(var + EPSILON)
    xhat = (v - mean[column]) * inv[column]
    along = (g * xhat).mean(over)[column] * xhat
    dv = (scale * inv)[column] * (g - g.mean(over)[column] - along)
    return {
        "y": xhat * scale[column] + bias[column],
        "mean": mean,
        "var": var,
        "x.grad": np.einsum("mc,nmhw->nchw", w[..., 0, 0], dv),
        "w.grad": np.einsum("nmhw,nchw->mc", dv, x)[..., None, None],
        "scale.grad": (g * xhat).sum(over),
        "bias.grad": g.sum(over),
    }


def large_means(feeds: Feeds) -> None:
    feeds["x"] += np.float32([[[[100.0]], [[-300.0]], [[1000.0]]]])


def constant_channel_of_x(feeds: Feeds) -> None:
    feeds["x"][:, 1] = 7.0


def nothing_varies(feeds: Feeds) -> None:
    feeds["x"][:] = 3.0


def channel_of_zeros(feeds: Feeds) -> None:
    feeds["w"][0] = 0.0


def nearly_constant_channel(feeds: Feeds) -> None:
    feeds["w"][0] *= 1e-3


def channels_that_cancel(feeds: Feeds) -> None:
    feeds["x"][:, 1] = feeds["x"][:, 0]
    feeds["w"][0, :, 0, 0] = 1.0, -1.0, 0.0


def almost_cancel(feeds: Feeds) -> None:
    feeds["x"][:, 1] = feeds["x"][:, 0] + 0.1 * feeds["x"][:, 1]
    feeds["w"][0, :, 0, 0] = 1.0, -1.0, 0.0


def cancel_by_a_thousand(feeds: Feeds) -> None:
    """κ² is 4e6 in a channel that ε does not hide: from second moments nothing would be left of the variance."""
    feeds["x"] *= 100.0
    feeds["x"][:, 1] = feeds["x"][:, 0] + 1e-3 * feeds["x"][:, 1]
    feeds["w"][0, :, 0, 0] = 1.0, -1.0, 0.0


def scale_of_zero(feeds: Feeds) -> None:
    feeds["scale"][:3] = 0.0


HARD = [
    large_means, constant_channel_of_x, nothing_varies, channel_of_zeros, nearly_constant_channel,
    channels_that_cancel, almost_cancel, cancel_by_a_thousand, scale_of_zero,
]  # fmt: skip


ROUNDED = {cancel_by_a_thousand: 3e-4}  # κ roundings of what cancels; by the second moments alone it would be 0.1


@pytest.mark.parametrize("change", HARD, ids=lambda f: f.__name__)
def test_hard_numbers_are_as_near_to_float64_as_the_portable_form(change: Any) -> None:
    feeds = numbers((4, 3, 6, 8), (8, 3, 1, 1))
    change(feeds)
    model = with_gradients(feeds)
    assert folded(model)
    feeds = cotangent(feeds, (6, 8))
    truth, plain, found = expected(feeds), run(portable(model), feeds), run(lowered(model), feeds)
    for name, value in truth.items():
        size = np.abs(value).max(initial=1e-3)
        errors = [np.abs(r[name] - value).max() / size for r in (plain, found)]
        assert errors[1] <= ROUNDED.get(change, 2e-5) + 4 * errors[0], name


SCALED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], tuple[int, ...]]] = {
    "3x3": ((3, 2, 8, 9), (5, 2, 3, 3), {"pads": [1] * 4}, (8, 9)),
    "blocks": ((2, 16, 32, 32), (16, 16, 3, 3), {"pads": [1] * 4}, (32, 32)),
    "depthwise": ((2, 16, 8, 8), (16, 1, 3, 3), {"group": 16, "pads": [1] * 4}, (8, 8)),
    "depthwise, stride": ((4, 16, 12, 12), (16, 1, 3, 3), {"group": 16, "pads": [1] * 4, "strides": [2, 2]}, (6, 6)),
    "groups": ((3, 6, 9, 8), (4, 3, 2, 2), {"group": 2}, (8, 7)),
    "stride and dilation": ((4, 2, 12, 13), (3, 2, 3, 3), {"strides": [2, 1], "dilations": [1, 2]}, (5, 9)),
    "1x1 with a stride": ((4, 3, 9, 9), (11, 3, 1, 1), {"strides": [2, 2]}, (5, 5)),
    "1x1 to fewer channels": ((2, 8, 12, 12), (5, 8, 1, 1), {}, (12, 12)),
    "1x1 of many channels": ((2, 48, 14, 14), (64, 48, 1, 1), {}, (14, 14)),
    "one axis": ((3, 2, 40), (5, 2, 3), {}, (38,)),
}  # fmt: skip


@pytest.mark.sweep(0.52)
@pytest.mark.parametrize("wrt", [WRT, ["w"], ["x"], ["scale"]], ids=" ".join)
@pytest.mark.parametrize(("x", "w", "conv", "size"), SCALED.values(), ids=SCALED)
def test_the_scale_goes_into_the_gradients_below(
    x: tuple[int, ...], w: tuple[int, ...], conv: dict[str, Any], size: tuple[int, ...], wrt: list[str]
) -> None:
    feeds = numbers(x, w)
    model = with_gradients(feeds, wrt, conv=conv)
    after = kinds(fold_norms(model.clone()))
    left = [k for k in kinds(model) if "ConvGrad" in k]
    assert [k for k in after if "Grad" in k] == ["UnscaledBatchNormalizationGrad", *left]
    assert differences(portable(model), lowered(model), cotangent(feeds, size)) == []


REFUSED: dict[str, dict[str, Any]] = {
    "output of the convolution is read": {"read": ("y", "v")},
    "momentum": {"norm": {"momentum": 0.9}},
    "inference": {"norm": {"training_mode": 0}, "read": ("y",)},
    "open batch": {"batch": "N"},
}


@pytest.mark.parametrize("w", [(11, 3, 1, 1), (3, 3, 1, 1)], ids=["expansion", "other"])
@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_where_it_is_not_done(options: dict[str, Any], w: tuple[int, ...]) -> None:
    feeds = numbers((2, 3, 5, 7), w)
    model = with_gradients(feeds, **options)
    assert kinds(fold_norms(model.clone())) == kinds(model)
    assert differences(portable(model), lowered(model), cotangent(feeds, (5, 7))) == []


def test_small_maps_are_left_alone() -> None:
    model = with_gradients(numbers((2, 3, 2, 2), (11, 3, 1, 1)))
    assert kinds(fold_norms(model.clone())) == kinds(model)


def test_a_cotangent_that_is_read_otherwise_is_written() -> None:
    model = with_gradients(numbers((2, 3, 5, 7), (11, 3, 1, 1), conv_bias=True), [*WRT, "b"])
    sums = [n for n in model.graph if n.op_type == "ReduceSum" and n.outputs[0].uses()]
    dv = next(n for n in model.graph if n.op_type == "BatchNormalizationGrad").outputs[0]
    for extra in (dv, *(n.outputs[0] for n in sums if n.inputs[0] is dv)):
        model.graph.outputs.append(extra)
        assert kinds(fold_norms(model.clone())) == kinds(model)
        model.graph.outputs.pop()
    assert folded(model)
