"""Depthwise convolutions by native kernels: right for every shape in every layout, and what is folded into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import ORT_NATIVE, native_table
from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native.native_bounds import CLOSED, NONE, OPEN
from gradgraph.frontend import Input, Module, nn
from gradgraph.rules.windows import Windows
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session

pytestmark = pytest.mark.usefixtures("library")

Arrays = dict[str, np.ndarray]
ROLES = {  # inputs and outputs
    "DepthwiseConv": (("x", "w"), ("y",)),
    "DepthwiseConvGradInput": (("dy", "w", "x"), ("dx",)),
    "DepthwiseConvGradWeight": (("x", "dy"), ("dw",)),
    "DepthwiseConvGrad": (("dy", "w", "x"), ("dx", "dw")),
}
BOUNDS = {NONE: (-np.inf, np.inf), CLOSED: (-0.5, 1.0), OPEN: (0.0, np.inf)}


@dataclass(frozen=True)
class Shape:
    images: int
    channels: int
    size: tuple[int, int]
    kernel: tuple[int, int] = (3, 3)
    pads: tuple[int, int, int, int] = (1, 1, 1, 1)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)

    @property
    def seen(self) -> Windows:
        return Windows(self.kernel, self.strides, self.dilations, self.pads[:2], self.pads[2:])

    def drawn(self) -> Arrays:
        rng = np.random.default_rng(0)
        count = self.seen.count(self.size)
        sizes = {"x": (self.images, self.channels, *self.size), "dy": (self.images, self.channels, *count)}
        arrays = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
        return arrays | {"w": rng.normal(size=(self.channels, 1, *self.kernel)).astype(np.float32)}


SHAPES = [
    Shape(3, 16, (5, 6)),
    Shape(2, 32, (24, 24)),
    Shape(2, 16, (17, 70)),
    Shape(70, 16, (3, 3)),
    Shape(2, 16, (48, 48), strides=(2, 2)),
    Shape(3, 32, (7, 33), strides=(2, 2)),
    Shape(2, 16, (8, 8), strides=(2, 2), pads=(0, 0, 1, 1)),
    Shape(2, 16, (9, 40), (5, 5), (2, 2, 2, 2), (1, 2)),
    Shape(1, 16, (40, 11), (4, 3), (0, 2, 3, 1), (2, 1), (2, 3)),
    Shape(2, 16, (6, 9), (1, 1), (0, 0, 0, 0), (2, 2)),  # pixels that no window reads
    Shape(2, 16, (10, 10), (2, 2), (0, 0, 0, 0), (2, 2), (3, 3)),
    Shape(1, 16, (2, 2), (2, 2), (3, 0, 0, 3)),  # windows of padding alone
    Shape(2, 16, (6, 80), (7, 7), (3, 3, 3, 3)),
    Shape(0, 16, (8, 8)),
    Shape(2, 7, (5, 6)),
    Shape(2, 19, (11, 35), (5, 3), (2, 1, 2, 1), (2, 2)),
    Shape(2, 24, (6, 6), (5, 5), (2, 2, 2, 2), (2, 2)),  # a block that is half full
    Shape(9, 16, (3, 3), (5, 5), (2, 2, 2, 2)),
    Shape(1, 3, (37, 300), (3, 5), (1, 2, 1, 2)),
    Shape(1, 16, (150, 120), strides=(2, 2)),  # too large for the cache in blocks
]
PLACED = [(shape, block) for shape in SHAPES for block in (1, 8, 16) if shape.channels % block == 0]


def in_blocks(a: np.ndarray, block: int) -> np.ndarray:
    """As it lies in memory; filters and what is read in plain layout stay as they are."""
    if block == 1 or a.shape[1] == 1:
        return a
    n, c, h, w = a.shape
    return np.ascontiguousarray(a.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2)).reshape(a.shape)


def out_of_blocks(a: np.ndarray, block: int) -> np.ndarray:
    if block == 1 or a.shape[1] == 1:
        return a
    n, c, h, w = a.shape
    return a.reshape(n, c // block, h, w, block).transpose(0, 1, 4, 2, 3).reshape(a.shape)


def by_kernel(
    op_type: str, shape: Shape, data: Arrays, *, kind: int = NONE, block: int = 1, threads: int = 2, **changed: Any
) -> Arrays:
    inputs, outputs = ROLES[op_type]
    seen, (lower, upper) = shape.seen, BOUNDS[kind]
    attributes: dict[str, Any] = {
        "strides": seen.strides, "dilations": seen.dilations, "begins": seen.begins, "ends": seen.ends, "block": block,
        "lower": float(lower), "upper": float(upper), "activation": kind,
        **({} if op_type == "DepthwiseConv" else {"size": shape.size, "kernel": shape.kernel}), **changed,
    }  # fmt: skip
    node = onnx.helper.make_node(op_type, inputs, outputs, domain=native.DOMAIN, **attributes)
    feeds = {name: in_blocks(data[name], block) for name in inputs}
    given = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, a.shape) for n, a in feeds.items()]
    wanted = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in outputs]
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(native.DOMAIN, 1)]
    graph = onnx.helper.make_graph([node], "g", given, wanted)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = RuntimeOptions(native_kernels=True, threads=threads)
    session = create_session(model, Placement(("CPUExecutionProvider",)), options)
    return {n: out_of_blocks(a, block) for n, a in zip(outputs, session.run(None, feeds), strict=True)}


def exact(shape: Shape, data: Arrays, kind: int = NONE) -> Arrays:
    """In float64, tap by tap."""
    x, w, dy = (data[name].astype(np.float64) for name in ("x", "w", "dy"))
    (top, left), (bottom, right), (lower, upper) = shape.seen.begins, shape.seen.ends, BOUNDS[kind]
    rows, columns = dy.shape[2:]
    padded = np.pad(np.clip(x, lower, upper), ((0, 0), (0, 0), (top, bottom), (left, right)))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(padded), np.zeros_like(w)
    for i, j in np.ndindex(shape.kernel):
        (s, t), (a, b) = shape.strides, (i * shape.dilations[0], j * shape.dilations[1])
        taken = np.s_[:, :, a : a + s * (rows - 1) + 1 : s, b : b + t * (columns - 1) + 1 : t]
        y += padded[taken] * w[:, 0, i, j, None, None]
        dx[taken] += dy * w[:, 0, i, j, None, None]
        dw[:, 0, i, j] = (padded[taken] * dy).sum((0, 2, 3))
    inside = (x > lower) if kind == OPEN else (x >= lower) & (x <= upper)
    dx = dx[:, :, top : top + shape.size[0], left : left + shape.size[1]]
    return {"y": y, "dx": np.where(inside | (kind == NONE), dx, 0), "dw": dw}


@pytest.mark.sweep(0.15)
@pytest.mark.parametrize("kind", [NONE, CLOSED, OPEN])
@pytest.mark.parametrize(("shape", "block"), PLACED, ids=str)
def test_it_is_as_exact_as_float32(shape: Shape, kind: int, block: int) -> None:
    data = shape.drawn()
    wanted, terms = exact(shape, data, kind), exact(shape, {name: np.abs(a) for name, a in data.items()})
    for op_type, (_, outputs) in ROLES.items():
        found = by_kernel(op_type, shape, data, kind=kind, block=block)
        alone = by_kernel(op_type, shape, data, kind=kind, block=block, threads=1)
        for name in outputs:
            assert found[name].shape == wanted[name].shape
            np.testing.assert_array_equal(found[name], alone[name])
            error = np.abs(found[name] - wanted[name]) / np.maximum(terms[name], 1e-30)
            assert error.max(initial=0.0) <= 4e-7, (op_type, name)


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize(("channels", "block"), [(3, 1), (16, 1), (16, 16)])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
@pytest.mark.parametrize("columns", [20, 24])
def test_what_is_not_finite_reaches_no_more_than_it_should(
    columns: int, strides: tuple[int, int], channels: int, block: int
) -> None:
    shape = Shape(3, channels, (6, columns), strides=strides)
    for special in (np.inf, -np.inf, np.nan):
        for role in ("x", "dy"):
            data = shape.drawn()
            data[role][1, 2, 0, 0] = data[role][0, 5 % channels, -1, -1] = data[role][2, 9 % channels, 2, 7] = special
            with np.errstate(invalid="ignore"):
                wanted = exact(shape, data)
            assert not all(np.isfinite(a).all() for a in wanted.values())
            for op_type, (_, outputs) in ROLES.items():
                found = by_kernel(op_type, shape, data, block=block)
                for name in outputs:
                    np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=op_type)


@pytest.mark.parametrize("kind", [CLOSED, OPEN])
def test_kinks(kind: int) -> None:
    """On the bounds of a Clip the cotangent passes, where Relu gives 0 it does not; nor where x is no number."""
    shape = Shape(1, 16, (3, 9))
    data = shape.drawn()
    lower, upper = BOUNDS[kind]
    data["x"][0, :, 1] = [lower, upper, np.nan, np.inf, -np.inf, -0.0, 0.0, 1.5, -1.5]
    with np.errstate(invalid="ignore"):
        wanted = exact(shape, data, kind)
    found = by_kernel("DepthwiseConvGradInput", shape, data, kind=kind)
    np.testing.assert_allclose(found["dx"], wanted["dx"], rtol=1e-5, atol=1e-5)
    assert (found["dx"][0, :, 1, 0] == 0).all() == (kind == OPEN)


def test_it_refuses_what_does_not_fit() -> None:
    shape = Shape(1, 16, (6, 6))
    data = shape.drawn()
    with pytest.raises(Exception, match="DepthwiseConv: its strides should be 1 or 2"):
        by_kernel("DepthwiseConv", Shape(1, 16, (6, 6), strides=(3, 1)), data)
    with pytest.raises(Exception, match="DepthwiseConv: it should have a filter for each channel"):
        by_kernel("DepthwiseConv", shape, data | {"w": data["w"][:3]})
    with pytest.raises(Exception, match="DepthwiseConv: there is no such activation"):
        by_kernel("DepthwiseConv", shape, data, activation=3)
    with pytest.raises(Exception, match="DepthwiseConvGrad: its dy does not fit x"):
        by_kernel("DepthwiseConvGrad", shape, data | {"dy": data["dy"][:, :, :5]})
    with pytest.raises(Exception, match="DepthwiseConvGradWeight: its x should be of another size"):
        by_kernel("DepthwiseConvGradWeight", shape, data | {"x": data["x"][:, :, :5]})
    with pytest.raises(Exception, match="DepthwiseConvGradInput: its filters should be of another size"):
        by_kernel("DepthwiseConvGradInput", shape, data | {"w": data["w"][:, :, :2]})


# --- whole steps -----------------------------------------------------------------------------------------------------


class Separable(Module):
    """Depthwise convolutions behind a norm's activation, one of its own, and one that somebody else reads, too."""

    def __init__(self, activation: type[Module]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation())
        self.apart = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.wide = nn.Sequential(nn.Conv2d(16, 48, 1), activation())
        self.strided = nn.Conv2d(48, 48, 5, stride=2, padding=2, groups=48, bias=False)
        self.activation = activation()
        self.again = nn.Conv2d(48, 48, 3, padding=1, groups=48, bias=False)
        self.head = nn.Linear(48 * 144, 4)

    def forward(self, x: Any) -> Any:
        x = self.strided(self.wide(self.apart(self.first(x))))
        read_twice = self.activation(x)
        return self.head((read_twice + self.again(read_twice)).flatten(1))


def separable(activation: type[Module], batch: int | str = 8) -> gg.Step:
    model = gg.frontend.export(Separable(activation), {"x": Input((batch, 3, 24, 24))})
    return gg.build(model, "cross_entropy", gg.optim.sgd(0.05))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6])
def test_steps_fold_activations_and_merge_gradients(activation: type[Module]) -> None:
    nodes = for_machine(separable(activation).train, ORT_NATIVE).graph.node
    own = [n for n in nodes if n.op_type.startswith("DepthwiseConv")]
    kinds = sorted((n.op_type, a.i) for n in own for a in n.attribute if a.name == "activation")
    kind = CLOSED if activation is nn.ReLU6 else OPEN
    wanted = [(op_type, k) for op_type in ("DepthwiseConv", "DepthwiseConvGrad") for k in (NONE, NONE, kind)]
    assert kinds == wanted
    programs = "".join(a.s.decode() for n in nodes if n.op_type == "Elementwise" for a in n.attribute)
    assert [n.op_type in ("Clip", "Relu") for n in nodes].count(True) == 1  # the one that is read twice
    assert programs.count("Grad") == 1
    norms = [n for n in nodes if "BatchNormalization" in n.op_type]
    assert {n.op_type for n in norms} == {"BatchNormalization", "UnscaledBatchNormalizationGrad"}
    assert {a.i for n in norms for a in n.attribute if a.name == "activation"} == {kind}


@pytest.mark.sweep(0.42)
@pytest.mark.parametrize("levels", [[], ["x86-64-v2"], ["x86-64-v2", "avx2"], ["x86-64-v2", "avx2", "avx512"]], ids=str)
def test_kernels_are_taken_where_they_were_measured_to_be_faster(
    levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_table, "levels_in_use", lambda: levels)
    families = {"depthwise convolution": "DepthwiseConv", "batch normalisation": "BatchNormalization"}
    assert native_table.LEAST_LEVEL.keys() == {*families, "transpose"}  # which test_native_transposes.py tests
    for least in ("avx512", "avx2"):
        for family in families:
            monkeypatch.setitem(native_table.LEAST_LEVEL, family, least)
        nodes = for_machine(separable(nn.ReLU6).train, ORT_NATIVE).graph.node
        own = {n.op_type for n in nodes if n.domain == native.DOMAIN}
        for name in families.values():
            assert any(op_type.startswith(name) for op_type in own) == (least in levels)
        assert "Elementwise" in own


@pytest.mark.sweep(0.7)
@pytest.mark.parametrize("batch", [8, "n"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6])
def test_steps_train_alike(activation: type[Module], batch: int | str) -> None:
    built = separable(activation, batch)
    plain = gg.Trainer(built, device="cpu", options=RuntimeOptions(native_kernels=False))
    fast = gg.Trainer(built, device="cpu", options=RuntimeOptions(native_kernels=True))
    rng = np.random.default_rng(0)
    for images in (8, 8, 8 if batch == 8 else 5):
        fed = {"x": rng.normal(size=(images, 3, 24, 24)).astype(np.float32), "target": rng.integers(0, 4, images)}
        np.testing.assert_allclose(fast.step(fed)["loss"], plain.step(fed)["loss"], rtol=1e-5)
    other = fast.state_dict()
    for name, value in plain.state_dict().items():
        np.testing.assert_allclose(other[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
