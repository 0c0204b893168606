"""Subnormal numbers count as zero while a session computes, and nowhere else."""

import threading

import numpy as np
import onnx.parser
import pytest

from gradgraph.runtime.execution import denormals
from gradgraph.runtime.execution.denormals import Flushed
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

known_here = pytest.mark.skipif(
    not denormals.known_here(), reason="the floating-point environment of this platform is not known"
)
TINY = np.full(100_000, 1e-40, np.float32)  # enough for every thread to get its share
HALVES = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[100000] x) => (float[100000] y) '
    "{ c = Constant<value_float = 0.5>()  y = Mul(x, c) }"
)


def halves_here() -> np.ndarray:
    return TINY[:8] * np.float32(0.5)


def session(**options: bool):
    return create_session(HALVES, Placement.choose("cpu"), RuntimeOptions(threads=2, **options))


@known_here
def test_a_thread_is_as_it_was_afterwards():
    assert halves_here().all()
    with Flushed():
        assert not halves_here().any()
        with Flushed():
            pass
        assert not halves_here().any()
    assert halves_here().all()
    with pytest.raises(ZeroDivisionError), Flushed():
        raise ZeroDivisionError
    assert halves_here().all()


@known_here
def test_every_thread_of_a_session_flushes_and_no_other():
    flushing = session()
    assert halves_here().all()
    assert not flushing.run(None, {"x": TINY})[0].any()
    assert halves_here().all()
    found = []
    thread = threading.Thread(target=lambda: found.append(flushing.run(None, {"x": TINY})[0]))
    thread.start()
    thread.join()
    assert not found[0].any()


@known_here
def test_bound_runs_flush():
    flushing = session()
    binding = flushing.io_binding()
    binding.bind_cpu_input("x", TINY)
    binding.bind_output("y")
    flushing.run_with_iobinding(binding)
    assert not binding.copy_outputs_to_cpu()[0].any()


@known_here
def test_a_thread_that_is_set_stays_so_between_runs():
    flushing = session()
    binding = flushing.io_binding()
    binding.bind_cpu_input("x", TINY)
    binding.bind_output("y")
    with Flushed():
        for _ in range(2):
            flushing.run_with_iobinding(binding)
            assert not halves_here().any()
            assert not binding.copy_outputs_to_cpu()[0].any()
    assert halves_here().all()


class Look:
    """A callback that computes with subnormal numbers."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_step(self, trainer: Trainer, results: object) -> None:
        self.found.append(bool(halves_here().all()))


def test_the_callers_of_a_fit_compute_as_ever():
    """Callbacks, schedules and generators of batches run in a thread that is set as they left it."""
    look, data = Look(), handmade.points(48)

    def rate(step: int) -> float:
        look.on_step(trainer, None)
        return 0.1

    def batches():
        look.on_step(trainer, None)
        yield handmade.points(16)

    trainer = Trainer(handmade.classifier(), device="cpu")
    trainer.fit(data, batch_size=16, progress=False, callbacks=[look])
    trainer.fit(data, batch_size=16, progress=False, learning_rate=rate)
    trainer.fit(batches, progress=False)
    trainer.fit(data, batch_size=16, progress=False)
    look.on_step(trainer, None)
    assert len(look.found) == 3 + 3 + 1 + 1 and all(look.found)  # a rate for each step


def test_off_keeps_them():
    assert session(flush_denormals=False).run(None, {"x": TINY})[0].all()


def test_unknown_platforms_keep_them(monkeypatch):
    monkeypatch.setattr(denormals, "_control", lambda: None)
    with Flushed():
        assert halves_here().all()
    assert session().run(None, {"x": TINY})[0].all()
