"""Detectors and segmenters in runs: trained from files, resumed, evaluated, and from the shell."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.frontend import export, manual_seed, nn
from gradgraph.frontend import functional as F
from tests.kit import drawn_shapes

pytest.importorskip("PIL", reason="pictures are read by Pillow")
LAID = {"image_size": (48, 48), "strides": (8,)}


class Detector(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        pairs = zip((3, 8, 16), (8, 16, 16), strict=True)
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in pairs))
        self.head = nn.Conv2d(16, outputs, 3, padding=1)

    def forward(self, image: Any) -> Any:
        each = self.head(self.body(image)).flatten(2).transpose(1, 2)
        if each.shape[2] == 8:  # FCOS, of 3 classes
            logits, sides, centre = F.split(each, [3, 4, 1], 2)
            return logits - 2.0, F.exp(sides), centre
        if each.shape[2] == 7:  # RetinaNet, one anchor for each cell
            logits, deltas = F.split(each, [3, 4], 2)
            return logits - 2.0, deltas
        if each.shape[2] == 11:  # SSD: the background and 3 classes
            logits, deltas, _ = F.split(each, [4, 4, 3], 2)
            return logits, deltas
        logits, boxes = F.split(each, [4, 5], 2)  # DETR: 3 classes and none
        return logits, F.sigmoid(boxes[..., :4])


def detector(outputs: int) -> onnx.ModelProto:
    manual_seed(0)
    return export(Detector(outputs), {"image": ("batch", 3, 48, 48)})


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_shapes.coco(tmp_path_factory.mktemp("coco"), 24, (48, 48), most=2)


DETECTORS = {
    "fcos": (8, gg.losses.fcos(**LAID)),
    "retinanet": (7, gg.losses.retinanet(**LAID, size=2.0, scales=(1.0,), ratios=(1.0,))),
    "ssd": (11, gg.losses.ssd(gg.vision.anchors(**LAID, size=2.0, scales=(1.0,), ratios=(1.0,)))),
    "detr": (9, gg.losses.detr()),
}


def built(name: str) -> gg.Step:
    outputs, loss = DETECTORS[name]
    return gg.build(detector(outputs), loss, gg.optim.adamw(3e-3))


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_learns_and_a_resumed_one_goes_on(name: str, shapes: Path, tmp_path: Path) -> None:
    step, data = built(name), gg.vision.coco(shapes, augment=["flip", "zoom", "color_jitter(0.2)"])
    whole = gg.Trainer(step, device="cpu", seed=3)
    before = whole.evaluate(gg.vision.coco(shapes))["loss"]
    history = whole.fit(data, epochs=6, batch_size=8, validation=gg.vision.coco(shapes), progress=False)
    assert history["val_loss"][-1] < 0.9 * before
    half = gg.Trainer(step, device="cpu", seed=3)
    half.fit(data, epochs=6, batch_size=8, progress=False, max_steps=4, checkpoint=tmp_path / "run.ckpt")
    again = gg.Trainer.resume(step, tmp_path / "run.ckpt", device="cpu")
    again.fit(data, epochs=6, batch_size=8, progress=False)
    for key, value in whole.parameters.items():
        np.testing.assert_array_equal(again.parameters[key], value)
    found = gg.vision.evaluate(again, gg.vision.coco(shapes))
    assert set(found["per_class"]) == set(drawn_shapes.CLASSES) and 0 <= found["ap"] <= found["ap50"] <= 1


def test_only_training_is_augmented(shapes: Path) -> None:
    trainer = gg.Trainer(built("fcos"), device="cpu")
    noisy, plain = gg.vision.coco(shapes, augment=["flip", "zoom"]), gg.vision.coco(shapes)
    assert trainer.evaluate(noisy) == trainer.evaluate(plain)
    for name, array in trainer.predict(noisy).items():
        np.testing.assert_array_equal(array, trainer.predict(plain)[name])


def test_detections_lie_in_pixels_of_the_picture(tmp_path: Path) -> None:
    """Whatever the shape of the picture, and stretched or not: the boxes of a model that finds all are the truth."""
    shapes = drawn_shapes.coco(tmp_path, 4, (96, 40), most=2)
    trainer = gg.Trainer(built("detr"), device="cpu")
    for letterbox in (False, True):
        data = gg.vision.coco(shapes, letterbox=letterbox)
        form = data.form_for(trainer.manifest.inputs, trainer.names)
        assert (form.size, bool(form.letterbox)) == ((48, 48), letterbox)
        specs = {s.name: s for s in trainer.manifest.batch}
        (batch,) = data.load(iter([range(4)]), specs, ())
        for i, (labels, boxes) in enumerate(zip(batch["target"], batch["target_boxes"], strict=True)):
            seen = boxes[labels >= 0]
            corners = np.concatenate([seen[:, :2] - seen[:, 2:] / 2, seen[:, :2] + seen[:, 2:] / 2], 1)
            np.testing.assert_allclose(data.in_picture(i, corners, form), data.truths()[i].boxes, atol=1e-3)
        assert len(gg.vision.detect(trainer, data)) == 4


def test_a_letterbox_of_training_is_one_later(tmp_path: Path) -> None:
    """For pictures with boxes, and for folders that know nothing of them; unless they say otherwise."""
    shapes = drawn_shapes.coco(tmp_path, 4, (96, 40), most=2)
    trainer = gg.Trainer(built("fcos"), device="cpu")
    boxed = gg.vision.coco(shapes, letterbox=True)
    trainer.fit(boxed, epochs=1, batch_size=4, progress=False)
    assert trainer.names.images["image"]["letterbox"] is True
    expected = trainer.predict(boxed)
    for later in (gg.vision.coco(shapes), gg.image_folder(tmp_path / "images")):
        for name, array in trainer.predict(later).items():
            np.testing.assert_array_equal(array, expected[name])
    stretched = trainer.predict(gg.vision.coco(shapes, letterbox=False))
    assert not np.array_equal(stretched["output_0"], expected["output_0"])


def test_another_loss_finds_no_objects(shapes: Path) -> None:
    trainer = gg.Trainer(gg.build(detector(8), {"output_0": "mse"}), device="cpu")
    with pytest.raises(gg.GradgraphError, match="has no decoder"):
        gg.vision.detect(trainer, gg.vision.coco(shapes))


# --- segmenters ----------------------------------------------------------------------------------------------


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, image: Any) -> Any:
        return self.body(image)


def test_a_segmenter_learns_from_masks(tmp_path: Path) -> None:
    """Cross entropy and Dice of one target; the mean IoU leaves out pixels of 255."""
    manual_seed(0)
    model = export(Segmenter(), {"image": ("batch", 3, 24, 48)}, outputs=["scores"])
    step = gg.build(model, {"scores": ["cross_entropy", "tversky"]}, gg.optim.adamw(1e-2), metrics=["iou"])
    data = gg.vision.masks(drawn_shapes.masks(tmp_path), classes=["none", "low", "high"])
    trainer = gg.Trainer(step, device="cpu")
    history = trainer.fit(data, epochs=12, batch_size=3, progress=False)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    found, scores = trainer.evaluate(data), trainer.predict(data)
    assert trainer.names.classes["scores_target"] == ("none", "low", "high")
    called, truth = scores.argmax(1), np.stack([mask for _, mask in map(data.__getitem__, range(3))])
    counts = truth != 255
    shares = [
        (counts & (called == c) & (truth == c)).sum() / (counts & ((called == c) | (truth == c))).sum()
        for c in range(3)
    ]
    assert found["iou"] == pytest.approx(np.mean(shares), rel=1e-6)


def test_a_segmenter_learns_from_outlines(shapes: Path) -> None:
    manual_seed(0)

    class Four(Segmenter):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))

    model = export(Four(), {"image": ("batch", 3, 48, 48)}, outputs=["scores"])
    trainer = gg.Trainer(gg.build(model, "lovasz", gg.optim.adamw(1e-2), metrics=["iou"]), device="cpu")
    history = trainer.fit(gg.vision.coco(shapes, augment="flip"), epochs=3, batch_size=8, progress=False)
    assert history["loss"][-1] < history["loss"][0]
    assert trainer.names.classes["target"] == ("background", *drawn_shapes.CLASSES)


# --- from the shell --------------------------------------------------------------------------------------------


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("name", DETECTORS)
def test_pictures_without_objects_train(name: str, tmp_path: Path) -> None:
    """Batches of them alone teach that nothing is there; what is measured is that of the same pictures in one batch."""
    path = drawn_shapes.coco(tmp_path, 8, (48, 48), most=2)
    table = json.loads(path.read_text())
    table["annotations"] = [a for a in table["annotations"] if a["image_id"] >= 104]
    path.write_text(json.dumps(table))
    trainer, data = gg.Trainer(built(name)), gg.vision.coco(path)
    trainer.fit(data, epochs=1, batch_size=2, shuffle=False, progress=False)
    assert np.isfinite(trainer.evaluate(data, batch_size=4)["loss"])
    empty = gg.vision.coco(path)
    empty.files, empty.found = empty.files[:4], empty.found[:4]
    assert np.isfinite(trainer.evaluate(empty, batch_size=4)["loss"])
    assert all(len(truth.labels) == 0 for truth in empty.truths())
    assert math.isnan(gg.vision.evaluate(trainer, empty)["ap"])
