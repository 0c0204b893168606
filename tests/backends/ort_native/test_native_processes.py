"""Native kernels in threads, in processes that are forked or spawned after they were loaded, and on awkward buffers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.backends.ort_native import library as native
from gradgraph.frontend import export, nn
from gradgraph.runtime.execution.session import RuntimeOptions

pytestmark = pytest.mark.one_level
WORKERS = 3


@pytest.fixture(autouse=True)
def every_family() -> None:
    """Processes of their own choose kernels by this processor, so this one does, too."""


def batch(rows: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, 3, 8, 8)).astype(np.float32), "target": rng.integers(0, 5, rows)}


def losses(folder: Path, given: dict[str, np.ndarray] | None = None) -> list[str]:
    """Three losses of a trainer with native kernels, to the bit."""
    trainer = gg.Trainer(folder, device="cpu", options=RuntimeOptions(threads=2, native_kernels=True))
    return [float(trainer.step(given or batch())["loss"]).hex() for _ in range(3)]


@pytest.fixture
def folder(library: native.Library, tmp_path: Path) -> Path:
    """A step of convolutions, normalisations and products."""
    conv = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 3, groups=16)]
    network = nn.Sequential(*conv, nn.Flatten(), nn.LayerNorm(576), nn.Linear(576, 5))
    path = tmp_path / "step"
    gg.build(export(network, {"x": ("batch", 3, 8, 8)}), "cross_entropy", gg.optim.adamw(1e-2)).save(path)
    return path


@pytest.mark.sweep(0)
def test_trainers_in_threads_compute_the_same_bits(folder: Path) -> None:
    wanted = losses(folder)
    with ThreadPoolExecutor(WORKERS) as pool:
        assert list(pool.map(losses, [folder] * WORKERS)) == [wanted] * WORKERS


@pytest.mark.sweep(0)
@pytest.mark.parametrize("way", [w for w in ("fork", "spawn") if w in multiprocessing.get_all_start_methods()])
def test_processes_that_begin_after_it_was_loaded_compute_the_same_bits(folder: Path, way: str) -> None:
    wanted = losses(folder)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(way)) as pool:
        assert list(pool.map(losses, [folder] * 2, timeout=120)) == [wanted] * 2


def misaligned(x: np.ndarray) -> np.ndarray:
    memory = np.empty(x.nbytes + 1, np.uint8)
    moved = memory[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    assert not moved.flags.aligned
    return moved


def every_second(x: np.ndarray) -> np.ndarray:
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


LIE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "at an odd address": misaligned,
    "at every second place": every_second,
    "backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "in Fortran's order": np.asfortranarray,
    "in part of a larger array": lambda x: np.concatenate([x, x, x])[len(x) :][: len(x)],
    "where nothing may be written": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.sweep(0.32)
@pytest.mark.parametrize("lies", LIE)
def test_it_does_not_matter_how_a_batch_lies(folder: Path, lies: str) -> None:
    given = batch()
    moved = {"x": LIE[lies](given["x"]), "target": given["target"]}
    np.testing.assert_array_equal(moved["x"], given["x"])
    assert losses(folder, moved) == losses(folder, given)


@pytest.mark.sweep(0.19)
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_batches_of_any_size_agree_with_stock(folder: Path, rows: int) -> None:
    given = batch(rows)
    stock = gg.Trainer(folder, device="cpu", options=RuntimeOptions(threads=2, native_kernels=False))
    wanted = [float(stock.step(given)["loss"]) for _ in range(3)]
    found = [float.fromhex(loss) for loss in losses(folder, given)]
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)
