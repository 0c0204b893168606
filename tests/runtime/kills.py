"""Training runs that are killed (SIGKILL) at random moments and resumed: the result is the same to the bit.

    python -m tests.runtime.kills [--kills 30] [--seed 0] [--ranks 2] [--further="--shard-state"]

A run of the command line is started again and again, killed each time, most often while it trains and sometimes while
it starts, and at last left to end. Its checkpoint and its exported model must be those of a run that nobody disturbed,
and no temporary file may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.kit.command_line import arrays, mlp  # noqa: E402

PATIENCE = 120.0  # seconds for anything that does not come to its end


def command(folder: Path, name: str, epochs: int, ranks: int, further: Sequence[str]) -> list[str]:
    words = ["train", "model.onnx", "--data", "train.npz", "--epochs", str(epochs), "--checkpoint", f"{name}.ckpt",
             "--export", f"{name}.onnx", "--seed", "3", "--force"]  # fmt: skip
    if (folder / f"{name}.ckpt").exists():
        words[-1] = "--resume"
    words += ["--ranks", str(ranks)] if ranks > 1 else []
    words += further
    return [sys.executable, "-m", "gradgraph.cli", *words]


def start(folder: Path, name: str, epochs: int, ranks: int, further: Sequence[str]) -> subprocess.Popen[bytes]:
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "talk.txt").open("wb") as talk:
        return subprocess.Popen(
            command(folder, name, epochs, ranks, further), cwd=folder, env={**os.environ, **quiet}, stderr=talk
        )


def finish(folder: Path, name: str, epochs: int, ranks: int, further: Sequence[str]) -> None:
    run = start(folder, name, epochs, ranks, further)
    code = run.wait(PATIENCE)
    assert code == 0, (folder / "talk.txt").read_text()


def kill_once(folder: Path, epochs: int, rng: random.Random, ranks: int, further: Sequence[str]) -> str:
    """Start or resume the run and kill it: what it was doing."""
    run = start(folder, "run", epochs, ranks, further)
    began = time.monotonic()
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 1.5))
    else:  # while it trains: it has told of an epoch
        while b"epoch" not in (folder / "talk.txt").read_bytes():
            assert run.poll() is None and time.monotonic() - began < PATIENCE, (folder / "talk.txt").read_text()
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2))
    run.kill()
    code = run.wait(PATIENCE)
    if ranks > 1:
        time.sleep(0.5)  # the ranks end a little later than what started them
    assert code in (0, -9), (folder / "talk.txt").read_text()
    return "done" if code == 0 else "training" if b"epoch" in (folder / "talk.txt").read_bytes() else "starting"


def survive(folder: Path, kills: int, seed: int, epochs: int, ranks: int = 1, further: Sequence[str] = ()) -> list[str]:
    """Kill a run so many times in ``folder``, and compare it in the end; what it was doing each time.

    Raises:
        AssertionError: something is lost, left over or different.
    """
    rng = random.Random(seed)
    onnx.save(mlp(), folder / "model.onnx")
    np.savez(folder / "train.npz", **arrays(96))
    finish(folder, "whole", epochs, ranks, further)
    doing = [kill_once(folder, epochs, rng, ranks, further) for _ in range(kills)]
    finish(folder, "run", epochs, ranks, further)
    for suffix in (".ckpt", ".onnx"):
        found, wanted = ((folder / f"{name}{suffix}").read_bytes() for name in ("run", "whole"))
        assert found == wanted, f"run{suffix} differs"
    expected = {"model.onnx", "train.npz", "talk.txt"} | {
        f"{n}{s}" for n in ("run", "whole") for s in (".ckpt", ".onnx", ".previous.ckpt")
    }
    left = {p.name for p in folder.iterdir()} - expected
    assert not left, f"left over: {sorted(left)}"
    return doing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="6000 by default, 600 of several ranks: one takes ten times as long")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--further", default="", help="options of the run, in one word")
    given = parser.parse_args()
    epochs = given.epochs or (6000 if given.ranks == 1 else 600)
    with tempfile.TemporaryDirectory() as folder:
        doing = survive(Path(folder), given.kills, given.seed, epochs, given.ranks, given.further.split())
    counts = ", ".join(f"{doing.count(what)} {what}" for what in sorted(set(doing)))
    print(f"{given.kills} kills with seed {given.seed} ({counts}): the same to the bit, nothing left over")


if __name__ == "__main__":
    main()
