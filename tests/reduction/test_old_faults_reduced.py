"""Three faults that gradgraph had and has no more, put back: reduce makes of a network that shows one what shows why.

A tanh GELU whose gradient overflowed, a Loop of PyTorch's older exporter whose gradient no runtime computed, and a
float16 product behind a Transpose that ended the process.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules import activation, control
from tests.kit.running import run
from tests.kit.small_models import parsed, real

SECRET = b"patient"


def gradient(model: onnx.ModelProto) -> onnx.ModelProto:
    """Of all outputs by all inputs and weights."""
    weights = [t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    wrt = [*(i.name for i in model.graph.input), *weights]
    found = gg.vjp(model, outputs=[o.name for o in model.graph.output], wrt=wrt, allow_unused=True)
    assert isinstance(found, onnx.ModelProto)
    return found


def drawn(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Feeds for the inputs of a model; open sizes are 2."""
    rng = np.random.default_rng(0)
    shapes = {i.name: [d.dim_value or 2 for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def judge(look: Callable[[onnx.ModelProto], bool]) -> Callable[[onnx.ModelProto], bool]:
    """What does not even get as far as the fault does not show it."""

    def shows(model: onnx.ModelProto) -> bool:
        try:
            return look(model)
        except Exception:
            return False

    return shows


# --- a wrong gradient --------------------------------------------------------------------------------------------


def overflowing(op: Builder, x: Var) -> Var:
    """The slope of a tanh GELU as it was: x³ overflows in float32, and 0 · ∞ is NaN."""
    k = 2.0 * math.sqrt(2.0 / math.pi)
    square = x * x
    sigmoid = op.Sigmoid(x * (square * (0.044715 * k) + k))
    return sigmoid * ((1.0 - sigmoid) * (x * (square * (3 * 0.044715 * k) + k)) + 1.0)


def encoder() -> onnx.ModelProto:
    """Blocks of a transformer's feed-forward part; one of them has weights that are far too large."""
    gg.frontend.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU("tanh"),
                                                    nn.Linear(32, 16))]  # fmt: skip
    model = frontend.export(nn.Sequential(*blocks), {"patient": ("batch", 16)})
    (huge,) = [t for t in model.graph.initializer if t.name == "5.weight"]
    huge.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(huge) * np.float32(1e13), huge.name))
    return model


@judge
def gives_nan(model: onnx.ModelProto) -> bool:
    found = gradient(model)
    feeds = drawn(found)
    outputs = run(model, {i.name: feeds[i.name] for i in model.graph.input})
    gradients = run(found, feeds)
    return all(np.isfinite(a).all() for a in outputs.values()) and any(np.isnan(a).any() for a in gradients.values())


@pytest.mark.sweep(0)
def test_a_gradient_that_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    assert not gives_nan(model)
    monkeypatch.setattr(activation, "_tanh_gelu_slope", overflowing)
    found = gg.reduce(model, shows=gives_nan)
    assert "Gelu" in found.operators
    assert found.nodes <= 3 < 16 <= found.nodes_before
    assert gives_nan(found.model)
    assert SECRET not in found.model.SerializeToString()
    monkeypatch.undo()
    assert not gives_nan(found.model)


# --- a gradient that no runtime computes -------------------------------------------------------------------------


def decoder() -> onnx.ModelProto:
    """A network with a Loop as PyTorch's older exporter wrote it: its body takes the number as a vector."""
    body = onnx.parser.parse_graph(
        """patient (int64[1] i, bool go, float[n, 8] s) => (bool on, float[n, 8] t) {
            on = Identity(go)
            e = Add(i, one)
            f = Slice(patient_w3, i, e, zero)
            g = Squeeze(f, zero)
            d = Tanh(s)
            t = Mul(d, g)
        }"""
    )
    model = parsed(
        """(float[batch, 6] patient_x) => (float[batch, 4] patient_y) {
            a = MatMul(patient_x, patient_w1)
            b = Relu(a)
            c = Softplus(c0)
            patient_y = MatMul(c, patient_w2)
        }""",
        patient_w1=real(6, 8),
        patient_w2=real(8, 4, seed=1),
        patient_w3=real(3, 8, seed=2),
    )
    constants = {"trips": np.array(3), "one": np.array([1]), "zero": np.array([0])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in constants.items())
    model.graph.node.insert(2, helper.make_node("Loop", ["trips", "", "b"], ["c0"], body=body))
    return model


@judge
def is_refused(model: onnx.ModelProto) -> bool:
    """With that message: a reduction must not slip to another fault."""
    found = gradient(model)
    feeds = drawn(found)
    run(model, {i.name: feeds[i.name] for i in model.graph.input})
    try:
        run(found, feeds)
    except Exception as error:
        return "Starts must be a 1-D array" in str(error)
    return False


@pytest.mark.sweep(0)
def test_a_gradient_that_no_runtime_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    assert not is_refused(model)
    monkeypatch.setattr(control, "_as_number", lambda op, x, number: x)
    found = gg.reduce(model, shows=is_refused)
    assert "Loop" in found.operators
    assert found.nodes <= 6 < found.nodes_before
    (loop,) = [n for n in found.model.graph.node if n.op_type == "Loop"]
    (text,) = [a.g for a in loop.attribute if a.name == "body"]
    assert len(text.input[0].type.tensor_type.shape.dim) == 1  # which is what the gradient did not look at
    assert SECRET not in found.model.SerializeToString()
    monkeypatch.undo()
    assert not is_refused(found.model)


# --- a process that ends -----------------------------------------------------------------------------------------

PLANTED = """
import subprocess, sys
import gradgraph as gg, onnx
import gradgraph.transforms
if len(sys.argv) < 4:
    gradgraph.transforms.align_product_ranks = lambda model: model
model = onnx.load(sys.argv[1])
found = gg.vjp(model, outputs=[o.name for o in model.graph.output], wrt=[i.name for i in model.graph.input])
onnx.save(found, sys.argv[2])
opens = "import onnxruntime as o, sys; o.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
sys.exit(subprocess.run([sys.executable, "-c", opens, sys.argv[2]], stderr=subprocess.DEVNULL).returncode >= 0)
"""


def speech() -> onnx.ModelProto:
    """Layers in float16 behind one another, which read a batch of sounds step by step."""
    text = """(float16[batch, time, 6] patient_x) => (float16[batch, 3] patient_y) {
        a = Transpose <perm = [1, 0, 2]> (patient_x)
        b = MatMul(a, w1)
        c = Tanh(b)
        d = ReduceMean <keepdims = 0> (c, first)
        patient_y = MatMul(d, w2)
    }"""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    rng, sizes = np.random.default_rng(0), {"w1": (6, 4), "w2": (4, 3)}
    arrays = {name: rng.normal(size=size).astype(np.float16) for name, size in sizes.items()} | {"first": np.array([0])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


@pytest.mark.sweep(0)
@pytest.mark.slow
def test_a_process_that_ends(tmp_path: Path) -> None:
    script, scratch, given = tmp_path / "planted.py", tmp_path / "gradient.onnx", tmp_path / "model.onnx"
    script.write_text(PLANTED)
    onnx.save(speech(), given)
    command = [sys.executable, str(script), str(given), str(scratch)]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this onnxruntime does not end at such a product")
    assert subprocess.run([*command, "as it is today"], stderr=subprocess.DEVNULL).returncode == 1
    found = gg.reduce(speech(), test=[sys.executable, str(script), "{}", str(scratch)])
    assert found.operators == {"Transpose": 1, "MatMul": 1}
    assert found.nodes < found.nodes_before
    assert SECRET not in found.model.SerializeToString()
