"""Classes of annotations are matched by name: losses, maps, detections and average precision, as pycocotools has it."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import UnmatchedError
from gradgraph.frontend import export, nn
from gradgraph.frontend import functional as F
from gradgraph.vision import Annotated
from gradgraph.vision.average_precision import mean_average_precision
from gradgraph.vision.decoding import Detections
from tests.kit import drawn_shapes

pytestmark = pytest.mark.any_kernels

SIDE = 48
IMAGE = TensorSpec("image", "float32", ("batch", 3, SIDE, SIDE))
MAP = TargetSpec("target", "int64", ("batch", SIDE, SIDE), classes=4, ignore_index=-100)
ORDERS = [(1, 2, 0), (2, 1, 0), (0, 2, 1)]


def renumbered(source: Path, folder: Path, order: tuple[int, ...], form: str) -> Annotated:
    """The same annotations, whose classes have other numbers."""
    data = json.loads(source.read_text())
    folder.mkdir()
    if form == "yolo":
        (folder / "images").symlink_to(source.parent / "images")
        (folder / "labels").mkdir()
        (folder / "classes.txt").write_text("\n".join(drawn_shapes.CLASSES[i] for i in order))
        for image in data["images"]:
            lines = []
            for one in data["annotations"]:
                if one["image_id"] == image["id"]:
                    x, y, w, h = np.array(one["bbox"]) / ([image["width"], image["height"]] * 2)
                    lines.append(f"{order.index(one['category_id'] // 10 - 1)} {x + w / 2} {y + h / 2} {w} {h}")
            (folder / "labels" / image["file_name"]).with_suffix(".txt").write_text("\n".join(lines))
        return gg.vision.yolo(folder)
    ids = {10 * (i + 1): 7 + order.index(i) for i in range(3)}
    data["categories"] = [{"id": ids[one["id"]], "name": one["name"]} for one in data["categories"]]
    data["annotations"] = [{**one, "category_id": ids[one["category_id"]]} for one in data["annotations"]]
    (folder / "annotations.json").write_text(json.dumps(data))
    return gg.vision.coco(folder, images=source.parent / "images")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL", reason="an extra")
    return drawn_shapes.coco(tmp_path_factory.mktemp("shapes"), 12, (SIDE, SIDE))


@pytest.fixture(scope="module")
def trainer(shapes: Path) -> gg.Trainer:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [3, 8, 16, 16]
            self.body = nn.Sequential(
                *(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in itertools.pairwise(sizes))
            )
            self.head = nn.Conv2d(16, 8, 3, padding=1)

        def forward(self, image: Any) -> Any:
            made = self.head(self.body(image)).flatten(2).transpose(1, 2)
            logits, sides, centre = F.split(made, [3, 4, 1], 2)
            return logits - 2.0, F.exp(sides), centre

    gg.frontend.manual_seed(0)
    outputs = ["logits", "distances", "centerness"]
    model = export(Detector(), {"image": ("batch", 3, SIDE, SIDE)}, outputs=outputs)
    step = gg.build(model, gg.losses.fcos(image_size=(SIDE, SIDE), strides=(8,)), gg.optim.adamw(1e-2))
    made = gg.Trainer(step, device="cpu")
    made.fit(gg.vision.coco(shapes), epochs=8, batch_size=4, progress=False)
    return made


@pytest.mark.sweep(0.07)
@pytest.mark.parametrize("form", ["coco", "yolo"])
@pytest.mark.parametrize("order", ORDERS)
def test_average_precision_is_that_of_the_names(
    order: tuple[int, ...], form: str, shapes: Path, trainer: gg.Trainer, tmp_path: Path
) -> None:
    data = gg.vision.coco(shapes)
    other = renumbered(shapes, tmp_path / "other", order, form)
    assert set(other.classes) == set(data.classes)
    expected, found = gg.vision.evaluate(trainer, data), gg.vision.evaluate(trainer, other)
    assert found["ap"] == pytest.approx(expected["ap"], rel=1e-9) and found["ap"] > 0
    assert list(found["per_class"]) == list(expected["per_class"]) == list(drawn_shapes.CLASSES)
    assert found["per_class"] == pytest.approx(expected["per_class"], rel=1e-9)
    for one, same in zip(gg.vision.detect(trainer, data), gg.vision.detect(trainer, other), strict=True):
        assert one.names == same.names and one.classes == drawn_shapes.CLASSES
    if form == "coco":
        assert trainer.evaluate(other)["loss"] == pytest.approx(trainer.evaluate(data)["loss"], rel=1e-6)


def test_fewer_classes_and_new_ones(shapes: Path, trainer: gg.Trainer, tmp_path: Path) -> None:
    data = json.loads(shapes.read_text())
    some = [one for one in data["annotations"] if one["category_id"] == 30]
    found = {}
    for name, categories in (("all", data["categories"]), ("alone", data["categories"][2:])):
        (tmp_path / f"{name}.json").write_text(json.dumps({**data, "annotations": some, "categories": categories}))
        read = gg.vision.coco(tmp_path / f"{name}.json", images=shapes.parent / "images")
        found[name] = gg.vision.evaluate(trainer, read)["per_class"]["triangle"]
    assert found["all"] == pytest.approx(found["alone"], rel=1e-9)
    new = [*data["categories"], {"id": 99, "name": "star"}]
    (tmp_path / "new.json").write_text(json.dumps({**data, "categories": new}))
    with pytest.raises(UnmatchedError, match="the new class 'star'"):
        gg.vision.evaluate(trainer, gg.vision.coco(tmp_path / "new.json", images=shapes.parent / "images"))


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("seed", range(40))
def test_average_precision_is_that_of_pycocotools(seed: int, shapes: Path, tmp_path: Path) -> None:
    """Random detections with the model's numbers, against annotations whose classes have others, or are fewer."""
    coco_of = pytest.importorskip("pycocotools.coco", reason="an extra").COCO
    from pycocotools.cocoeval import COCOeval

    rng = np.random.default_rng(seed)
    order = tuple(rng.permutation(3).tolist())
    read = renumbered(shapes, tmp_path / "other", order, "coco")
    known = [drawn_shapes.CLASSES[i] for i in rng.permutation(3)]
    truths, found, lines = read.truths(), [], []
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco_of(str(tmp_path / "other" / "annotations.json"))
    id_of = {one["name"]: one["id"] for one in truth.dataset["categories"]}
    for picture, one in zip(truth.dataset["images"], truths, strict=True):
        shifted = one.boxes + rng.normal(size=one.boxes.shape) * 2
        boxes = np.concatenate([shifted, rng.uniform([0, 0, 20, 20], [20, 20, 40, 40], (2, 4))])
        names = [read.classes[i] for i in one.labels] + rng.choice(known, 2).tolist()
        scores = np.sort(rng.random(len(boxes)))[::-1]
        found.append(Detections(np.array([known.index(n) for n in names]), scores, boxes, tuple(known)))
        for name, score, (left, top, right, bottom) in zip(names, scores.tolist(), boxes.tolist(), strict=True):
            lines.append({"image_id": picture["id"], "category_id": id_of[name], "score": score,
                          "bbox": [left, top, right - left, bottom - top]})  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        judge = COCOeval(truth, truth.loadRes(lines), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    mine = mean_average_precision(found, read)
    assert [mine["ap"], mine["ap50"], mine["ap75"]] == pytest.approx(judge.stats[:3].tolist(), abs=1e-9)


@pytest.mark.parametrize("order", ORDERS)
def test_maps_of_outlines_and_masks_have_the_numbers_of_the_names(
    order: tuple[int, ...], shapes: Path, tmp_path: Path
) -> None:
    specs: dict[str, TensorSpec] = {"image": IMAGE, "target": MAP}
    data = gg.vision.coco(shapes)
    known = data.names_for(specs, DataNames())
    expected = next(data.load(iter([range(len(data))]), specs, (), known))["target"]
    other = renumbered(shapes, tmp_path / "other", order, "coco")
    made = next(other.load(iter([range(len(data))]), specs, (), other.names_for(specs, known)))["target"]
    np.testing.assert_array_equal(made, expected)
    from PIL import Image

    for folder in ("images", "masks"):
        (tmp_path / "masks" / folder).mkdir(parents=True)
    names = ["background", *drawn_shapes.CLASSES]
    listed = [names[i] for i in (0, *(1 + i for i in order))]
    at = np.array([listed.index(name) for name in names], np.uint8)
    for i, mask in enumerate(expected):
        Image.open(data.files[i]).save(tmp_path / "masks" / "images" / f"{i:03}.png")
        Image.fromarray(at[mask]).save(tmp_path / "masks" / "masks" / f"{i:03}.png")
    for specs_of in (specs, {**specs, "target": TargetSpec("target", "float32", ("batch", 4, SIDE, SIDE))}):
        folder = gg.vision.masks(tmp_path / "masks", classes=listed)
        batch = next(folder.load(iter([range(len(data))]), specs_of, (), folder.names_for(specs_of, known)))
        wanted = expected if specs_of is specs else expected[:, None] == np.arange(4)[:, None, None]
        np.testing.assert_array_equal(batch["target"], wanted)
    with pytest.raises(UnmatchedError, match="new class 'star'"):
        gg.vision.masks(tmp_path / "masks", classes=[*listed[:3], "star"]).names_for(specs, known)
