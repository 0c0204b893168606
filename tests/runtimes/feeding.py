"""A step folder trained with nothing but "run a model", for every runtime that Python can call.

The scripts beside this file are started as ``python in_<runtime>.py STEP_FOLDER BATCHES.npz`` by the Python that has
the runtime and need not have gradgraph. They print one line for each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

Tensors = Mapping[str, np.ndarray]
Run = Callable[[Tensors], Tensors]  # what is fed, by name -> the outputs, by name
Open = Callable[[Path], Run]


def losses(folder: Path, batches: Sequence[Tensors], open_model: Open) -> Iterator[float]:
    """The loss of each step: init.onnx once, then train.onnx, its next state fed back as the manifest says."""
    manifest = json.loads((folder / "manifest.json").read_text())
    state = dict(open_model(folder / "init.onnx")({}))
    train = open_model(folder / "train.onnx")
    rates = {name: np.array(value, np.float32) for name, value in manifest["hyperparameters"].items()}
    for batch in batches:
        results = train({**batch, **rates, **state})
        state = {s["name"]: np.array(results[s["next"]]) for s in manifest["state"]}
        yield float(np.asarray(results[manifest["loss_output"]]).reshape(()))


def write_batches(path: Path, batches: Sequence[Tensors]) -> None:
    np.savez(path, **{f"{i}/{name}": value for i, batch in enumerate(batches) for name, value in batch.items()})


def read_batches(path: Path) -> list[dict[str, np.ndarray]]:
    batches: dict[int, dict[str, np.ndarray]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            number, _, name = key.partition("/")
            batches.setdefault(int(number), {})[name] = arrays[key]
    return [batches[i] for i in sorted(batches)]


def main(open_model: Open) -> None:
    """What such a script does."""
    folder, batches = map(Path, sys.argv[1:])
    for loss in losses(folder, read_batches(batches), open_model):
        print(json.dumps({"loss": loss}), flush=True)
