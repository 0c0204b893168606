"""Two runs from the shell, interrupted and resumed by their folders, compared, the better one used by its folder alone.

Every command is one of README, docs/how-to/runs.md or the page that the run itself wrote.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gradgraph.frontend import export, manual_seed, nn
from tests.kit.npz import npz

datasets = pytest.importorskip("sklearn.datasets", reason="its digits are the data, and its network the rival")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OURS = """
gradgraph train net.onnx --data train.npz --validation held_out.npz --epochs 30 --patience 8 --lr {low} --run runs/low
gradgraph train net.onnx --data train.npz --validation held_out.npz --epochs 30 --patience 8 --lr {high} --run runs/high
gradgraph train runs/high --resume
gradgraph runs runs --json --html runs.html
gradgraph evaluate runs/{best} --data test.npz --json
gradgraph predict runs/{best} --data test.npz -o predictions.npz
gradgraph export runs/{best} -o best.onnx
""".strip().splitlines()


def shell(line: str, interrupt_at: str | None = None) -> tuple[str, str]:
    """Run a command in a process of its own; with ``interrupt_at`` send Ctrl-C once this file is there."""
    command = [sys.executable, "-m", "gradgraph.cli", *shlex.split(line)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if interrupt_at is not None:
        while not Path(interrupt_at).exists() and ran.poll() is None:
            time.sleep(0.01)
        ran.send_signal(signal.SIGINT)
    out, talk = ran.communicate(timeout=600)
    assert ran.returncode == (0 if interrupt_at is None else 130), talk
    return out, talk


@pytest.mark.sweep(0)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals between processes")
def test_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = datasets.load_digits()
    x, y = (found.data / 16).astype(np.float32), found.target
    parts = np.split(np.random.default_rng(0).permutation(len(y)), [1100, 1400])
    for name, rows in zip(("train", "held_out", "test"), parts, strict=True):
        np.savez(f"{name}.npz", x=x[rows], target=y[rows])
    manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    onnx.save(export(net, {"x": ("batch", 64)}), "net.onnx")
    words = {"low": "3e-4", "high": "1e-2", "best": "high"}

    shell(OURS[0].format(**words))
    _, talk = shell(OURS[1].format(**words), interrupt_at="runs/high/run.ckpt")
    advice = next(line for line in talk.splitlines() if line.startswith("resume with: "))
    assert advice == f"resume with: {OURS[2]}"
    recipe, page = Path("runs/high/recipe.toml").read_bytes(), Path("runs/high/README.md").read_text()
    assert "Not finished" in page and list(Path("runs/high").glob("plot.*"))
    shell(OURS[2])
    assert Path("runs/high/recipe.toml").read_bytes() == recipe
    assert OURS[1].format(**words) in Path("runs/high/README.md").read_text()

    # the same run without an interruption has the same bits
    shell(OURS[1].format(**words).replace("runs/high", "whole"))
    for name in ("run.ckpt", "run.best.ckpt", "history.csv"):
        assert Path("whole", name).read_bytes() == Path("runs/high", name).read_bytes(), name

    compared = json.loads(shell(OURS[3])[0])
    assert [run["run"] for run in compared["runs"]] == ["high", "low"] and compared["differ"] == ["lr"]
    assert "<svg" in Path("runs.html").read_text()

    scores = json.loads(shell(OURS[4].format(**words))[0])["scores"]
    shell(OURS[5].format(**words))
    predicted = npz("predictions.npz")
    (logits,) = (array for array in predicted.values() if array.shape == (len(parts[2]), 10))
    assert scores["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == y[parts[2]]))
    shell(OURS[6].format(**words))
    session = ort.InferenceSession("best.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x[parts[2]]})[0], logits, atol=1e-5)
    assert scores["accuracy"] > rival(x, y, parts) - 0.02


def rival(x: np.ndarray, y: np.ndarray, parts: list[np.ndarray]) -> float:
    """The accuracy of scikit-learn's network of the same size, which stops early by itself."""
    from sklearn.neural_network import MLPClassifier

    rows = np.concatenate(parts[:2])
    network = MLPClassifier(64, learning_rate_init=1e-2, batch_size=32, max_iter=30, early_stopping=True,
                            n_iter_no_change=8, random_state=0)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(network.fit(x[rows], y[rows]).score(x[parts[2]], y[parts[2]]))
