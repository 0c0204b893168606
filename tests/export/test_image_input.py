"""Models that take bytes of images: what stands in front of them equals Pillow and NumPy, for images of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.augment.placing import whole
from gradgraph.data.images.image_form import ImageForm
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TensorSpec
from gradgraph.export import with_image_input
from gradgraph.frontend import nn

PIL: Any = pytest.importorskip("PIL", reason="an extra: onnx-gradgraph[images]")
Image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTOGRAPHS, SMALL = [(375, 500), (600, 801), (37, 50)], [(64, 48), (9, 7), (16, 12)]
TALL = [(120, 31), (500, 375)]  # which Pillow shrinks first in the other direction: no noise, whose overshoots it cuts
TIES = 1e-2  # the share of pixels that Pillow, whose weights are whole numbers, may round otherwise in photographs

FORMS: dict[str, dict[str, Any]] = {
    "stretched": {"size": (16, 12)},
    "stretched, bicubic": {"size": (16, 12), "resample": "bicubic"},
    "cut": {"size": (16, 12), "shorter": 18},
    "cut, bicubic": {"size": (16, 12), "shorter": 21, "resample": "bicubic"},
    "normalised": {"size": (16, 12), "mean": MEAN, "std": STD},
    "as it is": {"std": (0.5, 0.5, 0.5)},
    "BGR": {"size": (16, 12), "order": "BGR", "mean": MEAN, "std": STD},
    "BGR, from 0 to 255": {"size": (16, 12), "order": "BGR", "scale": 1.0, "mean": (103.9, 116.8, 123.7)},
    "as it is, another scale": {"scale": 1 / 127.5, "mean": (1.0, 1.0, 1.0)},
    "cut like transformers": {"size": (16, 12), "shorter": 19, "crop": "floor"},
    "cut out of less": {"size": (16, 12), "shorter": 9},
    "cut out of less like transformers": {"size": (17, 12), "shorter": 14, "crop": "floor", "mean": MEAN, "std": STD},
    "letterboxed": {"size": (16, 13), "letterbox": True, "mean": MEAN, "std": STD},
}


def taking(kind: str, layout: str, dtype: str, channels: int) -> onnx.ModelProto:
    """The identity of an input of images, with how they were read in its metadata."""
    form = {key: value[:channels] if key in ("mean", "std") else value for key, value in FORMS[kind].items()}
    without = (("mean", "std", "scale") if dtype == "uint8" else ()) + (("order",) if channels == 1 else ())
    form = {key: value for key, value in form.items() if key not in without}
    sides = form.get("size", ("a", "b"))
    shape = [channels, *sides] if layout == "NCHW" else [*sides, channels]
    dims = ", ".join(map(str, ["n", *shape]))
    name = {"float32": "float", "float16": "float16", "uint8": "uint8"}[dtype]
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g ({name}[{dims}] pixels) => ({name}[{dims}] y) {{ y = Identity(pixels) }}""")
    names = DataNames(images={"pixels": {**form, "layout": layout}})
    for key, value in names.as_metadata().items():
        model.metadata_props.add(key=key, value=value)
    return model


@pytest.mark.sweep(0.053)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("dtype", "channels"), [("float32", 3), ("float32", 1), ("uint8", 3), ("float16", 3)])
@pytest.mark.parametrize("kind", FORMS)
def test_it_equals_pillow(kind: str, dtype: str, channels: int, layout: str) -> None:
    model = taking(kind, layout, dtype, channels)
    raw = with_image_input(model)
    onnx.checker.check_model(raw, full_check=True)
    session = ort.InferenceSession(raw.SerializeToString())
    assert session.get_inputs()[0].type == "tensor(uint8)" and session.get_inputs()[0].name == "pixels"
    names = DataNames.read_from({p.key: p.value for p in model.metadata_props})
    shape = tuple(d.dim_value or d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim)
    form = ImageForm(**names.images["pixels"]).of(TensorSpec("pixels", dtype, shape))
    of_level = 1.0 if dtype == "uint8" else (form.scale or 1 / 255) / min(form.std or (1.0,))
    exact = {"uint8": 0.0, "float32": 2e-6, "float16": 4e-3}[dtype] * 255 * (form.scale or 1 / 255)
    levels = 2 if "bicubic" in kind else 1
    for i, (height, width) in enumerate([*PHOTOGRAPHS, *SMALL, *TALL]):
        bytes_of = np.random.default_rng(i).integers(0, 256, (2, height, width, channels), dtype=np.uint8)
        if (height, width) in TALL:
            bytes_of = (
                bytes_of[:, :1, :1] // 2 + np.linspace(0, 120, height * width).reshape(1, height, width, 1)
            ).astype(np.uint8)
        images = [Image.fromarray(one[:, :, 0] if channels == 1 else one) for one in bytes_of]
        expected = np.stack([form(image) for image in images]).astype(np.float64)
        found = session.run(None, {"pixels": bytes_of})[0].astype(np.float64)
        assert found.shape == expected.shape
        off = np.abs(found - expected)
        assert off.max() <= levels * of_level * 1.001 + exact
        if (height, width) in PHOTOGRAPHS:
            assert (off > exact).mean() <= TIES


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("seed", range(100))
def test_letterboxes_and_their_boxes_are_those_of_pillow_and_numpy(seed: int) -> None:
    """For random sizes and boxes: pixels within a level, and boxes there and back."""
    rng = np.random.default_rng(seed)
    (height, width), (tall, wide) = rng.integers(8, 60, 2).tolist(), rng.integers(1, 150, 2).tolist()
    dims = f"n, 3, {height}, {width}"
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (uint8[{dims}] pixels) => (uint8[{dims}] y) {{ y = Identity(pixels) }}""")
    form = {"size": (height, width), "letterbox": True, "layout": "NCHW"}
    for key, value in DataNames(images={"pixels": form}).as_metadata().items():
        model.metadata_props.add(key=key, value=value)
    picture = rng.integers(0, 256, (tall, wide, 3), np.uint8)
    scale = min(width / wide, height / tall)
    inner = [max(1, min(round(side * scale), most)) for side, most in ((wide, width), (tall, height))]
    left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
    expected = np.full((height, width, 3), 114, np.uint8)
    resized = np.asarray(Image.fromarray(picture).resize(inner, Image.Resampling.BILINEAR))
    expected[top : top + inner[1], left : left + inner[0]] = resized
    session = ort.InferenceSession(with_image_input(model).SerializeToString())
    found = session.run(None, {"pixels": picture[None]})[0][0].transpose(1, 2, 0)
    assert np.abs(found.astype(int) - expected).max() <= 1

    corners = np.sort(rng.uniform(0, [wide, tall], (5, 2, 2)), axis=1)
    place = whole((wide, tall), (width, height), letterbox=True)
    placed = corners * [inner[0] / wide, inner[1] / tall] + [left, top]
    np.testing.assert_allclose(place.boxes(corners.reshape(5, 4)), placed.reshape(5, 4))
    np.testing.assert_allclose(place.back(placed.reshape(5, 4)), corners.reshape(5, 4), atol=1e-9)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("seed", range(20))
def test_small_pictures_of_noise_are_resized_in_the_order_of_pillow(seed: int) -> None:
    """Pillow 13 resizes columns first where the height shrinks by more; it cuts overshoots off in between."""
    if int(PIL.__version__.split(".")[0]) < 13:
        pytest.skip("another order of directions")
    rng = np.random.default_rng(seed)
    height, width = rng.integers(4, 40, 2).tolist()
    dims = f"n, 3, {height}, {width}"
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (uint8[{dims}] pixels) => (uint8[{dims}] y) {{ y = Identity(pixels) }}""")
    form: dict[str, Any] = {"size": (height, width), "resample": "bicubic", "layout": "NCHW"}
    for key, value in DataNames(images={"pixels": form}).as_metadata().items():
        model.metadata_props.add(key=key, value=value)
    session = ort.InferenceSession(with_image_input(model).SerializeToString())
    for tall, wide in rng.integers(1, 120, (10, 2)).tolist():
        picture = rng.integers(0, 256, (tall, wide, 3), np.uint8)
        expected = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))
        found = session.run(None, {"pixels": picture[None]})[0][0].transpose(1, 2, 0)
        assert np.abs(found.astype(int) - expected).max() <= 2, (tall, wide)


def test_an_exported_classifier_takes_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(["a/1", "a/2", "b/1", "b/2"]):
        path = Path("photos") / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        made = np.random.default_rng(i).integers(0, 256, (20 + 5 * i, 31, 3), dtype=np.uint8)
        Image.fromarray(made).save(path)
    gg.frontend.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    onnx.save(gg.frontend.export(head, {"x": ("N", 3, 12, 12)}), "model.onnx")
    image = ["--image", "size=[12,12]", "--image", "shorter=14", "--image", "mean=[0.4,0.5,0.6]"]
    train = [
        "train",
        "model.onnx",
        "--data",
        "photos",
        "--epochs",
        "1",
        "-o",
        "step",
        "--checkpoint",
        "run.ckpt",
        *image,
    ]
    assert run(train) == 0
    assert run(["export", "step", "--checkpoint", "run.ckpt", "--image-input", "-o", "raw.onnx"]) == 0
    assert run(["export", "step", "--checkpoint", "run.ckpt", "-o", "plain.onnx"]) == 0
    assert run(["predict", "plain.onnx", "--data", "photos", "-o", "plain.csv"]) == 0
    assert run(["predict", "raw.onnx", "--data", "photos", "-o", "raw.csv", "--batch-size", "1"]) == 0
    plain, raw = (Path(name).read_text("utf-8").splitlines() for name in ("plain.csv", "raw.csv"))
    assert plain[0] == raw[0] and len(raw) == 5
    for one, other in zip(plain[1:], raw[1:], strict=True):
        np.testing.assert_allclose([*map(float, one.split(",")[:2])], [*map(float, other.split(",")[:2])], atol=1e-3)
        assert one.split(",")[-1] == other.split(",")[-1]


@pytest.mark.parametrize(
    ("dims", "images", "says"),
    [
        ("n, 4", {}, "no input that is known to contain images"),
        ("n, 3, 8, 8", {"resample": "lanczos"}, "with the filter lanczos"),
        ("n, 4, 8, 8", {"layout": "NCHW"}, "with four channels"),
    ],
)
def test_what_cannot_be_done_is_said(dims: str, images: dict[str, Any], says: str) -> None:
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[{dims}] x) => (float[{dims}] y) {{ y = Identity(x) }}""")
    for key, value in DataNames(images={"x": images} if images else {}).as_metadata().items():
        model.metadata_props.add(key=key, value=value)
    with pytest.raises(gg.errors.ModelError, match=says):
        with_image_input(model)


def test_a_refusal_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(gg.frontend.export(nn.Linear(4, 2), {"x": ("N", 4)}), "model.onnx")
    gg.build("model.onnx", "mse").save("step")
    for name in ("new.onnx", "old.onnx", "old.ort"):
        if name.startswith("old"):
            Path(name).write_bytes(b"old")
        assert run(["export", "step", "--image-input", "-o", name]) != 0
        assert "no input that is known to contain images" in capsys.readouterr().err
    assert not Path("new.onnx").exists()
    assert Path("old.onnx").read_bytes() == Path("old.ort").read_bytes() == b"old"
