"""LSTM by native kernels: as exact as onnxruntime's, whatever the sizes, directions, threads and numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native import library as native
from gradgraph.rules.registry import RULES, Case
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.form_kit import problems_of_rule
from tests.kit.lowered_networks import step

pytestmark = pytest.mark.usefixtures("library")

CPU = Placement(("CPUExecutionProvider",))
COUNT = {"forward": 1, "reverse": 1, "bidirectional": 2}
STATES = ("Y", "Y_h", "Y_c")
HAS_TILES = native.Library.has_tiles  # as it is where tests do not replace it
Arrays = dict[str, np.ndarray]
Sizes = tuple[int, int, int, int]  # steps, sequences, features, units


@pytest.fixture(autouse=True)
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of tests are small, and the kernels are right without tiles, too."""
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)
    monkeypatch.setattr(native.Library, "has_tiles", True)


def layer(sizes: Sizes, direction: str = "forward", read: tuple[str, ...] = STATES, **attrs: Any) -> onnx.ModelProto:
    """One node; everything that it reads is an input."""
    T, N, features, H = sizes
    D = COUNT[direction]
    shapes = {"x": [T, N, features], "W": [D, 4 * H, features], "R": [D, 4 * H, H], "B": [D, 8 * H]}
    shapes |= {"h": [D, N, H], "c": [D, N, H]}
    given, made = ["x", "W", "R", "B", "", "h", "c"], [y if y in read else "" for y in STATES]
    node = onnx.helper.make_node("LSTM", given, made, hidden_size=H, direction=direction, **attrs)
    ends = {"Y": [T, D, N, H], "Y_h": [D, N, H], "Y_c": [D, N, H]}
    graph = onnx.helper.make_graph(
        [node],
        "layer",
        [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()],
        [onnx.helper.make_tensor_value_info(y, 1, ends[y]) for y in read],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def drawn(model: onnx.ModelProto) -> Arrays:
    """Weights as layers have them, and other numbers of about 1."""
    rng, feeds = np.random.default_rng(0), {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        scale = 1 / math.sqrt(max(1, *shape[-1:])) if value.name in ("W", "R") else 1.0
        feeds[value.name] = (rng.uniform(-1, 1, shape) * scale).astype(np.float32)
    return feeds


def results(model: onnx.ModelProto, feeds: Arrays, threads: int = 2) -> Arrays:
    options = RuntimeOptions(native_kernels=True, threads=threads)
    session = create_session(model, CPU, options)
    names = {v.name for v in session.get_inputs()}
    found = session.run(None, {k: v for k, v in feeds.items() if k in names})
    return dict(zip([o.name for o in session.get_outputs()], found, strict=True))


def written(model: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Its outputs and all of its gradients: portable, and by the kernels."""
    portable, fast = (gg.vjp(model, backend=b) for b in ("portable", "ort-cpu-native"))
    assert {"LSTM", "LSTMGrad"} <= {n.op_type for n in fast.graph.node if n.domain == native.DOMAIN}
    return portable, fast


def in_two_parts(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with products of states that are less exact."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for node in copy.graph.node:
        if node.domain == native.DOMAIN and node.op_type in ("LSTM", "LSTMGrad"):
            node.attribute.append(onnx.helper.make_attribute("parts", 2))
    return copy


SIZES = [
    (1, 1, 1, 1),
    (3, 16, 5, 32),
    (5, 33, 7, 40),
    (2, 70, 20, 300),
    (7, 17, 16, 33),
    (4, 32, 64, 64),
    (40, 3, 2, 96),
]
DRAWN = [tuple(map(int, np.random.default_rng(seed).integers(1, (9, 40, 20, 80)))) for seed in range(30)]


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("direction", COUNT)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_states_and_gradients_are_as_exact_as_those_of_onnxruntime(sizes: Sizes, direction: str) -> None:
    check_digits(sizes, direction)


@pytest.mark.sweep(0.05)
@pytest.mark.parametrize("direction", COUNT)
@pytest.mark.parametrize("sizes", DRAWN, ids=str)
def test_drawn_sizes_are_as_exact(sizes: Sizes, direction: str) -> None:
    check_digits(sizes, direction)


def check_digits(sizes: Sizes, direction: str) -> None:
    portable, fast = written(layer(sizes, direction))
    feeds = drawn(portable)
    exact = Oracle(in_float64(portable))({k: v.astype(np.float64) for k, v in feeds.items()})
    theirs, ours = results(portable, feeds), results(fast, feeds)
    assert set(ours) == set(theirs)
    for name, wanted in exact.items():
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(ours[name], wanted, rtol=1e-5, atol=2e-6 * scale, err_msg=name)
        if wanted.size < 60:
            continue  # too few errors for a mean
        errors = [np.abs(found[name] - wanted).mean() for found in (ours, theirs)]
        assert errors[0] <= 1.2 * errors[1] + 3e-8 * scale, (name, errors)


@pytest.mark.parametrize("sizes", [(7, 17, 16, 33), (4, 32, 64, 64), (40, 3, 2, 96)], ids=str)
def test_two_parts_are_a_little_less_exact(library: native.Library, sizes: Sizes) -> None:
    model = layer(sizes, "bidirectional")
    portable, fast = written(model)
    feeds = drawn(portable)
    exact = Oracle(in_float64(portable))({k: v.astype(np.float64) for k, v in feeds.items()})
    three, two = results(fast, feeds), results(in_two_parts(fast), feeds)
    for name, wanted in exact.items():
        np.testing.assert_allclose(two[name], wanted, rtol=1e-4, atol=2e-5 * np.abs(wanted).max(), err_msg=name)
    if HAS_TILES.fget(library):
        errors = [max(np.abs(found[n] - w).max() / np.abs(w).max() for n, w in exact.items()) for found in (two, three)]
        assert errors[0] > 4 * errors[1]
    for threads in (1, 4):
        for name, value in results(in_two_parts(fast), feeds, threads).items():
            np.testing.assert_array_equal(value, two[name], err_msg=name)


@pytest.mark.sweep(0.38)
@pytest.mark.parametrize("direction", COUNT)
@pytest.mark.parametrize("read", [("Y",), ("Y_h",), ("Y_c",), ("Y_h", "Y_c")], ids=str)
def test_whichever_state_is_read(read: tuple[str, ...], direction: str) -> None:
    portable, fast = written(layer((5, 6, 3, 17), direction, read))
    feeds = drawn(portable)
    wanted, found = results(portable, feeds), results(fast, feeds)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("sizes", [(6, 33, 5, 70), (3, 70, 4, 20), (9, 5, 3, 130)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(sizes: Sizes) -> None:
    _, fast = written(layer(sizes, "bidirectional"))
    feeds = drawn(fast)
    one = results(fast, feeds, threads=1)
    for threads in (2, 4):  # more than there are cores, perhaps
        for name, value in results(fast, feeds, threads).items():
            np.testing.assert_array_equal(value, one[name], err_msg=name)


@pytest.mark.sweep(0.16)
@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.one_level), 3])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("where", ["x", "R", "h", "c", "Y.cotangent", "Y_h.cotangent", "Y_c.cotangent"])
def test_numbers_without_parts_come_out_as_they_should(where: str, number: float, parts: int) -> None:
    """As from loops in standard operators; onnxruntime's LSTM loses a NaN, so where c is infinite only it is asked."""
    model = layer((4, 20, 3, 35))
    portable, fast = written(model)
    reference = portable if where == "c" and np.isinf(number) else gg.vjp(model, backend="ort-cpu")
    feeds = drawn(portable)
    feeds[where][..., 1, 2] = number
    wanted, found = results(reference, feeds), results(fast if parts == 3 else in_two_parts(fast), feeds)
    for name, value in wanted.items():
        scale = np.abs(value[np.isfinite(value)]).max(initial=1.0)
        atol = (1e-6 if parts == 3 else 2e-5) * scale
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=atol, err_msg=name)


CASES = [pytest.param(c, id=str(i)) for i, c in enumerate(RULES["", "LSTM"].cases) if not c.onnxruntime]


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("case", CASES)
def test_every_case_of_the_rule(case: Case) -> None:
    """Lengths, peepholes, clip and other activations among them, for which the other forms serve."""
    assert problems_of_rule(RULES["", "LSTM"], case, ORT_NATIVE) == []


# --- the kernels by themselves --------------------------------------------------------------------------------


def alone(text: str, *inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of one node, of shapes that it sees when it runs."""
    names = [f"x{i}" for i in range(len(inputs))]
    types = ", ".join(f"float[{', '.join(f'{n}_{d}' for d in range(x.ndim))}] {n}" for n, x in zip(names, inputs))  # noqa: B905
    outputs = text.split("=")[0].split(", ")
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21, "{native.DOMAIN}" : 1]> g ({types}) => '
        f"({', '.join(f'float {y}' for y in outputs)}) {{ {text} ({', '.join(names)}) }}"
    )
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return list(results(model, dict(zip(names, inputs))).values())  # noqa: B905


FORWARD = f"gates, after, before, cells, h, c = {native.DOMAIN}.LSTM <backwards = 0>"
BACK = f"d, dh, dc, db = {native.DOMAIN}.LSTMGrad <backwards = 0>"


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(("steps", "sequences", "units"), [(0, 3, 5), (4, 0, 5), (4, 3, 0)])
def test_nothing_to_do(steps: int, sequences: int, units: int) -> None:
    T, N, H = steps, sequences, units
    state = np.full((N, H), 2.0, np.float32)
    gates, after, before, cells, h, c = alone(FORWARD, ones(T, N, 4 * H), ones(4 * H, H), state, 3 * state)
    assert gates.shape == (T, N, 4 * H) and after.shape == before.shape == cells.shape == (T, N, H)
    d, dh, dc, db = alone(BACK, gates, cells, ones(4 * H, H), state, state, 3 * state)
    assert d.shape == gates.shape and db.shape == (4 * H,) and not db.any()
    for found in ((h, c), (dh, dc)):
        np.testing.assert_array_equal(found, (state, 3 * state))


def test_gates_are_as_exact_as_float32() -> None:
    x = np.concatenate([np.linspace(-80, 80, 16_001), np.geomspace(1e-30, 1, 4_000), -np.geomspace(1e-6, 1, 1_999)])
    x = x.astype(np.float32).reshape(1, -1, 4)
    gates, *_ = alone(FORWARD, x, np.zeros((4, 1), np.float32), *[np.zeros((x.shape[1], 1), np.float32)] * 2)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(gates[..., :3], 1 / (1 + np.exp(-wide[..., :3])), rtol=4e-7)
    np.testing.assert_allclose(gates[..., 3], np.tanh(wide[..., 3]), rtol=4e-7)


def test_tensors_that_do_not_fit_are_refused() -> None:
    state = ones(3, 5)
    with pytest.raises(Exception, match="LSTM: its tensors differ in size"):
        alone(FORWARD, ones(2, 3, 20), ones(20, 4), state, state)
    with pytest.raises(Exception, match="LSTM: its tensors should have 3 and 2 axes"):
        alone(FORWARD, ones(6, 20), ones(20, 5), state, state)
    with pytest.raises(Exception, match="LSTMGrad: its tensors differ in size"):
        alone(BACK, ones(2, 3, 20), ones(2, 3, 5), ones(20, 5), state, state, ones(3, 4))


# --- where they are written -----------------------------------------------------------------------------------


def kernels(model: onnx.ModelProto) -> list[str]:
    found = for_machine(model, ORT_NATIVE).graph.node
    return [n.op_type for n in found if n.domain == native.DOMAIN and n.op_type.startswith("LSTM")]


def test_a_step_of_training_uses_them() -> None:
    built = step("lstm", 8, gg.optim.sgd(0.05))
    assert set(kernels(built.train)) == {"LSTM", "LSTMGrad"}
    assert not kernels(built.eval)


@pytest.mark.parametrize(
    "options", [{"clip": 0.5}, {"input_forget": 1}, {"activations": ["Sigmoid", "Sigmoid", "Tanh"]}]
)
def test_what_is_not_plain_keeps_the_other_forms(options: dict[str, Any]) -> None:
    model = gg.vjp(layer((4, 3, 2, 5), **options), backend="ort-cpu-native")
    assert "LSTM" not in [n.op_type for n in model.graph.node if n.domain == native.DOMAIN]


def test_a_processor_without_tiles_keeps_the_other_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.Library, "has_tiles", False)
    assert not kernels(step("lstm", 8, gg.optim.sgd(0.05)).train)
