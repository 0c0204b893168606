"""A detector from files of COCO to average precision: not worse than by hand in torch, in fewer lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="compares with PyTorch")
pytest.importorskip("PIL", reason="pictures are read by Pillow")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import detector_network  # noqa: E402
import detector_walk  # noqa: E402
import detector_walk_by_hand  # noqa: E402

from tests.kit import drawn_shapes  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
EPOCHS, LEAST = 12, 0.5  # by rounding alone, from 0.58 to 0.74


def lines(script: str) -> int:
    """Those that say something, but for the module's docstring."""
    text = (HERE / script).read_text(encoding="utf-8").split('"""', 2)[2]
    return sum(bool(line.strip()) for line in text.splitlines())


def test_a_detector_is_as_good_as_by_hand(tmp_path: Path) -> None:
    for split, count, seed in (("train", 200, 1), ("val", 60, 2)):
        drawn_shapes.coco(tmp_path / split, count, seed=seed)
    model = detector_network.exported(tmp_path / "detector.onnx")
    ours = detector_walk.average_precision(model, tmp_path, EPOCHS)
    by_hand = detector_walk_by_hand.average_precision(tmp_path, EPOCHS)
    assert ours > LEAST and ours > by_hand - 0.05, (ours, by_hand)
    assert lines("detector_walk.py") < lines("detector_walk_by_hand.py") / 5
