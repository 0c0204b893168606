"""Every n-th write is made to fail, for every n: the old artefact or the new one is there, whole, and nothing else."""

from __future__ import annotations

import ast
import contextlib
import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_native import library
from gradgraph.cli.app import run
from gradgraph.cli.digits import save_arrays
from gradgraph.errors import OutputError
from gradgraph.export import save_weights
from gradgraph.files import models as files
from gradgraph.files.models import save_model
from gradgraph.runtime.execution.session import Placement, RuntimeOptions
from gradgraph.runtime.execution.tuner import Tuner
from gradgraph.runtime.loop import reporter as progress
from gradgraph.runtime.saved.checkpoint import CheckpointKeeper, checkpoint_pieces, load_checkpoint
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step
from tests.kit import handmade
from tests.kit.command_line import arrays, mlp
from tests.runtime import kills, soak

pytestmark = pytest.mark.any_kernels

QUIET = RuntimeOptions(threads=1)
STEP = handmade.classifier()
DATA = handmade.points(48)


class Faults:
    """Counts what is done to the disk, and lets one of these things fail: half of what was to be written is then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done, self.fails_at, self.code = 0, 0, errno.ENOSPC
        for name in ("fsync", "rename", "replace", "link", "chmod", "fchmod", "mkdir", "write", "ftruncate"):
            patch.setattr(os, name, self._counted(getattr(os, name)))
        opened, opened_low = Path.open, os.open

        def open_low(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                self.act()
            return opened_low(path, flags, *arguments, **options)

        def open_(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if "x" not in mode and "w" not in mode:
                return opened(path, mode, *arguments, **options)
            self.act()
            return _File(opened(path, mode, *arguments, **options), self)

        patch.setattr(Path, "open", open_)
        patch.setattr(os, "open", open_low)

    def act(self) -> None:
        self.done += 1
        if self.done == self.fails_at:
            raise OSError(self.code, self.said)

    @property
    def said(self) -> str:
        return os.strerror(self.code)

    def begin(self, fails_at: int, code: int = errno.ENOSPC) -> None:
        self.done, self.fails_at, self.code = 0, fails_at, code

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


def wide(value: float) -> onnx.ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[1, 400] x) => (float y) { h = Mul (x, w)  y = ReduceSum <keepdims = 0> (h) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((1, 400), value, np.float32), "w"))
    return model


def keep_choice(path: Path, value: int) -> None:
    tuner = Tuner(ORT_CPU, Placement(("CPUExecutionProvider",)), cache=path)
    tuner.chosen = {"Op": str(value)}
    tuner._store()


def build_kernels(path: Path, value: int) -> None:
    """The compiler is a program of its own: here it has written its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_compiler", lambda given: "c++")
        patch.setattr(library, "_compile", lambda command: Path(command[-1]).write_bytes(bytes([value]) * 10))
        patch.setattr(library, "_check_that_it_runs", lambda made: None)
        library.build(library=library.Library(path))


ARTEFACTS: dict[str, Callable[[Path, Trainer], object]] = {
    "checkpoint": lambda folder, t: t.save(folder / "run.ckpt"),
    "step folder": lambda folder, t: (STEP if t.progress.steps else handmade.regression()).save(
        folder / "step", force=True
    ),
    "export": lambda folder, t: t.export(folder / "trained.onnx"),
    "weights": lambda folder, t: save_weights(STEP, folder / "weights.safetensors") if t.progress.steps else (
        folder / "weights.safetensors").write_bytes(b"old"),
    "history": lambda folder, t: History({"epoch": [1, t.progress.steps]}).to_csv(folder / "history.csv"),
    "model with data beside it": lambda folder, t: save_model(wide(t.progress.steps), folder / "wide.onnx"),
    "gradients": lambda folder, t: gg.value_and_grad(wide(t.progress.steps), output="y", out=folder / "grad.onnx"),
    "arrays of the demo": lambda folder, t: save_arrays(folder / "train.npz", {"x": np.arange(t.progress.steps)}),
    "kernels": lambda folder, t: build_kernels(folder / "kernels.so", t.progress.steps),
    "choices of the tuner": lambda folder, t: keep_choice(folder / "tuned.json", t.progress.steps),
}  # fmt: skip
GOES_ON = {"choices of the tuner"}  # with a warning: it costs another measurement


@pytest.mark.sweep(0.24)
@pytest.mark.parametrize("what", ARTEFACTS)
@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_every_write_of_an_artefact_may_fail(
    what: str, there: bool, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(files, "INLINE_LIMIT", 1000)
    write, first, second = ARTEFACTS[what], trainer(0), trainer(2)
    old = tmp_path / "old"
    old.mkdir()
    if there:
        write(old, first)
    before = contents(old)
    for name in ("once", "whole"):  # libraries write caches of theirs the first time
        shutil.copytree(old, tmp_path / name)
        faults.begin(0)
        write(tmp_path / name, second)
    after, acts = contents(tmp_path / "whole"), faults.done
    assert acts >= 4
    unchanged = 0
    for n in range(1, acts + 1):
        folder = tmp_path / str(n)
        shutil.copytree(old, folder)
        faults.begin(n, (errno.ENOSPC, errno.EIO)[(n + there) % 2])
        with contextlib.nullcontext() if what in GOES_ON else pytest.raises(OutputError, match=faults.said):
            write(folder, second)
        if what in GOES_ON:
            assert faults.said in caplog.text
            caplog.clear()
        found = contents(folder)
        unchanged += found == before
        # with only the last flush missing, data that the old file read may be there, too
        assert found in (before, after, {**before, **after})
        faults.begin(0)
        write(folder, second)
        assert len(contents(folder)) == len(after)
    assert unchanged >= acts - 1  # all but the last flush, of the folder that a complete file was renamed in


WRITERS = {
    "gradgraph/files/atomic.py": {"open", "replace", "link", "rename", "touch", "mkdir", "chmod", "fchmod"},
    "gradgraph/runtime/saved/lock.py": {"open", "write"},
    "gradgraph/runtime/loop/logs.py": {"open"},  # lines at the end of a log; training goes on without them
    "gradgraph/machine/caches.py": {"mkdir", "chmod"},
    "gradgraph/runtime/saved/checkpoint.py": {"mkdir"},
    "gradgraph/backends/ort_native/library.py": {"TemporaryDirectory", "chmod", "replace"},
    "cli/demo.py": {"mkdir"},
    "cli/surgery.py": {"mkdir"},
    "gradgraph/runs/run_folder.py": {"mkdir", "open"},  # a line at the end of the commands of a run
    "gradgraph/surgery/adapter_files.py": {"mkdir"},
    "export/frozen_layers.py": {"mkdir"},
    "gradgraph/runtime/features/kept_rows.py": {"mkdir", "open"},  # files count once their digest is written
    "gradgraph/chat/run_place.py": {"mkdir"},
    # a folder for a moment: what is written there is nobody's
    "gradgraph/machine/processes.py": {"TemporaryDirectory", "chmod"},
    "gradgraph/reduction/reduced.py": {"TemporaryDirectory"},
    "gradgraph/reduction/observer.py": {"TemporaryDirectory", "write_bytes"},
    "gradgraph/runtime/execution/opener.py": {"TemporaryDirectory"},
    "gradgraph/runtime/execution/profiler.py": {"TemporaryDirectory"},
    "gradgraph/surgery/ort_adapters.py": {"TemporaryDirectory"},
    "gradgraph/surgery/verification.py": {"TemporaryDirectory"},
    "gradgraph/files/spilled.py": {"mkdtemp", "open"},
    "gradgraph/chat/answers.py": {"TemporaryDirectory"},
    "gradgraph/runs/training.py": {"TemporaryDirectory"},
    "export/ort_format.py": {
        "TemporaryDirectory",
        "mkdir",
        "open",
        "write_bytes",
    },  # what onnxruntime's converter reads
    "gradgraph/files/stdin.py": {"TemporaryDirectory", "open"},  # what comes from stdin
    "cli/app.py": {"open", "write_text"},  # the null device; a help page
    # a folder for a moment beside the result, whose outputs grow there; the result itself is written at once
    "cli/predictions.py": {"TemporaryDirectory", "open"},
    "cli/__init__.py": {"write"},  # stderr
    "cli/explain.py": {"open"},  # parts of an archive in memory
}
"""Who touches the disk, and how. All else is written by ``gradgraph.files.atomic``, whose every write fails above."""


@pytest.mark.sweep(0)
def test_nobody_else_writes() -> None:
    root = Path(__file__).resolve().parents[2]
    found: dict[str, set[str]] = {}
    for path in (p for room in ("gradgraph", "cli", "export", "frontend") for p in (root / room).rglob("*.py")):
        calls = {name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if (name := written_by(node))}
        if calls:
            found[path.resolve().relative_to(root).as_posix()] = calls
    assert found == WRITERS


CALLS = {"write_bytes", "write_text", "rename", "link", "touch", "mkdir", "makedirs", "chmod", "fchmod", "symlink_to",
         "hardlink_to", "TemporaryDirectory", "NamedTemporaryFile", "mkstemp", "mkdtemp", "tofile"}  # fmt: skip
MODES = {"w", "wb", "x", "xb", "a", "ab", "r+", "rb+", "r+b"}


def written_by(node: ast.AST) -> str:
    """The name of the call, if it writes to the disk."""
    if not isinstance(node, ast.Call):
        return ""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    owner = getattr(getattr(node.func, "value", None), "id", "")
    if name in CALLS:
        renames_a_weight = name == "rename" and isinstance(node.func, ast.Name)
        return "" if owner == "self" or renames_a_weight else name
    if owner == "os":
        writes = name in ("write", "replace") or (name == "open" and "O_RDONLY" not in ast.dump(node))
    elif name == "open":
        writes = any(isinstance(a, ast.Constant) and a.value in MODES for a in node.args)
    else:  # text is replaced by text, and the fields of a dataclass by name
        writes = (
            name == "replace" and isinstance(node.func, ast.Attribute) and (len(node.args), node.keywords) == (1, [])
        )
    return name if writes else ""


OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 16, "patience": 3, "progress": False}


@pytest.mark.sweep(0)
def test_every_write_of_a_training_run_may_fail(tmp_path: Path, faults: Faults) -> None:
    """Training goes on; only the last save must succeed, and what is on the disk then goes on to the same bits."""
    whole = trainer(0)
    (tmp_path / "whole").mkdir()
    faults.begin(0)
    history = whole.fit(DATA, checkpoint=tmp_path / "whole" / "run.ckpt", **OPTIONS)
    image, acts = b"".join(checkpoint_pieces(whole.state_dict(), whole.progress)), faults.done
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    failed = 0
    for n in range(1, acts + 1):
        folder = tmp_path / str(n)
        folder.mkdir()
        faults.begin(n, (errno.ENOSPC, errno.EIO)[n % 2])
        t = trainer(0)
        try:
            assert t.fit(DATA, checkpoint=folder / "run.ckpt", **OPTIONS) == history
        except OutputError as error:
            failed += 1
            assert faults.said in str(error)
        faults.begin(0)
        assert b"".join(checkpoint_pieces(t.state_dict(), t.progress)) == image
        assert {p.name for p in folder.iterdir()} <= set(names)
        rest = Trainer.resume(STEP, folder / "run.ckpt", device="cpu", options=QUIET)
        rest.fit(DATA, checkpoint=folder / "run.ckpt", **OPTIONS)
        assert rest.progress == whole.progress
        for name in names:
            if (folder / name).exists():
                load_checkpoint(folder / name, STEP.manifest.state)
    assert failed <= 8


@pytest.mark.sweep(0)
def test_every_write_of_a_keeper_may_fail(tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on; that the last epoch's is missing is said at the end; the best one is the best that was kept."""
    faults.begin(0)
    history = trainer(0).fit(DATA, callbacks=[CheckpointKeeper(tmp_path / "kept", keep=2)], **OPTIONS)
    acts, names = faults.done, {p.name for p in (tmp_path / "kept").iterdir()}
    ended = 0
    for n in range(1, acts + 1):
        caplog.clear()
        t, keeper = trainer(0), CheckpointKeeper(tmp_path / str(n), keep=2)
        faults.begin(n, (errno.ENOSPC, errno.EIO)[n % 2])
        try:
            assert t.fit(DATA, callbacks=[keeper], **OPTIONS) == history
        except OutputError as error:
            ended += 1
            assert faults.said in str(error)
        assert t.history == history
        faults.begin(0)
        kept = {p.name: load_checkpoint(p, STEP.manifest.state)[1] for p in keeper.folder.glob("*")}
        assert kept.keys() <= names and ("training continues" in caplog.text or kept.keys() == names)
        if "best.ckpt" in kept:
            assert kept["best.ckpt"].history["loss"][-1] in (keeper.best_value, min(history["loss"]))
    assert 0 < ended < acts / 2 + 1


class Full(io.StringIO):
    """A log on a disk that is full, or a terminal that is gone."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("is_terminal", [False, True], ids=["a log", "a terminal"])
def test_training_goes_on_when_nobody_can_be_told(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", Full(is_terminal))
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.0)
    monkeypatch.setattr(progress, "REFRESH", 0.0)
    t = trainer(0)
    t.fit(DATA, epochs=2, batch_size=16, patience=1)
    assert t.progress.epoch == 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays(48))
    monkeypatch.chdir(tmp_path)
    assert run(["build", "model.onnx", "-o", "step"]) == 0
    return tmp_path


@pytest.mark.sweep(0)
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


@pytest.mark.sweep(0.68)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize(("stream", "json"), [("stdout", []), ("stdout", ["--json"]), ("stderr", [])])
def test_what_is_printed_may_fail(folder: Path, stream: str, json: list[str]) -> None:
    """A log on a full disk does not stop training; an answer that cannot be given is one sentence, and exit code 1."""
    words = ["train", "step", "--data", "train.npz", "--epochs", "1", "--export", "trained.onnx", *json]
    with Path("/dev/full").open("w") as full:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        ran = subprocess.run([sys.executable, "-m", "gradgraph.cli", *words], text=True, **streams)
    onnx.checker.check_model(onnx.load("trained.onnx"))
    if stream == "stderr":
        assert ran.returncode == 0 and "loss" in ran.stdout
    else:
        assert ran.returncode == 1 and "\nerror: No space left on device" in ran.stderr
        assert "Traceback" not in ran.stderr and "Exception" not in ran.stderr


@pytest.mark.sweep(0)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    """A sample of ``python -m tests.runtime.kills``."""
    assert len(kills.survive(tmp_path, kills=5, seed=1, epochs=150)) == 5


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells the memory of a process so")
def test_memory_stays_flat(tmp_path: Path) -> None:
    """A sample of ``python -m tests.runtime.soak``."""
    assert soak.growth(soak.soak(4000, tmp_path)) < soak.ROOM
