"""Constants that no file marks: input normalisation, priors, target scales and masks are not trained; weights are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.weights.verdicts import verdicts
from tests.kit.small_models import real

RNG = np.random.default_rng(0)
MEAN, STD = np.array([0.4, 0.5, 0.6], np.float32), np.array([0.2, 0.25, 0.3], np.float32)
PICTURE = "float[batch, 3, 6, 6] x"
ROWS = "float[batch, 3] x"
TOKENS = "float[batch, 5, 3] x"
PRIORS = RNG.uniform(0.1, 0.9, (6, 4)).astype(np.float32)
WHOLE: dict[str, np.ndarray] = {
    "kernel": real(4, 3, 3, 3, seed=1),
    "four": real(4, seed=2),
    "matrix": real(3, 4, seed=3),
    "square": real(3, 3, seed=4),
    "three": real(3, seed=5),
    "boxes_kernel": real(4, 3, 1, 1, seed=6),
    "half": np.array(2.0, np.float32),
    "tenth": np.array(0.1, np.float32),
    "epsilon": np.array(1e-5, np.float32),
    "one": np.array(1, np.float32),
    "huge": np.array(-1e9, np.float32),
    "rows": np.array([0, -1, 4]),
    "last": np.array([-1]),
    "first": np.array([0]),
    "ends": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "halves": np.array([2, 2]),
}
CHANNELS = (3, 1, 1)
TRIANGLE = np.tril(np.ones((5, 5), np.float32))


def model(body: str, given: str, **tensors: np.ndarray) -> onnx.ModelProto:
    """A model of ``body`` from x to y, as an exporter writes it that marks nothing."""
    found = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17], producer_name: "pytorch">net ({given}) => (float y) {{ {body} }}'
    )
    found.graph.output[0].type.tensor_type.ClearField("shape")
    words = set(body.replace("(", " ").replace(")", " ").replace(",", " ").split())
    stored = {**{n: a for n, a in WHOLE.items() if n in words}, **tensors}
    found.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in stored.items())
    return found


def trained(proto: onnx.ModelProto) -> set[str]:
    return {name for name, verdict in verdicts(normalise(proto).graph).items() if verdict.is_weight}


DECODED = (  # as SSD writes it: deltas, variances, centres and sizes
    "c = Conv(x, boxes_kernel, four) t = Transpose<perm = [0, 2, 3, 1]>(c) d = Reshape(t, rows) "
    "xy, wh = Split<axis = 2>(d, halves) "
)
CONSTANTS: dict[str, tuple[str, str, dict[str, np.ndarray]]] = {  # what no weight is begins with `c_`
    "mean and deviation": (
        "a = Sub(x, c_mean) b = Div(a, c_std) y = Conv(b, kernel, four)", PICTURE,
        {"c_mean": MEAN.reshape(1, 3, 1, 1), "c_std": STD.reshape(1, 3, 1, 1)},
    ),
    "bytes, padded": (
        "f = Div(x, half) a = Sub(f, c_mean) b = Mul(a, c_inverse) p = Pad(b, ends) y = Conv(p, kernel)", PICTURE,
        {"c_mean": MEAN.reshape(CHANNELS), "c_inverse": (1 / STD).reshape(CHANNELS)},
    ),
    "a factor and a shift": (
        "a = Mul(x, c_scale) b = Add(a, c_shift) y = Conv(b, kernel)", PICTURE,
        {"c_scale": (1 / STD).reshape(CHANNELS), "c_shift": (-MEAN / STD).reshape(CHANNELS)},
    ),
    "channels last": (
        "a = Sub(x, c_mean) b = Div(a, c_std) t = Transpose<perm = [0, 3, 1, 2]>(b) y = Conv(t, kernel)",
        "float[batch, 6, 6, 3] x", {"c_mean": MEAN, "c_std": STD},
    ),
    "bytes themselves": (
        "f = Cast<to = 1>(x) a = Sub(f, c_mean) y = Conv(a, kernel)", "uint8[batch, 3, 6, 6] x",
        {"c_mean": MEAN.reshape(CHANNELS)},
    ),
    "a mean picture": ("a = Sub(x, c_mean) y = Conv(a, kernel)", PICTURE, {"c_mean": real(1, 3, 6, 6)}),
    "columns": (
        "a = Sub(x, c_mean) b = Div(a, c_std) c = Clip(b) y = Gemm(c, matrix, four)", ROWS,
        {"c_mean": MEAN, "c_std": STD},
    ),
    "not folded": (
        "m = Unsqueeze(c_mean, first) v = Add(c_var, epsilon) s = Sqrt(v) a = Sub(x, m) b = Div(a, s) "
        "y = MatMul(b, matrix)", ROWS, {"c_mean": MEAN, "c_var": STD},
    ),
    "normalised, and used again at the end": (
        "a = Sub(x, c_mean) c = Conv(a, square4, three) s = Div(c, half) y = Add(s, c_mean)", PICTURE,
        {"c_mean": MEAN.reshape(CHANNELS), "square4": real(3, 3, 1, 1)},
    ),
    "a second branch reads it": (
        "a = Sub(x, c_mean) b = Div(a, c_std) c = Conv(b, square4, three) y = Add(b, c)", PICTURE,
        {"c_mean": MEAN.reshape(CHANNELS), "c_std": STD.reshape(CHANNELS), "square4": real(3, 3, 1, 1)},
    ),
    "a target's scale": (
        "g = Gemm(x, matrix, four) m = Mul(g, c_std) y = Add(m, c_mean)", ROWS,
        {"c_std": np.arange(1, 5, dtype=np.float32), "c_mean": real(4)},
    ),
    "a range of actions": (
        "g = MatMul(x, matrix) b = Add(g, four) t = Tanh(b) m = Mul(t, c_scale) y = Add(m, c_shift)", ROWS,
        {"c_scale": np.arange(1, 5, dtype=np.float32), "c_shift": real(4)},
    ),
    "priors of SSD": (
        DECODED + "v = Mul(xy, tenth) m = Mul(v, c_sizes) a = Add(m, c_centres) w = Mul(wh, tenth) e = Exp(w) "
        "z = Mul(e, c_sizes_again) h = Div(z, half) low = Sub(a, h) high = Add(low, z) y = Concat<axis = 2>(low, high)",
        "float[batch, 3, 2, 3] x",
        {"c_sizes": PRIORS[None, :, 2:], "c_centres": PRIORS[None, :, :2], "c_sizes_again": PRIORS[:, 2:]},
    ),
    "anchors and strides of YOLO": (
        "c = Conv(x, boxes_kernel, four) d = Reshape(c, columns) xy, wh = Split<axis = 1>(d, halves) "
        "low = Sub(c_points, xy) high = Add(c_points, wh) b = Concat<axis = 1>(low, high) y = Mul(b, c_strides)",
        "float[batch, 3, 2, 3] x",
        {"c_points": PRIORS[:, :2].T[None], "c_strides": np.array([[8, 8, 8, 16, 16, 16]], np.float32),
         "columns": np.array([0, 4, -1])},
    ),
    "a grid and anchors, a sigmoid before": (
        DECODED + "s = Sigmoid(xy) a = Add(s, c_grid) z = Sigmoid(wh) q = Mul(z, z) b = Mul(q, c_anchors) "
        "y = Concat<axis = 2>(a, b)",
        "float[batch, 3, 2, 3] x", {"c_grid": PRIORS[None, :, :2], "c_anchors": PRIORS[None, :, 2:]},
    ),
    "bins": (
        "c = Conv(x, boxes_kernel, four) s = Softmax<axis = 1>(c) y = Conv(s, c_bins)", PICTURE,
        {"c_bins": np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)},
    ),
    "a mask of large numbers": (
        "m = MatMul(x, square) t = Transpose<perm = [0, 2, 1]>(x) a = MatMul(m, t) b = Add(a, c_mask) "
        "s = Softmax(b) y = MatMul(s, m)", TOKENS, {"c_mask": (1 - TRIANGLE) * np.float32(-1e4)},
    ),
    "a mask of infinite numbers": (
        "m = MatMul(x, square) t = Transpose<perm = [0, 2, 1]>(x) a = MatMul(m, t) b = Add(a, c_mask) "
        "s = Softmax(b) y = MatMul(s, m)", TOKENS,
        {"c_mask": np.where(TRIANGLE > 0, 0, -np.inf).astype(np.float32)},
    ),
    "a mask of zeros and ones": (
        "m = MatMul(x, square) t = Transpose<perm = [0, 2, 1]>(x) a = MatMul(m, t) k = Mul(a, c_mask) "
        "n = Sub(one, c_mask) h = Mul(n, huge) b = Add(k, h) s = Softmax(b) y = MatMul(s, m)", TOKENS,
        {"c_mask": TRIANGLE},
    ),
    "connections of a masked layer": (
        "w = Mul(matrix, c_mask) y = Gemm(x, w, four)", ROWS,
        {"c_mask": np.array([[1, 0, 0, 1], [1, 1, 0, 1], [0, 1, 1, 1]], np.float32)},
    ),
}  # fmt: skip
WEIGHTS: dict[str, tuple[str, str, dict[str, tuple[int, ...]]]] = {  # every tensor of more than one number is one
    "positions behind a layer": ("m = MatMul(x, square) p = Add(m, w) y = MatMul(p, matrix)", TOKENS, {"w": (1, 5, 3)}),
    "positions of embeddings that go in": ("p = Add(x, w) y = MatMul(p, matrix)", TOKENS, {"w": (1, 5, 3)}),
    "positions at the end": ("m = MatMul(x, square) b = Add(m, three) y = Add(b, w)", TOKENS, {"w": (1, 5, 3)}),
    "positions of a scaled embedding": (
        "m = MatMul(x, square) b = Add(m, three) s = Mul(b, half) y = Add(s, w)", TOKENS, {"w": (1, 5, 3)},
    ),
    "a type that is added before a norm": (
        "a = Add(x, w) n = LayerNormalization(a, three) y = MatMul(n, matrix)", TOKENS, {"w": (3,)},
    ),
    "a type beside a residual": ("a = Add(x, w) m = MatMul(a, square) y = Add(a, m)", TOKENS, {"w": (3,)}),
    "a picture that is learnt": ("a = Add(x, w) y = Conv(a, kernel)", PICTURE, {"w": (1, 3, 6, 6)}),
    "a norm of the input": (
        "m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes = [-1]>(q) e = Add(v, epsilon) "
        "r = Sqrt(e) n = Div(d, r) g = Mul(n, w) s = Add(g, shift) y = MatMul(s, matrix)",
        TOKENS, {"w": (3,), "shift": (3,)},
    ),
    "a norm of the output": (
        "h = MatMul(x, square) b = Add(h, three) m = ReduceMean<axes = [-1]>(b) d = Sub(b, m) q = Mul(d, d) "
        "v = ReduceMean<axes = [-1]>(q) e = Add(v, epsilon) r = Sqrt(e) n = Div(d, r) g = Mul(n, w) y = Add(g, shift)",
        TOKENS, {"w": (3,), "shift": (3,)},
    ),
    "a norm without moments": (
        "h = MatMul(x, square) r = Add(x, h) a = Mul(r, half) t = Tanh(a) g = Mul(t, w) y = Add(g, shift)",
        TOKENS, {"w": (3,), "shift": (3,)},
    ),
    "a folded norm behind a convolution": (
        "c = Conv(x, kernel) m = Mul(c, w) y = Add(m, shift)", PICTURE, {"w": (4, 1, 1), "shift": (4, 1, 1)},
    ),
    "a folded norm behind an activation": (
        "c = Conv(x, kernel, four) r = Relu(c) m = Mul(r, w) y = Add(m, shift)", PICTURE,
        {"w": (4, 1, 1), "shift": (4, 1, 1)},
    ),
    "a folded norm between layers": (
        "g = Gemm(x, square, three) m = Mul(g, w) a = Add(m, shift) y = MatMul(a, matrix)", ROWS,
        {"w": (3,), "shift": (3,)},
    ),
    "a scale of a layer": (
        "m = MatMul(x, square) b = Add(m, three) s = Mul(b, w) y = Add(x, s)", TOKENS, {"w": (3,)},
    ),
    "a bias behind the last layer": ("m = MatMul(x, matrix) y = Add(m, w)", TOKENS, {"w": (4,)}),
    "a bias of positions behind the last layer": ("m = MatMul(x, matrix) y = Add(m, w)", TOKENS, {"w": (5, 4)}),
    "a scale of classes": ("g = Gemm(x, matrix, four) y = Mul(g, w)", ROWS, {"w": (4,)}),
    "an encoder's bias that is the decoder's": (
        "a = Sub(x, w) e = Gemm(a, matrix, four) r = Relu(e) d = MatMul(r, back) y = Add(d, w)", ROWS,
        {"w": (3,), "back": (4, 3)},
    ),
    "centres of a radial basis": (
        "u = Unsqueeze(x, middle) d = Sub(u, w) q = Mul(d, d) s = ReduceMean<axes = [-1], keepdims = 0>(q) "
        "y = MatMul(s, matrix)",
        ROWS, {"w": (3, 3)},
    ),
    "centres whose differences are read": (
        "u = Unsqueeze(x, middle) d = Sub(u, w) y = MatMul(d, matrix)", ROWS, {"w": (7, 3)},
    ),
    "an affine layer and no other": ("m = Mul(x, w) y = Add(m, shift)", ROWS, {"w": (3,), "shift": (3,)}),
    "a bias of attention": (
        "m = MatMul(x, square) t = Transpose<perm = [0, 2, 1]>(x) a = MatMul(m, t) b = Add(a, w) s = Softmax(b) "
        "y = MatMul(s, m)", TOKENS, {"w": (5, 5)},
    ),
}  # fmt: skip
UNTRAINED: dict[str, tuple[str, dict[str, np.ndarray]]] = {
    "before": ("m = Mul(x, w) a = Add(m, shift) y = MatMul(a, matrix)", {"w": np.ones(3), "shift": np.zeros(3)}),
    "behind": ("g = Gemm(x, square, three) m = Mul(g, w) y = Add(m, shift)", {"w": np.ones(3), "shift": np.zeros(3)}),
    "bias": ("g = MatMul(x, square) y = Add(g, w)", {"w": np.array([1, 0, 0])}),
}


@pytest.mark.parametrize("what", CONSTANTS)
def test_constants_are_left_alone(what: str) -> None:
    body, given, tensors = CONSTANTS[what]
    proto = model(body, given, **{n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in tensors.items()})
    stored = {t.name for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and np.prod(t.dims) > 1}
    assert trained(proto) == {name for name in stored if not name.startswith("c_")}
    verdict = verdicts(normalise(proto, parameters=[next(iter(tensors))]).graph)[next(iter(tensors))]
    assert verdict.is_weight, "named in full, it is one"


@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_are_trained(what: str) -> None:
    body, given, shapes = WEIGHTS[what]
    tensors = {n: RNG.uniform(0.5, 1.5, s).astype(np.float32) for n, s in shapes.items()}
    if "middle" in body:
        tensors["middle"] = np.array([1])
    proto = model(body, given, **tensors)
    stored = {t.name for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and np.prod(t.dims) > 1}
    assert trained(proto) == stored


@pytest.mark.parametrize("what", UNTRAINED)
def test_what_changes_nothing_is_to_be_trained(what: str) -> None:
    body, tensors = UNTRAINED[what]
    found = trained(model(body, ROWS, **{n: a.astype(np.float32) for n, a in tensors.items()}))
    assert found >= set(tensors)


def test_a_note_names_them_all_and_how_to_train_one(caplog: pytest.LogCaptureFixture) -> None:
    body, given, tensors = CONSTANTS["mean and deviation"]
    proto = model(body, given, **tensors)
    step = gg.build(proto, "mse")
    assert set(step.manifest.trainable) == {"kernel", "four"}
    (record,) = caplog.records
    assert record.getMessage() == (
        "the tensors 'c_mean', 'c_std' are not trained, and the graph reads them as constants (input normalisation, "
        "box decoding, output scaling or masks); if one was learned, name it in full: "
        "train=['*', 'c_mean'] (--train '*' --train c_mean)"
    )
    assert [str(f) for f in step.findings] == [record.getMessage()]
    assert set(gg.build(proto, "mse", train=["*", "c_mean"]).manifest.trainable) == {"kernel", "four", "c_mean"}
    assert gg.build(proto, "mse", train="c_std").manifest.trainable == ("c_std",)
    assert len(caplog.records) == 1, "what was chosen needs no note"
