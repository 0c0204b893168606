"""``gradgraph export`` says how near the file is to the step that it comes from, and writes int8 in one go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from tests.kit.command_line import Cli, arrays


@pytest.fixture
def run(cli: Cli, folder: Path) -> Path:
    np.savez("some.npz", **arrays(64))
    for words in (("build", "model.onnx"), ("train", "step", "--data", "some.npz", "--checkpoint", "run.ckpt")):
        assert cli(*words).code == 0
    return folder


def test_what_was_written_is_held_against_the_step(cli: Cli, run: Path) -> None:
    ran = cli("export", "step", "--checkpoint", "run.ckpt", "-o", "plain.onnx")
    assert "opset 21" in ran.err
    assert "3 nodes (evaluation graph: " in ran.err
    assert "'logits' is equal up to rounding" in ran.err
    told = json.loads(cli("export", "step", "--checkpoint", "run.ckpt", "-o", "plain.onnx", "--json").out)
    assert told["operators_after"] == {"Gemm": 2, "Relu": 1}
    assert told["operators_before"]["Gemm"] == 2
    assert told["input_shapes"] == {"x": ["N", 4]}
    assert told["output_shapes"] == {"logits": ["N", 3]}
    assert told["bytes"] == Path("plain.onnx").stat().st_size
    assert told["compared"]["logits"]["relative"] < 1e-5


@pytest.mark.parametrize("calibration", [("--calibration", "some.npz"), ()])
def test_int8_in_one_go(cli: Cli, run: Path, calibration: tuple[str, ...]) -> None:
    given = ("--checkpoint", "run.ckpt", "-o", "int8.onnx", "--quantize", "int8", *calibration)
    told = json.loads(cli("export", "step", *given, "--json").out)
    assert told["samples"] == (64 if calibration else 0)
    assert ("QuantizeLinear" in told["operators_after"]) == bool(calibration)
    assert 0 < told["quantized_outputs"]["logits"]["relative"] < 0.1
    assert 0 < told["compared"]["logits"]["relative"] < 0.1
    assert onnx.TensorProto.INT8 in {t.data_type for t in onnx.load("int8.onnx").graph.initializer}
    words = "data are uint8, weights int8 from -64 to 64" if calibration else "weights are int8: "
    assert words in cli("export", "step", *given).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--calibration", "some.npz"), "--calibration requires --quantize int8"),
        (("--quantize", "int8", "--store", "float16"), "omit --mixed and --store"),
        (("--quantize", "int8", "-o", "w.safetensors"), "--quantize has no effect on"),
    ],
)
def test_options_that_do_not_go_together_are_refused(cli: Cli, run: Path, words: tuple[str, ...], said: str) -> None:
    ran = cli("export", "step", "--checkpoint", "run.ckpt", *words)
    assert ran.code == 2
    assert said in ran.err


@pytest.fixture
def half(folder: Path) -> Path:
    """A step in float16 whose weight is an output, so that an export in mixed precision has a Cast of it."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 16] x) => (float[N, 16] y, float[16, 16] w) <float[16, 16] w = {0}> { y = MatMul(x, w) }""")
    model.graph.initializer[0].float_data[:] = [0.5] * 256
    step: Path = gg.build(model, {"y": "mse"}, gg.optim.sgd(0.1), precision="float16").save(folder / "half")
    return step


WORDS = ("export", "half", "--untrained", "--mixed", "--store", "float16", "-o", "small.onnx")


def test_weights_that_are_cast_anyway_are_stored_as_float16(cli: Cli, half: Path) -> None:
    assert cli(*WORDS).code == 0
    onnx.checker.check_model("small.onnx", full_check=True)
    assert {t.name for t in onnx.load("small.onnx").graph.initializer} == {"w_1.float16"}


def test_a_file_is_replaced_by_valid_models_only(cli: Cli, half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradgraph.export.storage.next_free", lambda name, taken: name)
    Path("small.onnx").write_bytes(b"of somebody")
    ran = cli(*WORDS)
    assert ran.code != 0 and "are called 'w.float16'" in ran.err
    assert Path("small.onnx").read_bytes() == b"of somebody"
