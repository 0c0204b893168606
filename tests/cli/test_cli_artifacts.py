"""Artifacts on request: `gradgraph build` and `gradgraph export` with options for other ways to train and to run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from tests.building.test_separate import assert_same_steps
from tests.kit.command_line import Cli


def test_build_writes_gradient_and_apply(cli: Cli) -> None:
    assert cli("build", "model.onnx", "--separate", "--backend", "portable").code == 0
    step = gg.Step.load("step")
    assert not any(model.functions for model in step.separate.values())
    assert ", gradient " in step.summary()
    assert_same_steps(step, [{"x": np.ones((2, 4), np.float32), "target": np.array([0, 2])}] * 2)
    assert gg.Trainer("step", device="cpu").step({"x": np.ones((2, 4), np.float32), "target": np.array([0, 2])})
    assert cli("build", "model.onnx", "--force").code == 0
    assert not Path("step", "gradient.onnx").exists()


def test_sizes_are_given_by_name(cli: Cli) -> None:
    assert cli("build", "model.onnx", "--size", "N=8").code == 0
    assert gg.Step.load("step").manifest.inputs[0].shape == (8, 4)
    assert cli("export", "step", "-o", "eight.onnx").code == 0
    assert cli("build", "model.onnx", "-o", "open").code == 0
    assert cli("export", "open", "--size", "x=2,4", "-o", "two.onnx").code == 0
    fixed = [onnx.load(f).graph.input[0].type.tensor_type.shape.dim[0].dim_value for f in ("eight.onnx", "two.onnx")]
    assert fixed == [8, 2]
    assert cli("build", "model.onnx", "--size", "N:8", "-o", "other").code == 2
    wrong = cli("build", "model.onnx", "--size", "M=8", "-o", "other")
    assert wrong.code == 1 and "no input has a dimension called 'M'; there is N" in wrong.err


def test_a_recipe_says_sizes_and_storage(cli: Cli) -> None:
    typed = ["build", "model.onnx", "--size", "N=8", "--size", "x=8,4", "--separate", "--store", "float16"]
    printed = cli(*typed, "--print-config").out
    assert "[model.size]\nN = 8\nx = [8, 4]" in printed and "separate = true" in printed
    Path("recipe.toml").write_text(printed)
    assert cli("build", "recipe.toml").code == 0
    manifest = gg.Step.load("step").manifest
    assert manifest.inputs[0].shape == (8, 4) and manifest.separate is not None
    Path("recipe.toml").write_text(printed.replace("[8, 4]", '"many"'))
    wrong = cli("build", "recipe.toml", "--force")
    assert wrong.code and "sizes is" in wrong.err


def test_flat_weights_go_out_and_in(cli: Cli) -> None:
    assert cli("build", "model.onnx").code == 0
    ran = cli("export", "step", "-o", "w.bin")
    assert ran.code == 0 and "4 tensors, 67 numbers; w.json says where" in ran.err
    (np.fromfile("w.bin", "<f4") + 1).astype("<f4").tofile("w.bin")
    assert cli("export", "step", "--weights", "w.bin", "-o", "moved.onnx").code == 0
    assert cli("export", "step", "-o", "plain.onnx").code == 0
    moved, plain = ({t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(f).graph.initializer}
                    for f in ("moved.onnx", "plain.onnx"))  # fmt: skip
    for name, array in plain.items():
        np.testing.assert_array_equal(moved[name], array + np.float32(1))


def test_weights_are_stored_as_float16(cli: Cli) -> None:
    big = gg.frontend.export(gg.frontend.nn.Linear(32, 32), {"x": ("n", 32)})
    onnx.save(big, "big.onnx")
    ran = cli("build", "big.onnx", "--loss", "mse", "--store", "float16")
    assert ran.code == 0 and "1 tensor stored as float16" in ran.err
    ran = cli("export", "step", "--store", "float16", "-o", "m.onnx", "--json")
    assert ran.code == 0 and "relative_error" in ran.out
    assert Path("m.onnx").stat().st_size < 32 * 32 * 2 + 1500


@pytest.mark.sweep(0)
def test_ort_files_and_lists_of_operators(cli: Cli) -> None:
    assert cli("build", "model.onnx").code == 0
    ran = cli("export", "step", "-o", "ops.config", "--types")
    assert ran.code == 0, ran.err
    assert "Gemm{" in Path("ops.config").read_text()
    assert cli("export", "step", "-o", "m.ort").code == 0
    assert ort.InferenceSession("m.ort", providers=["CPUExecutionProvider"]).get_inputs()[0].name == "x"
    assert cli("export", "step", "--ort", "-o", "small").code == 0
    assert Path("small/train.ort").is_file() and Path("small/required_operators.config").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "w.bin", "--store", "float16"], "--store has no effect on a flat vector"),
        (["-o", "w.safetensors", "--output", "y"], "--output has no effect on a file of weights"),
        (["-o", "m.onnx", "--types"], "--types has no effect on a model"),
        (["--ort", "-o", "f", "--checkpoint", "run.ckpt"], "--checkpoint has no effect on a step of .ort files"),
    ],
)
def test_an_option_that_changes_nothing_is_refused(cli: Cli, words: list[str], said: str) -> None:
    ran = cli("export", "step", *words)
    assert ran.code == 2 and said in ran.err


def test_the_extension_of_another_format_is_refused(cli: Cli) -> None:
    cli("build", "model.onnx", "-o", "step")
    ran = cli("export", "step", "--untrained", "-o", "w.npz")
    assert ran.code == 1 and "'w.npz' has the extension of arrays" in ran.err and not Path("w.npz").exists()
    ran = cli("train", "step", "--data", "train.npz", "--checkpoint", "run.onnx")
    assert ran.code == 1 and ".onnx is written by: gradgraph export STEP -o FILE.onnx" in ran.err
    assert not Path("run.onnx").exists()
