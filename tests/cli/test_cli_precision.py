"""--precision, --keep-float32, and what becomes of them in recipes, runs and exports."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests.kit.command_line import Cli


def test_a_run_in_mixed_precision(cli: Cli) -> None:
    ran = cli("train", "model.onnx", "--data", "train.npz", "--epochs", "2", "--precision", "float16", "-o", "step",
              "--keep-float32", "last*", "--keep-float32", "Relu", "--checkpoint", "run.ckpt", "--json")  # fmt: skip
    assert ran.code == 1 and "'last*', whose precision is given, is neither a node nor an operator" in ran.err
    ran = cli("train", "model.onnx", "--data", "train.npz", "--epochs", "2", "--precision", "float16", "-o", "step",
              "--keep-float32", "Relu", "--checkpoint", "run.ckpt", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    manifest = json.loads(Path("step/manifest.json").read_text())
    assert manifest["precision"]["name"] == "float16" and manifest["precision"]["arguments"] == {"float32": ["Relu"]}
    for words, types in (([], {1}), (["--mixed"], {1, 10})):
        assert cli("export", "step", "--checkpoint", "run.ckpt", "-o", "m.onnx", *words).code == 0
        assert {t.data_type for t in onnx.load("m.onnx").graph.initializer} <= types
    assert any(t.data_type == 10 for t in onnx.load("m.onnx").graph.initializer)
    refused = cli("export", "step", "-o", "w.safetensors", "--mixed")
    assert refused.code == 2 and "--mixed has no effect on a file of weights" in refused.err


def test_a_recipe_says_it_under_model(cli: Cli) -> None:
    Path("recipe.toml").write_text(
        '[model]\npath = "model.onnx"\nprecision = "bfloat16"\nkeep_float32 = ["Relu"]\n[data]\ntrain = "train.npz"\n'
    )
    ran = cli("build", "recipe.toml", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["manifest"]["precision"] == {
        "name": "bfloat16", "arguments": {"float32": ["Relu"]}, "state": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--precision", "fp16"], "there is no precision 'fp16'; did you mean 'float16'?"),
        (["--precision", "16-mixed"], "did you mean 'float16'?"),
        (["--keep-float32", "Relu"], "requires --precision float16 or bfloat16"),
    ],
)
def test_a_slip_is_named(cli: Cli, words: list[str], says: str) -> None:
    ran = cli("build", "model.onnx", *words)
    assert ran.code == 1 and says in ran.err, ran.err


def test_a_step_in_float32_has_no_mixed_export(cli: Cli) -> None:
    assert cli("build", "model.onnx", "-o", "step").code == 0
    ran = cli("export", "step", "--mixed")
    assert ran.code == 1 and "this step is in float32" in ran.err and "remove --mixed" in ran.err
