"""By default large tensors are written over where they lie, and a step that goes wrong leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.backends.ort_native import in_use
from gradgraph.errors import DivergedError, ModelError
from gradgraph.frontend import nn
from gradgraph.runtime.execution import inplace, step_session
from gradgraph.runtime.execution.after_loss import GATE, with_updates_after_loss
from gradgraph.runtime.execution.overwrites import proven
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step
from tests.runtime.test_inplace import batches, convolutions, mlp, reordered, tokens


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inplace, "LARGE", 1)


def opened_trainer(step: Step, in_place: Any = "auto", **options: Any) -> Trainer:
    return Trainer(step, device="cpu", options=RuntimeOptions(threads=1, in_place=in_place), **options)


def two_losses() -> Step:
    gg.frontend.manual_seed(0)
    net = gg.frontend.export(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)), {"x": ("batch", 12)})
    return gg.build(net, "cross_entropy", gg.optim.adamw(1e-2), metrics=["accuracy"], grad_norm=True)


def rewritten() -> Step:
    """With a clip over all gradients, and an average of the weights."""
    gg.frontend.manual_seed(0)
    net = gg.frontend.export(nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 5)), {"x": ("batch", 12)})
    optimizer = gg.optim.chain(gg.optim.clip_by_global_norm(1.0), gg.optim.adamw(1e-2))
    return gg.build(net, "cross_entropy", optimizer, ema=0.9)


def float64() -> Step:
    gg.frontend.manual_seed(0)
    net = gg.frontend.export(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)), {"x": ("batch", 12)})
    return gg.build(net, "cross_entropy", gg.optim.sgd(1e-1, momentum=0.9), recompute="sqrt")


STEPS = [mlp, tokens, convolutions, two_losses, rewritten, float64]
Make = Callable[[], Step]


def state_after(step: Step, in_place: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    t = opened_trainer(step, in_place)
    losses = [float(t.step(batch)["loss"]) for batch in batches(step, 12)]
    return losses, t.state_dict()


@pytest.mark.sweep(0.12)
@pytest.mark.parametrize("make", STEPS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_losses_and_state_are_those_of_two_sets(make: Make, seed: int | None) -> None:
    step = make() if seed is None else reordered(make(), seed)
    losses, state = state_after(step, "auto")
    expected_losses, expected = state_after(step, False)
    assert losses == expected_losses
    assert all(np.array_equal(state[n], expected[n]) for n in expected)


@pytest.mark.parametrize("make", STEPS)
def test_weights_and_slots_lie_in_memory_once(make: Make) -> None:
    step = make()
    t = opened_trainer(step)
    t.step(batches(step, 1)[0])
    once = {s.name for s in step.manifest.state if s.kind in ("parameter", "optimizer")}
    if in_use.by_default():  # a native kernel computes an average together with the weight, and reads both to its end
        once = {name for name in once if not name.endswith(".ema")}
    assert t.state.shared >= once


def test_with_a_large_tensor_small_ones_that_wait_for_nothing_lie_in_memory_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the small weight: its update would have to wait for the gradient of the layer before."""
    gg.frontend.manual_seed(0)
    net = gg.frontend.export(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 5)), {"x": ("batch", 12)})
    step = gg.build(net, "cross_entropy", gg.optim.adamw(1e-2))
    shared = {}
    for large in (600, 1000):
        monkeypatch.setattr(inplace, "LARGE", large)
        t = opened_trainer(step)
        t.step(batches(step, 1)[0])
        shared[large] = t.state.shared
    small, waits = {s.name for s in step.manifest.state if s.kind in ("parameter", "optimizer")}, {"2.weight"}
    assert (shared[600], shared[1000]) == (small - waits, frozenset())


def test_the_gate_stands_where_onnxruntime_leaves_it(tmp_path: Path) -> None:
    """Onnxruntime makes one Reshape of several that follow each other, and what one of them waits for is lost."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        step (float[2, 3] x, float[6] w) => (float loss, float[6] next)
        <int64[2] sizes = {2, 3}, int64[1] size = {6}> {
            a = Mul (x, x)
            loss = ReduceSum <keepdims = 0> (a)
            b = Reshape (w, sizes)
            c = Transpose (b)
            d = Sin (c)
            e = Reshape (d, size)
            f = Unsqueeze (e, zero)
            g = Squeeze (f, zero)
            next = Add (w, g)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "zero"))
    model = onnx.shape_inference.infer_shapes(model)
    assert with_updates_after_loss(model, "loss", {"w": "next"}, ["w"], fails=True)
    options = RuntimeOptions().session_options()
    options.optimized_model_filepath = str(tmp_path / "executed.onnx")
    ort.InferenceSession(model.SerializeToString(), options)
    executed = onnx.load(tmp_path / "executed.onnx")
    assert proven(executed, {"w": "next"}, RuntimeOptions()) == {"w"}


def poisoned(step: Step) -> dict[str, np.ndarray]:
    """A batch whose loss is NaN."""
    batch = batches(step, 1)[0]
    return {**batch, "x": batch["x"] * np.float32(np.nan)}


@pytest.mark.sweep(0.193)
@pytest.mark.parametrize("make", [m for m in STEPS if m is not tokens])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_step_that_diverges_leaves_the_state_as_it_was(make: Make, seed: int | None) -> None:
    step = make() if seed is None else reordered(make(), seed)
    first, second = batches(step, 2)
    t, plain = opened_trainer(step), opened_trainer(step)
    for trainer in (t, plain):
        trainer.step(first)
    before = t.state_dict()
    with pytest.raises(DivergedError, match=r"the loss became nan in step 2 \(the state before it is kept\)"):
        t.step(poisoned(step))
    assert t.state.shared and all(np.array_equal(value, before[n]) for n, value in t.state_dict().items())
    assert t.step(second)["loss"] == plain.step(second)["loss"]


def test_a_step_that_fails_before_its_loss_leaves_the_state_as_it_was() -> None:
    step = tokens()
    batch = batches(step, 1)[0]
    t = opened_trainer(step)
    t.step(batch)
    before = t.state_dict()
    with pytest.raises(ModelError, match="running the step failed"):
        t.step({**batch, "x": np.full_like(batch["x"], 99)})  # no such row of the embedding
    assert all(np.array_equal(value, before[n]) for n, value in t.state_dict().items())
    assert np.isfinite(t.step(batch)["loss"])


def test_a_loss_that_nobody_checks_moves_the_state() -> None:
    step = mlp()
    t = opened_trainer(step, check_loss=False)
    t.step(batches(step, 1)[0])
    assert np.isnan(t.step(poisoned(step))["loss"])
    assert t.state.shared and any(np.isnan(value).any() for value in t.state_dict().values())


def test_a_step_that_fails_while_it_writes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    step = mlp()
    batch = batches(step, 1)[0]
    t = opened_trainer(step)
    t.step(batch)
    session = t._session.part.of(batch)
    run = session.session.run_with_iobinding

    def fails(*given: Any) -> None:
        run(*given)
        raise RuntimeError("no memory")

    monkeypatch.setattr(session.session, "run_with_iobinding", fails)
    with pytest.raises(ModelError):
        t.step(batch)
    with pytest.raises(ModelError, match="failed while it overwrote the state; load a checkpoint"):
        t.state_dict()


def test_a_session_without_the_proof_keeps_the_state_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second session, for other sizes, may have to copy what the first one writes over."""
    step = mlp()
    first, other = batches(step, 2)
    assert len(first["x"]) != len(other["x"])
    t, plain = opened_trainer(step), opened_trainer(step, False)
    for trainer in (t, plain):
        trainer.step(first)
    monkeypatch.setattr(step_session, "proven", lambda *given: frozenset())
    assert t.step(other)["loss"] == plain.step(other)["loss"]
    before = t.state_dict()
    with pytest.raises(DivergedError, match="is kept"):
        t.step({**other, "x": other["x"] * np.float32(np.nan)})
    assert all(np.array_equal(value, before[n]) for n, value in t.state_dict().items())
    assert t.step(other)["loss"] == plain.step(other)["loss"]


@pytest.mark.parametrize("proves", [(True, False), (False, True)])
def test_sessions_that_can_prove_less_or_more_than_the_first(
    proves: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one session has bound twice, another one must not write over, even if it could."""
    step, made = mlp(), list[bool]()

    def sometimes(*given: Any) -> frozenset[str]:
        made.append(proves[len(made)])
        return proven(*given) if made[-1] else frozenset()

    expected, state = state_after(step, False)
    monkeypatch.setattr(step_session, "proven", sometimes)
    losses, found = state_after(step, "auto")
    assert made == list(proves) and losses == expected
    assert all(np.array_equal(found[n], state[n]) for n in state)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("make", STEPS)
def test_an_estimate_counts_what_lies_in_memory_once(make: Make) -> None:
    step = make()
    state = {s.name: s.nbytes for s in step.manifest.state}
    t = opened_trainer(step)
    t.step(batches(step, 1)[0])
    twice = sum(size for name, size in state.items() if name not in t.state.shared)
    assert gg.memory(step, batch=5).following == twice
    assert gg.memory(step, batch=5, options=RuntimeOptions(in_place=False)).following == sum(state.values())


def gated(body: str, loss: str = "loss") -> tuple[onnx.ModelProto, bool]:
    from gradgraph.runtime.execution.after_loss import with_updates_after_loss

    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[4] p, float[4] m, float[4] x)'
        f" => (float[4] q, float[4] n, float loss) {{ {body} }}"
    ))  # fmt: skip
    return model, with_updates_after_loss(model, loss, {"p": "q", "m": "n"}, ["p", "m"], True)


@pytest.mark.parametrize("body, waits", [
    ("y = Mul(p, x) loss = ReduceSum<keepdims=0>(y) g = Neg(y) n = Add(m, g) q = Sub(p, n)", 1),
    ("y = Mul(p, x) loss = ReduceSum<keepdims=0>(y) g = Neg(y) n = Add(m, g) q = Sub(p, y)", 2),
])  # fmt: skip
def test_one_node_waits_for_all_that_need_it(body: str, waits: int) -> None:
    model, done = gated(body)
    assert done
    assert sum(node.op_type == "Reshape" and GATE in node.output[0] for node in model.graph.node) == waits + 1
    assert inplace.overwritable(model, {"p": "q", "m": "n"}, GATE) == {"p", "m"}
    onnx.checker.check_model(model, full_check=True)


def test_what_does_not_wait_is_not_written_over() -> None:
    body = "y = Mul(p, x) g = Neg(x) n = Add(m, g) q = Sub(p, y) loss = ReduceSum<keepdims=0>(y)"
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[4] p, float[4] m, float[4] x)'
        f" => (float[4] q, float[4] n, float loss) {{ {body} }}"
    )
    assert inplace.overwritable(model, {"p": "q", "m": "n"}) == {"p", "m"}
    assert not inplace.overwritable(model, {"p": "q", "m": "n"}, "loss")
    assert not inplace.overwritable(model, {"p": "q", "m": "n"}, GATE)
    assert inplace.overwritable(model, {"p": "q", "m": "n"}, "y") == {"p"}
