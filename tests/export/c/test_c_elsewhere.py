"""Exported C on other machines: WebAssembly in Node.js, and other processors under QEMU, compiled by Clang (Zig)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.frontend import export, manual_seed, nn
from gradgraph.step.step import Step
from tests.kit.compiled_c import NEEDS_COMPILER, STRICT, ZIG, compiler
from tests.kit.running import Loop
from tests.kit.trained_c import batch_of

ROOT = Path(__file__).parents[3]
NEEDS_ZIG = pytest.mark.skipif(not ZIG.exists(), reason="Zig is not installed: make runtimes")
PROCESSORS = {"aarch64": "aarch64-linux-musl", "riscv64": "riscv64-linux-musl"}
DRIVE = """
import { readFileSync } from "node:fs";
import { open } from "TRAINER";
const read = (name) => readFileSync(`FOLDER/${name}`);
const trainer = await open(read("trainer.wasm"), JSON.parse(read("manifest.json")), read("state.bin"));
const losses = JSON.parse(read("batches.json")).map(({ x, target }) =>
  trainer.call("step", { x, target: target.map(BigInt), learning_rate: 0.05 }).loss);
const saved = trainer.save();
trainer.load(saved);
console.log(JSON.stringify(losses));
"""


def small_step() -> Step:
    manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    return gg.build(export(net, {"x": (3, 2, 6, 6)}, outputs=["y"]), "cross_entropy", gg.optim.sgd(0.05, momentum=0.9))


def zig(*arguments: str | Path, cwd: Path | None = None) -> None:
    """Run Zig's C compiler, and fail with its messages."""
    ran = subprocess.run([ZIG, "-m", "ziglang", "cc", *map(str, arguments)], capture_output=True, text=True, cwd=cwd)
    assert ran.returncode == 0, ran.stderr[:4000]


@NEEDS_ZIG
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_webassembly_trains_as_onnxruntime_does(tmp_path: Path) -> None:
    """By the command in README.md, without weights in the module."""
    step, folder = small_step(), tmp_path / "c"
    gg.export.c(step, folder)
    (command,) = re.findall(r"^    python -m ziglang cc (.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    zig(*STRICT, "-DTRAINER_NO_WEIGHTS", *command.split(), cwd=folder)
    loop, rng, batches, expected = Loop(step), np.random.default_rng(0), [], []
    for _ in range(10):
        batch = batch_of(step, rng)
        expected.append(float(loop(batch)["loss"]))
        batches.append({name: value.ravel().tolist() for name, value in batch.items()})
    (folder / "batches.json").write_text(json.dumps(batches))
    script = tmp_path / "drive.mjs"
    trainer = ROOT / "examples" / "wasm" / "trainer.js"
    script.write_text(DRIVE.replace("TRAINER", trainer.as_posix()).replace("FOLDER", folder.as_posix()))
    ran = subprocess.run(["node", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    np.testing.assert_allclose(json.loads(ran.stdout), expected, atol=1e-5)


@NEEDS_ZIG
@NEEDS_COMPILER
@pytest.mark.timeout(900)
@pytest.mark.sweep(0)  # Zig compiles a C library for each, once
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors_compute_the_same(processor: str, tmp_path: Path) -> None:
    qemu = shutil.which(f"qemu-{processor}") or shutil.which(f"qemu-{processor}-static")
    if qemu is None:
        pytest.skip("QEMU is not installed: apt-get install qemu-user")
    gg.export.c(small_step(), tmp_path / "c")
    sources = [tmp_path / "c" / "trainer.c", tmp_path / "c" / "example.c"]
    compiler(*STRICT, "-O1", *sources, "-o", tmp_path / "here", "-lm")
    zig("-target", PROCESSORS[processor], "-static", *STRICT, "-O1", *sources, "-o", tmp_path / "there")
    here, there = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for command in ([tmp_path / "here"], [qemu, tmp_path / "there"])
    )
    assert here == there != ""
