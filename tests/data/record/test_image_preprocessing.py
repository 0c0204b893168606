"""Files of Hugging Face and timm beside a model say how its images are read: as these do, or not at all."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.record.data_names import DataNames
from gradgraph.frontend import nn
from tests.kit.npz import npz

Image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NORMAL = {"do_normalize": True, "image_mean": MEAN, "image_std": STD}
TIMM = {"input_size": [3, 16, 16], "interpolation": "bicubic", "crop_pct": 0.8, "mean": MEAN, "std": STD}
BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR


def plainly(image: Any, size: int, how: Any, shorter: int | None, scale: float = 1 / 255, mean: Any = None,
            std: Any = None, rest: str = "floor", flips: bool = False) -> np.ndarray:  # fmt: skip
    """Resize (the shorter side, and cut the middle out), scale and normalise.

    Half of the rest ends at ``rest``: "floor" in transformers, "round" in torchvision, which timm uses.
    """
    if shorter is None:
        image = image.resize((size, size), how)
    else:
        width, height = image.size
        new = (shorter, int(shorter * height / width)) if width <= height else (int(shorter * width / height), shorter)
        image = image.resize(new, how)
        left, top = (int((side - size) / 2) if rest == "floor" else round((side - size) / 2) for side in image.size)
        image = image.crop((left, top, left + size, top + size))
    array = np.asarray(image).transpose(2, 0, 1)[:: -1 if flips else 1] * scale
    column = lambda values: np.array(values)[:, None, None]  # noqa: E731
    return array if mean is None else (array - column(mean)) / column(std)


# document: the arguments of ``plainly`` that stand for it
DOCUMENTS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "ViT": ({**NORMAL, "image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "resample": 2},
            (16, BILINEAR, None, 1 / 255, MEAN, STD)),
    "ViT with an old size": ({**NORMAL, "feature_extractor_type": "ViTFeatureExtractor", "size": 16, "resample": 3},
                             (16, BICUBIC, None, 1 / 255, MEAN, STD)),
    "CLIP": ({**NORMAL, "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 18}, "resample": 3,
              "do_center_crop": True, "crop_size": {"height": 16, "width": 16}}, (16, BICUBIC, 18, 1 / 255, MEAN, STD)),
    "CLIP with old sizes": ({**NORMAL, "feature_extractor_type": "CLIPFeatureExtractor", "size": 20, "resample": 3,
                             "do_center_crop": True, "crop_size": 16}, (16, BICUBIC, 20, 1 / 255, MEAN, STD)),
    "ConvNext": ({**NORMAL, "image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 16},
                  "crop_pct": 0.875, "resample": 3}, (16, BICUBIC, 18, 1 / 255, MEAN, STD)),
    "MobileNet, from -1 to 1": ({"image_processor_type": "MobileNetV2ImageProcessor", "size": {"shortest_edge": 20},
                                 "do_center_crop": True, "crop_size": {"height": 16, "width": 16}, "resample": 2,
                                 "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
                                (16, BILINEAR, 20, 1 / 255, [0.5] * 3, [0.5] * 3)),
    "another factor": ({**NORMAL, "image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16},
                        "rescale_factor": 1 / 127.5}, (16, BILINEAR, None, 1 / 127.5, MEAN, STD)),
    "bytes as they are": ({"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16},
                           "do_rescale": False, "do_normalize": False}, (16, BILINEAR, None, 1.0)),
    "a shorter side below the size": ({**NORMAL, "image_processor_type": "BitImageProcessor", "resample": 3,
        "size": {"shortest_edge": 11}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}},
        (16, BICUBIC, 11, 1 / 255, MEAN, STD)),
    "MobileViT, BGR": ({"image_processor_type": "MobileViTImageProcessor", "size": {"shortest_edge": 18}, "resample": 2,
                        "do_center_crop": True, "crop_size": {"height": 16, "width": 16}, "do_normalize": False,
                        "do_flip_channel_order": True}, (16, BILINEAR, 18, 1 / 255, None, None, "floor", True)),
    "timm": ({"architecture": "resnet18", "pretrained_cfg": TIMM}, (16, BICUBIC, 20, 1 / 255, MEAN, STD, "round")),
    "timm, squashed": ({"pretrained_cfg": {**TIMM, "crop_pct": 1.0, "crop_mode": "squash"}},
                       (16, BICUBIC, None, 1 / 255, MEAN, STD)),
}  # fmt: skip
PLACES = ("beside", "above onnx/", "metadata")


def model(size: int | str = 16) -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(2) if isinstance(size, int) else nn.AdaptiveAvgPool2d(1)
    head = nn.Sequential(pool, nn.Flatten(), nn.Linear(12 if isinstance(size, int) else 3, 2))
    return gg.frontend.export(head, {"pixels": ("N", 3, size, size)})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i, name in enumerate(["a/1", "a/2", "b/1"]):
        path = tmp_path / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        made = np.random.default_rng(i).integers(0, 256, (30 + 9 * i, 41, 3), dtype=np.uint8)
        Image.fromarray(made).save(path)
    return tmp_path / "photos"


def placed(document: Any, folder: Path, place: str = "beside", size: int | str = 16) -> Path:
    folder = folder / "repository"
    path = folder / ("onnx/model.onnx" if place == "above onnx/" else "model.onnx")
    path.parent.mkdir(parents=True, exist_ok=True)
    made, is_timm = model(size), "pretrained_cfg" in document
    if place == "metadata":
        value = document["pretrained_cfg"] if is_timm else document
        made.metadata_props.add(key="pretrained_cfg" if is_timm else "preprocessor_config", value=json.dumps(value))
    else:
        (folder / ("config.json" if is_timm else "preprocessor_config.json")).write_text(json.dumps(document))
    onnx.save(made, path)
    return path


@pytest.mark.sweep(0.215)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_images_are_read_as_the_file_says(name: str, place: str, photos: Path, tmp_path: Path) -> None:
    document, arguments = DOCUMENTS[name]
    path = placed(document, tmp_path, place)
    step = gg.build(path, loss="cross_entropy")
    files = sorted(photos.glob("*/*.png"))
    arrays = np.stack([plainly(Image.open(file), *arguments) for file in files]).astype(np.float32)
    trainer = gg.Trainer(step, device="cpu")
    found = gg.image_folder(photos).load(iter([range(3)]), {"pixels": step.manifest.inputs[0]}, (), trainer.names)
    np.testing.assert_allclose(next(found)["pixels"], arrays, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(trainer.predict(photos), trainer.predict(arrays), rtol=1e-4, atol=1e-4)
    (told,) = step.taken
    assert told.startswith("images of 'pixels' are read as ") and "resample" in told


def test_a_new_head_an_export_and_the_shell_keep_it(photos: Path, tmp_path: Path, capsys: Any) -> None:
    document, arguments = DOCUMENTS["CLIP"]
    path = placed(document, tmp_path)
    arrays = np.stack([plainly(Image.open(f), *arguments) for f in sorted(photos.glob("*/*.png"))]).astype(np.float32)
    trainer = gg.Trainer(gg.build(gg.new_head(path, 2), loss="cross_entropy"), device="cpu")
    trainer.export(tmp_path / "trained.onnx")
    assert run(("surgery", str(path), "--new-head", "5", "-o", str(tmp_path / "headed.onnx"))) == 0
    assert gg.build(tmp_path / "headed.onnx").manifest.data.images == trainer.names.images
    expected = trainer.predict(arrays)
    for given in (path, tmp_path / "trained.onnx"):
        out = tmp_path / "out.npz"
        assert run(("predict", str(given), "--data", str(photos), "-o", str(out))) == 0
        want = expected if given != path else gg.Trainer(gg.build(path), device="cpu").predict(arrays)
        np.testing.assert_allclose(npz(out)["output"], want, rtol=1e-4, atol=1e-4)
    assert "are read as" in capsys.readouterr().err


def test_what_is_said_wins(photos: Path, tmp_path: Path) -> None:
    path = placed(DOCUMENTS["CLIP"][0], tmp_path, size="side")
    step = gg.build(path, loss="cross_entropy")
    known = gg.Trainer(step, device="cpu").names
    read = gg.image_folder(photos, (8, 8), mean=(0, 0, 0)).load(
        iter([[0]]), {"pixels": step.manifest.inputs[0]}, (), known
    )
    image = Image.open(sorted(photos.glob("*/*.png"))[0])
    expected = plainly(image, 8, BICUBIC, None, 1 / 255, [0, 0, 0], STD)
    np.testing.assert_allclose(next(read)["pixels"][0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"do_pad": True}, "do_pad"),
        ({"size": {"shortest_edge": 18}, "do_center_crop": False}, "different sizes"),
        ({"size": {"height": 20, "width": 20}, "do_center_crop": True, "crop_size": 16}, "stretches images"),
        ({"size": {"longest_edge": 18}}, "longest_edge"),
        ({"size": 18, "image_processor_type": "OwnImageProcessor"}, "of the shorter side or of both"),
        ({"size": {"height": 32, "width": 32}}, "the model reads [16, 16]"),
        ({"size": {"height": -1, "width": 32}}, "not a whole number of pixels"),
        ({"image_mean": "much"}, "not a list of numbers"),
        ({"image_std": [1e999] * 3}, "it contains Infinity, which is not a finite number"),
        ({"resample": 77}, "filter 77"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"rescale_factor": "x"}, "a number up to"),
        ({"do_resize": "yes"}, "true or false"),
    ],
)
def test_what_is_not_understood_is_told_and_not_used(
    change: dict[str, Any], says: str, tmp_path: Path, caplog: Any
) -> None:
    document = {**DOCUMENTS["ViT"][0], **change}
    with caplog.at_level(logging.WARNING):
        step = gg.build(placed(document, tmp_path), loss="cross_entropy")
    assert step.manifest.data == DataNames() and not step.taken
    assert says in caplog.text and "is not supported (" in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"[1, 2]", b"{", b"\xff\xfe", b'{"pretrained_cfg": 3}', b'{"size": ' + b"[" * 99999]
)
def test_a_damaged_file_is_told(content: bytes, tmp_path: Path, caplog: Any) -> None:
    path = placed({}, tmp_path)
    (path.parent / "preprocessor_config.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        gg.build(path, loss="cross_entropy")
    assert "is not supported (" in caplog.text


def test_other_files_are_none_of_its_business(tmp_path: Path, caplog: Any) -> None:
    """A model's ``config.json`` of transformers is about the network."""
    path = placed({}, tmp_path)
    (path.parent / "preprocessor_config.json").unlink()
    (path.parent / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 768}))
    with caplog.at_level(logging.WARNING):
        step = gg.build(path, loss="cross_entropy")
    assert not step.taken and not caplog.text
