"""Lowering for CUDA, as far as tests prove it: the same numbers, and a kernel for every node by the table of kernels.

``python -m benchmarks.placement`` compares that table with the real onnxruntime-gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.backends.engine import for_machine
from gradgraph.backends.forms import Form
from gradgraph.backends.ort_cuda import ORT_CUDA
from gradgraph.backends.ort_cuda.cuda_kernels import Stray, obstacles_to_capture, without_kernel
from gradgraph.backends.portable import PORTABLE
from gradgraph.frontend import Input, export, manual_seed, nn
from gradgraph.rules.registry import RULES, Case, Rule
from tests.kit.form_kit import problems_of_form, problems_of_rule
from tests.kit.running import run
from tests.networks.test_light_models import NETWORKS, with_random_weights

FORMS = [pytest.param(f, id=f"{f.op_type}-{f.name}") for f in ORT_CUDA.lowering.forms]
LOWERED = {f.values[0].op_type for f in FORMS} | {"Conv", "Gather", "MaxPool"}  # type: ignore[attr-defined]
CASES = [
    pytest.param(r, c, id=f"{r.op_type}-{i}")
    for r in RULES.values()
    for i, c in enumerate(r.cases)
    if r.op_type in LOWERED and not c.onnxruntime
]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_equals_the_portable_one(form: Form) -> None:
    assert problems_of_form(ORT_CUDA, form) == []


@pytest.mark.sweep(0.08)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_a_lowered_rule_equals_the_portable_one(rule: Rule, case: Case) -> None:
    assert problems_of_rule(rule, case, ORT_CUDA) == []
    assert problems_of_rule(rule, case, ORT_CUDA, unknown=True) == []
    assert problems_of_rule(rule, case, ORT_CUDA, every=True) == []


# --- a kernel for every node ----------------------------------------------------------------------------------


class Decoder(nn.Module):
    """A GPT-2 in small: every operator of the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(300, 16), nn.Embedding(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))
        self.head = nn.Linear(16, 300, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.places(np.arange(8))
        return self.head(self.layers(x)).reshape(-1, 300)


class Pixels(nn.Module):
    """Down and up again, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.strided = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Dropout(0.2))
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, 2))

    def forward(self, x: Any) -> Any:
        return self.up(self.strided(self.down(x)))


def decoder() -> gg.Step:
    return gg.build(export(Decoder(), {"ids": Input((2, 8), "int64")}), "cross_entropy", gg.optim.adamw(1e-3))


def pixels() -> gg.Step:
    return gg.build(export(Pixels(), {"x": (4, 1, 8, 8)}), "cross_entropy", gg.optim.sgd(0.1, momentum=0.9))


def resnet50() -> gg.Step:
    return gg.build(
        with_random_weights("resnet50"), "cross_entropy", gg.optim.adamw(1e-3), output=NETWORKS["resnet50"][0]
    )


def opened(model: onnx.ModelProto) -> ir.Model:
    return ir.from_proto(model)


STEPS = [decoder, pixels, resnet50]


@pytest.mark.sweep(0.8)
@pytest.mark.parametrize("make", STEPS)
def test_every_node_has_a_cuda_kernel(make: Callable[[], gg.Step]) -> None:
    manual_seed(0)
    step = make()
    lowered = opened(for_machine(step.train, ORT_CUDA))
    assert obstacles_to_capture(lowered) == []


def test_a_node_without_a_cuda_kernel_is_seen() -> None:
    assert without_kernel(opened(for_machine(pixels().train, PORTABLE))) != []


@pytest.mark.parametrize("make", [decoder, pixels])
def test_the_lowered_step_gives_the_same_numbers(make: Callable[[], gg.Step]) -> None:
    manual_seed(0)
    step = make()
    rng = np.random.default_rng(0)
    feeds = {s.name: rng.integers(0, 3, s.shape) if "int" in s.dtype else rng.normal(size=s.shape).astype(np.float32)
             for s in step.manifest.batch}  # fmt: skip
    feeds |= {name: np.array(value, np.float32) for name, value in step.manifest.hyperparameters.items()}
    feeds |= run(step.init, {})
    expected, found = run(step.train, feeds), run(for_machine(step.train, ORT_CUDA), feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=2e-5, err_msg=name)


# --- the check itself -----------------------------------------------------------------------------------------


def model(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'))


REFUSED = {
    "m (float[4] x) => (float[4] y) { y = Atan(x) }": "it has no operator Atan",
    "m (uint8[4] x) => (uint8[4] y) { y = Max(x) }": "it has no Max of uint8",
    "m (float[1,1,2,2] x, float[1] s) => (float[1,1,2,2] y) {"
    " y = BatchNormalization <training_mode=1> (x, s, s, s, s) }": "CUDA refuses it in training mode",
    "m (float[1,1,4] x, float[1,1,2] w) => (float[1,1,4] y) { y = ConvTranspose <pads=[1,0]> (x, w) }": "both ends",
    "m (float[1,4,4] x) => (float[1,4,4] y) { y = LRN <size=4> (x) }": "odd numbers of channels",
    "m (float[2,1,3] x, float[1,8,3] w, float[1,8,2] r) => (float[2,1,1,2] y) {"
    " y = LSTM <hidden_size=2, clip=1.0> (x, w, r) }": "cuDNN knows the usual form only",
    "m (float[2,1,3] x, float[1,6,3] w, float[1,6,2] r) => (float[2,1,1,2] y) {"
    " y = GRU <hidden_size=2> (x, w, r) }": "linear_before_reset=1",
    "m (float[2,1,3] x, float[1,2,3] w, float[1,2,2] r) => (float[2,1,1,2] y) {"
    ' y = RNN <hidden_size=2, activations=["Relu"]> (x, w, r) }': "without activations",
    "m (float[2,1,3] x, float[1,k,3] w, float[1,k,k] r) => (float[2,1,1,k] y) { y = RNN (x, w, r) }": "hidden_size",
    "m (float[4] x) => (int64 y) { y = ArgMax <axis=0, keepdims=0, select_last_index=1> (x) }": "the first of equals",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items())
def test_what_cuda_refuses_is_named(text: str, reason: str) -> None:
    (stray,) = without_kernel(model(text))
    assert reason in str(stray)


def test_arithmetic_on_shapes_is_no_stray() -> None:
    assert without_kernel(model("m (float[4] x, float[4] y) => (float[4] z) { z = Add(x, y) }")) == []
    for text in (
        "m (float[a,b] x) => (int64[2] z) { s = Shape(x) z = BitwiseAnd(s, s) }",
        "m (seq(float[a]) x, int64 k) => (int64 z) { n = SequenceLength(x) z = BitwiseAnd(n, k) }",
    ):
        assert without_kernel(model(text)) == []
    device = model("m (int64[2] x) => (int64[2] z) { z = BitwiseAnd(x, x) }")
    assert [s.operator for s in without_kernel(device)] == ["BitwiseAnd"]


def test_what_cuda_takes_is_no_stray() -> None:
    pool = (
        "m (float[1,1,4] x) => (float[1,1,3] y) { y = AveragePool <kernel_shape=[2], dilations=[2], pads=[0,1]> (x) }"
    )
    usual = """m (float[2,1,3] x, float[1,2,3] w, float[1,2,2] r) => (float[2,1,1,2] y) {
        y = RNN <hidden_size=2, activations=["Tanh", "Tanh"]> (x, w, r) }"""
    norm = "m (float[2,3] x) => (float[2,3] y) { y = LpNormalization (x) }"
    like = "m (int64[2] x) => (float[2] y) { y = RandomNormalLike <dtype=1> (x) }"
    for text in (pool, usual, norm, like):
        assert without_kernel(model(text)) == []


def test_what_a_graph_cannot_record() -> None:
    found = obstacles_to_capture(model("m (float[n] x) => (int64[1,k] y) { y = NonZero(x) }"))
    assert found == [
        Stray("x", "input", "its size is not fixed"),
        Stray("", "NonZero", "the size of its result is read back by the CPU"),
    ]
