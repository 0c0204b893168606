"""The table of a summary: weights and multiplications by module; and the package's version and entry."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.frontend import export, nn
from gradgraph.step.modules import Module, modules, tree


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, groups=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def test_weights_and_macs_by_module() -> None:
    step = gg.build(export(Net(), {"x": ("batch", 3, 16, 16)}), freeze="features.0*")
    found, unknown = modules(step.manifest, step.eval, {"batch": 2})
    assert unknown == 0
    assert found == [
        Module("features.0", 0, 8 * 27 + 8, 2 * 8 * 14 * 14 * 27),
        Module("features.1", 16, 0, 0),
        Module("head", 90, 0, 2 * 80),
    ]
    lines = step.summary(batch=2).splitlines()
    assert "MACs            84,832 forward (batch=2)" in lines
    assert lines[-1].split() == ["head", "90", "0", "160"]
    assert "42,416 forward (batch=1)" in step.summary()
    assert tree(found, most=2) == [Module("features", 16, 224, 84_672), Module("head", 90, 0, 160)]


@pytest.mark.parametrize(
    ("body", "inputs", "weight", "macs"),
    [
        ("y = MatMul (x, w)", "float[N, 5, 4] x", (4, 3), 2 * 5 * 4 * 3),
        ("y = Gemm <transA = 1> (x, w)", "float[4, N] x", (4, 3), 2 * 4 * 3),
        ("y = Conv <group = 2> (x, w)", "float[N, 4, 9] x", (6, 2, 3), 2 * 6 * 7 * 2 * 3),
        ("y = ConvTranspose (x, w)", "float[N, 4, 9] x", (4, 6, 3), 2 * 4 * 9 * 6 * 3),
        ('y = Einsum <equation = "nti,io->nto"> (x, w)', "float[N, 5, 4] x", (4, 3), 2 * 5 * 4 * 3),
        ("z = Relu (x) y = Mul (z, w)", "float[N, 4] x", (4,), 0),
    ],
)
def test_products(body: str, inputs: str, weight: tuple[int, ...], macs: int) -> None:
    net = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net ({inputs}) => (float loss) {{ {body} loss = ReduceMean <keepdims = 0> (y) }}""")
    net.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(weight, np.float32), "w"))
    step = gg.build(net, loss=None)
    found, unknown = modules(step.manifest, step.eval, {"N": 2})
    assert (sum(m.macs for m in found), unknown) == (macs, 0)


def test_recurrence() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 6, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0].mean(1)

    step = gg.build(export(Tagger(), {"x": ("batch", "time", 4)}))
    assert f"{3 * 5 * 4 * 6 * (4 + 6):,} forward (batch=3, time=5)" in step.summary(batch=3, time=5)


def test_the_version() -> None:
    assert gg.__version__ == metadata.version("onnx-gradgraph")


def test_the_package_is_a_command() -> None:
    words = [sys.executable, "-m", "gradgraph", "--version"]
    ran = subprocess.run(words, text=True, capture_output=True, check=True)
    assert ran.stdout == f"gradgraph {gg.__version__}\n"
