"""Two runs that save to one path: the second is told who is first; whatever way the first ends, its lock ends too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradgraph.errors import OutputError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.saved.lock import SUFFIX, only_writer
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

HOLD = """
import sys
from gradgraph.runtime.saved.lock import only_writer
with only_writer(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_fit_with_the_same_checkpoint_is_refused(tmp_path: Path) -> None:
    options = {"batch_size": 16, "progress": False, "checkpoint": tmp_path / "run.ckpt"}
    first, second = (Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1)) for _ in range(2))
    refused = []

    class Disturb:
        def on_epoch(self, trainer: Trainer, row: object) -> None:
            with pytest.raises(
                OutputError, match=f"another run .process {os.getpid()} on .* saves its checkpoint to"
            ) as error:
                second.fit(handmade.points(32), **options)
            refused.append(error)

    first.fit(handmade.points(32), **options, callbacks=[Disturb()])
    assert len(refused) == 1 and second.progress.steps == 0
    assert [p.name for p in tmp_path.iterdir()] == ["run.ckpt"]
    second.fit(handmade.points(32), **options)


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_the_lock_ends_with_its_process(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run.ckpt"
    words = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match=f"process {other.pid} on "), only_writer(path):
            pass
        if how == "is killed":
            other.kill()
        other.stdin.close()
        other.wait(60)
    with only_writer(path):
        pass


def test_a_lock_left_behind_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / f".run.ckpt{SUFFIX}").write_text("process 1 on a host that was switched off, with a long story")
    path = tmp_path / "run.ckpt"
    with (
        only_writer(path),
        pytest.raises(OutputError, match=rf"process {os.getpid()} on [^,]*; wait"),
        only_writer(path),
    ):
        pass


def test_a_missing_folder_is_left_to_the_save(tmp_path: Path) -> None:
    with only_writer(tmp_path / "missing" / "run.ckpt"):
        assert list(tmp_path.iterdir()) == []


def laid(kind: str, lock: Path, victim: Path) -> None:
    {"hard link": lock.hardlink_to, "symlink": lock.symlink_to, "fifo": lambda _: os.mkfifo(lock)}[kind](victim)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["hard link", "symlink", "fifo"])
def test_what_a_stranger_lays_at_the_name_of_a_lock_is_left_alone(kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    laid(kind, tmp_path / f".run.ckpt{SUFFIX}", victim)
    with (
        pytest.raises(OutputError, match="is a link or not a regular file; remove it"),
        only_writer(tmp_path / "run.ckpt"),
    ):
        pass
    assert victim.read_text() == "precious"
