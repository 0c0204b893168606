"""Models that were exported for one size take any, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import ArgumentError, DataError, ModelError, UnknownNameError

RNG = np.random.default_rng(0)

# what exporters fix: input, nodes, the sizes of the output, weights
FIXED = {
    "a flat image": (
        "float[1, 2, 3, 3] x",
        "t = Constant<value_ints=[1, 18]>() f = Reshape(x, t) y = MatMul(f, w)",
        "float[1, 4] y",
        {"w": (18, 4)},
    ),
    "a target of parts": (
        "float[4, 2, 3] x",
        "a = Constant<value_ints=[4]>() b = Constant<value_ints=[6]>() t = Concat<axis=0>(a, b) y = Reshape(x, t)",
        "float[4, 6] y",
        {},
    ),
    "heads of an attention": (
        "float[2, 5, 6] x",
        """s = Constant<value_ints=[2, 5, 3, 2]>() h = Reshape(x, s) q = Transpose<perm=[0, 2, 1, 3]>(h)
        u = Constant<value_ints=[6, 5, 2]>() m = Reshape(q, u) k = Transpose<perm=[0, 2, 1]>(m) p = MatMul(m, k)
        v = Constant<value_ints=[2, 3, 5, 5]>() d = Reshape(p, v) e = Softmax<axis=-1>(d) g = MatMul(e, q)
        i = Transpose<perm=[0, 2, 1, 3]>(g) r = Constant<value_ints=[2, 5, 6]>() y = Reshape(i, r)""",
        "float[2, 5, 6] y",
        {},
    ),
    "a class token": (
        "float[1, 3, 4] x",
        "c = Concat<axis=1>(token, x) y = Add(c, places)",
        "float[1, 4, 4] y",
        {"token": (1, 1, 4), "places": (1, 4, 4)},
    ),
    "initial states": (
        "float[5, 2, 3] x",
        """s = Constant<value_ints=[1, 2, 4]>() z = ConstantOfShape(s) o, h, c = LSTM<hidden_size=4>(x, w, r, , , z, z)
        t = Transpose<perm=[2, 0, 1, 3]>(o) u = Constant<value_ints=[2, 5, 4]>() y = Reshape(t, u)""",
        "float[2, 5, 4] y",
        {"w": (1, 16, 3), "r": (1, 16, 4)},
    ),
}


def model(name: str) -> onnx.ModelProto:
    given, nodes, result, weights = FIXED[name]
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g ({given}) => ({result}) {{ {nodes} }}')
    for key, shape in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), key))
    return made


def run(made: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    (y,) = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return y


@pytest.mark.parametrize("name", FIXED)
def test_a_batch_of_any_size_gives_what_its_parts_give(name: str) -> None:
    old = model(name)
    axis = 1 if name == "initial states" else 0
    new = surgery.open_axes(old, {"x": {axis: "batch"}})
    sizes = [d.dim_value for d in old.graph.input[0].type.tensor_type.shape.dim]
    batch = sizes[axis]
    sizes[axis] = 3 * batch
    x = RNG.normal(size=sizes).astype(np.float32)
    parts = [run(old, part) for part in np.split(x, 3, axis)]
    np.testing.assert_allclose(run(new, x), np.concatenate(parts), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(new, np.take(x, range(batch), axis)), parts[0], rtol=1e-5, atol=1e-6)
    assert [d.dim_param or d.dim_value for d in new.graph.input[0].type.tensor_type.shape.dim][axis] == "batch"
    declared = [d.dim_param or d.dim_value for d in new.graph.output[0].type.tensor_type.shape.dim]
    assert axis or declared == ["batch", *parts[0].shape[1:]]  # as it was seen to grow


def test_the_output_is_declared_as_it_grows() -> None:
    new = surgery.open_axes(model("a flat image"), {"x": {0: "n"}})
    assert [d.dim_param or d.dim_value for d in new.graph.output[0].type.tensor_type.shape.dim] == ["n", 4]


def test_it_is_written(tmp_path: Path) -> None:
    surgery.open_axes(model("a class token"), {"x": {0: "n"}}, out=tmp_path / "open.onnx")
    assert run(onnx.load(tmp_path / "open.onnx"), np.zeros((6, 3, 4), np.float32)).shape == (6, 4, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("g (float[2, 3] x) => (float[2, 3] y) { y = Add(x, w) }", "does not run with more of 'batch'"),
        ("g (float[2, 3] x) => (float[3] y) { y = ReduceMean<keepdims=0>(x, a) }", "does not grow with 'batch'"),
        ("g (float[2, 3] x) => (float[2, 3] y) { m = ReduceMean(x, a) y = Sub(x, m) }", "the output 'y' is different"),
        (
            "g (float[2, 3] x) => (float[3, 2] y) { t = Constant<value_ints=[3, 2]>() y = Reshape(x, t) }",
            "does not run with more",
        ),
    ],
)
def test_a_model_that_stays_fixed_is_refused(text: str, says: str) -> None:
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    made.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "w"))
    made.graph.initializer.append(numpy_helper.from_array(np.array([0]), "a"))
    with pytest.raises(ModelError) as raised:
        surgery.open_axes(made, {"x": {0: "batch"}})
    assert says in str(raised.value)


def test_bad_arguments() -> None:
    with pytest.raises(UnknownNameError, match="no input 'z'"):
        surgery.open_axes(model("a class token"), {"z": {0: "n"}})
    with pytest.raises(ModelError, match="no axis 3"):
        surgery.open_axes(model("a class token"), {"x": {3: "n"}})
    with pytest.raises(ModelError, match="is used for the sizes"):
        surgery.open_axes(model("a class token"), {"x": {0: "n", 1: "n"}})
    with pytest.raises(ArgumentError, match="a dict of axes by input"):
        surgery.open_axes(model("a class token"), {"x": ["n"]})  # type: ignore[dict-item]


def squeezed() -> onnx.ModelProto:
    """Pooled features without their empty axes, as torch's ``x.squeeze()``: the exporter declares the traced batch."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]>
        g (float[batch, 6, 5, 5] x) => (float[4, 3] logits) {
            p = ReduceMean<axes=[2, 3], keepdims=0>(x)
            s = Squeeze(p)
            logits = MatMul(s, w)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(6, 3)).astype(np.float32), "w"))
    return model


def test_a_squeeze_that_declares_its_traced_batch_is_told_with_the_way_out() -> None:
    """A batch by hand, data of a fit and the shell name what opens the model, and the opened one trains."""
    batch = {"x": RNG.normal(size=(32, 6, 5, 5)).astype(np.float32), "target": np.arange(32) % 3}
    trainer = gg.Trainer(gg.build(squeezed()), device="cpu")
    for call in (lambda: trainer.step(batch), lambda: trainer.fit(batch, batch_size=32, progress=False)):
        with pytest.raises(DataError, match=r"4.*surgery\.open_axes\(model, \{'INPUT': \{0: 'batch'\}\}\)$") as caught:
            call()
        assert "--open INPUT:0=batch" in caught.value.in_shell()
    opened = gg.build(surgery.open_axes(squeezed(), {"x": {0: "batch"}}))
    assert [spec.shape[0] for spec in opened.manifest.batch] == ["batch"] * 2
    assert np.isfinite(gg.Trainer(opened, device="cpu").step(batch)["loss"])
