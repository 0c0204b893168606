"""What a command has written is named, each file of it; and a run that had nothing left to do says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.frontend import export, nn
from tests.kit.command_line import Cli, arrays, mlp

COMMANDS = [
    "export step -o out.onnx",
    "export step --image-input -o out.onnx",
    "grad large.onnx --vjp --wrt 3.* -o out.onnx",
    "surgery large.onnx --lora 3.* -o out.onnx",
    "train step --data rows.npz --epochs 1 --export out.onnx --history h.csv",
    "export small -o out.onnx",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step whose frozen trunk has 8 MiB, and its model with external data; and a small one."""
    made = tmp_path_factory.mktemp("large")
    network = nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 2))
    model = export(network, {"x": ("batch", 3, 32, 32)})
    onnx.save(model, made / "large.onnx", save_as_external_data=True, location="large.onnx.data")
    gg.build(str(made / "large.onnx"), train="3.*").save(made / "step")
    gg.build(mlp()).save(made / "small")
    np.savez(made / "rows.npz", x=np.zeros((4, 3, 32, 32), np.float32), target=np.zeros(4, np.int64))
    return made


@pytest.mark.sweep(0.36)
@pytest.mark.parametrize("words", COMMANDS)
def test_each_file_is_named(
    cli: Cli, folder: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before = {path.name for path in Path().iterdir()}
    ran = cli(*words.split())
    assert ran.code == 0, ran.err
    new = {path.name for path in Path().iterdir()} - before
    said = next(line for line in ran.err.splitlines() if line.startswith("wrote ") and "out.onnx" in line)
    named = set(said.removeprefix("wrote ").split(": ")[0].split(", "))
    assert "out.onnx" in new and new == named


@pytest.mark.sweep(0)
@pytest.mark.parametrize("words, says", [(("--max-steps", "3"), "3 of at most 3 steps"), ((), "2 of 2 epochs")])
def test_a_run_that_has_nothing_left_to_do_says_so(
    cli: Cli, words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "model.onnx")
    np.savez("train.npz", **arrays(32))
    begun = ("train", "model.onnx", "--data", "train.npz", "--epochs", "2", "--batch-size", "8", *words, "--run", "r")
    assert cli(*begun).code == 0
    ran = cli("train", "r", "--resume")
    assert ran.code == 0 and f"nothing left to do: {says}" in ran.err
