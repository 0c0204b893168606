"""Every n-th write is made to fail, for every n: the old artefact or the new one is there, whole, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade
import kills
import numpy as np
import onnx
import pytest
import soak
from command_line import arrays, mlp

from gradgraph.cli.app import run
from gradgraph.errors import OutputError
from gradgraph.export import save_weights
from gradgraph.runtime.checkpoint import encode_checkpoint, load_checkpoint
from gradgraph.runtime.history import History
from gradgraph.runtime.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step import Step

QUIET = RuntimeOptions(threads=1)
STEP = handmade.classifier()
DATA = handmade.points(48)


class Faults:
    """Counts what is done to the disk, and lets one of these things fail: half of what was to be written is then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done, self.fails_at = 0, 0
        for owner, name in [(os, "fsync"), (os, "replace"), (os, "link"), (os, "fchmod"), (Path, "mkdir"),
                            (Path, "rename"), (Path, "replace"), (Path, "touch")]:  # fmt: skip
            patch.setattr(owner, name, self._counted(getattr(owner, name)))
        opened = Path.open

        def open_(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if "x" not in mode and "w" not in mode:
                return opened(path, mode, *arguments, **options)
            self.act()
            return _File(opened(path, mode, *arguments, **options), self)

        patch.setattr(Path, "open", open_)

    def act(self) -> None:
        self.done += 1
        if self.done == self.fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def begin(self, fails_at: int) -> None:
        self.done, self.fails_at = 0, fails_at

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.act()
            return call(*arguments, **options)

        return counted


class _File:
    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, data: Any) -> None:
        try:
            self._faults.act()
        except OSError:
            self._file.write(memoryview(data)[: len(data) // 2])
            raise
        self._file.write(data)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def trainer(steps: int) -> Trainer:
    t = Trainer(STEP, device="cpu", options=QUIET)
    for i in range(steps):
        t.step(handmade.points(8, seed=i))
    return t


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


ARTEFACTS: dict[str, Callable[[Path, Trainer], object]] = {
    "checkpoint": lambda folder, t: t.save(folder / "run.ckpt"),
    "step folder": lambda folder, t: (STEP if t.progress.steps else handmade.regression()).save(
        folder / "step", force=True
    ),
    "export": lambda folder, t: t.export(folder / "trained.onnx"),
    "weights": lambda folder, t: save_weights(STEP, folder / "weights.safetensors") if t.progress.steps else (
        folder / "weights.safetensors").write_bytes(b"old"),
    "history": lambda folder, t: History({"epoch": [1, t.progress.steps]}).to_csv(folder / "history.csv"),
}  # fmt: skip


@pytest.mark.parametrize("what", ARTEFACTS)
@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_every_write_of_an_artefact_may_fail(what: str, there: bool, tmp_path: Path, faults: Faults) -> None:
    write, first, second = ARTEFACTS[what], trainer(0), trainer(2)
    old = tmp_path / "old"
    old.mkdir()
    if there:
        write(old, first)
    before = contents(old)
    shutil.copytree(old, tmp_path / "whole")
    faults.begin(0)
    write(tmp_path / "whole", second)
    after, acts = contents(tmp_path / "whole"), faults.done
    assert acts >= 4
    unchanged = 0
    for n in range(1, acts + 1):
        folder = tmp_path / str(n)
        shutil.copytree(old, folder)
        faults.begin(n)
        with pytest.raises(OutputError, match="No space left on device"):
            write(folder, trainer(2))
        found = contents(folder)
        assert found.keys() in (before.keys(), after.keys())
        unchanged += found == before
        assert found in (before, after)
        faults.begin(0)
        write(folder, trainer(2))
        assert contents(folder).keys() == after.keys()
    assert unchanged >= acts - 1  # all but the last flush, of the folder that a complete file was renamed in


OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 16, "patience": 3, "progress": False}


def test_every_write_of_a_training_run_may_fail(tmp_path: Path, faults: Faults) -> None:
    """Training goes on; only the last save must succeed, and what is on the disk then goes on to the same bits."""
    whole = trainer(0)
    (tmp_path / "whole").mkdir()
    faults.begin(0)
    history = whole.fit(DATA, checkpoint=tmp_path / "whole" / "run.ckpt", **OPTIONS)
    image, acts = encode_checkpoint(whole.state_dict(), whole.progress), faults.done
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    failed = 0
    for n in range(1, acts + 1):
        folder = tmp_path / str(n)
        folder.mkdir()
        faults.begin(n)
        t = trainer(0)
        try:
            assert t.fit(DATA, checkpoint=folder / "run.ckpt", **OPTIONS) == history
        except OutputError as error:
            failed += 1
            assert "No space left on device" in str(error)
        faults.begin(0)
        assert encode_checkpoint(t.state_dict(), t.progress) == image
        assert {p.name for p in folder.iterdir()} <= set(names)
        rest = Trainer.resume(STEP, folder / "run.ckpt", device="cpu", options=QUIET)
        rest.fit(DATA, checkpoint=folder / "run.ckpt", **OPTIONS)
        assert rest.progress == whole.progress
        for name in names:
            if (folder / name).exists():
                load_checkpoint(folder / name, STEP.manifest.state)
    assert failed <= 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays(48))
    monkeypatch.chdir(tmp_path)
    assert run(["build", "model.onnx", "-o", "step"]) == 0
    return tmp_path


def test_every_write_of_the_command_line_may_fail(
    folder: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0 with a note, or 1 with one sentence; what is there is whole."""
    words = ["train", "step", "--data", "train.npz", "--epochs", "2", "--checkpoint", "out/run.ckpt", "--export",
             "out/trained.onnx", "--history", "out/history.csv", "--quiet"]  # fmt: skip
    out = folder / "out"
    out.mkdir()
    faults.begin(0)
    assert run(words) == 0
    acts, specs = faults.done, Step.load("step").manifest.state
    names = {p.name for p in out.iterdir()}
    for n in range(1, acts + 1, 2):
        shutil.rmtree(out)
        faults.begin(0)
        out.mkdir()
        capsys.readouterr()
        faults.begin(n)
        code = run(words)
        said = capsys.readouterr().err
        assert code in (0, 1)
        assert code == 0 or (said.startswith("error: ") and said.count("\n") == 1), said
        found = {p.name for p in out.iterdir()}
        assert found <= names
        if "run.ckpt" in found:
            load_checkpoint(out / "run.ckpt", specs)
        if "trained.onnx" in found:
            onnx.checker.check_model(onnx.load(out / "trained.onnx"))
        if "history.csv" in found:
            assert (out / "history.csv").read_text().count("\n") == 3


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    """A sample of ``python tests/kills.py``."""
    assert len(kills.survive(tmp_path, kills=5, seed=1, epochs=150)) == 5


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells the memory of a process so")
def test_memory_stays_flat(tmp_path: Path) -> None:
    """A sample of ``python tests/soak.py``."""
    assert soak.growth(soak.soak(4000, tmp_path)) < soak.ROOM
