"""Pictures with boxes and masks: what a step gets, and that boxes and masks move with their picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import drawn_shapes

pytest.importorskip("PIL", reason="pictures are read by Pillow")
from PIL import Image

import gradgraph as gg
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import DataError, UnmatchedError
from gradgraph.vision import Annotated

IMAGE = TensorSpec("image", "float32", ("batch", 3, 48, 48))
LABELS = TargetSpec("target", "int64", ("batch", "objects"), classes=3, ignore_index=-1)
BOXES = TargetSpec("target_boxes", "float32", ("batch", "objects", 4))
MASKS = TargetSpec("masks", "float32", ("batch", "objects", 48, 48))
MAP = TargetSpec("target", "int64", ("batch", 48, 48), classes=4, ignore_index=-100)
SHOWN = TensorSpec("pixel_mask", "int64", ("batch", "height", "width"))


def specs(*given: TensorSpec) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in given}


def loaded(data: Any, *given: TensorSpec, seed: tuple[int, ...] = (), known: DataNames = NO_NAMES) -> dict[str, Any]:
    (batch,) = data.load(iter([range(len(data))]), specs(*given), seed, known)
    return dict(batch)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_shapes.coco(tmp_path_factory.mktemp("coco"), 6, (96, 48), most=4)


def corners(cxcywh: np.ndarray) -> np.ndarray:
    return np.concatenate([cxcywh[..., :2] - cxcywh[..., 2:] / 2, cxcywh[..., :2] + cxcywh[..., 2:] / 2], -1)


def stands_out(image: np.ndarray, box: np.ndarray) -> bool:
    """Is what lies in the middle of a box (in shares) drawn, and the middle of its margin not?"""
    x, y = ((box[:2] + box[2:]) / 2 * 48).astype(int)
    return bool(image[:, y, x].max() > 100 / 255)


# --- COCO ----------------------------------------------------------------------------------------------------


def test_a_step_gets_pictures_labels_and_boxes(shapes: Path) -> None:
    data = gg.vision.coco(shapes)
    table = json.loads(shapes.read_text())
    assert (len(data), data.classes) == (6, list(drawn_shapes.CLASSES))
    batch = loaded(data, IMAGE, LABELS, BOXES)
    n = batch["target"].shape[1]
    assert {name: (a.dtype, a.shape) for name, a in batch.items()} == {
        "image": (np.float32, (6, 3, 48, 48)),
        "target": (np.int64, (6, n)),
        "target_boxes": (np.float32, (6, n, 4)),
    }
    for i, (labels, boxes) in enumerate(zip(batch["target"], batch["target_boxes"], strict=True)):
        mine = [a for a in table["annotations"] if a["image_id"] == 100 + i]
        np.testing.assert_array_equal(labels, [a["category_id"] // 10 - 1 for a in mine] + [-1] * (n - len(mine)))
        for annotation, box in zip(mine, corners(boxes), strict=False):
            x, y, w, h = annotation["bbox"]
            np.testing.assert_allclose(box, [x / 96, y / 48, (x + w) / 96, (y + h) / 48], atol=1e-6)
            assert stands_out(batch["image"][i], box)
        assert not boxes[len(mine) :].any()
    names = data.names_for(specs(IMAGE, LABELS, BOXES), NO_NAMES)
    assert names.classes == {"target": drawn_shapes.CLASSES}


def test_a_letterbox_keeps_the_shape(shapes: Path) -> None:
    plain, boxed = (
        loaded(gg.vision.coco(shapes, letterbox=flag), IMAGE, LABELS, BOXES, SHOWN) for flag in (False, True)
    )
    (near, far) = corners(plain["target_boxes"]), corners(boxed["target_boxes"])
    there = plain["target"] >= 0
    np.testing.assert_allclose(far[there], near[there] * [1, 0.5, 1, 0.5] + [0, 0.25, 0, 0.25], atol=1e-6)
    np.testing.assert_allclose(boxed["image"][:, :, :12], 114 / 255)
    np.testing.assert_array_equal(boxed["pixel_mask"].sum((1, 2)), 24 * 48)
    assert plain["pixel_mask"].all()


@pytest.mark.parametrize(
    "options",
    [
        {"augment": "flip"},
        {"augment": "zoom([0.5, 2])"},
        {"augment": ["flip", gg.augment.zoom((0.5, 2)), "color_jitter(0.1)"], "letterbox": True},
    ],
)
def test_boxes_and_masks_move_with_their_picture(shapes: Path, options: dict[str, Any]) -> None:
    data, plain = gg.vision.coco(shapes, **options), loaded(gg.vision.coco(shapes), IMAGE)["image"]
    moved = 0
    for epoch in range(6):
        batch = loaded(data, IMAGE, LABELS, BOXES, MASKS, seed=(3, epoch))
        moved += int((batch["image"] != plain).any((1, 2, 3)).sum())
        for image, labels, boxes, masks in zip(
            *(batch[n] for n in ("image", "target", "target_boxes", "masks")), strict=True
        ):
            for box, mask in zip(corners(boxes)[labels >= 0], masks[labels >= 0], strict=True):
                assert stands_out(image, box) and box.min() >= 0 and box.max() <= 1
                rows, columns = np.nonzero(mask)
                seen = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) / 48
                np.testing.assert_allclose(seen, box, atol=3 / 48)  # a sharp corner has no pixel of its own
        again = loaded(data, IMAGE, LABELS, BOXES, seed=(3, epoch))
        np.testing.assert_array_equal(again["image"], batch["image"])
    assert moved >= 12  # of 36


def test_colours_may_change_and_shapes_may_not(shapes: Path) -> None:
    dark = gg.vision.coco(shapes, augment=lambda image, rng: image // 2)
    plain = loaded(gg.vision.coco(shapes, size=(48, 96)), IMAGE.__class__("image", "uint8", ("b", 3, 48, 96)))
    halved = loaded(dark, TensorSpec("image", "uint8", ("b", 3, 48, 96)), seed=(1, 2))
    np.testing.assert_array_equal(halved["image"], plain["image"] // 2)
    with pytest.raises(DataError, match="augment returned an image of 96 × 24 pixels for one of 96 × 48"):
        loaded(gg.vision.coco(shapes, augment=lambda image, rng: image[::2]), IMAGE, seed=(1, 2))
    for name in ("rotation(10)", "mixup", "random_erasing"):
        with pytest.raises(DataError, match=f"boxes and masks cannot follow .*{name[:5]}"):
            gg.vision.coco(shapes, augment=["flip", name])


def test_a_map_of_classes(shapes: Path) -> None:
    data = gg.vision.coco(shapes)
    batch = loaded(data, IMAGE, MAP)
    assert data.names_for(specs(IMAGE, MAP), NO_NAMES).classes == {"target": ("background", *drawn_shapes.CLASSES)}
    bright = batch["image"].max(1) > 110 / 255
    agree = (batch["target"] > 0) == bright
    assert agree.mean() > 0.97 and set(np.unique(batch["target"])) <= {0, 1, 2, 3}


def changed(shapes: Path, to: Path, change: Any) -> Path:
    shutil.copytree(shapes.parent, to, dirs_exist_ok=True)
    table = json.loads(shapes.read_text())
    change(table)
    path = to / "annotations.json"
    path.write_text(json.dumps(table))
    return path


def test_crowds_run_lengths_and_boxes_outside(shapes: Path, tmp_path: Path) -> None:
    """A packed mask of pycocotools, one of plain run lengths, a crowd, a box that sticks out, one without an area."""
    table: dict[str, Any] = {}

    def change(given: dict[str, Any]) -> None:
        table.update(given)
        first = {"image_id": 100, "category_id": 10, "iscrowd": 0}
        runs = [48 * 10, *[20, 28] * 9, 20, 96 * 48 - 480 - 9 * 48 - 20]  # columns 10 to 19, rows 0 to 19
        given["annotations"] = [
            {**first, "bbox": [10, 0, 10, 20], "segmentation": {"size": [48, 96], "counts": runs}},
            {**first, "bbox": [10, 0, 10, 20], "segmentation": {"size": [48, 96], "counts": packed(runs)}},
            {**first, "bbox": [0, 0, 96, 48], "iscrowd": 1, "segmentation": {"size": [48, 96], "counts": runs}},
            {**first, "bbox": [80, 30, 32, 32]},
            {**first, "bbox": [5, 5, 0, 10]},
        ]

    data = gg.vision.coco(changed(shapes, tmp_path, change))
    wide = TensorSpec("image", "float32", ("b", 3, 48, 96)), TargetSpec("m", "bool", ("b", "n", 48, 96))
    batch = loaded(data, wide[0], LABELS, BOXES, wide[1])
    np.testing.assert_array_equal(batch["target"], [[0, 0, 0]] + [[-1, -1, -1]] * 5)
    expected = np.zeros((48, 96), bool)
    expected[:20, 10:20] = True
    np.testing.assert_array_equal(batch["m"][0, 0], expected)
    np.testing.assert_array_equal(batch["m"][0, 1], expected)
    np.testing.assert_allclose(corners(batch["target_boxes"][0, 2]), [80 / 96, 30 / 48, 1, 1], atol=1e-6)
    assert data.truths()[0].crowd.tolist() == [False, False, True, False, False]


def test_objects_that_a_tool_marks_as_crowds_are_said(shapes: Path, tmp_path: Path, caplog: Any) -> None:
    """As CVAT writes masks that were painted."""
    count = len(json.loads(shapes.read_text())["annotations"])
    for crowds in (0, count // 2, count):

        def change(table: dict[str, Any], crowds: int = crowds) -> None:
            for i, entry in enumerate(table["annotations"]):
                entry["iscrowd"] = int(i < crowds)

        path, said = changed(shapes, tmp_path, change), f"marks {crowds} of {count} objects as iscrowd"
        if crowds == count:
            with pytest.raises(
                DataError, match=f"{said}, which are excluded from training; if each is a single object"
            ):
                gg.vision.coco(path)
            continue
        caplog.clear()
        gg.vision.coco(path)
        assert (said in caplog.text) == (crowds > 0)


def packed(runs: list[int]) -> str:
    """As pycocotools packs run lengths."""
    text = ""
    for i, run in enumerate(runs):
        value, more = run - (runs[i - 2] if i > 2 else 0), True
        while more:
            bits = value & 31
            value >>= 5
            more = value != (-1 if bits & 16 else 0)
            text += chr(48 + bits + (32 if more else 0))
    return text


def test_classes_are_matched_by_name(shapes: Path, tmp_path: Path) -> None:
    known = DataNames(classes={"target": ["triangle", "other", "square", "circle"]})
    four = TargetSpec("target", "int64", ("batch", "objects"), classes=4, ignore_index=-1)
    data = gg.vision.coco(shapes)
    plain, matched = loaded(data, IMAGE, LABELS)["target"], loaded(data, IMAGE, four, known=known)["target"]
    np.testing.assert_array_equal(matched, np.array([3, 2, 0, -1])[plain])
    with pytest.raises(UnmatchedError, match="has the new class 'square'"):
        data.names_for(specs(IMAGE, LABELS), DataNames(classes={"target": ["circle", "triangle", "star"]}))
    two = TargetSpec("target", "int64", ("batch", "objects"), classes=2, ignore_index=-1)
    with pytest.raises(DataError, match=r"has 3 classes .* but the model's labels range from 0 to 1"):
        data.names_for(specs(IMAGE, two), NO_NAMES)


def _no_category(table: dict[str, Any]) -> None:
    table["annotations"][0]["category_id"] = 7


def _no_image(table: dict[str, Any]) -> None:
    table["annotations"][0]["image_id"] = 7


def _outside(table: dict[str, Any]) -> None:
    table["images"][0]["file_name"] = "../../secret.png"


def _bad_box(table: dict[str, Any]) -> None:
    table["annotations"][0]["bbox"] = [1, 2, 3]


def _other_size(table: dict[str, Any]) -> None:
    table["images"][0]["width"] = 95


def _bad_runs(table: dict[str, Any]) -> None:
    table["annotations"][0]["segmentation"] = {"size": [48, 96], "counts": [1, 2]}


def _huge_runs(table: dict[str, Any]) -> None:
    table["annotations"][0]["segmentation"] = {"size": [10**9, 10**9], "counts": "0" * 9}


def _twice(table: dict[str, Any]) -> None:
    table["categories"][1]["name"] = "circle"


def _no_list(table: dict[str, Any]) -> None:
    table["images"] = {"a": 1}


REFUSED = {
    "category": (_no_category, r"refers to the category 7, which does not exist"),
    "image": (_no_image, r"refers to the image 7, which does not exist"),
    "outside": (_outside, r"leads out of the folder"),
    "box": (_bad_box, r"is not a list of left, top, width and height"),
    "size": (_other_size, r"has 96 × 48 pixels, but its annotations state 95 × 48"),
    "runs": (_bad_runs, r"have 3 pixels, but its size is 4608"),
    "many runs": (_huge_runs, r"has the size 1000000000 × 1000000000"),
    "name": (_twice, r"two classes of the same name"),
    "list": (_no_list, r"images is a table, not a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_annotations_that_cannot_be_meant(shapes: Path, tmp_path: Path, name: str) -> None:
    change, says = REFUSED[name]
    with pytest.raises(DataError, match=says) as caught:
        loaded(gg.vision.coco(changed(shapes, tmp_path, change)), IMAGE, LABELS, BOXES)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_a_step(shapes: Path) -> None:
    data = gg.vision.coco(shapes)
    with pytest.raises(DataError, match="the step expects 'image float32"):
        data.names_for(specs(IMAGE, TargetSpec("y", "float32", ("batch", 7))), NO_NAMES)
    few = TargetSpec("target", "int64", ("batch", 1), classes=3, ignore_index=-1)
    with pytest.raises(DataError, match="objects, but 'target' has room for 1; drop the image"):
        loaded(data, IMAGE, few)
    with pytest.raises(DataError, match="has no JSON file"):
        gg.vision.coco(shapes.parent / "images")


def test_pictures_as_cameras_hold_them(shapes: Path, tmp_path: Path) -> None:
    """A picture that EXIF says is turned: annotations of the size that it is looked at, or of that it is stored in."""
    folder = tmp_path / "photos"
    folder.mkdir()
    array = np.zeros((40, 20, 3), np.uint8)
    array[:10] = 255  # above
    upright = Image.fromarray(array)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned to the right to look at it
    upright.transpose(Image.Transpose.ROTATE_90).save(folder / "a.png", exif=exif)
    table = {"images": [{"id": 0, "file_name": "a.png", "width": 20, "height": 40}], "annotations": [],
             "categories": [{"id": 0, "name": "top"}]}  # fmt: skip
    for width, height, bright in ((20, 40, np.s_[:, :12]), (40, 20, np.s_[:, :, :12])):
        table["images"][0].update(width=width, height=height)
        (folder / "annotations.json").write_text(json.dumps(table))
        image = loaded(gg.vision.coco(folder), IMAGE)["image"][0]
        assert image[bright].min() > 0.9 and image.mean() < 0.4


# --- YOLO ----------------------------------------------------------------------------------------------------


def yolo_of(shapes: Path, folder: Path) -> Path:
    """The same pictures in YOLO's layout, from their boxes."""
    table = json.loads(shapes.read_text())
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    for image in table["images"]:
        shutil.copy(shapes.parent / "images" / image["file_name"], folder / "images" / "train")
        lines = [
            " ".join(map(str, [a["category_id"] // 10 - 1, (x + w / 2) / 96, (y + h / 2) / 48, w / 96, h / 48]))
            for a in table["annotations"]
            if a["image_id"] == image["id"]
            for x, y, w, h in [a["bbox"]]
        ]
        (folder / "labels" / "train" / image["file_name"]).with_suffix(".txt").write_text("\n".join(lines))
    return folder


YAMLS = {
    "list": "path: .\ntrain: images/train\nnc: 3\nnames: ['circle', \"square\", triangle]  # three\n",
    "lines": "train: images/train\nnames:\n  - circle\n  - square\n  - triangle\n",
    "table": "# shapes\ntrain: ../images/train  # so far\nnames:\n  0: circle\n  1: square\n  2: triangle\n",
    "braces": "train: [images/train]\nnames: {0: circle, 1: square,\n  2: triangle}\n",
}


@pytest.mark.parametrize("layout", [*YAMLS, "classes.txt"])
def test_yolo_gives_what_coco_gives(shapes: Path, tmp_path: Path, layout: str) -> None:
    folder = yolo_of(shapes, tmp_path / "yolo")
    if layout in YAMLS:
        (folder / "data.yaml").write_text(YAMLS[layout])
    else:
        (folder / layout).write_text("circle\nsquare\ntriangle\n")
    data = gg.vision.yolo(folder)
    assert isinstance(gg.vision.read(folder), Annotated) and data.classes == list(drawn_shapes.CLASSES)
    found, expected = (loaded(d, IMAGE, LABELS, BOXES) for d in (data, gg.vision.coco(shapes)))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)


def test_polygons_of_yolo_and_pictures_without_labels(shapes: Path, tmp_path: Path) -> None:
    folder = yolo_of(shapes, tmp_path / "yolo")
    (folder / "classes.txt").write_text("circle\nsquare\ntriangle\n")
    labels = sorted((folder / "labels" / "train").iterdir())
    labels[0].write_text("2 0.1 0.2 0.5 0.2 0.3 0.8\n\n")
    labels[1].unlink()
    batch = loaded(gg.vision.yolo(folder), IMAGE, LABELS, BOXES)
    assert batch["target"][0].max() == 2 and (batch["target"][1] == -1).all()
    np.testing.assert_allclose(corners(batch["target_boxes"][0, 0]), [0.1, 0.2, 0.5, 0.8], atol=1e-6)


BAD_LINES = {
    "3 0.5 0.5 0.1 0.1": "has the class 3, but the classes are 0 to 2",
    "0 0.5 0.5 0.1": "has 4 numbers, but a class and a box are 5",
    "0 50 50 10 10": "seems to use pixels",
    "0 a b c d": "contains a value that is not a number",
    "0 nan 0.5 0.1 0.1": "seems to use pixels",
    "0.5 0.5 0.5 0.1 0.1": "has the class 0.5",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_lines_of_yolo_that_cannot_be_meant(shapes: Path, tmp_path: Path, line: str) -> None:
    folder = yolo_of(shapes, tmp_path / "yolo")
    (folder / "classes.txt").write_text("circle\nsquare\ntriangle\n")
    (folder / "labels" / "train" / "0000.txt").write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(DataError, match=f"line 2 of .*0000.txt' {BAD_LINES[line]}"):
        gg.vision.yolo(folder)


BAD_YAMLS = {
    "names: &a [b]\n": "is not a key with a string, a list or a table of strings",
    "names: [a\n": "is not a key with a string",
    "names: a\nnames: b\n": "line 2 repeats 'names'",
    "names:\n  0: a\n  2: b\n": "the class numbers in 'names' are not 0, 1, 2",
    "names: a\n  b: c\n": "line 2 is indented, but not part of a table",
    "- a\n": "line 1 is an item without a list",
    "names: !!python/object a\n": "is not a key with a string",
    "names: [a]\n": "has no split 'train'",
    "names: [a]\ntrain: nowhere\n": "refers to 'nowhere', which does not exist",
}


@pytest.mark.parametrize("text", BAD_YAMLS)
def test_yaml_that_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=BAD_YAMLS[text]) as caught:
        gg.vision.yolo(tmp_path)
    assert "\n" not in str(caught.value)


# --- masks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["P", "L"])
def test_masks_are_class_numbers(tmp_path: Path, mode: str) -> None:
    data = gg.vision.masks(drawn_shapes.masks(tmp_path, mode), classes=["none", "low", "high"])
    batch = loaded(data, IMAGE, MAP)
    assert data.names_for(specs(IMAGE, MAP), NO_NAMES).classes == {"target": ("none", "low", "high")}
    assert set(np.unique(batch["target"])) == {-100, 0, 1, 2}  # the loss's word for 255
    assert (batch["target"][:, :2] == -100).all() and (batch["target"] == -100).sum() == 3 * 2 * 48
    np.testing.assert_array_equal(batch["target"][1, 12:36, 6:18], 2)
    _, mask = data[0]
    assert set(np.unique(mask)) == {0, 1, 255}


def test_masks_as_ones_and_zeros(tmp_path: Path) -> None:
    """For sigmoids and Dice: of anything, or of each class; what does not count is of none."""
    data = gg.vision.masks(drawn_shapes.masks(tmp_path))
    numbers = loaded(data, IMAGE, MAP)["target"]
    one, three = (TargetSpec("t", "float32", ("batch", n, 48, 48)) for n in (1, 3))
    np.testing.assert_array_equal(loaded(data, IMAGE, one)["t"][:, 0], numbers > 0)
    each = loaded(data, IMAGE, three)["t"]
    assert each.dtype == np.float32
    for c in range(3):
        np.testing.assert_array_equal(each[:, c], numbers == c)
    with pytest.raises(DataError, match="a mask has the class 2, but 't' has the classes 0 to 1"):
        loaded(data, IMAGE, TargetSpec("t", "float32", ("batch", 2, 48, 48)))


def test_masks_move_with_their_picture(tmp_path: Path) -> None:
    data = gg.vision.masks(drawn_shapes.masks(tmp_path), augment=["flip", "zoom"], letterbox=True)
    for epoch in range(5):
        batch = loaded(data, IMAGE, MAP, seed=(0, epoch))
        bright = batch["image"].mean(1) > 0.75
        counts = batch["target"] >= 0
        assert ((batch["target"] > 0) == bright)[counts].mean() > 0.95
        assert (~counts).any((1, 2)).all()  # what no picture covers


def test_masks_that_are_refused(tmp_path: Path) -> None:
    data = gg.vision.masks(drawn_shapes.masks(tmp_path, "RGB"))
    with pytest.raises(DataError, match=r"is a colour image \(RGB\), but should contain class numbers"):
        loaded(data, IMAGE, MAP)
    with pytest.raises(DataError, match="has no folders 'images' and 'masks'"):
        gg.vision.masks(tmp_path / "images")
    with pytest.raises(DataError, match="the step expects 'image float32"):
        loaded(data, IMAGE, LABELS)


def test_a_path_of_no_layout(tmp_path: Path) -> None:
    assert not gg.vision.is_annotated(tmp_path)
    with pytest.raises(DataError, match="is not in the format of COCO"):
        gg.vision.read(tmp_path)
