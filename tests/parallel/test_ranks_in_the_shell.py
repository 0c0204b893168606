"""``gradgraph train --ranks``: the same files as one process, one voice, resumed with any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from tests.kit.command_line import arrays, mlp
from tests.parallel.mpi_jobs import MPIEXEC, needs_mpi, quiet
from tests.runtime import kills

pytestmark = needs_mpi

COMMAND = [sys.executable, "-c", "from gradgraph.cli import main; main()", "train"]
PLAIN = ["model.onnx", "--data", "train.npz", "--seed", "3"]


EPOCHS = "250"  # of a run that a signal finds on its way


def filled(place: Path) -> Path:
    onnx.save(mlp(), place / "model.onnx")
    np.savez(place / "train.npz", **arrays(90))
    np.savez(place / "held_out.npz", **arrays(31, seed=2))
    return place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path)


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=folder, env=quiet(100), capture_output=True, text=True, timeout=120)


def weights(path: Path) -> dict[str, np.ndarray]:
    return load_file(path)


def test_a_run_in_two_processes_goes_on_in_three_and_is_that_of_one(folder: Path) -> None:
    words = [*PLAIN, "--validation", "held_out.npz", "--metric", "accuracy"]
    one = train(folder, *words, "--epochs", "3", "--checkpoint", "one.ckpt")
    assert one.returncode == 0, one.stderr
    two = train(folder, *words, "--epochs", "2", "--run", "run", "--ranks", "2", "--json")
    assert two.returncode == 0, two.stderr
    assert json.loads(two.stdout)["epochs"] == 2 and two.stderr.count("epoch 2/2") == 1
    assert {"README.md", "recipe.toml", "run.ckpt", "history.csv", "log.jsonl", "trained.onnx", "step"} <= {
        file.name for file in (folder / "run").iterdir()
    }
    more = train(folder, "run", "--resume", "--epochs", "3", "--ranks", "3")
    assert more.returncode == 0, more.stderr
    expected, found = weights(folder / "one.ckpt"), weights(folder / "run" / "run.ckpt")
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    again = train(folder, "run", "--resume", "--epochs", "4", "--ranks", "1")
    assert again.returncode == 0, again.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The weights of a run to its end."""
    place = filled(tmp_path_factory.mktemp("undisturbed"))
    whole = train(place, *PLAIN, "--ranks", "2", "--epochs", EPOCHS, "--checkpoint", "whole.ckpt")
    assert whole.returncode == 0, whole.stderr
    return weights(place / "whole.ckpt")


@pytest.mark.sweep(0)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_once_and_the_run_that_goes_on_is_the_undisturbed_one(
    folder: Path, number: int, undisturbed: dict[str, np.ndarray]
) -> None:
    words = [*PLAIN, "--ranks", "2", "--epochs", EPOCHS, "--checkpoint", "run.ckpt"]
    pipe, command = subprocess.PIPE, [*COMMAND, *words]
    process = subprocess.Popen(command, cwd=folder, env=quiet(100), stdout=pipe, stderr=pipe, text=True,
                               start_new_session=True)  # fmt: skip
    while not (folder / "run.ckpt").exists():
        time.sleep(0.01)
        assert process.poll() is None
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("it was done before the signal came")
    assert process.returncode in (130, 143), err
    assert err.count("and saved to run.ckpt") == 1 and err.count("resume with: gradgraph") == 1, err
    assert "BAD TERMINATION" not in out + err
    rest = train(folder, *words, "--resume")
    assert rest.returncode == 0, rest.stderr
    found = weights(folder / "run.ckpt")
    assert all(np.array_equal(found[name], value) for name, value in undisturbed.items())


def test_a_run_whose_process_is_killed_ends_and_says_so(folder: Path) -> None:
    process = subprocess.Popen([*COMMAND, *PLAIN, "--ranks", "2", "--epochs", "9000", "--checkpoint", "run.ckpt"],
                               cwd=folder, env=quiet(100), stderr=subprocess.PIPE, text=True)  # fmt: skip
    while not (folder / "run.ckpt").exists():
        time.sleep(0.01)
        assert process.poll() is None
    ranks = [place for place in Path("/proc").iterdir() if place.name.isdecimal() and _is_rank(place, folder)]
    os.kill(max(int(place.name) for place in ranks), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count("error:") == 1 and "was killed from outside" in err, err


def _is_rank(process: Path, folder: Path) -> bool:
    try:
        is_one = b"PMI_RANK=" in (process / "environ").read_bytes()
        return is_one and (process / "cwd").resolve() == folder.resolve()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--data", "few.npz", "--ranks", "4"], "fewer than the 4 ranks", 1),
        (["--batch-size", "3", "--ranks", "4"], "fewer --ranks", 1),
        (["--batch-size", "auto", "--ranks", "2"], "give a number", 1),
        (["--ranks", "2", "--find-lr"], "--find-lr runs in one process", 2),
        (["--ranks", "2", "--data", "-"], "stdin can be read by one process", 2),
        (["--ranks", "2", "--data", "nothing.npz"], "nothing.npz", 1),
        (["--ranks", "2", "--checkpoint", "other.ckpt", "--resume"], "other.ckpt", 1),
        (["--ranks", "2", "--device", "cuda"], "", 1),
    ],
)
def test_what_cannot_be_is_one_sentence_from_one_rank(folder: Path, words: list[str], said: str, code: int) -> None:
    np.savez(folder / "few.npz", **arrays(3))
    if "other.ckpt" in words:
        assert (
            train(folder, *PLAIN, "--optimizer", "sgd", "--checkpoint", "other.ckpt", "--epochs", "1").returncode == 0
        )
    ran = train(folder, *PLAIN, *words)
    assert ran.returncode == code and ran.stderr.count("error:") == 1 and said in ran.stderr, ran.stderr


def test_under_mpiexec_one_rank_speaks(folder: Path) -> None:
    assert MPIEXEC is not None
    ran = subprocess.run([MPIEXEC, "-n", "2", *COMMAND, *PLAIN, "--bogus"], cwd=folder, env=quiet(60),
                         capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 2 and ran.stderr.count("error:") == 1, ran.stderr
    ran = subprocess.run([MPIEXEC, "-n", "2", *COMMAND, *PLAIN, "--epochs", "2", "--json", "--checkpoint", "run.ckpt"],
                         cwd=folder, env=quiet(60), capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 0 and json.loads(ran.stdout)["epochs"] == 2, ran.stderr


@pytest.mark.sweep(0)
@pytest.mark.parametrize("further", [[], ["--shard-state"], ["--compress", "top_k(ratio=0.2)"]])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path, further: list[str]) -> None:
    """A sample of ``python -m tests.runtime.kills --ranks 2``."""
    assert len(kills.survive(tmp_path, kills=2, seed=1, epochs=60, ranks=2, further=further)) == 2
