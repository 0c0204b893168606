"""Models that onnxruntime has optimised and saved: outputs and gradients are those of the original."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn
from tests.kit.small_models import assert_same, model_of, normal_form, op_types, real, run

LEVELS = ort.GraphOptimizationLevel


def optimised(model, folder, level=LEVELS.ORT_ENABLE_EXTENDED):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 4  # it warns that the file suits this machine
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimised.onnx")


def assert_alike(original, fused, feeds):
    """The same outputs before and after the normal form, and the gradients of the original."""
    found = normal_form(fused)
    assert {o.domain for o in found.opset_import} == {""}
    assert_same(run(original, feeds), run(found, feeds), atol=1e-5)
    wrt = [*feeds, *_shared(original, fused)]
    name = original.graph.output[0].name
    seed = {f"{name}.cotangent": real(*run(original, feeds)[0].shape, seed=7)}
    gradients = [run(gg.vjp(m, outputs=name, wrt=wrt), feeds | seed)[-len(wrt) :] for m in (original, fused)]
    assert_same(*gradients, atol=3e-5, rtol=1e-4)


def _shared(original, fused):
    """Names of weights that optimising has kept as they are."""
    kept = {t.name: t for t in fused.graph.initializer}
    data = {v.name: v for v in ir.from_proto(original).graph.initializers.values() if v.dtype == ir.DataType.FLOAT}
    return [
        n
        for n, v in data.items()
        if n in kept and v.shape.rank() and (onnx.numpy_helper.to_array(kept[n]) == v.const_value.numpy()).all()
    ]


class Transformer(nn.Module):
    def __init__(self, activation, first):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 4, 32, 0.0, activation, batch_first=True, norm_first=first) for _ in "ab")
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layers(x))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2), nn.LeakyReLU(0.1), nn.Conv2d(16, 16, 1), nn.Sigmoid(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 4))

    def forward(self, x):
        return self.head(self.features(x))


@pytest.mark.sweep(0.25)
@pytest.mark.parametrize("level", [LEVELS.ORT_ENABLE_EXTENDED, LEVELS.ORT_ENABLE_ALL], ids=["extended", "all"])
@pytest.mark.parametrize("first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_transformer(activation, first, level, tmp_path):
    model = frontend.export(Transformer(activation, first), {"x": ("batch", "time", 16)})
    fused = optimised(model, tmp_path, level)
    assert {n.op_type for n in fused.graph.node if n.domain} >= {"FusedMatMul"}
    assert_alike(model, fused, {"x": real(2, 6, 16)})


def test_images(tmp_path):
    model = frontend.export(Images().eval(), {"x": ("batch", 3, 10, 10)})
    fused = optimised(model, tmp_path)
    assert {n.op_type for n in fused.graph.node if n.domain} >= {"FusedConv", "FusedGemm"}
    assert_alike(model, fused, {"x": real(2, 3, 10, 10)})


# --- as PyTorch's older exporter spells them out -----------------------------------------------------------------


def _n(op, inputs, output, **attrs):
    return helper.make_node(op, inputs.split(), [output], **attrs)


NORM = [
    _n("Add", "x skip", "s"),
    _n("ReduceMean", "s", "m", axes=[-1]),
    _n("Sub", "s m", "c"),
    _n("Pow", "c two", "c2"),
    _n("ReduceMean", "c2", "v", axes=[-1]),
    _n("Add", "v eps", "ve"),
    _n("Sqrt", "ve", "d"),
    _n("Div", "c d", "u"),
    _n("Mul", "u gamma", "g"),
    _n("Add", "g beta", "n"),
]
GELU = [
    _n("MatMul", "n w", "h"),
    _n("Add", "h b", "hb"),
    _n("Div", "hb root", "z"),
    _n("Erf", "z", "e"),
    _n("Add", "e one", "e1"),
    _n("Mul", "hb e1", "he"),
    _n("Mul", "he half", "y"),
]
NUMBERS = {"two": 2.0, "eps": 1e-5, "root": 2**0.5, "one": 1.0, "half": 0.5}
RMS = [
    _n("Pow", "x two", "x2"),
    _n("ReduceMean", "x2", "v", axes=[-1]),
    _n("Add", "v eps", "ve"),
    _n("Sqrt", "ve", "d"),
    _n("Div", "x d", "u"),
    _n("Mul", "u gamma", "y"),
]
SPELT_OUT = {
    "SkipLayerNormalization, Gelu": (NORM + GELU, ["x", "skip"], {"SkipLayerNormalization", "Gelu"}),
    "SimplifiedLayerNormalization": (RMS, ["x"], {"SimplifiedLayerNormalization"}),
}


@pytest.mark.parametrize("case", SPELT_OUT)
def test_spelt_out(case, tmp_path):
    nodes, inputs, expected = SPELT_OUT[case]
    feeds = {n: real(2, 3, 8, seed=i) for i, n in enumerate(inputs)}
    weights = {"gamma": real(8, seed=3), "beta": real(8, seed=4), "w": real(8, 6, seed=5), "b": real(6, seed=6)}
    weights |= {n: np.array(x, np.float32) for n, x in NUMBERS.items()}
    read = {i for n in nodes for i in n.input}
    model = model_of(nodes, feeds, opset=14, weights={n: a for n, a in weights.items() if n in read})
    fused = optimised(model, tmp_path)
    assert set(op_types(fused)) >= expected
    assert_alike(model, fused, feeds)
