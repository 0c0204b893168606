"""How much memory commands take beyond the imports, at a size where whole copies of the weights would be seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.large_memory import watched, write_model

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system tells peaks in /proc")

GIGABYTES = 0.1
FLOOR = 0.1  # GB: graphs, and what does not grow with the weights
PLACES = ("inside", "beside")


@pytest.fixture(scope="module", params=PLACES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    (made / "export").mkdir()
    write_model(made / "model.onnx", "backbone", GIGABYTES, request.param == "inside")
    return made


# Stages of the benchmark, and how many sizes of the weights each may take: state counts, and half of one is room
# (commands import more; onnxruntime takes 1.6 to write an .ort file, in a process with imports of its own). The forward
# and the backward pass of adapters each read a copy of their own.
BOUNDS = {
    "check": 0.5, "save": 0.5, "save all": 0.5, "save run": 1.5, "resume": 1.5, "export all": 1.5, "train": 1.5,
    "predict .onnx": 1.5, "cli train": 1.7, "cli small": 0.5, "cli flat": 1.7, "cli ort": 3.0,
    "cli int8": 0.9, "cli int8 data": 0.9, "lora": 0.5, "train lora": 3.0,
}  # fmt: skip
ONCE = {"cli int8 data"}  # with weights beside the model alone: onnxruntime's quantiser takes 8 s


@pytest.mark.sweep(0)  # sixteen processes for each of two folders
def test_no_whole_copy_of_the_weights(folder: Path) -> None:
    """Of memory that no file backs, as a copy is; how many pages of files stay in memory is the system's choice, and
    differs from run to run. One stage after the other: some read what others have written.
    """
    stages = [stage for stage in BOUNDS if stage not in ONCE or folder.name.startswith("beside")]
    found = {stage: watched(stage, folder, share=False) for stage in stages}
    assert {stage: said for stage, said in found.items() if "error" in said} == {}
    peaks = {stage: said["peaks"][0] / 1e9 for stage, said in found.items()}
    assert {stage: peak for stage, peak in peaks.items() if peak >= BOUNDS[stage] * GIGABYTES + FLOOR} == {}
