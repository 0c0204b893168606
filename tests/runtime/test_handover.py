"""What is handed over between calls, trainers and threads stays what it was: results are copies, a buffer belongs to
its reader until that is done, and what one trainer has checked is taken by another only if that would check the same.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.data.sources import sources as data_module
from gradgraph.errors import BusyError, DataError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step import folder as step_folder
from tests.kit import handmade

pytestmark = pytest.mark.any_kernels

QUIET = RuntimeOptions(threads=1)
DATA = handmade.points(56)  # with a last batch that is smaller
OTHER = handmade.points(56, seed=1)
FIT: dict[str, Any] = {"batch_size": 16, "progress": False}


def trainer(**options: Any) -> Trainer:
    return Trainer(handmade.classifier(), device="cpu", options=QUIET, **options)


# --- results are the caller's -------------------------------------------------------------------------------------


class Results:
    """A callback that keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_step(self, t: Trainer, results: Any) -> None:
        self.kept.append(results)

    def on_epoch(self, t: Trainer, row: Any) -> None:
        self.kept.append(row)


def of_callbacks(t: Trainer) -> Any:
    results = Results()
    t.fit(OTHER, callbacks=[results], **FIT)
    return results.kept


GIVEN: dict[str, Callable[[Trainer], Any]] = {
    "step": lambda t: t.step({n: a[:16] for n, a in OTHER.items()}),
    "fit": lambda t: t.fit(OTHER, **FIT),
    "callbacks": of_callbacks,
    "evaluate": lambda t: t.evaluate(OTHER, 16),
    "predict": lambda t: t.predict(OTHER, 56),
    "predict in batches": lambda t: t.predict(OTHER, 8),
    "state_dict": Trainer.state_dict,
    "parameters": lambda t: t.parameters,
    "export": lambda t: t.export(),
}


@pytest.mark.sweep(0.485)
@pytest.mark.parametrize("what", GIVEN)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_a_call_has_given_does_not_change(what: str, steps: int) -> None:
    """Whatever is called afterwards, on either of the two sets of state tensors."""
    t = trainer()
    for _ in range(steps):
        GIVEN["step"](t)
    given = GIVEN[what](t)
    expected = copy.deepcopy(given)
    for call in [*GIVEN.values(), *GIVEN.values()]:
        call(t)
    t.load_state_dict({name: np.zeros_like(value) for name, value in t.state_dict().items()})
    GIVEN["step"](t)
    np.testing.assert_equal(plain(given), plain(expected))


def plain(given: Any) -> Any:
    return given.SerializeToString(deterministic=True) if isinstance(given, onnx.ModelProto) else given


def test_what_a_call_was_given_is_not_kept() -> None:
    """A state that was loaded, a batch that was trained on: their owner may write over them."""
    one, two = trainer(), trainer()
    state, batch = one.state_dict(), {n: a[:16].copy() for n, a in DATA.items()}
    for t, mine in ((one, lambda a: a), (two, np.copy)):
        given = {name: mine(value) for name, value in state.items()}
        t.load_state_dict(given)
        if t is one:
            for value in given.values():
                value[...] = 7
        fed = {name: mine(value) for name, value in batch.items()}
        t.step(fed)
        if t is one:
            batch = {name: value.copy() for name, value in batch.items()}
            for value in fed.values():
                value[...] = 1
        t.step(batch)
        state = two.state_dict() if t is one else state
    assert all(np.array_equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())


# --- batches belong to their reader -------------------------------------------------------------------------------


def passes(t: Trainer, prepared: Any) -> dict[str, Callable[[], object]]:
    """Other uses of what is trained on."""
    closed = prepared.batches(0)
    next(closed)
    return {
        "evaluate": lambda: t.evaluate(prepared),
        "predict": lambda: t.predict(prepared),
        "a pass": lambda: [dict(batch) for batch in prepared.batches(3)],
        "a pass that is given up": lambda: [dict(batch) for batch in itertools.islice(prepared.batches(3), 2)],
        "a pass that ends late": closed.close,
        "another trainer": lambda: trainer(seed=5).fit(prepared, epochs=1, **FIT),
    }


@pytest.mark.sweep(0.014)
@pytest.mark.parametrize("ahead", [1 << 30, 0], ids=["one by one", "ahead"])
@pytest.mark.parametrize("threaded", [False, True], ids=["in a callback", "in a thread"])
@pytest.mark.parametrize("what", ["evaluate", "predict", "a pass", "a pass that is given up", "a pass that ends late",
                                  "another trainer"])  # fmt: skip
def test_prepared_data_may_be_read_while_they_are_trained_on(
    what: str, threaded: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step, and the training ends with the same bits."""
    monkeypatch.setattr(data_module, "PREFETCH_BYTES", ahead)
    alone, shared = trainer(), trainer()
    prepared = shared.prepare(DATA, 16)
    history = alone.fit(DATA, epochs=2, **FIT)

    class Disturb:
        def on_step(self, t: Trainer, results: object) -> None:
            call = passes(t, prepared)[what]
            if not threaded:
                call()
                return
            thread = threading.Thread(target=call)
            thread.start()
            thread.join(0.01)  # it may go on into the next step

    assert shared.fit(prepared, epochs=2, callbacks=[Disturb()], **FIT) == history
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(10)
    assert all(np.array_equal(value, alone.state_dict()[name]) for name, value in shared.state_dict().items())


def test_two_trainers_in_two_threads_share_prepared_data() -> None:
    alone, shared = [trainer(seed=s) for s in (1, 1)], [trainer(seed=s) for s in (1, 1)]
    for t in alone:
        t.fit(DATA, epochs=8, **FIT)
    prepared = shared[0].prepare(DATA, 16)
    threads = [threading.Thread(target=lambda t=t: t.fit(prepared, epochs=8, **FIT)) for t in shared]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, shared, strict=True):
        assert one.history == other.history
        assert all(np.array_equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.sweep(0)
def test_trainers_in_several_threads_share_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its initial weights are let go by the first and read again by the next; both files beside it are mapped once."""
    monkeypatch.setattr(step_folder, "LEAST_KEPT", 16)
    gg.build(two_layers(70_000), "cross_entropy", gg.optim.adamw(0.01), train=["w"]).save(tmp_path / "step")
    assert (tmp_path / "step" / "frozen.bin").exists() and (tmp_path / "step" / "init.bin").exists()
    alone = Trainer(tmp_path / "step", device="cpu", options=QUIET)
    history, shared = alone.fit(LABELLED, epochs=3, **FIT), gg.Step.load(tmp_path / "step")
    found: list[Any] = []

    def train() -> None:
        t = Trainer(shared, device="cpu", options=QUIET)
        found.append((t.fit(LABELLED, epochs=3, **FIT), t.evaluate(LABELLED), t.export().SerializeToString()))

    for _ in range(3):
        threads = [threading.Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = history, alone.evaluate(LABELLED), alone.export().SerializeToString()
    assert found == [expected] * 12


def test_small_weights_beside_the_models_are_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from the working folder, where there is none of that name. No step that we save has any."""
    step = gg.build(two_layers(16), "cross_entropy", gg.optim.adamw(0.01), train=["w"])
    with monkeypatch.context() as patch:
        patch.setattr(step_folder, "LEAST_BYTES", 16)
        step.save(tmp_path / "step")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    one, two = (Trainer(s, device="cpu", options=QUIET) for s in (step, tmp_path / "step"))
    assert one.fit(LABELLED, **FIT) == two.fit(LABELLED, **FIT)
    assert one.evaluate(LABELLED) == two.evaluate(LABELLED)


def two_layers(features: int) -> onnx.ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, 10] y) { h = MatMul (x, f)  y = MatMul (h, w) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"f": (4, features), "w": (features, 10)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


# --- what another trainer has checked -------------------------------------------------------------------------------


def linear(classes: int, features: int = 4, name: str = "x", **loss: Any) -> gg.Step:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, {features}] {name}) => (float[batch, {classes}] y) {{ y = MatMul ({name}, w) }}""")
    weight = np.random.default_rng(0).normal(size=(features, classes)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return gg.build(model, gg.losses.cross_entropy(**loss), gg.optim.sgd(0.1))


LABELLED = {"x": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32), "target": np.arange(64) % 10}
UNFIT: dict[str, tuple[Callable[[], Trainer], str]] = {
    "fewer classes": (lambda: Trainer(linear(3), device="cpu"), "labels must be from 0 to 2"),
    "other features": (lambda: Trainer(linear(10, 7), device="cpu"), r"the step expects \[batch, 7\]"),
    "another name": (lambda: Trainer(linear(10, name="z"), device="cpu"), "has no input 'x'"),
    "finite numbers only": (lambda: Trainer(linear(10), device="cpu", check_inputs=True), "'x' contains nan"),
}


@pytest.mark.sweep(0.55)
@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_data_that_another_trainer_has_prepared_are_checked(case: str, shuffle: bool, call: str) -> None:
    columns = {**LABELLED, "x": LABELLED["x"].copy()}
    columns["x"][3] = np.nan if case == "finite numbers only" else 0
    prepared = Trainer(linear(10), device="cpu").prepare(columns, 16, shuffle=shuffle)
    make, says = UNFIT[case]
    t = make()
    with pytest.raises(DataError, match=says):
        t.fit(prepared, shuffle=shuffle, **FIT) if call == "fit" else t.evaluate(prepared)


@pytest.mark.parametrize("shuffle", [False, True])
def test_means_are_over_what_the_trainer_at_hand_counts(shuffle: bool) -> None:
    """Another step ignores another label."""
    prepared = Trainer(linear(10), device="cpu").prepare(LABELLED, 16, shuffle=shuffle)
    ignoring = Trainer(linear(10, ignore_index=3), device="cpu")
    assert ignoring.evaluate(prepared) == pytest.approx(ignoring.evaluate(LABELLED, 16), rel=1e-6)


@pytest.mark.parametrize("shuffle", [False, True])
def test_predictions_for_prepared_data_are_in_the_order_of_the_samples(shuffle: bool) -> None:
    t = trainer()
    found, expected = t.predict(t.prepare(DATA, 16, shuffle=shuffle)), t.predict(DATA, 16)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(value, expected[name]) for name, value in found.items())


class Dataset:
    def __len__(self) -> int:
        return len(DATA["x"])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: array[i] for name, array in DATA.items()}


def test_a_prepared_dataset_takes_the_order_that_fit_is_asked_for() -> None:
    one, two = trainer(), trainer()
    assert one.fit(one.prepare(Dataset(), 8, shuffle=False), **FIT) == two.fit(Dataset(), **FIT)


# --- calls within a fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_step", "on_epoch", "on_end"])
@pytest.mark.parametrize("what", ["fit", "load"])
def test_fit_and_load_in_a_callback_of_fit_are_refused(what: str, hook: str, tmp_path: Path) -> None:
    """They would move the epoch that the fit stands in: after a load it never ended."""
    alone, t = trainer(), trainer()
    t.save(tmp_path / "run.ckpt")
    refused = []

    def disturb(trainer: Trainer, given: object) -> None:
        with pytest.raises(BusyError, match=f"^{what} cannot run in a callback of fit") as error:
            t.fit(OTHER, **FIT) if what == "fit" else t.load(tmp_path / "run.ckpt")
        refused.append(error)

    callback = type("Callback", (), {hook: staticmethod(disturb)})()
    assert t.fit(DATA, epochs=2, callbacks=[callback], **FIT) == alone.fit(DATA, epochs=2, **FIT)
    assert refused
    t.load(tmp_path / "run.ckpt")


@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan"), -float("inf")])
def test_a_time_that_is_over_before_it_begins_is_refused(value: float) -> None:
    with pytest.raises(DataError, match=r"max_time is (0|-|nan).*should be a positive number of seconds"):
        trainer().fit(DATA, max_time=value, **FIT)
