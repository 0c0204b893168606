"""Detectors from the shell: trained on files of COCO, evaluated with average precision, and their outputs written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from gradgraph.frontend import export, manual_seed, nn
from gradgraph.frontend import functional as F
from tests.kit import drawn_shapes
from tests.kit.command_line import Cli

pytest.importorskip("PIL", reason="pictures are read by Pillow")


class Points(nn.Module):
    """FCOS of three classes, on a map of 6 × 6."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 8, 8)

    def forward(self, image: Any) -> Any:
        logits, sides, centre = F.split(self.conv(image).flatten(2).transpose(1, 2), [3, 4, 1], 2)
        return logits - 2.0, F.exp(sides), centre


@pytest.fixture
def files(tmp_path: Path) -> Path:
    drawn_shapes.coco(tmp_path / "shapes", 12, (48, 48), most=2)
    manual_seed(0)
    model = export(Points(), {"image": ("batch", 3, 48, 48)}, outputs=["logits", "distances", "centerness"])
    onnx.save(model, tmp_path / "detector.onnx")
    return tmp_path


LOSS = ("--loss", "fcos(image_size=[48,48],strides=[8])")


def test_a_detector_trains_is_evaluated_and_predicts(files: Path, cli: Cli) -> None:
    model, data, run = (str(files / name) for name in ("detector.onnx", "shapes", "run"))
    trained = cli("train", model, "--data", data, "--validation", f"{data}/annotations.json", "--augment", "flip",
                  "--augment", "zoom", "--image", "letterbox=true", *LOSS, "--epochs", "2", "--run", run)  # fmt: skip
    assert trained.code == 0, trained.err
    evaluated = cli("evaluate", run, "--data", data, "--json")
    found = json.loads(evaluated.out)
    assert set(found["scores"]) == {"loss", "ap", "ap50", "ap75", "ap_per_class"}
    assert found["class_names"] == list(drawn_shapes.CLASSES)
    predicted = cli("predict", f"{run}/trained.onnx", "--data", data, "-o", str(files / "p.npz"))
    assert predicted.code == 0, predicted.err
    with np.load(files / "p.npz") as arrays:
        assert arrays["logits"].shape == (12, 36, 3)


WRONG = {
    "option": (("--image", "shorter=7", *LOSS), "--image has no argument 'shorter'"),
    "augmentation": (("--augment", "mixup", *LOSS), "boxes and masks cannot follow"),
    "size": (("--loss", "fcos"), "--loss 'fcos(image_size=[480, 640])'"),
    "other cells": (("--loss", "fcos(image_size=[64,64],strides=[8])"), "the options of fcos result in 64 points"),
    "other targets": (("--loss", "mse"), "provides images, labels [N, objects], boxes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_sentence(files: Path, cli: Cli, name: str) -> None:
    words, says = WRONG[name]
    ran = cli("train", str(files / "detector.onnx"), "--data", str(files / "shapes"), *words)
    assert ran.code == 1 and says in ran.err and "Traceback" not in ran.err
