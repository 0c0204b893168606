"""Whole steps with native kernels train as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native import library as native
from gradgraph.runtime.execution.session import RuntimeOptions
from tests.kit.lowered_networks import NETWORKS, batches, step

pytestmark = pytest.mark.usefixtures("library")

OPTIMIZERS: dict[str, Callable[[], gg.optim.Optimizer]] = {
    "momentum": lambda: gg.optim.sgd(0.05, momentum=0.9),
    "nesterov": lambda: gg.optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: gg.optim.adamw(0.01),
}


@pytest.fixture(autouse=True)
def lower_small_layers_too(monkeypatch: pytest.MonkeyPatch, every_attention: None) -> None:
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)


def trainer(built: gg.Step, native_kernels: bool = False, **options: object) -> gg.Trainer:
    return gg.Trainer(built, device="cpu", options=RuntimeOptions(native_kernels=native_kernels, **options))


def assert_alike(found: gg.Trainer, wanted: gg.Trainer, tolerance: float = 1e-3) -> None:
    other = found.state_dict()
    for name, value in wanted.state_dict().items():
        scale = max(1.0, float(np.abs(value).max(initial=0.0)))
        np.testing.assert_allclose(other[name], value, rtol=tolerance, atol=0.1 * tolerance * scale, err_msg=name)


def kernels(built: gg.Step) -> list[str]:
    return [n.op_type for n in for_machine(built.train, ORT_NATIVE).graph.node if n.domain == native.DOMAIN]


@pytest.mark.sweep(0.23)
@pytest.mark.parametrize("rows", [8, "n"], ids=["fixed", "open"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, rows: int | str) -> None:
    """In blocks, in loops and in between: three steps, then a batch of another size."""
    built = step(name, rows, gg.optim.sgd(0.05, momentum=0.9))
    plain, fast = trainer(built, threads=2), trainer(built, threads=2, native_kernels=True)
    for batch in batches(name, 8, 3) + (batches(name, 3, 1) if rows == "n" else []):
        np.testing.assert_allclose(fast.step(batch)["loss"], plain.step(batch)["loss"], rtol=1e-4)
    assert_alike(fast, plain)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, threads: int, in_place: bool) -> None:
    built = step("mlp", "n", OPTIMIZERS[name]())
    assert {"AdamUpdate", "MomentumUpdate"} & set(kernels(built))
    plain = trainer(built, threads=threads)
    fast = trainer(built, threads=threads, native_kernels=True, in_place=in_place)
    for batch in batches("mlp", 8, 5):
        np.testing.assert_allclose(fast.step(batch)["loss"], plain.step(batch)["loss"], rtol=1e-5)
    assert_alike(fast, plain, 1e-4)


def test_state_is_written_over_in_place() -> None:
    """What an optimizer remembers needs no second buffer; nor does a weight that no gradient flows through later."""
    fast = trainer(step("mlp", 8, gg.optim.adamw(0.01)), native_kernels=True, in_place=True)
    fast.step(batches("mlp", 8, 1)[0])
    shared = fast.state.shared
    slots = {s.name for s in fast.manifest.state if s.kind != "parameter" and s.shape}
    assert slots and slots <= shared


def test_nothing_of_it_is_saved(tmp_path: Path) -> None:
    built = step("mlp", "n", gg.optim.adamw(0.01))
    plain, fast = trainer(built), trainer(built, native_kernels=True)
    (batch,) = batches("mlp", 8, 1)
    for one in (plain, fast):
        one.step(batch)
    fast.save(tmp_path / "run.ckpt")
    again = gg.Trainer.resume(built, tmp_path / "run.ckpt", device="cpu")
    assert_alike(again, plain, 1e-4)
    np.testing.assert_allclose(again.predict(batch["x"]), fast.predict(batch["x"]), rtol=1e-6)
    assert native.DOMAIN not in str(fast.export())
