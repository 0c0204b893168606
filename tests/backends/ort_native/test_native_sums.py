"""Long sums of one sign, where a chain of additions loses most: every kernel is as exact as the portable form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.backends.engine import lower
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native import library as native
from gradgraph.files.models import to_proto
from gradgraph.rules.registry import Case, Draw, case, real, uniform
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.form_kit import one_call, portable

pytestmark = pytest.mark.usefixtures("library")

CPU = Placement(("CPUExecutionProvider",))
Feeds = dict[str, np.ndarray]


def one_sign(*shape: int) -> Draw:
    return uniform(0.0, 1.0, *shape)


def rows(count: int, columns: int = 35) -> Case:
    return case(one_sign(count, 20_000), one_sign(20_000, columns))


NORM = (one_sign(3), one_sign(3), uniform(0.5, 1.5, 3))
WINDOWS: dict[str, Any] = {"pads": [1, 1, 1, 1]}
MANY_CHANNELS = (one_sign(1, 5_000, 4, 5), one_sign(3, 5_000, 3, 3))
MANY_WINDOWS = (one_sign(6, 2, 50, 50), one_sign(6, 3, 50, 50), one_sign(3, 2, 3, 3))
DEEP = (one_sign(6, 2, 50, 50), one_sign(6, 2, 50, 50), one_sign(2, 1, 3, 3))

# by the name of a form; inputs of `gradgraph` operators as there
SUMS: dict[str, list[Case]] = {
    "matmul_by_tiles": [*(rows(n) for n in (1, 2, 3, 4, 5, 8, 13, 48)), rows(50, 7), rows(2, 600)],
    "gemm_by_tiles": [
        case(one_sign(20_000, 40), one_sign(20_000, 9), transA=1),
        case(one_sign(2_000, 40), one_sign(9, 2_000), transA=1, transB=1),
    ],
    "by_tiles": [case(*MANY_CHANNELS, **WINDOWS)],
    "dx_by_tiles": [case(one_sign(1, 5_000, 4, 5), one_sign(5_000, 3, 3, 3), real(1, 3, 4, 5), **WINDOWS)],
    "dw_in_one_pass": [case(*MANY_WINDOWS, **WINDOWS)],
    "depthwise": [case(one_sign(1, 3, 40, 40), one_sign(3, 1, 31, 31), group=3)],
    "depthwise_dx": [case(one_sign(1, 3, 40, 40), one_sign(3, 1, 31, 31), real(1, 3, 70, 70), group=3)],
    "depthwise_dw": [case(*DEEP, **WINDOWS, group=2)],
    "layer_norm_by_rows": [
        case(one_sign(3, 40_000), one_sign(3, 40_000), one_sign(40_000), uniform(-2, -1, 3, 1), one_sign(3, 1), axis=1),
        case(one_sign(20_000, 5), one_sign(20_000, 5), one_sign(5), uniform(-2, -1, 20_000, 1), one_sign(20_000, 1),
             axis=1),
    ],
    "softmax_by_rows": [case(one_sign(9, 100_000), one_sign(9, 100_000), axis=-1)],
    "batch_norm": [
        case(one_sign(2, 3, 30_000), *NORM, one_sign(3), outputs=3, training_mode=1, momentum=0.0, epsilon=1e-5)
    ],
    "batch_norm_backwards": [case(one_sign(2, 3, 30_000), one_sign(2, 3, 30_000), *NORM, epsilon=1e-5)],
    "unscaled_batch_norm_backwards": [case(one_sign(2, 3, 30_000), one_sign(2, 3, 30_000), *NORM, epsilon=1e-5)],
}  # fmt: skip
SHORT = {  # number by number, or a few numbers at a time
    "adam_in_one_pass", "momentum_in_one_pass", "relu_in_one_pass", "clip_in_one_pass", "silu_in_one_pass",
    "gelu_in_one_pass", "hard_swish_in_one_pass", "max_pool_backwards",
    "fused_matmul_by_tiles", "bias_in_product",  # the product is that of another form
}  # fmt: skip
FORMS = {f.name: f for f in ORT_NATIVE.lowering.forms}
TRIALS = [pytest.param(name, c, id=f"{name}-{i}") for name, cases in SUMS.items() for i, c in enumerate(cases)]


def test_every_form_is_in_a_table() -> None:
    assert set(SUMS) | SHORT == set(FORMS)
    assert not set(SUMS) & SHORT


def outputs(model: onnx.ModelProto, feeds: Feeds, kernels: bool) -> Feeds:
    session = create_session(model, CPU, RuntimeOptions(native_kernels=kernels, threads=2))
    names = {v.name for v in session.get_inputs()}
    found = session.run(None, {k: v for k, v in feeds.items() if k in names})
    return dict(zip([y.name for y in session.get_outputs()], found, strict=True))


def check(reference: onnx.ModelProto, fast: onnx.ModelProto, draws: Sequence[Feeds], kernels: set[str]) -> None:
    """The mean error of every output is about that of onnxruntime at most, or what rounding the result costs."""
    assert kernels <= {n.op_type for n in fast.graph.node if n.domain == native.DOMAIN}
    errors = [errors_of(reference, fast, feeds) for feeds in draws]
    for name in errors[0]:
        ours, theirs = np.mean([found[name] for found in errors], axis=0)
        assert ours <= max(1.5 * theirs, 2.0**-23), (name, ours, theirs)


def errors_of(reference: onnx.ModelProto, fast: onnx.ModelProto, feeds: Feeds) -> dict[str, list[float]]:
    """Mean errors of the kernels and of onnxruntime, as parts of the mean size of each output."""
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}
    both = outputs(fast, feeds, True), outputs(reference, feeds, False)
    return {
        name: [float(np.abs(found[name] - wanted).mean() / np.abs(wanted).mean()) for found in both]
        for name, wanted in Oracle(in_float64(reference))(wide).items()
    }


@pytest.mark.parametrize(("name", "given"), TRIALS)
def test_long_sums_of_one_sign_are_as_exact_as_those_of_onnxruntime(name: str, given: Case) -> None:
    form = FORMS[name]
    model, feeds = one_call(form.domain, form.op_type, given, unknown=False)
    fast = to_proto(lower(model.clone(), ORT_NATIVE, lambda call, forms: [f for f in forms if f is form]))
    check(portable(model), fast, [feeds], set())
    assert any(n.domain == native.DOMAIN for n in fast.graph.node)


# --- what whole patterns become ---------------------------------------------------------------------------------------

HEAD = '<ir_version: 10, opset_import: ["" : 21]> g '
ATTENTION = (
    HEAD + "(float[1, 2, {q}, 8] q, float[1, 2, {k}, 8] k, float[1, 2, {k}, 9] v) => (float[1, 2, {q}, 9] y)"
    "<float c = {{0.5}}> {{"
    "kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) w = Mul (s, c)"
    "p = Softmax <axis = -1> (w) y = MatMul (p, v) }}"
)
LSTM = (
    HEAD + "(float[{t}, {n}, 4] x, float[1, {h4}, 4] w, float[1, {h4}, {h}] r, float[1, {h8}] b)"
    " => (float[{t}, 1, {n}, {h}] y) {{ y = LSTM <hidden_size = {h}> (x, w, r, b) }}"
)


def scaled(shape: list[int], rng: np.random.Generator, size: float) -> np.ndarray:
    return np.asarray(rng.uniform(0, size, shape), np.float32)


def check_gradients(text: str, wrt: str, kernels: set[str], size: Callable[[str], float], draws: int = 1) -> None:
    """Of the inputs named in ``wrt``, a letter each; errors are means over so many draws of all inputs."""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    reference: onnx.ModelProto = gg.vjp(model, wrt=list(wrt))
    fast = gg.vjp(model, wrt=list(wrt), backend="ort-cpu-native")
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in reference.graph.input}
    drawn = [{name: scaled(shape, rng, size(name)) for name, shape in shapes.items()} for _ in range(draws)]
    check(reference, fast, drawn, kernels)


@pytest.mark.usefixtures("every_attention")
@pytest.mark.parametrize(("queries", "keys"), [(40, 5_000), (5_000, 40)])
def test_attention_over_many_keys_and_of_many_queries(queries: int, keys: int) -> None:
    """Of few queries, errors of one draw are those of a few sums: of ours and of onnxruntime's 0.8 to 1.8 times the
    other's.
    """
    text, kernels = ATTENTION.format(q=queries, k=keys), {"Attention", "AttentionGrad"}
    check_gradients(text, "qkv", kernels, lambda name: 1.0, draws=8)


@pytest.mark.sweep(0.18)
@pytest.mark.parametrize(("steps", "sequences", "units"), [(3_000, 1, 3), (2, 3_000, 3), (3, 2, 700)])
def test_an_lstm_of_many_steps_or_sequences_or_units(
    steps: int, sequences: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)
    monkeypatch.setattr(native.Library, "has_tiles", True)
    text = LSTM.format(t=steps, n=sequences, h=units, h4=4 * units, h8=8 * units)
    check_gradients(text, "xwrb", {"LSTM", "LSTMGrad"}, lambda name: 1.0 / units if name == "r" else 0.5)
