"""How many batches are in memory at once, whatever the number of samples: as docs/how-to/data.md promises."""

from __future__ import annotations

import io
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.data.arrays.batch import BatchChecker
from gradgraph.data.record.specs import TensorSpec
from gradgraph.data.sources import sources
from gradgraph.data.sources.sources import Order, as_source

ROWS, SIZE, WIDTH = 64, 4, 50_000
BATCH = SIZE * WIDTH * 4  # bytes
SPECS = [TensorSpec("x", "float32", ("n", WIDTH))]


class Dataset:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"x": np.full(WIDTH, i, np.float32)}


def tar(path: Path) -> Path:
    with tarfile.open(path, "w") as file:
        for i in range(ROWS):
            content = io.BytesIO()
            np.save(content, np.full(WIDTH, i, np.float32))
            info = tarfile.TarInfo(f"{i:03}.npy")
            info.size = content.tell()
            content.seek(0)
            file.addfile(info, content)
    return path


KINDS: dict[str, tuple[Any, float]] = {  # the most batches that are held at once
    "shards": (tar, 5),
    "a dataset": (lambda path: Dataset(), 3),
    "arrays": (lambda path: {"x": np.zeros((ROWS, WIDTH), np.float32)}, 1),
    "large arrays": (lambda path: {"x": np.zeros((ROWS, WIDTH), np.float32)}, 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pause", [0.0, 0.01])
def test_no_more_batches_are_held_than_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, pause: float
) -> None:
    make, most = KINDS[kind]
    if kind == "large arrays":
        monkeypatch.setattr(sources, "PREFETCH_BYTES", 1)
    source = as_source(make(tmp_path / "a.tar"), BatchChecker(SPECS), Order(SIZE, shuffle=True))
    tracemalloc.start()
    try:
        seen = 0
        for batch in source.batches(0):
            seen += len(batch["x"])
            time.sleep(pause)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == ROWS and peak < (most + 0.5) * BATCH  # and what single samples take while they are read
