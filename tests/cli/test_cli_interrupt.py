"""Ctrl-C and SIGTERM while training: the checkpoint is saved, and the command that is printed goes on from it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from tests.kit.command_line import Cli

ROOT = Path(__file__).parents[2]


@pytest.mark.sweep(0)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals between processes")
def test_an_interrupted_run_goes_on(cli: Cli, folder: Path, number: signal.Signals, code: int) -> None:
    words = ["train", "model.onnx", "--data", "train.npz", "--checkpoint", "run.ckpt", "--epochs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gradgraph.cli", *words, "1000000"]
    run = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "run.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(number)
    _, talk = run.communicate(timeout=60)
    assert run.returncode == code, talk
    assert "Traceback" not in talk
    advice = re.search(r"resume with: gradgraph (.*)", talk)
    assert advice is not None, talk
    resume = shlex.split(advice[1])
    done = int(re.findall(r"epoch (\d+)/\d+: step", talk)[-1])
    resume[resume.index("1000000")] = str(done + 2)
    ran = cli(*resume, "--export", "trained.onnx")
    assert ran.code == 0, ran.err
    assert re.findall(r"epoch (\d+)/\d+: step", ran.err)[-1] == str(done + 2)
    onnx.checker.check_model(onnx.load(folder / "trained.onnx"))


STOPPED = {
    "click": "raise KeyboardInterrupt",
    "onnx": "raise KeyboardInterrupt",
    "numpy": "raise ImportError('initialization failed') from KeyboardInterrupt()",  # as compiled modules say it
}


@pytest.mark.parametrize("module", STOPPED)
def test_ctrl_c_while_importing_leaves_no_traceback(module: str, folder: Path) -> None:
    """The module that is being imported when Ctrl-C comes."""
    shadow = folder / "shadow"
    shadow.mkdir()
    (shadow / f"{module}.py").write_text(STOPPED[module])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(shadow), str(ROOT)])}
    command = [sys.executable, "-m", "gradgraph.cli", "inspect", "model.onnx"]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr.strip()) == (130, "", "interrupted")
