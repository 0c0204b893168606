"""Randomly damaged files: they are read, or refused in one sentence. Nothing else may happen."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.errors import GradgraphError
from gradgraph.runtime.saved.checkpoint import load_checkpoint
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step
from tests.kit import handmade

ROUNDS = 120
STEP = handmade.classifier()


def mutated(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        i = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[i] = rng.randrange(256)
            case 1:
                del data[i : i + rng.randrange(1, 20)]
            case 2:
                data[i:i] = rng.randbytes(rng.randrange(1, 8))
            case 3:
                del data[max(i, 1) :]
    return bytes(data)


def step_folder(path: Path, name: str) -> tuple[Path, Callable[[], object]]:
    STEP.save(path / "s")
    return path / "s" / name, lambda: Step.load(path / "s")


def checkpoint(path: Path, _: str) -> tuple[Path, Callable[[], object]]:
    Trainer(STEP, device="cpu").save(path / "run.ckpt")
    return path / "run.ckpt", lambda: load_checkpoint(path / "run.ckpt", STEP.manifest.state)


def archive(path: Path, _: str) -> tuple[Path, Callable[[], object]]:
    np.savez_compressed(path / "data.npz", **handmade.points(20))
    return path / "data.npz", lambda: load_arrays(path / "data.npz")


@pytest.mark.sweep(0.38)
@pytest.mark.parametrize(
    ("make", "name"),
    [(step_folder, f) for f in ("manifest.json", "train.onnx", "eval.onnx")] + [(checkpoint, ""), (archive, "")],
)
def test_damage_is_refused_in_one_sentence(
    make: Callable[[Path, str], tuple[Path, Callable[[], object]]], name: str, tmp_path: Path
) -> None:
    file, read = make(tmp_path, name)
    whole = file.read_bytes()
    read()
    rng = random.Random(0)
    refused = 0
    for _ in range(ROUNDS):
        file.write_bytes(mutated(whole, rng))
        try:
            read()
        except GradgraphError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
    assert refused > ROUNDS // 2
