"""Which stored tensors are weights: by what readers take them for, seen through casts, moves and bodies."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph.frontend import Buffer, Parameter, export, nn
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.dialects.contrib import forms
from gradgraph.passes.normal.weights.roles import FACTORS, SETTINGS, STATES
from gradgraph.passes.normal.weights.verdicts import verdicts
from tests.kit.small_models import model_of, real

ONE, ROW, SQUARE, IMAGE = (), (3,), (3, 3), (1, 3, 4, 4)


def verdicts_of(model: onnx.ModelProto) -> dict[str, bool]:
    return {name: verdict.is_weight for name, verdict in verdicts(normalise(model).graph).items()}


def text(body: str, shape: tuple[int, ...] = (2, 3), opset: int = 21, **weights: np.ndarray) -> onnx.ModelProto:
    """A model of ``body`` from x to y, with initializers."""
    model = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>
    net (float{list(shape)} x) => (float y) {{ {body} }}""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in weights.items())
    return model


def number(shape: tuple[int, ...] = ()) -> np.ndarray:
    return np.full(shape, 0.3, np.float32)


# each body reads w; a weight must stay one, a number must not be trained
READERS = [
    # settings, whatever their size
    ("y = Clip(x, w)", ONE, False),
    ("y = Clip(x, , w)", ONE, False),
    ("c = Cast<to=1>(w) y = Clip(x, , c)", ONE, False),
    ("c = CastLike(w, x) y = Clip(x, c)", ONE, False),
    ("s = Squeeze(w) y = Clip(x, s)", (1, 1), False),
    ("n = Neg(w) y = Clip(x, n, w)", ONE, False),
    ("y = Max(x, w)", ONE, False),
    ("y = Min(x, w)", (1,), False),
    ("y = Pow(x, w)", ONE, False),
    ("y = Pow(x, w)", ROW, False),
    ("t = Transpose(w) e = Add(x, x) y = Pow(e, t)", (3, 1), False),
    ("q = QuantizeLinear(x, w) y = DequantizeLinear(q, w)", ONE, False),
    ("q = QuantizeLinear<axis=1>(x, w) y = DequantizeLinear<axis=1>(q, w)", ROW, False),
    ("y = Pad(x, ends, w)", ONE, False),
    ("i = Cast<to=7>(x) y = OneHot(i, depth, w)", (2,), False),
    ("f = Identity(w) y = Dropout(x, f)", ONE, False),
    ("y = com.microsoft.QuickGelu(x) z = Mul(y, w)", ONE, False),
    # numbers of formulas
    ("y = Add(x, w)", ONE, False),
    ("y = Mul(w, x)", (1,), False),
    ("s = ReduceMean(x) e = Add(s, w) r = Sqrt(e) y = Div(x, r)", ONE, False),
    ("y = Where(there, x, w)", ONE, False),
    ("r = Sqrt(w) y = Div(x, r)", ONE, False),
    ("m = MatMul(x, square) y = Add(m, w)", ONE, False),
    ("m = MatMul(x, square) y = Add(m, w)", (1,), False),
    ("k = Sub(one, w) y = Mul(x, k)", ONE, False),
    ("i = Unsqueeze(x, last) c = Conv(i, kernel) y = Add(c, w)", (1,), False),
    ("b = Greater(x, w) y = Cast<to=1>(b)", ROW, False),
    # weights, of one number too
    ("y = MatMul(x, w)", SQUARE, True),
    ("t = Transpose(w) c = Cast<to=1>(t) y = MatMul(x, c)", SQUARE, True),
    ("y = Gemm(x, square, w)", (1,), True),
    ("y = Add(x, w)", ROW, True),
    ("y = Mul(x, w)", ROW, True),
    ("k = Sub(one, w) y = Mul(x, k)", ROW, True),
    ("y = Max(x, w)", ROW, True),
    ("y = PRelu(x, w)", (1,), True),
    ("y = LayerNormalization(x, w)", ROW, True),
    ("m = MatMul(x, column) y = Add(m, w)", (1,), True),
    ("m = MatMul(x, column) r = Reshape(m, flat) y = Add(w, r)", (1,), True),
    ("m = MatMul(x, column) y = Add(m, w)", ONE, True),
    ("e = Exp(w) y = Mul(x, e)", ONE, True),
    ("p = Softplus(w) n = Neg(p) y = Mul(x, n)", (1,), True),
    ("i = Cast<to=7>(x) y = Gather(w, i)", (5, 4), True),
    ("q = QuantizeLinear(w, step) d = DequantizeLinear(q, step) y = MatMul(x, d)", SQUARE, True),
    ("p = Pow(x, w) y = Add(p, w)", ROW, True),
    # in bodies
    ("y = If<then_branch = a () => (float a) { a = Clip(x, w) }, else_branch = b () => (float b) { b = Identity(x) }>"
     "(there)", ONE, False),
    ("y = If<then_branch = a () => (float a) { a = MatMul(x, w) }, else_branch = b () => (float b) { b = Identity(x) }>"
     "(there)", SQUARE, True),
    ("k = If<then_branch = a () => (float a) { a = Neg(w) }, else_branch = b () => (float b) { b = Identity(w) }>"
     "(there) y = Clip(x, k)", ONE, False),
    ("y, z = Loop<body = b (int64 i, bool go, float[2,3] s, float v) => (bool on, float[2,3] t, float u)"
     "{ on = Identity(go) t = Clip(s, v) u = Identity(v) }>(depth, , x, w)", ONE, False),
    ("y = Scan<num_scan_inputs=1, body = b (float[3] s, float[3] r) => (float[3] t) { t = Add(s, r) }>(w, x)",
     ROW, True),
]  # fmt: skip
HELP = {
    "ends": np.array([0, 1, 0, 1]),
    "depth": np.array(4),
    "there": np.array(True),
    "square": real(3, 3, seed=1),
    "column": real(3, 1, seed=2),
    "flat": np.array([2, 1]),
    "step": number(),
    "kernel": real(4, 3, 1, seed=3),
    "last": np.array([2]),
    "one": np.array(1, np.float32),
}


@pytest.mark.parametrize(
    ("body", "shape", "is_weight"), READERS, ids=[f"{i} {r[0][:60]}" for i, r in enumerate(READERS)]
)
def test_what_readers_take_a_tensor_for(body, shape, is_weight):
    used = {name: array for name, array in HELP.items() if name in body}
    model = text(body, w=number(shape), **used)
    assert verdicts_of(model)["w"] == is_weight
    assert verdicts(normalise(model, parameters=["w"]).graph)["w"].is_weight, "named in full, it is one"


OPERANDS = {  # floating inputs behind the first that are tensors like any other
    *(("Add", 1), ("Div", 1), ("Mod", 1), ("Mul", 1), ("Sub", 1), ("SwiGLU", 1), ("Where", 1), ("Where", 2)),
    *(("Attention", 1), ("Attention", 2), ("Attention", 3), ("DeformConv", 2), ("DeformConv", 4)),
    *(("LinearAttention", 1), ("LinearAttention", 2), ("LinearAttention", 4), ("LinearAttention", 5)),
    *(("Loop", 2), ("Scan", 1), ("SequenceInsert", 1), ("SequenceMap", 1), ("TensorScatter", 1)),
    *(("Scatter", 2), ("ScatterElements", 2), ("ScatterND", 2), ("NonMaxSuppression", 1)),
    *(("Split", 1), ("Tile", 1), ("Tile", 2)),  # sizes, which opset 1 let be floating
}


def test_the_table_has_every_floating_input_of_every_operator():
    tables = [SETTINGS, FACTORS, STATES]
    unknown = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        types = {t.type_param_str: t.allowed_type_strs for t in schema.type_constraints}
        for i, formal in enumerate(schema.inputs):
            known = (schema.name, i) in OPERANDS or any(i in table.get(schema.name, ()) for table in tables)
            if i and schema.domain == "" and "tensor(float)" in types.get(formal.type_str, (formal.type_str,)):
                unknown |= set() if known else {(schema.name, i, formal.name)}
    assert not unknown, "say in gradgraph.passes.normal.weights.roles, or here, what these inputs are"


@pytest.mark.parametrize(
    ("name", "body", "first", "is_weight"),
    [
        ("zeros", "y = Loop<body = b (int64 i, bool go, float[2,3] s) => (bool on, float[2,3] t)"
         "{ on = Identity(go) t = Add(s, x) }>(depth, , w)", np.zeros((2, 3), np.float32), False),
        ("learned", "y = Loop<body = b (int64 i, bool go, float[2,3] s) => (bool on, float[2,3] t)"
         "{ on = Identity(go) t = Add(s, x) }>(depth, , w)", number((2, 3)), True),
        ("unchanged", "z, y = Loop<body = b (int64 i, bool go, float[2,3] s, float[2,3] t) =>"
         "(bool on, float[2,3] s, float[2,3] u) { on = Identity(go) u = Add(s, t) }>(depth, , w, x)",
         np.zeros((2, 3), np.float32), True),
        ("rnn", "s = Unsqueeze(x, axis) z, y = RNN<hidden_size=3>(s, cell, cell, , , w)",
         np.zeros((1, 1, 3), np.float32), False),
    ],
)  # fmt: skip
def test_first_states_of_zeros(name, body, first, is_weight):
    used = {"axis": np.array([1]), "cell": real(1, 3, 3), **HELP}
    model = text(body, w=first, **{n: a for n, a in used.items() if n in body})
    assert verdicts_of(model)["w"] == is_weight


@pytest.mark.parametrize(
    ("producer", "name", "shape", "is_weight", "doubtful"),
    [
        ("tf2onnx", "attention/Mul/ReadVariableOp:0", (), True, False),
        ("tf2onnx", "activation/Relu6_max__71", (), False, False),
        ("skl2onnx", "unity", (), False, False),
        ("jax2onnx", "const_7", (), False, False),
        ("pytorch", "layers.0.gate", (1,), True, False),
        ("pytorch", "onnx::Mul_7", (1,), False, False),
        ("pytorch", "val_7", (1,), False, False),
        ("pytorch", "/layer/Sqrt_output_0", (), False, False),
        ("pytorch", "gate", (), False, True),
        ("somebody", "layers.0.gate", (), False, True),
        ("somebody", "onnx::Mul_7", (3,), True, False),
        ("somebody", "/layer/Constant_2_output_0", (3,), False, False),
        ("somebody", "const/float32[3]", (3,), False, False),
    ],
)
def test_what_names_of_exporters_tell(producer, name, shape, is_weight, doubtful):
    model = model_of([helper.make_node("Mul", ["x", name], ["y"])], {"x": real(2, 3)}, weights={name: number(shape)})
    model.producer_name = producer
    verdict = verdicts(normalise(model).graph)[name]
    assert (verdict.is_weight, verdict.doubtful) == (is_weight, doubtful)


@pytest.mark.parametrize(("kind", "is_weight"), [(Parameter, True), (Buffer, False)])
def test_the_frontend_says_what_numbers_are(kind, is_weight):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.scale = kind(np.array(2.0))

        def forward(self, x):
            return self.fc(x) * self.scale

    trained = gg.build(export(Net(), {"x": ("batch", 3)}), "mse").manifest.trainable
    assert ("scale" in trained) == is_weight


def relu6(**more) -> onnx.ModelProto:
    """Linear, ReLU6, Linear, as torch.onnx.export(dynamo=True) writes it."""
    body = "h = MatMul(x, w1) c = Clip(h, min_val_cast, max_val_cast) m = MatMul(c, w2) y = Mul(m, val_9)"
    bounds = {"min_val_cast": np.array(0, np.float32), "max_val_cast": np.array(6, np.float32)}
    return text(body, w1=real(3, 8), w2=real(8, 2, seed=1), **bounds, val_9=number(), **more)


def test_bounds_of_relu6_stay_and_are_trained_by_name_only(caplog):
    assert gg.build(relu6(), "mse").manifest.trainable == ("w1", "w2")
    assert gg.build(relu6(), "mse", train=["w*", "max_val_cast"]).manifest.trainable == ("w1", "w2", "max_val_cast")
    with pytest.raises(gg.errors.UnknownNameError):
        gg.build(relu6(), "mse", train="max_*")
    assert not caplog.records
    assert [o.name for o in gg.vjp(relu6()).graph.output] == ["y", "w1.grad", "w2.grad"]


PACKED = {"packed": np.arange(9, dtype=np.int8).reshape(3, 3), "s": number(), "bias": real(3)}


def test_a_step_that_trains_no_matrix_says_what_it_leaves_out(caplog):
    model = text("d = DequantizeLinear(packed, s) m = MatMul(x, d) y = Add(m, bias)", **PACKED)
    assert gg.build(model, "mse").manifest.trainable == ("bias",)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the step trains 3 numbers in 1 tensor and no matrix, and excludes 'packed' (it has dtype int8), 's' (a "
        "scale of the node that computes 'd' (DequantizeLinear)); name the tensors to train in full: "
        "train=['*', 'NAME'] (--train '*' --train NAME); train quantized tensors before quantization"
    )
    gg.build(model, "mse", train="bias")
    assert len(caplog.records) == 1, "what was chosen needs no note"


def test_nothing_to_train_says_what_is_left_out():
    model = text(
        "d = DequantizeLinear(packed, s) m = MatMul(x, d) b = Add(m, bias) q = QuantizeLinear(b, step) "
        "y = DequantizeLinear(q, step)",
        step=number(),
        **PACKED,
    )
    words = r"excluded: 'packed' \(it has dtype int8\), 'bias' \(.*\), 'step' \(a scale of the node .*\), 's' \("
    with pytest.raises(gg.errors.BuildError, match=words):
        gg.build(model, "mse")


def test_numbers_that_may_be_learned_are_named(caplog):
    model = text(
        "m = MatMul(x, w) a = Mul(m, temperature) y = Add(a, shift)", w=real(3, 3), temperature=number(), shift=number()
    )
    assert gg.build(model, "mse").manifest.trainable == ("w",)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the scalars 'temperature', 'shift' are not trained, and the file does not say whether they were learned; if "
        "so, name each of them in full: train=['*', 'temperature'] (--train '*' --train temperature)"
    )
    assert gg.build(model, "mse", train=["*", "temperature"]).manifest.trainable == ("w", "temperature")
    assert gg.build(model, "mse", freeze=["temperature"]).manifest.trainable == ("w",)
    assert len(caplog.records) == 1


def test_tables_of_rotary_positions_are_settings():
    """Onnxruntime's operators that gradgraph differentiates never train their ``cos_cache`` and ``sin_cache``."""
    known = forms() | {("", "RotaryEmbedding")}
    tables = {(schema.domain, schema.name, i) for schema in ort_state.get_all_operator_schema()
              for i, given in enumerate(schema.inputs) if given.name in ("cos_cache", "sin_cache")}  # fmt: skip
    read = {(domain, name, i) for domain, name, i in tables if (domain, name) in known}
    assert len(read) >= 12
    missing = [x for x in sorted(read) if x[2] not in SETTINGS.get(f"{x[0]}.{x[1]}".lstrip("."), {})]
    assert missing == []
