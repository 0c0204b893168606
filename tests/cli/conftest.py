"""A folder with a tiny model and data, and a way to run the command line in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from gradgraph.cli.app import run
from tests.kit.command_line import Cli, Ran, arrays, mlp


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with model.onnx, train.npz and held_out.npz."""
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays(96))
    np.savez(tmp_path / "held_out.npz", **arrays(32, seed=2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """``cli("build", "model.onnx")`` runs the command line in ``folder``."""

    def call(*words: str) -> Ran:
        capsys.readouterr()
        code = run(words)
        return Ran(code, *capsys.readouterr())

    return call
