"""A trained model written with int8, calibrated or weights alone: as near as its report says, in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import BuildError, DataError, OutputError
from gradgraph.export import drawn
from gradgraph.files import large_weights
from gradgraph.files.models import load_model, to_proto
from gradgraph.frontend import nn
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.surgery import calibrated_model, integer_model
from tests.kit.running import run

ROWS = 96


def images(batch: str | int) -> onnx.ModelProto:
    layers = (nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 64), nn.Linear(64, 5))
    return frontend.export(nn.Sequential(*layers), {"x": (batch, 2, 8, 8)})


def rows(batch: str | int) -> onnx.ModelProto:
    return frontend.export(
        nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 5)), {"x": (batch, 8)}
    )


NETWORKS: dict[str, tuple[Callable[[str | int], onnx.ModelProto], tuple[int, ...]]] = {
    "images": (images, (2, 8, 8)),
    "rows": (rows, (8,)),
}


def data(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(ROWS, *shape)).astype(np.float32)


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("batch", ["batch", 7])
@pytest.mark.parametrize("name", NETWORKS)
def test_calibrated_models_are_as_near_as_they_say(name: str, batch: str | int, tmp_path: Path) -> None:
    network, shape = NETWORKS[name]
    model, x = network(batch), data(shape)
    before = model.SerializeToString()
    small = gg.quantize(model, {"x": x})
    assert model.SerializeToString() == before
    assert small.samples == ROWS
    pairs = [n for n in small.result.graph.node if n.op_type == "QuantizeLinear"]
    assert len(pairs) >= 2
    assert onnx.TensorProto.INT8 in {t.data_type for t in small.result.graph.initializer}
    first = x[:7] if batch == 7 else x
    exact, found = (run(m, {"x": first})["output"] for m in (model, small.result))
    told = small.outputs["output"]
    assert 0 < np.abs(exact - found).max() <= told.largest * (1 + 1e-4)
    assert told.relative < 0.1
    assert told.same_class is not None
    assert told.same_class > 0.8
    np.savez(tmp_path / "some.npz", x=x)
    again = gg.quantize(model, tmp_path / "some.npz")
    assert again.outputs == small.outputs


@pytest.mark.parametrize("shape", [(8,), (1, 8), (), (ROWS, 8)], ids=str)
@pytest.mark.parametrize("attributes", ["", "<beta = 2.0>", "<alpha = 0.5, beta = 0.25>", "<transB = 1, beta = 0.0>"])
def test_factors_and_biases_of_gemm(attributes: str, shape: tuple[int, ...]) -> None:
    """The quantiser of onnxruntime leaves ``beta`` out, and its kernels the scale of a bias that two layers share."""
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 8] x) => (float[n, 8] y) {{ h = Gemm{}(x, w, b) {}'
    model = onnx.parser.parse_model(text.format(attributes, "r = Relu(h) y = Gemm(r, v, b) }"))
    rng = np.random.default_rng(4)
    for name, sizes in {"w": (8, 8), "v": (8, 8), "b": shape}.items():
        numbers = np.asarray(rng.normal(size=sizes), np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, name))
    x = data((8,))
    wanted, found = (run(m, {"x": x})["y"] for m in (model, gg.quantize(model, {"x": x}, batch_size=ROWS).result))
    assert np.abs(wanted - found).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_convolutions_in_groups(operator: str, groups: int, bias: bool) -> None:
    header = '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4, 6, 6] x) => (float[n, 6, h, w] y)'
    nodes = [f"{operator}<group = {groups}>({x}, {w}{', b' * bias})" for x, w in (("x", "w"), ("r", "v"))]
    model = onnx.parser.parse_model(f"{header} {{ h = {nodes[0]} r = Relu(h) y = {nodes[1]} }}")
    rng = np.random.default_rng(5)
    shapes = {"w": (4, 6), "v": (6, 6), "b": (6,)}
    for name, (*inputs, outputs) in shapes.items():
        if not bias and name == "b":
            continue
        sizes = (
            [*inputs, outputs // groups] if operator == "ConvTranspose" else [outputs, *(i // groups for i in inputs)]
        )
        numbers = rng.normal(size=[*sizes, 3, 3] if inputs else shapes[name]).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, name))
    x = data((4, 6, 6))
    wanted, found = (run(m, {"x": x})["y"] for m in (model, gg.quantize(model, {"x": x}).result))
    assert np.abs(wanted - found).max() < 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_alone_are_integers_without_data(name: str) -> None:
    network, shape = NETWORKS[name]
    model = network("batch")
    small = gg.quantize(model)
    assert small.samples == 0
    assert not any(n.op_type == "QuantizeLinear" for n in small.result.graph.node)
    assert small.bytes_after < 0.6 * small.bytes_before
    exact, found = (run(m, {"x": data(shape)})["output"] for m in (model, small.result))
    assert 0 < np.abs(exact - found).max() < 0.02 * np.abs(exact).max()
    assert "weights are int8" in str(small)
    feeds = drawn(load_model(model))
    assert feeds is not None
    exact, found = (Predictor(load_model(m), device="cpu")(feeds)["output"] for m in (model, small.result))
    apart = np.abs(exact - found).max()  # in sessions that optimise, and may multiply by MatMulNBits
    np.testing.assert_allclose(small.outputs["output"].largest, apart, rtol=1e-3)


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("room", [True, False])
def test_large_weights_are_read_from_their_file(
    calibrated: bool, room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The integers are those of a model in memory, and lie in a file as well, or in memory where there is no room."""
    model = frontend.export(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), {"x": ("batch", 512)})
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    model = onnx.load(tmp_path / "m.onnx")  # which has moved its weights away
    calibration = {"x": data((512,))} if calibrated else None
    expected = gg.quantize(model, calibration)
    monkeypatch.setattr(large_weights, "LEAST_KEPT", 1)
    if not room:
        monkeypatch.setattr(integer_model, "store_outside", full_disk)
    found = gg.quantize(ir.load(tmp_path / "m.onnx"), calibration)
    assert isinstance(found.result, ir.Model)
    large = [
        t for v in found.result.graph.initializers.values() if (t := v.const_value) is not None and t.size > 200_000
    ]
    assert [t.dtype for t in large] == [ir.DataType.INT8] * 2
    assert all(isinstance(t, ir.ExternalTensor) for t in large) == room
    for other in (to_proto(found.result), gg.quantize(tmp_path / "m.onnx", calibration).result):
        arrays = {t.name: onnx.numpy_helper.to_array(t) for t in other.graph.initializer}
        assert arrays.keys() == {t.name for t in expected.result.graph.initializer}
        for tensor in expected.result.graph.initializer:  # ranges come from sessions that multiply in another order
            numbers = arrays[tensor.name]
            relative, absolute = {"float32": (1e-6, 0), "int32": (0, 1)}.get(numbers.dtype.name, (0, 0))
            np.testing.assert_allclose(numbers, onnx.numpy_helper.to_array(tensor), relative, absolute)
        assert [n.op_type for n in other.graph.node] == [n.op_type for n in expected.result.graph.node]
    told, said = (of.outputs["output"] for of in (expected, found))  # in sessions that multiply in another order
    np.testing.assert_allclose([said.largest, said.relative], [told.largest, told.relative], rtol=1e-3)


def attention(batch: str | int) -> onnx.ModelProto:
    """With weights that are read transposed, and norms."""
    layers = (nn.TransformerEncoderLayer(24, 3, 48), nn.Linear(24, 5))
    return frontend.export(nn.Sequential(*layers), {"x": (batch, 7, 24)})


TIED = """<ir_version: 8, opset_import: ["" : 17]> g (float[N, 8] x) => (float[N, 9] y, float[8, 8] v)
    <int64[1] i = {2}> { a = MatMul(x, v)  b = Gemm<transB = 1>(a, v)  c = Gather(v, i)  d = Mul(b, c)
                         e = MatMul(d, w)  f = Max(e, u)  y = Relu(f) }"""


def tied(_: str | int) -> onnx.ModelProto:
    """One weight that is read along both axes and by Gather, and is an output; and one that has no integers."""
    model, rng = onnx.parser.parse_model(TIED), np.random.default_rng(0)
    for name, shape in {"v": (8, 8), "w": (8, 9), "u": (1, 9)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


@pytest.mark.parametrize(
    ("network", "shape"), [*NETWORKS.values(), (attention, (7, 24)), (tied, (8,))], ids=[*NETWORKS, "attention", "tied"]
)
def test_large_weights_become_what_onnxruntime_makes_of_them(
    network: Callable[[str | int], onnx.ModelProto], shape: tuple[int, ...], tmp_path: Path, monkeypatch: Any
) -> None:
    """To the last bit, though its quantiser sees their ranges alone: all weights count as large here."""
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model, x = network("batch"), data(shape)
    onnx.save(model, tmp_path / "m.onnx")
    quant_pre_process(tmp_path / "m.onnx", tmp_path / "prepared.onnx", skip_symbolic_shape=True)
    batches = iter([{"x": x[:32]}, {"x": x[32:64]}, {"x": x[64:]}])
    reader = type("Reader", (), {"get_next": lambda _: next(batches, None)})()
    quantize_static(tmp_path / "prepared.onnx", tmp_path / "int8.onnx", reader, per_channel=True, reduce_range=True,
                    activation_type=QuantType.QUInt8)  # fmt: skip
    expected = onnx.load(tmp_path / "int8.onnx")
    monkeypatch.setattr(calibrated_model, "LEAST_BYTES", 1)
    found = gg.quantize(model, {"x": x}).result
    assert [n.op_type for n in found.graph.node] == [n.op_type for n in expected.graph.node]
    arrays, wanted = ({t.name: onnx.numpy_helper.to_array(t) for t in of.graph.initializer} for of in (found, expected))
    assert arrays.keys() == wanted.keys()
    for name, array in wanted.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)
    ours, theirs = (run(m, {"x": x}) for m in (found, expected))
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)


def full_disk(*_: Any) -> None:
    raise OutputError("no space is left")


def test_names_of_classes_stay() -> None:
    model = rows("batch")
    model.metadata_props.add(key="gradgraph.example", value="kept")
    for calibration in ({"x": data((8,))}, None):
        found = gg.quantize(model, calibration).result
        assert ("gradgraph.example", "kept") in {(p.key, p.value) for p in found.metadata_props}


@pytest.mark.parametrize(
    ("calibration", "words"),
    [
        ({"y": np.zeros((3, 8), np.float32)}, "the calibration data lack 'x', which the model expects"),
        ({"x": np.zeros((0, 8), np.float32)}, "the data are empty"),
        ({"x": np.zeros((3, 7), np.float32)}, r"\[3, 7\]"),
        ("none.npz", "none.npz"),
    ],
)
def test_data_that_do_not_fit_are_refused(calibration: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        gg.quantize(rows("batch"), calibration)


@pytest.mark.parametrize("opset", [7, 9, 10, 12])
def test_models_of_opsets_without_scales_per_channel(opset: int) -> None:
    text = f'<ir_version: 4, opset_import: ["": {opset}]> g (float[n, 8] x) => (float[n, 8] y) '
    model = onnx.parser.parse_model(text + "{ h = Gemm(x, w, b) s = Softmax(h) y = Dropout(s) }")
    rng = np.random.default_rng(4)
    for name, sizes in {"w": (8, 8), "b": (8,)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=sizes).astype(np.float32), name))
    small, x = gg.quantize(model, {"x": data((8,))}), data((8,))
    assert all(np.abs(run(model, {"x": x})[name] - y).max() < 0.05 for name, y in run(small.result, {"x": x}).items())


def test_a_model_without_layers_is_refused() -> None:
    model = frontend.export(nn.ReLU(), {"x": ("batch", 3)})
    with pytest.raises(BuildError, match="no Conv, Gemm or MatMul of the model has a stored float32 weight"):
        gg.quantize(model)


@pytest.mark.parametrize("how", ["a frame", "a file", "a dict", "weights alone"])
@pytest.mark.parametrize("name", ["mlp", "ft_transformer"])
def test_models_that_take_the_columns_of_tables_still_do(name: str, how: str, tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"word": rng.choice(["a", "b"], 40), "n": rng.normal(size=40)})
    labelled = frame.assign(t=rng.choice(["x", "y"], 40))
    plan = gg.preprocess.fit(labelled, "t", index=name == "ft_transformer")
    model = getattr(gg.tables, name)(plan)
    trainer = gg.Trainer(gg.build(model, gg.tables.loss(plan)), device="cpu")
    trainer.fit(labelled, progress=False)
    exact = trainer.export(tmp_path / "t.onnx")
    frame.to_csv(tmp_path / "t.csv", index=False)
    data: dict[str, Any] = {"a frame": frame, "a file": tmp_path / "t.csv", "weights alone": None}
    small = gg.quantize(tmp_path / "t.onnx", data.get(how, dict(frame)))
    assert [v.name for v in small.result.graph.input] == ["word", "n"]
    assert [v.name for v in small.result.graph.output] == ["logits", "class", "probabilities"]
    feeds = plan.feeds(frame)
    off = np.abs(run(small.result, feeds)["logits"] - run(exact, feeds)["logits"]).max()
    assert 0 < off <= small.outputs["logits"].largest * (4 if how == "weights alone" else 1.001)


def test_images_calibrate(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3), np.uint8)
        image.fromarray(pixels).save(tmp_path / "photos" / "cat" / f"{i}.png")
    layers = (nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6 * 36, 5))
    model = frontend.export(nn.Sequential(*layers), {"x": ("batch", 3, 8, 8)})
    for data in (tmp_path / "photos", gg.image_folder(tmp_path / "photos")):
        assert gg.quantize(model, data).samples == 3


def test_what_is_no_calibration_data_is_said() -> None:
    with pytest.raises(DataError, match="not calibration data; pass a path"):
        gg.quantize(rows("batch"), [1, 2, 3])
