"""Next values written over current ones: only where no order of execution could tell, and then with the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.errors import DivergedError, ModelError
from gradgraph.runtime.execution import inplace, overwrites
from gradgraph.runtime.execution.inplace import overwritable
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step
from tests.kit import handmade

nn = gg.frontend.nn


def proven(body: str, outputs: str = "float[4] q, float loss") -> bool:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>'
        f"m (float[4] p, float[4] g, int64[1, 1] i, float[1] u, bool c) => ({outputs}) {{ {body} }}"
    )
    return overwritable(model, {"p": "q"}) == {"p"}


@pytest.mark.parametrize(
    "body",
    [
        "q = Sub(p, g) loss = ReduceSum(g)",
        "d = Mul(p, g) q = Sub(p, d) loss = ReduceSum(d)",
        "a = Mul(p, g) q = Add(a, g) loss = ReduceSum(a)",  # like an average of gradients
        "v = Identity(p) s = ReduceSum(v) q = Sub(p, s) loss = Identity(s)",  # the view's reader is an ancestor
        "q = ScatterND(p, i, u) loss = ReduceSum(g)",
        "loss = ReduceSum(p) d = Mul(g, loss) q = Sub(p, d) r = ReduceSum(q)",  # who reads q may read it late
        "q = Neg(g) loss = ReduceSum(g)",  # nobody reads p
    ],
)
def test_proven(body: str) -> None:
    assert proven(body)


@pytest.mark.parametrize(
    "body",
    [
        "q = Sub(p, g) loss = ReduceSum(p)",  # may run after the update
        "v = Identity(p) q = Sub(p, g) loss = ReduceSum(v)",  # a view of it, too
        "v = Identity(p) w = Identity(v) q = Sub(p, g) loss = ReduceSum(w)",
        "v = Identity(p) q = Sub(p, v) loss = ReduceSum(g)",
        "q = CumSum(p, i) loss = ReduceSum(g)",  # no operator that is known to read before it writes
        "q = ScatterND(g, i, p) loss = ReduceSum(g)",
        "q = Identity(p) loss = ReduceSum(g)",
        "q = Sub(p, g) loss = If (c) <then_branch = t () => (float a) { a = ReduceSum(p) },"
        " else_branch = e () => (float b) { b = ReduceSum(g) }>",
        "s = If (c) <then_branch = t () => (float[4] a) { a = Identity(p) },"
        " else_branch = e () => (float[4] b) { b = Neg(g) }> q = Sub(p, s) loss = ReduceSum(g)",
    ],
)
def test_not_proven(body: str) -> None:
    assert not proven(body)


def test_an_output_of_the_model_is_not_written_over() -> None:
    assert not proven("q = Sub(p, g) loss = ReduceSum(g)", "float[4] q, float loss, float[4] p")


def test_tensors_that_change_places_are_not_written_over() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>'
        "m (float[4] a, float[4] b) => (float[4] x, float[4] y) { x = Add(a, b) y = Sub(b, a) }"
    )
    assert overwritable(model, {"a": "x", "b": "y"}) == frozenset()


# --- training --------------------------------------------------------------------------------------------------


def mlp() -> Step:
    gg.frontend.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    return gg.build(gg.frontend.export(net, {"x": ("batch", 12)}), "cross_entropy", gg.optim.adamw(1e-2))


def tokens() -> Step:
    gg.frontend.manual_seed(0)
    layers = [nn.Embedding(20, 12), nn.LayerNorm(12), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 5)]
    net = gg.frontend.export(nn.Sequential(*layers), {"x": gg.frontend.Input(("batch", 4), "int64")})
    return gg.build(net, "cross_entropy", gg.optim.sgd(0.1, momentum=0.9))


def convolutions() -> Step:
    """Of 1 x 1 images: products with a view of the weight."""
    gg.frontend.manual_seed(0)
    layers = [
        nn.Unflatten(1, (12, 1, 1)),
        nn.Conv2d(12, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1),
        nn.Flatten(),
        nn.Linear(16, 5),
    ]
    return gg.build(
        gg.frontend.export(nn.Sequential(*layers), {"x": ("batch", 12)}), "cross_entropy", gg.optim.adamw(1e-2)
    )


def batches(step: Step, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        n = 8 if i % 7 else 5  # the general session, too
        x = rng.normal(size=(n, 12)) if step.manifest.inputs[0].dtype == "float32" else rng.integers(0, 20, (n, 4))
        made.append({"x": x.astype(step.manifest.inputs[0].dtype), "target": rng.integers(0, 5, n)})
    return made


def reordered(step: Step, seed: int) -> Step:
    """The same step with the nodes of train.onnx in another topological order."""
    train = onnx.ModelProto()
    train.CopyFrom(step.train)
    nodes, rng = list(train.graph.node), random.Random(seed)
    missing = {name for node in nodes for name in node.output}
    del train.graph.node[:]
    while nodes:
        ready = [node for node in nodes if not missing.intersection(node.input)]
        chosen = rng.choice(ready)
        nodes.remove(chosen)
        missing.difference_update(chosen.output)
        train.graph.node.append(chosen)
    return Step(train, step.init, step.eval, step.manifest)


def losses(step: Step, in_place: bool) -> list[float]:
    t = Trainer(step, device="cpu", options=RuntimeOptions(threads=1, in_place=in_place))
    found = [float(t.step(batch)["loss"]) for batch in batches(step, 20)]
    assert bool(t.state.shared) == in_place
    return found


@pytest.mark.sweep(0.06)
@pytest.mark.parametrize("make", [mlp, tokens])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by_priority", [False, True])
def test_every_order_gives_the_losses_of_two_buffers(
    make: object, seed: int, by_priority: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_priority:
        original = RuntimeOptions.session_options

        def ordered(self: RuntimeOptions) -> ort.SessionOptions:
            options = original(self)
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
            return options

        monkeypatch.setattr(RuntimeOptions, "session_options", ordered)
    step = reordered(make(), seed)  # type: ignore[operator]
    assert losses(step, in_place=True) == losses(step, in_place=False)


@pytest.mark.sweep(0.05)
@pytest.mark.parametrize("make", [mlp, tokens, convolutions])
@pytest.mark.parametrize("seed", range(4))
def test_updates_of_large_tensors_wait_for_their_other_readers(
    make: Callable[[], Step], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then weights of products lie in memory once, too."""
    monkeypatch.setattr(inplace, "LARGE", 1)
    step = reordered(make(), seed)
    expected = losses(step, in_place=False)
    assert losses(step, in_place=True) == expected
    trainer = Trainer(step, device="cpu", options=RuntimeOptions(threads=1, in_place=True))
    trainer.step(batches(step, 1)[0])
    assert set(trainer.state.shared) >= {s.name for s in step.manifest.state if s.kind == "parameter"}


def test_who_needs_an_update_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two reads what the other has become."""
    monkeypatch.setattr(inplace, "LARGE", 1)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>'
        "m (float[4] a, float[4] b) => (float[4] x, float[4] y, float loss)"
        "{ x = Neg(a) y = Neg(b) s = Mul(x, b) t = Mul(y, a) u = Add(s, t) loss = ReduceSum(u) }"
    )
    before = model.SerializeToString()
    assert inplace.with_updates_last(model, {"a": "x", "b": "y"}).SerializeToString() == before


def test_without_the_proof_the_losses_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison above is worth."""
    step = mlp()
    monkeypatch.setattr(overwrites, "overwritable", lambda model, next_of, behind: frozenset(next_of))
    assert losses(step, in_place=True) != losses(step, in_place=False)


def test_slots_of_the_optimizer_lie_in_memory_once() -> None:
    t = Trainer(mlp(), device="cpu", options=RuntimeOptions(threads=1, in_place=True))
    t.step(batches(mlp(), 1)[0])
    slots = {s.name for s in t.manifest.state if s.kind == "optimizer"}
    assert slots <= t.state.shared
    assert len(slots) == 2 * len(t.manifest.trainable)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_state_lies_in_memory_twice_at_most(in_place: bool) -> None:
    """After training with both sessions, evaluation and prediction, too."""
    t = Trainer(mlp(), device="cpu", options=RuntimeOptions(threads=1, in_place=in_place))
    batch = batches(mlp(), 1)[0]
    t.fit(batch, batch_size=3, progress=False, validation=batch)
    t.predict(batch)
    tensors = [{n: v.data_ptr() for n, v in t.state.values(side).items()} for side in range(2)]
    twice = {n for n, where in tensors[0].items() if where != tensors[1][n]}
    assert twice == t.state.specs.keys() - t.state.shared
    assert bool(t.state.shared) == in_place
    copied = [session._copied.keys() for session in t._session.part._made.values()]
    assert copied == [set(), set()]


def test_initial_weights_are_released_once_the_state_is_there(tmp_path: Path) -> None:
    """A step that was built keeps them, having no other place; one from a folder reads them again when asked."""
    folder = mlp().save(tmp_path / "step")
    t, built = Trainer(folder, device="cpu"), Trainer(mlp(), device="cpu")
    initial = t.definition.init.SerializeToString()
    assert t.state.specs and "init" not in vars(t.definition)
    assert built.state.specs and "init" in vars(built.definition)
    assert t.definition.init.SerializeToString() == initial
    t.definition.release_init()
    mlp().save(folder, force=True)
    with pytest.raises(
        ModelError, match="is gone, or is not the file that this step was loaded from; load the step again"
    ):
        t.definition.save(tmp_path / "copy")


def test_a_session_that_may_not_overwrite_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second session has a graph of its own; what it cannot prove it writes elsewhere first."""
    step, calls = mlp(), list[int]()

    def proven_once(model: onnx.ModelProto, next_of: dict[str, str], behind: str) -> frozenset[str]:
        calls.append(1)
        return overwritable(model, next_of, behind) if len(calls) == 1 else frozenset()

    monkeypatch.setattr(overwrites, "overwritable", proven_once)
    assert losses(step, in_place=True) == losses(step, in_place=False)
    assert len(calls) == 2


def test_a_failed_step_loses_the_state_and_says_so() -> None:
    t = Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1, in_place=True))
    batch = handmade.points(8)
    t.step(batch)
    before = t.state_dict()
    with pytest.raises(DivergedError, match="was overwritten, since in_place=True: load a checkpoint"):
        t.step({**batch, "x": batch["x"] * np.float32(np.nan)})
    for use in (t.state_dict, lambda: t.step(batch), lambda: t.predict(batch), lambda: t.evaluate(batch)):
        with pytest.raises(ModelError, match="the last step failed while it overwrote the state"):
            use()
    t.load_state_dict(before)
    assert np.isfinite(t.step(batch)["loss"])
