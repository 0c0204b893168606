"""How much memory commands take beyond the imports, at a size where whole copies of the weights would be seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.large_memory import watched, write_model

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system tells peaks in /proc")

GIGABYTES = 0.1
FLOOR = 0.13  # GB: graphs, and what does not grow with the weights
PLACES = ("inside", "beside")


@pytest.fixture(scope="module", params=PLACES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    (made / "export").mkdir()
    write_model(made / "model.onnx", "backbone", GIGABYTES, request.param == "inside")
    return made


# stages of the benchmark, and how many sizes of the weights each may take: state counts, and half of one is room
# (the forward and the backward pass of adapters each read a copy of their own, and batches of other sizes the file;
# at this size, `gradgraph export` takes 0.15 to 0.20 GB from run to run)
BOUNDS = {
    "check": 0.5, "save": 0.5, "save all": 0.5, "save run": 1.5, "train": 1.5, "predict .onnx": 1.5, "cli train": 1.5,
    "cli export": 1.2, "lora": 0.5, "train lora": 4.6,
}  # fmt: skip


def test_no_whole_copy_of_the_weights(folder: Path) -> None:
    """One after the other: some stages read what others have written."""
    found = {stage: watched(stage, folder, share=False) for stage in BOUNDS}
    assert {stage: said for stage, said in found.items() if "error" in said} == {}
    peaks = {stage: said["peaks"][2] / 1e9 for stage, said in found.items()}
    assert {stage: peak for stage, peak in peaks.items() if peak >= BOUNDS[stage] * GIGABYTES + FLOOR} == {}
