"""Pictures in folders to a fine-tuned classifier, its CSV and its page: as good as by hand in torch, in fewer lines."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="compares with PyTorch")
Image: Any = pytest.importorskip("PIL.Image", reason="pictures are read by Pillow")
datasets: Any = pytest.importorskip("sklearn.datasets", reason="carries the pictures")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import picture_walk  # noqa: E402
import picture_walk_by_hand  # noqa: E402

from gradgraph.cli.app import run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
KNOWN, EPOCHS, LEAST = 5, 8, 0.93  # the backbone has seen the digits below 5; the others are learnt


def lines(script: str) -> int:
    """Those that say something, but for the module's docstring."""
    text = (HERE / script).read_text(encoding="utf-8").split('"""', 2)[2]
    return sum(bool(line.strip()) for line in text.splitlines())


def backbone(digits: Any) -> Any:
    """A network of torch that was trained on digits below 5."""
    torch.manual_seed(0)
    conv = lambda a, b: [torch.nn.Conv2d(a, b, 3, 2, 1), torch.nn.BatchNorm2d(b), torch.nn.ReLU()]  # noqa: E731
    network = torch.nn.Sequential(*conv(1, 16), *conv(16, 32), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(),
                                  torch.nn.Linear(128, KNOWN))  # fmt: skip
    seen = digits.target < KNOWN
    x = torch.nn.functional.interpolate(torch.tensor(digits.images[seen] / 16, dtype=torch.float32)[:, None], (16, 16))
    y, optimizer = torch.tensor(digits.target[seen]), torch.optim.AdamW(network.parameters(), 3e-3)
    for _ in range(5):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    return network.eval()


def written(digits: Any, folder: Path) -> None:
    """The other digits as PNG files, in a folder for each class; every third is held out."""
    for i in np.flatnonzero(digits.target >= KNOWN):
        part = "held_out" if i % 3 == 0 else "train"
        path = folder / part / f"digit {digits.target[i]}" / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[i] * 255 / 16).round().astype(np.uint8)).save(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.onnx.errors.OnnxExporterWarning")
def test_a_classifier_of_pictures_is_as_good_as_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = datasets.load_digits()
    written(digits, tmp_path)
    network = backbone(digits)
    torch.onnx.export(network, torch.zeros(2, 1, 16, 16), tmp_path / "backbone.onnx", dynamo=False,
                      input_names=["pixels"], dynamic_axes={"pixels": {0: "batch"}}, do_constant_folding=False,
                      training=torch.onnx.TrainingMode.PRESERVE)  # fmt: skip
    ours = picture_walk.accuracy(tmp_path / "backbone.onnx", tmp_path, EPOCHS)
    by_hand = picture_walk_by_hand.accuracy(network, tmp_path, EPOCHS)
    assert ours > LEAST and ours > by_hand - 0.03, (ours, by_hand)
    assert lines("picture_walk.py") < lines("picture_walk_by_hand.py") / 5
    monkeypatch.chdir(tmp_path)
    assert run(["predict", "trained.onnx", "--data", "held_out", "-o", "predicted.csv"]) == 0
    rows = list(csv.DictReader((tmp_path / "predicted.csv").read_text("utf-8").splitlines()))
    right = np.mean([row["class"] == Path(row["file"]).parent.name for row in rows])
    assert right == pytest.approx(ours, abs=1e-6) and "probability[digit 7]" in rows[0]
    page = (tmp_path / "mistakes.html").read_text("utf-8")
    assert page.count("data:image/png") >= 24 and "digit 9" in page
