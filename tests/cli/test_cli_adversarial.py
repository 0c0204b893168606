"""``--adversarial``: training on attacked inputs, as the recipe of the run records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.kit.command_line import Cli, arrays, mlp


def test_on_the_command_line(cli: Cli, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "model.onnx")
    np.savez("data.npz", **arrays(16))
    attack = "pgd(epsilon=0.5, n=2, bounds=(-9, 9))"
    for name, more in {"plain": (), "robust": ("--adversarial", attack)}.items():
        done = cli("train", "model.onnx", "--data", "data.npz", "--epochs", "1", "--run", name, *more)
        assert done.code == 0, done.err
    weights = [onnx.load(f"{name}/trained.onnx").graph.initializer[0] for name in ("plain", "robust")]
    assert weights[0] != weights[1]
    assert f'adversarial = "{attack}"' in Path("robust/recipe.toml").read_text("utf-8")
    wrong = cli("build", "model.onnx", "--adversarial", "pgd(epsilon=-1)")
    assert (wrong.code, "epsilon is -1; it should be a number above 0" in wrong.err) == (1, True)
