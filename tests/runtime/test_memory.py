"""Estimates of memory against what processes take; the size of batches that is found fits, and harms nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest

import gradgraph as gg
from gradgraph.backends.executed_order import as_executed
from gradgraph.backends.ort_native import in_use
from gradgraph.cli.app import run as command
from gradgraph.errors import DataError, UnknownNameError
from gradgraph.machine.free_memory import at_most_free, free_memory, resident_memory
from gradgraph.runtime.execution import walk
from gradgraph.runtime.execution.peak import peak
from gradgraph.runtime.loop import sizing
from gradgraph.runtime.loop.logs import peak_memory
from gradgraph.runtime.loop.sizing import limit_of
from tests.kit.command_line import arrays, mlp
from tests.kit.lowered_networks import exported

MIB = 2**20
SESSIONS = 30 * MIB  # of onnxruntime for a session of any size, with a reserve
MEASURED = """
import sys
import numpy as np
import gradgraph as gg
from tests.kit.lowered_networks import batches
from gradgraph.runtime.loop.logs import memory
options = gg.RuntimeOptions(threads=1, native_kernels=sys.argv[4] == "True")
trainer = gg.Trainer(gg.Step.load(sys.argv[1]), device="cpu", options=options)
(batch,) = batches(sys.argv[2], int(sys.argv[3]), 1)
before = memory()["memory_mib"]
for _ in range(2):
    trainer.step(batch)
print(memory()["memory_mib"] - before)
"""


def grown(folder: Path, name: str, rows: int, native_kernels: bool) -> float:
    """The bytes that a process of its own grows by when it trains."""
    words = [sys.executable, "-c", MEASURED, str(folder), name, str(rows), str(native_kernels)]
    modules = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # those of the tests, too
    ran = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120, env=modules)
    return float(ran.stdout) * MIB


@pytest.mark.sweep(0)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what a process takes")
@pytest.mark.parametrize(
    ("name", "rows", "recompute"),
    [("residual", 768, None), ("transformer", 1536, None), ("lstm", 8192, None), ("u-net", 128, None),
     ("u-net", 160, "sqrt")],
)  # fmt: skip
def test_estimates_are_near_what_processes_take(name: str, rows: int, recompute: str | None, tmp_path: Path) -> None:
    step = gg.build(exported(name, "batch"), "cross_entropy", "adamw", recompute=recompute)
    step.save(tmp_path / "step")
    for native_kernels, most in ((False, 1.7), (True, 2.1)):
        if native_kernels and in_use.found().why_not:
            continue
        found = gg.memory(step, batch=rows, options=gg.RuntimeOptions(native_kernels=native_kernels))
        assert found.total > 2 * SESSIONS
        took = grown(tmp_path / "step", name, rows, native_kernels)
        assert 0.6 * found.total < took < most * found.total + SESSIONS


def test_what_it_counts() -> None:
    step = gg.build(mlp(), "cross_entropy", "adamw", freeze="first.*")
    found = gg.memory(step, N=8)
    state = sum(s.nbytes for s in step.manifest.state)
    assert found.weights + found.optimizer == found.following == state
    assert 4 * (8 * 4 + 8) <= found.frozen < 4 * (8 * 4 + 8) + 100, "and constants of the step"
    assert found.batch == 8 * (4 * 4 + 8)
    assert found.total == 2 * state + found.frozen + found.batch + found.peak + found.gaps + found.session
    for word in ("weights", "frozen", "optimizer", "a training step (N=8)"):
        assert word in str(found)
    assert "<td>weights</td>" in found._repr_html_()
    larger = gg.memory(step, N=800)
    assert larger.peak > 50 * found.peak / 2
    assert json.dumps(larger.as_data())
    with pytest.raises(UnknownNameError, match="no dynamic dimension 'batch'"):
        gg.memory(step, batch=8)


@pytest.mark.sweep(0)
def test_frozen_weights_count_as_they_are_stored() -> None:
    adapted = gg.lora(Path(__file__).parents[2] / "examples" / "tiny_llama_int4.onnx", "*attn*", rank=2)
    model = gg.surgery.language_model(adapted)
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), "adamw")
    state = {spec.name for spec in step.manifest.state}
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name not in state}
    integers = sum(array.nbytes for array in stored.values() if array.dtype == np.uint8)
    assert integers > 10_000
    whole = sum(array.nbytes for array in stored.values())
    assert whole <= gg.memory(step).frozen < 1.05 * whole, "and constants of the step"


def test_what_the_peak_consists_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = gg.build(mlp(), "cross_entropy", "adamw")
    found = peak(step, N=64)
    assert sum(h.bytes for h in found.held) == found.memory.peak
    assert sum(found.modules.values()) == found.memory.activations
    assert sum(found.operators.values()) == found.memory.peak
    assert {name.partition(", ")[0] for name in found.operators} <= {*walk.KINDS}
    assert all(" (" in h.made_by and h.kind in walk.KINDS for h in found.held)
    assert [h.bytes for h in found.held] == sorted((h.bytes for h in found.held), reverse=True)
    assert found.memory == gg.memory(step, N=64) and found.batches[128] == gg.memory(step, N=128).total
    step.save(tmp_path / "step")
    assert command(["inspect", str(tmp_path / "step"), "--memory", "--batch-size", "64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["memory"]
    assert data["held"][0]["name"] == found.held[0].name and data["batches"]["64"] == found.memory.total
    assert command(["inspect", str(tmp_path / "step"), "--memory", "--batch-size", "64"]) == 0
    said = capsys.readouterr().out
    assert "at the peak, by operator" in said and "gaps between them" in said
    assert "activations at the peak, by module" in said and "kept by" in said
    onnx.save(mlp(), tmp_path / "model.onnx")
    assert command(["inspect", str(tmp_path / "model.onnx"), "--memory"]) == 2


def test_the_order_is_that_of_onnxruntime() -> None:
    """What the last node needs comes first, and a gradient is used up before the next one is computed."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[2] x) => (float[2] p, float[2] q) {
            a = Sin (x)
            b = Cos (a)
            c = Exp (b)
            p = Neg (c)
            q = Abs (b)
        }""")
    order = [node.op_type for node in as_executed(onnx_ir.from_proto(model).graph)]
    assert order == ["Sin", "Cos", "Abs", "Exp", "Neg"]


def test_the_worst_moment() -> None:
    """Two tensors of 400 bytes and what is made of them; one that is written over another takes nothing, and one that
    nobody reads lives to the end.
    """
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[100] x) => (float[] y) {
            a = Sin (x)
            b = Cos (x)
            flat = Reshape (a, shape)
            c = Add (flat, b)
            e, unread = Split <axis = 0, num_outputs = 2> (x)
            d = Concat <axis = 0> (c, c, e)
            y = ReduceSum <keepdims = 0> (d)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "shape"))
    assert walk.walked(model).peak == {"activations": 400 + 1000 + 2 * 200, "gradients": 0, "update": 0}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("auto", None),
        ("auto:4GB", 4 * 10**9),
        ("auto:1.5 GiB", 3 * 2**29),
        ("AUTO:500m", 5 * 10**8),
        ("auto:1024", 1024),
    ],
)
def test_limits(given: str, found: int | None) -> None:
    assert limit_of(given) == found


@pytest.mark.parametrize("given", ["automatic", "auto:", "auto:much", "4GB", ""])
def test_what_is_no_limit(given: str) -> None:
    with pytest.raises(DataError, match="should be a whole number, 'auto'"):
        limit_of(given)


def searched(monkeypatch: pytest.MonkeyPatch, each: float, allowed: float, rows: int = 1000) -> tuple[int, list[int]]:
    """The size that is found where a sample takes ``each`` MiB and a step 10 more, and what was tried."""
    tried: list[int] = []

    def trial(self: Any, size: int) -> int:
        tried.append(size)
        return int((10 + each * size) * MIB)

    monkeypatch.setattr(sizing._Search, "trial", trial)
    monkeypatch.setattr(sizing, "_allowed", lambda limit: int(allowed * MIB))
    trainer = gg.Trainer(gg.build(mlp()), device="cpu")
    return trainer.find_batch_size(arrays(rows)).samples, tried


@pytest.mark.sweep(0)
@pytest.mark.parametrize(
    ("each", "allowed", "best"),
    [(0.1, 20, 64), (1, 100, 64), (1, 30, 16), (5, 21, 2), (1e-3, 900, 512), (20, 31, 1)],
)
def test_the_largest_power_of_two_that_fits(
    monkeypatch: pytest.MonkeyPatch, each: float, allowed: float, best: int
) -> None:
    found, tried = searched(monkeypatch, each, allowed)
    assert found == best
    assert best in tried
    assert len(tried) < 10


@pytest.mark.sweep(0)
def test_not_even_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="one sample needs more than"):
        searched(monkeypatch, 50, 40)


@pytest.mark.sweep(0)
def test_fit_with_batches_of_the_size_that_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = gg.Trainer(gg.build(mlp(), "cross_entropy", "adamw"), device="cpu")
    trainer.fit(arrays(100), 1, "auto", progress=False, max_steps=1, checkpoint=tmp_path / "run.ckpt")
    assert trainer.progress.order["batch_size"] == 64
    other = gg.Trainer.resume(trainer.definition, tmp_path / "run.ckpt", device="cpu")
    other.fit(arrays(100), 1, "auto", progress=False)
    assert other.progress.order["batch_size"] == 64
    prepared = trainer.prepare(arrays(100), "auto:100GB")
    assert prepared.order.batch_size == 64
    fixed = gg.Trainer(gg.build(exported("mlp", 5), "cross_entropy", "sgd"), device="cpu")
    data = {"x": np.zeros((20, 12), np.float32), "target": np.zeros(20, np.int64)}
    assert fixed.find_batch_size(data).samples == 5


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = gg.Trainer(gg.build(mlp()), device="cpu")
    with pytest.raises(DataError, match="the data are already batched"):
        trainer.find_batch_size([arrays(4)])
    with pytest.raises(DataError, match=r"already uses .*; give a larger"):
        trainer.find_batch_size(arrays(8), "1MB")
    with pytest.raises(DataError, match="should be a whole number, 'auto'"):
        trainer.fit(arrays(8), batch_size="many")
    monkeypatch.setattr(sizing, "free_memory", lambda: None)
    with pytest.raises(DataError, match="the free memory of this system is unknown"):
        trainer.find_batch_size(arrays(8))


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux says what is free")
def test_free_memory() -> None:
    found = free_memory()
    assert found is not None and 0 < found < 2**50
    with at_most_free(1000):
        assert free_memory() == 1000
        with at_most_free(None):
            assert free_memory() != 1000
    assert free_memory() != 1000
    assert 0 < (resident_memory() or 0) <= peak_memory()["peak_memory_mib"] * MIB


@pytest.mark.sweep(0)
def test_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "model.onnx")
    np.savez("train.npz", **arrays(40))
    words = ["train", "model.onnx", "--data", "train.npz", "--epochs", "1", "--batch-size", "auto", "-o", "step"]
    assert command(words) == 0
    assert "batches of 32 samples" in capsys.readouterr().err
    assert command(["train", "model.onnx", "--data", "train.npz", "--batch-size", "0"]) == 2
    assert command(["train", "model.onnx", "--data", "train.npz", "--batch-size", "auto:x"]) == 1
    capsys.readouterr()
    assert command(["inspect", "step", "--batch-size", "64"]) == 0
    assert "a training step (N=64)" in capsys.readouterr().out
    assert command(["inspect", "step", "--batch-size", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["sizes"] == {"N": 64}
    Path("recipe.toml").write_text('[model]\npath = "model.onnx"\n[data]\ntrain = "train.npz"\nbatch_size = "auto"\n')
    assert command(["train", "recipe.toml", "--max-steps", "1", "--json"]) == 0
