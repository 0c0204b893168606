"""Files of opsets 1 to 6, which onnxruntime does not run: NumPy's formulas, and gradients by differences."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.compat.onnxruntime_training import artifacts
from gradgraph.errors import ModelError
from gradgraph.passes.normal import normalise
from gradgraph.verify.diagnose import diagnose
from gradgraph.verify.reference import model_in_float64, oracle_of
from tests.kit.small_models import normal_form, real, run

LAST = 6  # opset 7 has NumPy's broadcasting, and is the oldest that onnxruntime runs


@dataclass(frozen=True)
class Case:
    """One node, and what it computes of its inputs and weights; one without a gradient is not differentiated."""

    op: str
    opset: int
    inputs: tuple[Any, ...]
    expected: Any
    attrs: dict[str, Any] = field(default_factory=dict)
    weights: tuple[Any, ...] = ()
    outputs: int = 1
    smooth: bool = True


def model_at(opset, nodes, inputs, weights, outputs=("y",)):
    """A model of IR version 3, whose initializers are also inputs."""
    tensors = [numpy_helper.from_array(a, n) for n, a in weights.items()]
    named = {**inputs, **weights}
    infos = [
        helper.make_tensor_value_info(
            n, *((helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) if hasattr(a, "dtype") else a)
        )
        for n, a in named.items()
    ]
    results = [helper.make_value_info(name, onnx.TypeProto()) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", infos, results, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)


def model_of_case(case):
    inputs = {f"x{i}": a for i, a in enumerate(case.inputs)}
    weights = {f"w{i}": a for i, a in enumerate(case.weights)}
    outputs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, [*inputs, *weights], outputs, **case.attrs)
    return model_at(case.opset, [node], inputs, weights, outputs), inputs, weights


X, M = real(2, 4, 6, 5), real(3, 5)
P = np.abs(X) + 0.5
FOUR = (real(4, seed=1), real(4, seed=2), real(4, seed=3), np.abs(real(4, seed=4)) + 0.5)
NO_HINT, HINT = {}, {"consumed_inputs": [0]}


def _pooled(x, how):
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), (2, 3))[:, :, ::2, ::2]
    return how(windows, axis=(4, 5))


def _batch_norm(x, scale, bias, mean, var):
    scale, bias, mean, var = (v[:, None, None] for v in (scale, bias, mean, var))
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias


def _batch_norm_of_rows(x, *four):
    return _batch_norm(x[:, :, None, None], *four)[:, :, 0, 0]


def _instance_norm(x, scale, bias):
    y = (x - x.mean((2, 3), keepdims=True)) / np.sqrt(x.var((2, 3), keepdims=True) + 1e-5)
    return y * scale[:, None, None] + bias[:, None, None]


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _selu(alpha, gamma):
    return lambda x: gamma * np.where(x > 0, x, alpha * np.expm1(x))


def _rnn(x, w, r, b):
    """[time, 1, batch, hidden] and the last state."""
    h, states = np.zeros((x.shape[1], r.shape[-1])), []
    for step in x:
        h = np.tanh(step @ w[0].T + h @ r[0].T + b[0].reshape(2, -1).sum(0))
        states.append(h)
    return np.stack(states)[:, None], h[None]


def _gru(x, w, r, b):
    h, states, size = np.zeros((x.shape[1], r.shape[-1])), [], r.shape[-1]
    wb, rb = b[0][: 3 * size], b[0][3 * size :]
    for step in x:
        a = step @ w[0].T + wb
        z, s = (_sigmoid(a[:, g] + h @ r[0][g].T + rb[g]) for g in (slice(size), slice(size, 2 * size)))
        last = slice(2 * size, None)
        h = (1 - z) * np.tanh(a[:, last] + (s * h) @ r[0][last].T + rb[last]) + z * h
        states.append(h)
    return np.stack(states)[:, None], h[None]


def _lstm(x, w, r, b):
    h, states = np.zeros((x.shape[1], r.shape[-1])), []
    c = h
    for step in x:
        i, o, f, g = np.split(step @ w[0].T + h @ r[0].T + b[0].reshape(2, -1).sum(0), 4, axis=1)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
        h = _sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.stack(states)[:, None], h[None]


def _recurrent(op, opset, gates, expected):
    weights = real(1, 3 * gates, 2), real(1, 3 * gates, 3, seed=1), real(1, 6 * gates, seed=2)
    return Case(op, opset, (real(4, 2, 2),), expected, {"hidden_size": 3, "output_sequence": 1}, weights, outputs=2)


UNARY = {
    "Abs": (np.abs, X), "Ceil": (np.ceil, X), "Floor": (np.floor, X), "Neg": (np.negative, X), "Exp": (np.exp, X),
    "Log": (np.log, P), "Sqrt": (np.sqrt, P), "Reciprocal": (np.reciprocal, P), "Tanh": (np.tanh, X),
    "Sigmoid": (_sigmoid, X), "Relu": (lambda x: np.maximum(x, 0), X),
    "Elu": (lambda x: np.where(x > 0, x, np.expm1(x)), X), "LeakyRelu": (lambda x: np.where(x > 0, x, 0.01 * x), X),
    "HardSigmoid": (lambda x: np.clip(0.2 * x + 0.5, 0, 1), X), "Clip": (lambda x: x, X),
}  # fmt: skip
ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
FLOATS = ARITHMETIC | {"Pow": np.power}
LOGIC = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}
COMPARISONS = {"Greater": np.greater, "Less": np.less}
MANY = {"Max": np.maximum.reduce, "Min": np.minimum.reduce, "Sum": sum, "Mean": lambda xs: sum(xs) / len(xs)}
ALIGNMENTS = [  # second shape, attributes, the shape that NumPy would need
    ((2, 4, 6, 5), {}, (2, 4, 6, 5)),
    ((5,), {"broadcast": 1}, (5,)),
    ((6, 5), {"broadcast": 1}, (6, 5)),
    ((4,), {"broadcast": 1, "axis": 1}, (4, 1, 1)),
    ((2,), {"broadcast": 1, "axis": 0}, (2, 1, 1, 1)),
    ((4, 6), {"broadcast": 1, "axis": 1}, (4, 6, 1)),
    ((5,), {"broadcast": 1, "axis": 3}, (5,)),
    ((6, 5), {"broadcast": 1, "axis": -1}, (6, 5)),
    ((1, 1), {"broadcast": 1}, (1, 1)),
    ((1,), {"broadcast": 1, "axis": 1}, (1,)),
    ((), {"broadcast": 1}, ()),
]


def _aligned(op, opset, f, number, **options):
    for size, attrs, wide in ALIGNMENTS:
        b = np.asarray(number(*size))
        given = attrs | ({"consumed_inputs": [0, 0]} if op in ARITHMETIC and opset < 6 else {})
        yield Case(
            op, opset, (number(2, 4, 6, 5),), lambda x, b, wide=wide: f(x, b.reshape(wide)), given, (b,), **options
        )


def _positive(*size):
    return np.asarray(np.abs(real(*size, seed=len(size))) + 0.5, np.float32)


def _truth(*size):
    return np.asarray(real(*size, seed=len(size)) > 0)


def _integer(*size):
    return np.asarray(np.sign(real(*size, seed=len(size))), np.int32)


def _cases():
    for op, (f, x) in UNARY.items():
        yield from (Case(op, v, (x,), f, HINT if v < 6 else {}, smooth=op not in ("Ceil", "Floor")) for v in (1, 5, 6))
    for (op, f), v in itertools.product(FLOATS.items(), (1, 5, 6)):
        yield from _aligned(op, v, f, _positive)
    for (op, f), v in itertools.product(LOGIC.items(), (1, 6)):
        yield from _aligned(op, v, f, _truth, smooth=False)
    for (op, f), v in itertools.product(COMPARISONS.items(), (1, 6)):
        yield from _aligned(op, v, f, _positive, smooth=False)
    for v in (1, 6):
        yield from _aligned("Equal", v, np.equal, _integer, smooth=False)
    for (op, f), v in itertools.product(MANY.items(), (1, 6)):
        parts = (M, real(3, 5, seed=1), real(3, 5, seed=2))
        yield Case(op, v, parts, lambda *xs, f=f: f(xs), {"consumed_inputs": [0, 0, 0]} if v < 6 else {})
    for v in (1, 5, 6):
        hints = {"consumed_inputs": [0, 0, 0, 1, 1]} if v < 6 else {}
        yield Case("BatchNormalization", v, (X,), _batch_norm, {"is_test": 1, "spatial": 1, **hints}, FOUR)
        yield Case("BatchNormalization", v, (X,), _batch_norm, hints, FOUR)
        rows = {"is_test": 1, "spatial": 0, **hints}
        yield Case("BatchNormalization", v, (real(3, 4),), _batch_norm_of_rows, rows, FOUR)
        yield Case("Dropout", v, (M,), lambda x: x, {"is_test": 1, "ratio": 0.3, **(HINT if v < 6 else {})})
        yield Case("Dropout", v, (M,), lambda x: x)
        yield Case("InstanceNormalization", v, (X,), _instance_norm, HINT if v < 6 else {}, FOUR[:2])
        yield Case("Clip", v, (M,), lambda x: np.clip(x, -0.5, 0.7), {"min": -0.5, "max": 0.7})
        yield Case("Gemm", v, (M,), lambda a, b, c: 0.5 * a @ b.T + 2 * c,
                   {"transB": 1, "alpha": 0.5, "beta": 2.0, "broadcast": 1}, (real(4, 5), real(4, seed=1)))  # fmt: skip
        yield Case("Gemm", v, (M,), lambda a, b, c: a @ b + c, {}, (real(5, 4), real(3, 4, seed=1)))
        slopes = real(4, seed=3)
        yield Case("PRelu", v, (X,), lambda x, s: np.where(x > 0, x, x * s[:, None, None]),
                   HINT if v < 6 else {}, (slopes,))  # fmt: skip
        yield Case("PRelu", v, (X,), lambda x, s: np.where(x > 0, x, x * s), {}, (slopes[:1],))
        yield Case("PRelu", v, (real(3, 4),), lambda x, s: np.where(x > 0, x, x * s), {}, (slopes,))
    yield Case("Selu", 1, (X,), _selu(1.6732, 1.0507), HINT)
    yield Case("Selu", 1, (X,), _selu(1.2, 1.0507), {"alpha": 1.2, **HINT})
    yield Case("Selu", 5, (X,), _selu(1.2, 0.8), {"alpha": 1.2, "gamma": 0.8})
    yield Case("Selu", 6, (X,), _selu(1.67326319217681884765625, 1.05070102214813232421875))
    yield Case("Cast", 1, (3 * M,), lambda x: x.astype(np.int32), {"to": "INT32"}, smooth=False)
    yield Case("Cast", 5, (np.arange(4),), lambda x: x.astype(np.float64), {"to": "double"}, smooth=False)
    yield Case("Cast", 6, (3 * M,), lambda x: x.astype(np.int64), {"to": 7}, smooth=False)
    for v in (1, 3):
        yield Case("Concat", v, (M, real(3, 2)), lambda *xs: np.concatenate(xs, 1))
        yield Case("Concat", v, (M, real(2, 5)), lambda *xs: np.concatenate(xs, 0), {"axis": 0})
    yield Case("Concat", 4, (M, real(2, 5)), lambda *xs: np.concatenate(xs, 0), {"axis": 0})
    for v in (1, 4):
        yield Case("Reshape", v, (X,), lambda x: x.reshape(2, 4, -1), {"shape": [0, 4, -1]})
        yield Case("Reshape", v, (X,), lambda x: x.reshape(2, -1), {"shape": [2, -1], "consumed_inputs": [0]})
    yield Case("Reshape", 5, (X,), lambda x, _: x.reshape(2, 4, -1), {}, (np.array([0, 4, -1]),))
    around = {"constant_values": 1.5}
    yield Case(
        "Pad", 1, (M,), lambda x: np.pad(x, [(0, 2), (1, 3)], **around), {"paddings": [0, 1, 2, 3], "value": 1.5}
    )
    yield Case(
        "Pad", 1, (M,), lambda x: np.pad(x, [(1, 0), (2, 1)], "reflect"), {"paddings": [1, 2, 0, 1], "mode": "reflect"}
    )
    yield Case("Pad", 2, (M,), lambda x: np.pad(x, [(0, 2), (1, 3)], "edge"), {"pads": [0, 1, 2, 3], "mode": "edge"})
    cut = lambda x, *_: np.split(x, [1, 3], 1)  # noqa: E731
    yield Case("Split", 1, (M,), cut, {"axis": 1, "split": [1, 2, 2]}, outputs=3)
    yield Case("Split", 1, (M,), cut, {"axis": 1}, (np.array([1, 2, 2], np.float32),), outputs=3)
    yield Case("Split", 1, (real(2, 6),), lambda x: np.split(x, 3, 1), {"axis": 1}, outputs=3)
    yield Case("Split", 2, (M,), cut, {"axis": 1, "split": [1, 2, 2]}, outputs=3)
    yield Case("Split", 2, (real(6, 2),), lambda x: np.split(x, 3, 0), outputs=3)
    for axis in (1, -1):
        where = (np.array(3, np.float32), np.array(axis, np.float32))
        yield Case("Tile", 1, (M,), lambda x, *_: np.tile(x, (1, 3)), {}, where)
    yield Case(
        "Tile", 5, (M,), lambda x, *_: np.tile(x, (2, 1)), {}, (np.array([2], np.float32), np.zeros(1, np.float32))
    )
    yield Case("Tile", 6, (M,), lambda x, _: np.tile(x, (2, 3)), {}, (np.array([2, 3]),))
    for v in (1, 6):
        scales = {"height_scale": 2.0, "width_scale": 3.0}
        yield Case("Upsample", v, (X,), lambda x: x.repeat(2, 2).repeat(3, 3), scales)
    yield Case(
        "LpPool",
        1,
        (P,),
        lambda x: _pooled(x**3, np.sum) ** (1 / 3),
        {"p": 3.0, "kernel_shape": [2, 2], "strides": [2, 2]},
    )
    yield Case(
        "LpPool",
        2,
        (P,),
        lambda x: _pooled(x**3, np.sum) ** (1 / 3),
        {"p": 3, "kernel_shape": [2, 2], "strides": [2, 2]},
    )
    for v, p in ((1, 3.0), (2, 3)):
        yield Case("GlobalLpPool", v, (P,), lambda x: (x**3).sum((2, 3), keepdims=True) ** (1 / 3), {"p": p})
    for v in (1, 6):
        window = {"kernel_shape": [2, 2], "strides": [2, 2]}
        yield Case("AveragePool", v, (X,), lambda x: _pooled(x, np.mean), window)
        yield _recurrent("RNN", v, 1, _rnn)
        yield _recurrent("LSTM", v, 4, _lstm)
    yield from (_recurrent("GRU", v, 3, _gru) for v in (1, 3, 6))


CASES = [*_cases()]


def test_every_operator_whose_schema_changed_up_to_opset_7_has_a_case():
    versions: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= LAST + 1:
            versions.setdefault(schema.name, set()).add(schema.since_version)
    changed = {(op, v) for op, known in versions.items() for v in known if v < max(known)}
    tested = {(case.op, max(v for v in versions[case.op] if v <= case.opset)) for case in CASES}
    assert changed <= tested


def _id(case):
    written = ",".join(f"{k}={v}" for k, v in case.attrs.items() if k != "consumed_inputs").replace(" ", "")
    shapes = ",".join("x".join(map(str, w.shape)) for w in case.weights)
    return "-".join(filter(None, [f"{case.op}.{case.opset}", written, shapes]))


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_old_forms_keep_their_meaning(case):
    model, inputs, weights = model_of_case(case)
    wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in {**inputs, **weights}.items()}
    expected = case.expected(*wide.values())
    expected = expected if isinstance(expected, list | tuple) else [expected]
    single = run(normal_form(model), inputs)
    double = oracle_of(model_in_float64(normalise(model)))({n: wide[n] for n in inputs})
    for want, small, large in zip(expected, single, double.values(), strict=True):
        np.testing.assert_allclose(small, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(large, want, rtol=1e-6, atol=1e-7)
    if case.smooth:
        report = gg.check_gradients(model)
        assert report.ok, report
        assert report.precision == "float64", report.reason


# --- files as PyTorch wrote them in 2018, with PyTorch's numbers --------------------------------------------------

SHIPPED = Path(onnx.__file__).parent / "backend" / "test" / "data"  # part of the onnx package


def _old_files():
    for path in sorted(SHIPPED.glob("pytorch-*/*/model.onnx")):
        if max(o.version for o in onnx.load(path).opset_import) <= LAST:
            yield pytest.param(path, id=path.parent.name.removeprefix("test_"))


def _stored(folder, kind):
    for i in itertools.count():
        if not (path := folder / f"{kind}_{i}.pb").is_file():
            return
        yield numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("path", [*_old_files()])
def test_files_of_opset_6_compute_what_their_exporter_stored(path):
    found = normal_form(onnx.load(path))
    folder = path.parent / "test_data_set_0"
    feeds = dict(zip([v.name for v in found.graph.input], _stored(folder, "input"), strict=True))
    for a, b in zip(_stored(folder, "output"), run(found, feeds), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-5)
    if any(a.dtype.kind == "f" for a in feeds.values()):
        assert gg.check_gradients(path).ok


# --- what has no meaning at opset 21 ------------------------------------------------------------------------------


def one_node(opset, op, weights=None, x=(TensorProto.FLOAT, ["n", None, 6, 5]), outputs=("y",), **attrs):
    weights = weights or {}
    node = helper.make_node(op, ["x", *weights], list(outputs), name="here", **attrs)
    return model_at(opset, [node], {"x": x}, weights, outputs)


CHANNELS = {"w": real(4)}
RANKLESS = (TensorProto.FLOAT, None)
REFUSED = {
    "rank of the first": (
        one_node(3, "Add", CHANNELS, RANKLESS, axis=1, broadcast=1),
        "aligns its second input with axis 1 of the first, but the rank of one of them is unknown; declare the shapes",
    ),
    "rank for slopes": (one_node(6, "PRelu", CHANNELS, RANKLESS), "but the rank of its input is unknown"),
    "beyond the end": (
        one_node(3, "Mul", {"w": real(4, 6)}, axis=3, broadcast=1),
        "aligns an input of rank 2 with axis 3 of one of rank 4",
    ),
    "before the start": (one_node(3, "Mul", CHANNELS, axis=-2, broadcast=1), "with axis -2 of one of rank 4"),
    "no target of Reshape": (one_node(1, "Reshape"), "'shape'"),
    "no axis of Split": (one_node(1, "Split", outputs=("y", "z")), "'axis'"),
    "an unknown type": (one_node(1, "Cast", to="REAL"), "casts to 'REAL', which is not an element type"),
    "a fraction": (one_node(1, "GlobalLpPool", p=2.5), "has p=2.5, but p must be a whole number"),
    "an infinite power": (one_node(1, "GlobalLpPool", p=float("inf")), "has p=inf, but p must be a whole number"),
    "three borders": (one_node(1, "Crop", border=[1, 1, 1]), "must have four borders"),
    "statistics of a test": (
        one_node(6, "BatchNormalization", dict(zip("abcd", FOUR, strict=True)), outputs=("y", "mean"), is_test=1),
        "has is_test=1 and a used output that only training computes",
    ),
    "per activation": (
        one_node(6, "BatchNormalization", dict(zip("abcd", FOUR, strict=True)), is_test=1, spatial=0),
        "has spatial=0",
    ),
    "an operator of later": (one_node(6, "Expand", {"w": np.array([2])}), "an operator that opset 6 does not have"),
    "an attribute of later": (one_node(3, "MaxPool", kernel_shape=[2, 2], ceil_mode=1), "'ceil_mode', which"),
    "an experimental operator": (one_node(3, "MeanVarianceNormalization"), "an operator that opset 3 does not have"),
}


@pytest.mark.parametrize(("model", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_converted_is_reported_by_name(model, words):
    with pytest.raises(ModelError) as caught:
        normalise(model)
    assert words in str(caught.value)
    assert "here" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_required_hint_without_meaning_may_be_missing():
    assert normal_form(one_node(1, "BatchNormalization", dict(zip("abcd", FOUR, strict=True)), x=X))


# --- operators that ONNX removed ----------------------------------------------------------------------------------

EXPERIMENTAL = [
    ("Affine", {"alpha": 0.5, "beta": 2.0}),
    ("Crop", {"border": [1, 2, 0, 1]}),
    ("Crop", {"border": [1, 2, 0, 1], "scale": [3, 2]}),
    ("ImageScaler", {"scale": 0.5, "bias": [1.0, 2.0, 3.0, 4.0]}),
    ("ParametricSoftplus", {"alpha": 0.5, "beta": 2.0}),
    ("Scale", {"scale": 3.0}),
    ("ScaledTanh", {"alpha": 0.5, "beta": 2.0}),
    ("ThresholdedRelu", {"alpha": 0.7}),
]


@pytest.mark.parametrize(("op", "attrs"), EXPERIMENTAL, ids=lambda v: v if isinstance(v, str) else "")
def test_experimental_operators_as_onnxruntime_computes_them(op, attrs):
    newer, older = (model_at(opset, [helper.make_node(op, ["x"], ["y"], **attrs)], {"x": X}, {}) for opset in (7, 3))
    (expected,) = run(newer, {"x": X})
    for model in (newer, older):
        np.testing.assert_allclose(run(normal_form(model), {"x": X})[0], expected, rtol=1e-5, atol=1e-6)
    assert gg.check_gradients(older).ok


FILLED = [  # attributes, sizes or tensor, the shape
    ({"shape": [3, 5]}, None, (3, 5)),
    ({"input_as_shape": 1}, np.array([3, 5]), (3, 5)),
    ({"input_as_shape": 1, "extra_shape": [5]}, np.array([3]), (3, 5)),
    ({}, real(3, 5), (3, 5)),
    ({}, None, ()),
]


@pytest.mark.parametrize("opset", [1, 6, 8])
@pytest.mark.parametrize(("attrs", "given", "shape"), FILLED)
def test_filled_constants(opset, attrs, given, shape):
    switch = {"broadcast": 1} if opset < 7 else {}
    inputs = {} if given is None else {"k": given}
    nodes = [helper.make_node("ConstantFill", [*inputs], ["c"], value=2.5, **attrs)]
    nodes += [helper.make_node("Mul", ["x", "c"], ["z"], **switch), helper.make_node("Identity", ["c"], ["d"])]
    found = run(normal_form(model_at(opset, nodes, {"x": M}, inputs, ("z", "d"))), {"x": M})
    for a, b in zip(found, (2.5 * M, np.full(shape, 2.5, np.float32)), strict=True):
        np.testing.assert_array_equal(a, b)


# --- whole networks -----------------------------------------------------------------------------------------------

# as Caffe2 wrote it, and at opset 13; the first version's initializers are inputs, too
SIZES = {"w1": (8, 3, 3, 3), "b1": (8,), "scale": (8,), "bias": (8,), "mean": (8,), "var": (8,), "w2": (4, 8, 1, 1),
         "w3": (4, 8, 3, 3), "shift": (8,), "slope": (8,), "fw": (5, 128), "fb": (5,)}  # fmt: skip
CAFFE2 = """
    c = Conv<kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1]>(x, w1, b1)
    r = Relu(c)
    l = LRN<size=5, alpha=0.0001, beta=0.75, bias=1.0>(r)
    p = MaxPool<kernel_shape=[3, 3], pads=[0, 0, 1, 1], strides=[2, 2]>(l)
    n = BatchNormalization<consumed_inputs=[0, 0, 0, 1, 1], is_test=1, epsilon=0.00001>(p, scale, bias, mean, var)
    s = PRelu(n, slope)
    one = Conv<kernel_shape=[1, 1]>(s, w2)
    three = Conv<kernel_shape=[3, 3], pads=[1, 1, 1, 1]>(s, w3)
    both = Concat(one, three)
    moved = Add<broadcast=1, axis=1>(both, shift)
    sum = Sum(moved, s)
    a = AveragePool<kernel_shape=[2, 2], strides=[2, 2]>(sum)
    d = Dropout<is_test=1, ratio=0.3>(a)
    f = Reshape<shape=[-1, 128]>(d)
    logits = Gemm<transB=1, broadcast=1>(f, fw, fb)
    y = Softmax<axis=1>(logits)
"""
AT_13 = (
    CAFFE2.replace("consumed_inputs=[0, 0, 0, 1, 1], is_test=1, ", "")
    .replace("Dropout<is_test=1, ratio=0.3>(a)", "Dropout(a, ratio)")
    .replace("PRelu(n, slope)", "PRelu(n, tall_slope)")
    .replace("Concat(", "Concat<axis=1>(")
    .replace("Add<broadcast=1, axis=1>(both, shift)", "Add(both, tall_shift)")
    .replace("Reshape<shape=[-1, 128]>(d)", "Reshape(d, sizes)")
    .replace(", broadcast=1>", ">")
)


def network(opset):
    weights = {n: real(*size, seed=i) * np.float32(0.3) for i, (n, size) in enumerate(SIZES.items())}
    weights["var"] = np.abs(weights["var"]) + 0.5
    if opset == 13:
        weights |= {f"tall_{n}": weights.pop(n).reshape(8, 1, 1) for n in ("shift", "slope")}
        weights |= {"sizes": np.array([-1, 128]), "ratio": np.array(0.3, np.float32)}
    header = f'<ir_version: {3 if opset < 13 else 8}, opset_import: ["": {opset}]>'
    nodes = CAFFE2 if opset < 13 else AT_13
    model = onnx.parser.parse_model(f"{header} g (float[n, 3, 16, 16] x) => (float[n, 5] y) {{ {nodes} }}")
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    if opset < 13:
        infos = (helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in weights.items())
        model.graph.input.extend(infos)
    return model


BATCH = {"x": real(6, 3, 16, 16), "target": np.abs(real(6, 5, seed=1))}
QUIET = gg.RuntimeOptions(threads=1)


def test_a_network_of_caffe2_trains_like_its_newer_form():
    losses, exported = [], []
    for opset in (3, 13):
        step = gg.build(network(opset), loss="mse", optimizer=gg.optim.adamw(lr=0.01), seed=1)
        trainer = gg.Trainer(step, device="cpu", options=QUIET)
        losses.append([float(trainer.step(BATCH)["loss"]) for _ in range(5)])
        exported.append(run(trainer.export(), {"x": BATCH["x"]})[0])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(exported[0], exported[1], rtol=1e-4, atol=1e-6)
    assert losses[0][-1] < losses[0][0]


def test_gradients_of_a_network_of_caffe2():
    report = gg.check_gradients(network(3), sizes={"n": 2})
    assert report.ok, report
    assert report.precision == "float64"
    assert not diagnose(network(3))


def test_a_file_of_caffe2_can_be_edited_and_run(tmp_path):
    """Everything that runs a model, or edits it, does so with the converted one."""
    onnx.save(network(3), old := tmp_path / "old.onnx")
    (expected,) = run(normal_form(network(3)), {"x": BATCH["x"]})
    adapted = gg.surgery.merge_adapters(gg.surgery.lora(old, "*", rank=2))
    np.testing.assert_allclose(run(adapted, {"x": BATCH["x"]})[0], expected, rtol=1e-4, atol=1e-6)
    for small in (gg.surgery.quantize(old), gg.surgery.quantize(old, {"x": BATCH["x"]})):
        np.testing.assert_allclose(run(small.result, {"x": BATCH["x"]})[0], expected, atol=0.05)
    assert "gradgraph.teacher" in str(gg.distill(network(3), old).metadata_props)
    fixed = network(3)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    opened = gg.surgery.open_axes(fixed, {"x": {0: "batch"}})
    np.testing.assert_allclose(run(opened, {"x": BATCH["x"]})[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("opset", [6, 9])
def test_weights_that_had_to_be_inputs_are_constants_in_a_newer_file(opset):
    """Otherwise onnxruntime would keep them from its optimiser, and its quantiser would ask for them."""
    switch = {"broadcast": 1} if opset < 7 else {}
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], **switch)
    old = model_at(opset, [node], {"x": (TensorProto.FLOAT, ["n", 5])}, {"w": real(5, 4), "b": real(4, seed=1)})
    (expected,) = run(normal_form(old), {"x": M})
    for new in (gg.quantize(old, {"x": M}).result, gg.qat(old, {"x": M}), gg.surgery.name_weights(old)):
        assert new.ir_version < 4 or [v.name for v in new.graph.input] == ["x"]
        np.testing.assert_allclose(run(new, {"x": M})[0], expected, atol=0.1)


OLD_BODY = "t = Add<broadcast = 1, axis = 1>(a, b) r = Relu(t)"
NEW_BODY = "i = Constant<value_ints = [1, 2]>() u = Unsqueeze(b, i) t = Add(a, u) r = Relu(t)"


@pytest.mark.parametrize(("opset", "own", "body"), [(3, 3, OLD_BODY), (17, 6, OLD_BODY), (6, 17, NEW_BODY)])
def test_functions_of_old_opsets_run_wherever_a_model_is_run_or_edited(opset, own, body):
    imports = f'<ir_version: 8, opset_import: ["": {opset}, "own": 1]>'
    main = f"{imports} g (float[n, 4, 6, 5] x) => (float[n, 4, 6, 5] y) {{ y = own.F(x, w) }}"
    function = f'<domain: "own", opset_import: ["": {own}]> F (a, b) => (r) {{ {body} }}'
    model = onnx.parser.parse_model(f"{main} {function}")
    model.graph.initializer.append(numpy_helper.from_array(FOUR[0], "w"))
    for found in (normal_form(model), gg.surgery.name_weights(model), gg.quantize(model, {"x": X}).result):
        np.testing.assert_allclose(run(found, {"x": X})[0], np.maximum(X + FOUR[0][:, None, None], 0), atol=0.05)


def test_artifacts_for_onnxruntime_training_from_a_model_whose_weights_are_inputs(tmp_path):
    loss = artifacts.LossType.MSELoss
    artifacts.generate_artifacts(network(3), requires_grad=["fw"], loss=loss, artifact_directory=str(tmp_path))
    assert onnx.load(tmp_path / "training_model.onnx").opset_import[0].version == 21


def test_backends_report_the_opset_of_the_file_and_check_its_converted_nodes():
    old, new = (gg.check_backend(network(opset), "openvino") for opset in (3, 13))
    assert "opset 3 was converted to 21" in old.notes
    assert old.findings[0].reason.startswith("it has opset 3, but")
    assert [f.operator for f in old.findings[1:]] == [f.operator for f in new.findings]
