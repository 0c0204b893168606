"""Convolutions by tiles: as exact as onnxruntime's own in float32, for every shape, any numbers and any threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native.library import Library
from gradgraph.files.models import to_proto
from gradgraph.frontend import Input, nn
from gradgraph.rules.registry import case, real
from gradgraph.rules.windows import Windows
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from tests.kit.form_kit import one_call, portable

pytestmark = pytest.mark.usefixtures("library")

OPERATORS = ("Conv", "ConvGradInput", "ConvGradWeight")


@dataclass(frozen=True)
class Shape:
    """Images, channels of x and of y, size and windows."""

    images: int
    c: int
    m: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)

    @property
    def seen(self) -> Windows:
        return Windows(self.kernel, self.strides, self.dilations, self.pads[:2], self.pads[2:])

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        count = tuple(self.seen.count(self.size))
        return {
            "x": (self.images, self.c, *self.size),
            "w": (self.m, self.c, *self.kernel),
            "y": (self.images, self.m, *count),
        }


SHAPES = [
    Shape(3, 1, 1, (5, 6), (3, 3), (1, 1, 1, 1)),
    Shape(2, 16, 32, (16, 16), (3, 3), (1, 1, 1, 1)),
    Shape(3, 64, 70, (8, 8), (3, 3), (1, 1, 1, 1)),
    Shape(5, 70, 17, (4, 4), (3, 3), (1, 1, 1, 1)),
    Shape(9, 33, 40, (2, 2), (3, 3), (1, 1, 1, 1)),
    Shape(1, 24, 30, (40, 1), (5, 1), (2, 0, 1, 0)),
    Shape(1, 15, 16, (1, 40), (1, 7), (0, 3, 0, 0)),
    Shape(2, 31, 16, (12, 11), (7, 7), (3, 3, 3, 3), (2, 2)),
    Shape(3, 40, 33, (9, 13), (3, 3), (1, 1, 1, 1), (2, 2)),
    Shape(2, 20, 20, (7, 18), (3, 2), (0, 2, 1, 0), (2, 1), (2, 3)),
    Shape(2, 18, 19, (9, 7), (1, 1), (0, 0, 0, 0), (2, 2)),
    Shape(4, 50, 66, (7, 9), (1, 1)),
    Shape(1, 3, 64, (130, 90), (3, 3), (1, 1, 1, 1)),  # rows of an image taken in turn
    Shape(2, 90, 20, (70, 60), (5, 5), (2, 2, 2, 2)),
    Shape(1, 4, 4, (2, 2), (2, 2), (3, 0, 0, 3)),  # windows of padding alone
    Shape(0, 16, 16, (8, 8), (3, 3), (1, 1, 1, 1)),
]


def drawn(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in shape.sizes.items()}


def by_kernel(
    op_type: str, shape: Shape, data: dict[str, np.ndarray], threads: int = 2, parts: int | None = None, **bounds: float
) -> np.ndarray:
    roles = {"Conv": "xw", "ConvGradInput": "yw", "ConvGradWeight": "xy"}[op_type]
    seen, lists = shape.seen, {"ConvGradInput": {"size": shape.size}, "ConvGradWeight": {"kernel": shape.kernel}}
    attributes: dict[str, Any] = {
        "strides": seen.strides, "dilations": seen.dilations, "begins": seen.begins, "ends": seen.ends,
        **lists.get(op_type, {}),
    }  # fmt: skip
    if op_type == "Conv":
        attributes |= {"lower": -np.inf, "upper": np.inf, **bounds}
    node = onnx.helper.make_node(op_type, list(roles), ["out"], domain=native.DOMAIN)
    for name, value in attributes.items():
        node.attribute.append(
            onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else float(value))
        )
    if parts is not None:
        node.attribute.append(onnx.helper.make_attribute("parts", parts))
    found = run([node], {role: data[role] for role in roles}, threads)
    return found.reshape(shape.sizes["w"]) if op_type == "ConvGradWeight" else found


def run(nodes: Sequence[onnx.NodeProto], feeds: dict[str, np.ndarray], threads: int = 2) -> np.ndarray:
    inputs = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, a.shape) for n, a in feeds.items()]
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(native.DOMAIN, 1)]
    graph = onnx.helper.make_graph(nodes, "g", inputs, [out])
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = RuntimeOptions(native_kernels=True, threads=threads)
    return np.asarray(create_session(model, Placement(("CPUExecutionProvider",)), options).run(None, feeds)[0])


def by_onnxruntime(op_type: str, shape: Shape, data: dict[str, np.ndarray]) -> np.ndarray:
    """The portable form in float32."""
    roles = {"Conv": "xw", "ConvGradInput": "ywx", "ConvGradWeight": "xyw"}[op_type]
    attrs = {"pads": list(shape.pads), "strides": list(shape.strides), "dilations": list(shape.dilations), "group": 1}
    if op_type == "Conv":
        attrs["kernel_shape"] = list(shape.kernel)
    domain = "" if op_type == "Conv" else "gradgraph"
    model, _ = one_call(domain, op_type, case(*(real(*shape.sizes[r]) for r in roles), **attrs), unknown=False)
    proto = to_proto(model) if op_type == "Conv" else portable(model)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    fed = {f"x{i}": data[r] for i, r in enumerate(roles)}
    return np.asarray(session.run(None, {v.name: fed[v.name] for v in session.get_inputs()})[0])


def exact(op_type: str, shape: Shape, data: dict[str, np.ndarray]) -> np.ndarray:
    """In float64, tap by tap."""
    x, w, y = (data[role].astype(np.float64) for role in "xwy")
    (top, left), (bottom, right) = shape.seen.begins, shape.seen.ends
    rows, columns = y.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    out = {"Conv": np.zeros_like(y), "ConvGradInput": np.zeros_like(padded), "ConvGradWeight": np.zeros_like(w)}[
        op_type
    ]
    for i, j in np.ndindex(shape.kernel):
        (s, t), (a, b) = shape.strides, (i * shape.dilations[0], j * shape.dilations[1])
        taken = np.s_[:, :, a : a + s * (rows - 1) + 1 : s, b : b + t * (columns - 1) + 1 : t]
        if op_type == "Conv":
            out += np.einsum("nchw,mc->nmhw", padded[taken], w[:, :, i, j], optimize=True)
        elif op_type == "ConvGradInput":
            out[taken] += np.einsum("nmhw,mc->nchw", y, w[:, :, i, j], optimize=True)
        else:
            out[:, :, i, j] = np.einsum("nchw,nmhw->mc", padded[taken], y, optimize=True)
    if op_type == "ConvGradInput":
        return out[:, :, top : top + shape.size[0], left : left + shape.size[1]]
    return out


@pytest.mark.sweep(0.007)
@pytest.mark.parametrize("op_type", OPERATORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_exact_as_float32(op_type: str, shape: Shape) -> None:
    data = drawn(shape)
    wanted = exact(op_type, shape, data)
    found = by_kernel(op_type, shape, data)
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, by_kernel(op_type, shape, data, threads=1))
    if not found.size or not shape.images:
        assert not found.any()
        return
    terms = exact(op_type, shape, {role: np.abs(a) for role, a in data.items()}).max()
    other = np.abs(by_onnxruntime(op_type, shape, data) - wanted).max() / terms
    assert np.abs(found - wanted).max() / terms <= max(2 * other, 2**-23)


@pytest.mark.one_level  # lower levels have no tiles, and compute as with three parts
@pytest.mark.sweep(0.15)
@pytest.mark.parametrize("op_type", OPERATORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_parts_keep_their_bound(op_type: str, shape: Shape) -> None:
    """Errors are below 2^-15 of the magnitudes that are added up, number by number."""
    data = drawn(shape)
    wanted, magnitude = (
        exact(op_type, shape, data),
        exact(op_type, shape, {role: np.abs(a) for role, a in data.items()}),
    )
    found = by_kernel(op_type, shape, data, parts=2)
    assert (np.abs(found - wanted) <= 2.0**-15 * magnitude).all()
    for threads in (1, 4):
        np.testing.assert_array_equal(found, by_kernel(op_type, shape, data, threads, parts=2))


@pytest.mark.parametrize("op_type", OPERATORS)
def test_two_parts_are_less_exact_than_three(library: native.Library, op_type: str) -> None:
    if not library.has_tiles:
        pytest.skip("this processor has no tiles (AMX with bfloat16)")
    shape = Shape(3, 64, 70, (8, 8), (3, 3), (1, 1, 1, 1))
    data = drawn(shape)
    wanted, magnitude = (
        exact(op_type, shape, data),
        exact(op_type, shape, {role: np.abs(a) for role, a in data.items()}),
    )
    errors = {parts: np.abs(by_kernel(op_type, shape, data, parts=parts) - wanted) / magnitude for parts in (2, 3)}
    assert errors[3].max() < 2.0**-22 < 4 * 2.0**-22 < errors[2].max()
    np.testing.assert_array_equal(by_kernel(op_type, shape, data), by_kernel(op_type, shape, data, parts=3))
    with pytest.raises(Exception, match=f"{op_type}: its parts should be 2 or 3"):
        by_kernel(op_type, shape, data, parts=1)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.one_level), 3])
@pytest.mark.parametrize("op_type", OPERATORS)
def test_numbers_that_have_no_parts(op_type: str, parts: int) -> None:
    """Infinities, what is no number, and what bfloat16 would round to infinity."""
    shape = Shape(2, 20, 18, (6, 7), (3, 3), (1, 1, 1, 1))
    for special in (np.inf, -np.inf, np.nan, 3.4e38):
        for role in {"Conv": "xw", "ConvGradInput": "yw", "ConvGradWeight": "xy"}[op_type]:
            data = {name: a * np.float32(1e-3) for name, a in drawn(shape).items()}
            data[role][1, 2, 1, 1] = special
            with np.errstate(invalid="ignore"):
                wanted = exact(op_type, shape, data)
            usual = np.abs(wanted) < 1
            assert usual.any() and not usual.all()
            found = by_kernel(op_type, shape, data, parts=parts)
            np.testing.assert_allclose(found[usual], wanted[usual], rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(found[~usual], wanted[~usual], rtol=1e-5)


def test_large_and_small_numbers() -> None:
    """Products near the ends of float32's range; parts below its normal numbers count as zero."""
    shape = Shape(1, 32, 16, (5, 5), (3, 3), (1, 1, 1, 1))
    data = drawn(shape)
    lost = 3 * 2.0**-126 * np.abs(data["w"]).sum((1, 2, 3)).max()  # of each weight, with parts of 1e-37
    for x, w, missing in ((1e37, 1e-3, 0), (1e-15, 1e-15, 0), (1e-30, 1e30, 0), (1e-37, 1.0, lost)):
        scaled = data | {"x": data["x"] * np.float32(x), "w": data["w"] * np.float32(w)}
        wanted = exact("Conv", shape, scaled)
        np.testing.assert_allclose(by_kernel("Conv", shape, scaled), wanted, atol=1e-5 * x * w + missing)


def test_bounds() -> None:
    shape = Shape(2, 16, 20, (6, 7), (3, 3), (1, 1, 1, 1))
    data = drawn(shape)
    plain = by_kernel("Conv", shape, data)
    np.testing.assert_array_equal(by_kernel("Conv", shape, data, lower=-1.5, upper=2.5), np.clip(plain, -1.5, 2.5))
    data["x"][0, 0, 0, 0] = np.nan
    bounded = by_kernel("Conv", shape, data, lower=0.0)
    assert np.isnan(bounded).any() and np.nanmin(bounded) == 0.0


def test_it_refuses_what_does_not_fit() -> None:
    shape = Shape(1, 4, 4, (6, 6), (3, 3))
    data = drawn(shape)
    with pytest.raises(Exception, match="Conv: its strides should be 1 or 2"):
        by_kernel("Conv", Shape(1, 4, 4, (6, 6), (3, 3), strides=(3, 1)), data)
    with pytest.raises(Exception, match="Conv: its weights do not fit its images"):
        by_kernel("Conv", shape, data | {"w": data["w"][:, :3]})
    with pytest.raises(Exception, match="Conv: its windows are larger than the padded image"):
        by_kernel("Conv", shape, data | {"x": data["x"][:, :, :2]})
    with pytest.raises(Exception, match="ConvGradInput: its weights do not fit dy"):
        by_kernel("ConvGradInput", shape, data | {"w": data["w"][:3]})
    with pytest.raises(Exception, match="ConvGradWeight: its dy does not fit x"):
        by_kernel("ConvGradWeight", shape, data | {"y": data["y"][:, :, :3]})


def convolutional() -> gg.Step:
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 256, 4),
    )  # fmt: skip
    return gg.build(gg.frontend.export(network, {"x": Input((8, 3, 16, 16))}), "cross_entropy", gg.optim.sgd(0.05))


@pytest.mark.parametrize("has_tiles", [False, True])
def test_steps_choose_them_where_they_are_faster(has_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tiles the kernels still give what they should, only slowly, so that this runs on every processor."""
    monkeypatch.setattr(Library, "has_tiles", property(lambda self: has_tiles))
    built = convolutional()
    nodes = for_machine(built.train, ORT_NATIVE).graph.node
    convs = [n for n in nodes if n.domain == native.DOMAIN and n.op_type.startswith("Conv")]
    by_vectors = OPERATORS[2:] if native.here().has_fast_vectors else ()
    assert sorted(n.op_type for n in convs) == sorted(2 * (OPERATORS if has_tiles else by_vectors))
    if has_tiles:
        lowers = {a.f for n in convs for a in n.attribute if a.name == "lower"}
        assert lowers == {0.0, -np.inf}  # the activation is part of the convolution
    rng = np.random.default_rng(0)
    plain = gg.Trainer(built, device="cpu", options=RuntimeOptions(native_kernels=False))
    fast = gg.Trainer(built, device="cpu", options=RuntimeOptions(native_kernels=True))
    for _ in range(3):
        batch = {"x": rng.normal(size=(8, 3, 16, 16)).astype(np.float32), "target": rng.integers(0, 4, 8)}
        np.testing.assert_allclose(fast.step(batch)["loss"], plain.step(batch)["loss"], rtol=1e-5)
    other = fast.state_dict()
    for name, value in plain.state_dict().items():
        np.testing.assert_allclose(other[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
