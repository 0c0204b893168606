"""Training sessions have one region of memory each: how large it is, and that nothing depends on it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.runtime.execution import memory, opener, regions
from gradgraph.runtime.execution.arena import Arena
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.execution.walk import most_alive
from tests.kit.lowered_networks import exported

MIB = 1 << 20


def test_where_memory_counts_that_is_not_written_it_is_as_usual(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    monkeypatch.setattr(regions, "_counts_all", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert regions.first_region(1 << 40) == regions.region_for(regions.LEAST_STATE, 1 << 40) == regions.LARGE
    assert regions.region_for(regions.LEAST_STATE, 100 * MIB + 1) == 200 * MIB + regions.WORKSPACES
    assert regions.region_for(regions.LEAST_STATE - 1, 1 << 40) == regions.USUAL
    for limited in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft = {limited: 1 << 32}
        monkeypatch.setattr(resource, "getrlimit", lambda kind, s=soft: (s.get(kind, resource.RLIM_INFINITY),) * 2)
        assert regions.first_region(1) == regions.USUAL
    monkeypatch.undo()
    (tmp_path / "never").write_text("2\n")
    monkeypatch.setattr(regions, "_OVERCOMMIT", tmp_path / "never")
    regions._counts_all.cache_clear()
    assert regions.first_region(1) == regions.USUAL
    regions._counts_all.cache_clear()


def test_pieces_that_lie_in_two_regions_serve_no_large_tensor() -> None:
    taken = []
    for first in (regions.USUAL, 128 * MIB):
        arena = Arena(first, regions.most_left(first))
        for piece in [arena.take(5 * MIB) for _ in range(6)]:
            arena.give(piece)
        arena.take(30 * MIB)
        taken.append(arena.taken // MIB)
    assert taken == [57, 34]  # of which 2 and 4 are tables


def test_what_lives_at_a_time() -> None:
    """Neither inputs, outputs nor views count; what is read for the last time goes behind its reader."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[4] x) => (float[4] y, float[2, 2] z) <int64[2] two = {2, 2}> {
            a = Sin (x)
            b = Cos (a)
            c = Exp (a)
            y = Add (b, c)
            d = Neg (y)
            e = Reshape (d, two)
            f = Abs (e)
            z = Sqrt (f)
        }""")
    assert most_alive(onnx.shape_inference.infer_shapes(model)) == 3 * 16  # a, b and c; then d with f


def test_an_arena_has_the_sessions_of_a_block_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[object]()
    monkeypatch.setattr(regions, "_register", lambda first: found.append(first))

    class Settings:
        def add_session_config_entry(self, *entry: str) -> None:
            found.append(entry)

    settings: Any = Settings()
    its_arena = ("session.use_env_allocators", "1")
    first = regions.first_region(MIB)
    with regions.in_one_region(MIB, settings):
        found.append("made")
    assert found == [first, its_arena, "made", regions.USUAL]
    found.clear()
    with pytest.raises(ZeroDivisionError), regions.region_of_several(MIB) as memory:
        for i in (1, 0):
            with memory(settings):
                found.append(1 // i)
    assert found == [first, its_arena, 1, its_arena, regions.USUAL]


def test_losses_are_the_same_in_either_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of two trainers that open at a time."""
    step = gg.build(exported("mlp", "batch"), "cross_entropy", "adamw")
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((6, 12)).astype(np.float32), "target": rng.integers(0, 4, 6)}
    found = dict[int, list[float]]()
    monkeypatch.setattr(opener, "LEAST_STATE", 1)

    def train(number: int) -> None:
        trainer = gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1))
        found[number] = [float(trainer.step(batch)["loss"]) for _ in range(3)]
        found[number].append(float(trainer.evaluate(batch)["loss"]))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(opener, "in_one_region", lambda alive, settings: contextlib.nullcontext())
    train(2)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("native_kernels", [None, False])
def test_gradients_of_weights_do_not_stand_together(native_kernels: bool | None) -> None:
    """A weight moves once its gradient is there, unless a norm over all is asked for."""
    nn, layers, width = gg.frontend.nn, 12, 512
    network = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))
    model = gg.frontend.export(network, {"x": ("batch", width)})
    clipped = gg.optim.chain(gg.optim.clip_by_global_norm(1.0), gg.optim.adamw(1e-3))
    options = RuntimeOptions(native_kernels=native_kernels)
    once, together = (memory.memory(gg.build(model, "mse", o), options=options, batch=4) for o in ("adamw", clipped))
    weight = 4 * width * width
    assert once.peak < 5 * weight  # a gradient, and what is made of it
    assert together.peak > layers * weight
    assert once.following < weight < once.weights
