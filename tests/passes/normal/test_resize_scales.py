"""Resizes by scales of which ONNX's inference miscounts the output: 7 pixels by 9/7, in float32, are 9."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph.graph.shapes import as_dims
from gradgraph.passes.normal import normalise
from tests.kit.running import run, session

NINE_SEVENTHS, FIVE_THIRDS = float(np.float32(9) / np.float32(7)), float(np.float32(5) / np.float32(3))


def resized(opset, height, *scales, mode="linear", rows=0):
    """Input [n, 1, ``height``, 1], resized along its third axis by each of ``scales``; times w if that has ``rows``."""
    nodes = [
        f'h{i + 1} = Resize<mode="{mode}", coordinate_transformation_mode="half_pixel">(h{i}, roi, s{i})'
        for i in range(len(scales))
    ]
    fixed = [numpy_helper.from_array(np.array([1, 1, s, 1], np.float32), f"s{i}") for i, s in enumerate(scales)]
    weight = numpy_helper.from_array(np.linspace(-1, 1, 2 * rows, dtype=np.float32).reshape(rows, 2), "w")
    end = f"f = Flatten(h{len(scales)}) y = MatMul(f, w)" if rows else f"y = Identity(h{len(scales)})"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[n, 1, {height}, 1] x) => (float[{"n, 2" if rows else "n, 1, p, 1"}] y) <float[0] roi = {{}}> {{
            h0 = Identity(x) {" ".join(nodes)} {end}
        }}"""
    )
    model.graph.initializer.extend([*fixed, weight] if rows else fixed)
    return model


def transposed_gradient(model, x):
    """The gradient of Σ c·y by x for a linear y, from its values at the basis vectors; c."""
    (y,) = run(model, {"x": x}).values()
    c = np.linspace(-1, 1, y.size, dtype=np.float32).reshape(y.shape)
    s = session(model)
    columns = [(s.run(None, {"x": e.reshape(x.shape)})[0] * c).sum() for e in np.eye(x.size, dtype=np.float32)]
    return np.array(columns).reshape(x.shape), c


CHAINS = [(7, [NINE_SEVENTHS], 9), (3, [FIVE_THIRDS], 5), (7, [NINE_SEVENTHS, float(np.float32(10 / 9))], 10)]
CHAINS += [(7, [1.3, NINE_SEVENTHS], 11), (3, [FIVE_THIRDS, 1.3, FIVE_THIRDS], 10)]


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("opset", [11, 13, 21])
@pytest.mark.parametrize(("height", "scales", "after"), CHAINS, ids=str)
def test_sizes_and_gradients(height, scales, after, opset, mode):
    model = resized(opset, height, *scales, mode=mode)
    x = np.linspace(-2, 3, height, dtype=np.float32).reshape(1, 1, height, 1)
    resizes = [n for n in normalise(model).graph if n.op_type == "Resize"]
    assert as_dims(resizes[-1].outputs[0].shape)[2] == after
    (y,) = run(model, {"x": x}).values()
    assert y.shape[2] == after
    expected, cotangent = transposed_gradient(model, x)
    got = run(gg.vjp(model), {"x": x, "y.cotangent": cotangent})
    np.testing.assert_array_equal(got["y"], y)
    np.testing.assert_allclose(got["x.grad"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [13, 21])
def test_a_layer_behind_it_fits(opset):
    """What was inferred of the Resize, 8 pixels, has no part in what the product may read."""
    model = resized(opset, 7, NINE_SEVENTHS, rows=9)
    trainer = gg.Trainer(gg.build(model, loss="mse", optimizer=gg.optim.sgd(0.01)))
    batch = {"x": np.linspace(-2, 3, 14, dtype=np.float32).reshape(2, 1, 7, 1), "target": np.ones((2, 2), np.float32)}
    losses = [float(trainer.step(batch)["loss"]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_what_a_file_says_of_the_size_does_not_count():
    model = onnx.shape_inference.infer_shapes(resized(13, 7, NINE_SEVENTHS, rows=9))
    assert any(v.name == "h1" and v.type.tensor_type.shape.dim[2].dim_value == 8 for v in model.graph.value_info)
    x = np.ones((2, 1, 7, 1), np.float32)
    assert run(gg.vjp(model, wrt="x"), {"x": x, "y.cotangent": np.ones((2, 2), np.float32)})["x.grad"].shape == x.shape


@pytest.mark.parametrize("turned", [False, True])
def test_sizes_known_in_part(turned):
    """Behind a Transpose, too, which onnxruntime's optimizer moves through the Resize."""
    back, forth = ("[0, 3, 1, 2]", "[0, 2, 3, 1]") if turned else ("[0, 1, 2, 3]", "[0, 1, 2, 3]")
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 13]>
    g (float[n, 7, 7, 7] x) => (float[n, p, q, r] y)
    <float[4] s = {{1, 1, {NINE_SEVENTHS}, {NINE_SEVENTHS}}}, float[0] roi = {{}},
     float[7] w = {{1, 2, 3, 4, 5, 6, 7}}> {{
        z = Mul(x, w) t = Transpose<perm = {back}>(z) u = Resize<mode = "linear">(t, roi, s)
        y = Transpose<perm = {forth}>(u)
    }}""")
    x = np.random.default_rng(0).normal(size=(2, 7, 7, 7)).astype(np.float32)
    (y,) = run(model, {"x": x}).values()
    gradient = gg.vjp(model, wrt=["x", "w"])
    assert sum(n.op_type == "EyeLike" for n in gradient.graph.node) <= 2  # a matrix for each axis that is resized
    found = run(gradient, {"x": x, "y.cotangent": y})
    np.testing.assert_allclose(found["y"], y, rtol=1e-6)
    np.testing.assert_allclose((x * found["x.grad"]).sum(), (y * y).sum(), rtol=1e-5)  # y is linear in x, and in w
    np.testing.assert_allclose((np.arange(1, 8) * found["w.grad"]).sum(), (y * y).sum(), rtol=1e-5)


def test_inference_knows_type_and_rank_where_sizes_are_computed():
    """In a loop over boxes, as tf2onnx writes crop_and_resize, ONNX's inference says that there are 0 sizes."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 15]>
    g (float[n, 3, h, w] x) => (float[k, n, 3, 4, 4] y)
    <int64 count = {2}, bool go = {1}, int64[2] four = {4, 4}, int64[1] zero = {0}, int64[1] two = {2},
     float[0] none = {}, float[8] roi = {0, 0, 0.1, 0.2, 1, 1, 0.9, 0.8}> {
        y = Loop(count, go)<body = b (int64 i, bool c) => (bool d, float[?, ?, ?, ?] v) {
            d = Identity(c) s = Shape(x) front = Slice(s, zero, two) sizes = Concat<axis = 0>(front, four)
            r = Resize<coordinate_transformation_mode = "tf_crop_and_resize", mode = "linear">(x, roi, none, sizes)
            v = Tanh(r)
        }>
    }""")
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)
    (y,) = run(model, {"x": x}).values()
    gradient = session(gg.vjp(model, wrt="x"))
    c = np.random.default_rng(1).normal(size=y.shape).astype(np.float32)
    slope = (gradient.run(["x.grad"], {"x": x, "y.cotangent": c})[0] * x).sum()
    lower, upper = (run(model, {"x": x * (1 + e)})["y"] for e in (-0.01, 0.01))
    np.testing.assert_allclose(slope, ((upper - lower) * c).sum() / 0.02, rtol=2e-3)
