"""A step folder trained with nothing but "run a model", for every runtime that Python can call.

The scripts beside this file are started as ``python in_<runtime>.py STEP_FOLDER BATCHES.npz`` by the Python that has
the runtime and need not have gradgraph. They print one line for each step, and one of evaluation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]
Run = Callable[[Tensors], Tensors]  # what is fed, by name -> the outputs, by name
Open = Callable[[Path], Run]


def losses(folder: Path, batches: Sequence[Tensors], open_model: Open, evaluate: bool = True) -> Iterator[float]:
    """The loss of each step, then that of the first batch in evaluation, all as docs/how-to/loops.md says.

    Of a step in two files too, these and train.onnx take turns; gradients that accumulate move the weights every other
    time.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    state = dict(open_model(folder / "init.onnx")({}))
    ways = [[open_model(folder / f"{name}.onnx") for name in names] for names in _ways(manifest)]
    rates = {name: np.array(value, np.float32) for name, value in manifest["hyperparameters"].items()}
    for i, batch in enumerate(batches):
        if "update" in rates:
            rates["update"] = np.array(i % 2, np.float32)
        results: dict[str, np.ndarray] = {}
        for model in ways[i % len(ways)]:
            results |= model({**batch, **rates, **state, **results})
        state = {s["name"]: np.array(results[s["next"]]) for s in manifest["state"]}
        yield _number(results, manifest)
    if evaluate:
        averages = {name: state[average] for name, average in manifest.get("averages", {}).items()}
        yield _number(open_model(folder / "eval.onnx")({**batches[0], **state, **averages}), manifest)


def _ways(manifest: Mapping[str, Any]) -> list[list[str]]:
    """The files of one step, one after the other; where there are two ways, both."""
    return [["train"], ["gradient", "apply"]] if manifest.get("separate") else [["train"]]


def _number(results: Tensors, manifest: Mapping[str, Any]) -> float:
    return float(np.asarray(results[manifest["loss_output"]]).reshape(()))


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
    """What such a script does; a third argument, ``--no-evaluation``, leaves eval.onnx alone."""
    folder, batches = map(Path, sys.argv[1:3])
    for loss in losses(folder, read_batches(batches), open_model, "--no-evaluation" not in sys.argv):
        print(json.dumps({"loss": loss}), flush=True)
