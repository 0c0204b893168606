"""Resizes by scales of which ONNX's inference miscounts the output: 7 pixels by 9/7, in float32, are 9."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from running import run, session

import gradgraph as gg
from gradgraph.normal import normalise
from gradgraph.shapes import as_dims

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
