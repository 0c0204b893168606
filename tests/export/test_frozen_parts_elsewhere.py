"""What --split-frozen writes trains without Python: as C without a runtime, and in onnxruntime-node."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.compiled_c import NEEDS_COMPILER, STRICT, compiler

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    runpy.run_path(str(EXAMPLES / "frozen" / "make_parts.py"))["main"](folder)
    return folder


def expected(run: Path) -> list[float]:
    losses = [float(line) for line in (run / "losses.txt").read_text().splitlines()]
    assert len(losses) == 4 * EPOCHS and losses[-1] < losses[0]
    return losses


@NEEDS_COMPILER
def test_in_c(run: Path) -> None:
    sources = [EXAMPLES / "frozen" / "train_head.c", run / "frozen" / "frozen.c", run / "trainer" / "trainer.c"]
    includes = [f"-I{run / name}" for name in ("frozen", "trainer")]
    compiler(*STRICT, "-O1", *includes, *sources, "-lm", "-o", run / "train_head")
    done = subprocess.run([run / "train_head", run], capture_output=True, text=True, timeout=60, check=True)
    assert [float(line) for line in done.stdout.splitlines()] == pytest.approx(expected(run), abs=2e-6)


@pytest.mark.node
def test_in_node(run: Path, tmp_path: Path) -> None:
    packages = EXAMPLES / "node" / "node_modules"
    if shutil.which("node") is None or not all((packages / p).is_dir() for p in ("onnxruntime-node", "gradgraph")):
        pytest.skip("onnxruntime-node is not installed: make node")
    files = [run / "parts", run / "batches.json", str(EPOCHS), tmp_path / "head.onnx"]
    done = subprocess.run(["node", EXAMPLES / "node" / "train_head.mjs", *files], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["loss"] for line in done.stdout.splitlines()] == pytest.approx(expected(run), abs=2e-6)
    assert (tmp_path / "head.onnx").stat().st_size > 0
