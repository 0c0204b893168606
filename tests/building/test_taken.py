"""What a glob matches is shown where a step is built: in the summary, in the log, and in the shell."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from tests.kit.small_models import parsed, real

# a backbone that calls its last norm head.norm, and a head of ours
MODEL = parsed("""(float[N, 4] x) => (float[N, 3] y) {
    a = MatMul(x, body.weight) b = LayerNormalization(a, head.norm.weight, head.norm.bias)
    c = MatMul(b, head.weight) y = Add(c, head.bias) }""".replace(".", "_"),
    body_weight=real(4, 8), head_norm_weight=real(8), head_norm_bias=real(8), head_weight=real(8, 3),
    head_bias=real(3))  # fmt: skip
ALL = "'head_norm_weight', 'head_norm_bias', 'head_weight', 'head_bias'"
HEAD = f"'head_*' matches 4 tensors, 43 numbers: {ALL}"


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, []),
        ({"train": "*"}, []),
        ({"train": "head_weight"}, []),
        ({"train": "head_*"}, [f"train {HEAD}"]),
        ({"train": ["head_*", "body_weight"]}, [f"train {HEAD}"]),
        ({"freeze": "*norm*"}, ["freeze '*norm*' matches 2 tensors, 16 numbers: 'head_norm_weight', 'head_norm_bias'"]),
        ({"train": "head_*", "freeze": "body*"},
         [f"train {HEAD}", "freeze 'body*' matches 1 tensor, 32 numbers: 'body_weight'"]),
        ({"optimizer": gg.optim.adamw(1e-3, no_decay="*bias")},
         ["no_decay '*bias' matches 2 tensors, 11 numbers: 'head_norm_bias', 'head_bias'"]),
        ({"optimizer": gg.optim.adamw(1e-3, no_decay="norm_and_bias")}, []),
        ({"train": "head_*", "optimizer": gg.optim.adamw(1e-3, groups={"*weight": {"lr_factor": 2.0}})},
         [f"train {HEAD}", "groups '*weight' matches 2 tensors, 32 numbers: 'head_norm_weight', 'head_weight'"]),
        ({"optimizer": gg.optim.magnitude_pruning(gg.optim.sgd(0.1), target="head_*")},
         ["pruning 'head_*' matches 1 tensor, 24 numbers: 'head_weight'"]),
        ({"optimizer": gg.optim.magnitude_pruning(gg.optim.sgd(0.1), "2:4", target=["body_weight", "*"])},
         ["pruning '*' matches 2 tensors, 56 numbers: 'body_weight', 'head_weight'"]),
        ({"steps": {"a": gg.StepOptions("mse", train="head_*"), "b": gg.StepOptions("mse", train="body_*")}},
         [f"train of 'a' {HEAD}", "train of 'b' 'body_*' matches 1 tensor, 32 numbers: 'body_weight'"]),
    ],
)  # fmt: skip
def test_a_glob_is_told(options: dict[str, Any], lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradgraph"):
        step = gg.build(MODEL, **({"loss": "mse"} if "steps" not in options else {}), **options)
    assert list(step.taken) == lines == [m for m in caplog.messages if " matches " in m]
    assert [line[16:] for line in step.summary().splitlines() if " matches " in line] == lines
    told = {name for line in lines if line.startswith("train") for name in line.partition(": ")[2].split("'")[1::2]}
    if len(lines) == 1 and told:
        assert told <= set(step.manifest.trainable)


def test_a_long_list_is_cut() -> None:
    names = {f"w{i}": real(4, 4) for i in range(9)}
    steps = " ".join(f"x{i + 1} = MatMul(x{i}, w{i})" for i in range(9))
    model = parsed(f"(float[N, 4] x0) => (float[N, 4] x9) {{ {steps} }}", **names)
    (line,) = gg.build(model, "mse", train="w*").taken
    assert line == "train 'w*' matches 9 tensors, 144 numbers: 'w0', 'w1', 'w2', 'w3', 'w4', 'w5' and 3 more"


# surgery's arguments, and the line on what their globs take
SURGERY = {
    "lora": (lambda m: gg.lora(m, "*weight", rank=2), "adapters at 2 layers: 'body_weight', 'head_weight'"),
    "qat": (lambda m: gg.qat(m, target="head*", activations=None), "rounding at 1 layer: 'head_weight'"),
    "qat again": (
        lambda m: gg.qat(integers(m), target="body*"),
        "training the integers of 1 tensor: 'body_weight.weight'",
    ),
}


def integers(model: onnx.ModelProto) -> onnx.ModelProto:
    rounded = gg.qat(model, activations=None)
    assert isinstance(rounded, onnx.ModelProto)
    return onnx.ModelProto.FromString(gg.Trainer(gg.build(rounded, "mse", "sgd")).export().SerializeToString())


@pytest.mark.parametrize("name", SURGERY)
def test_surgery_tells_its_layers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, line = SURGERY[name]
    with caplog.at_level(logging.INFO, "gradgraph"):
        change(MODEL)
    assert caplog.messages[-1] == line


def test_the_shell_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(MODEL, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((8, 4), np.float32), target=np.zeros((8, 3), np.float32))
    model, step = str(tmp_path / "m.onnx"), str(tmp_path / "step")
    options = ["--loss", "mse", "--train", "head_*"]
    assert run(["build", model, *options, "-o", step]) == 0
    assert f"train {HEAD}" in capsys.readouterr().out
    assert run(["train", model, *options, "--data", str(tmp_path / "d.npz"), "--epochs", "1"]) == 0
    assert f"train {HEAD}" in capsys.readouterr().err
    assert run(["surgery", model, "--lora", "head*", "--rank", "2", "-o", str(tmp_path / "lora.onnx")]) == 0
    assert "adapters at 1 layer: 'head_weight'" in capsys.readouterr().err
    rounding = ["--qat", str(tmp_path / "d.npz"), "--qat-target", "head*"]
    assert run(["surgery", model, *rounding, "-o", str(tmp_path / "qat.onnx")]) == 0
    assert "rounding at 1 layer: 'head_weight'" in capsys.readouterr().err
    assert run(["--quiet", "surgery", model, *rounding, "-o", str(tmp_path / "qat.onnx")]) == 0
    assert capsys.readouterr().err == ""
