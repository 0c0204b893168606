"""What became of models of one operator in a runtime: run one after the other, by a process that may crash or hang."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.runtimes import browsing
from tests.runtimes.condensed import Outcome
from tests.runtimes.probe_cases import RANDOM, Trial
from tests.runtimes.runtimes import HERE, RUNTIMES
from tests.runtimes.waiting import lines_of

LONGEST_S = 40.0  # for one model
TOLERANCE = {"float16": 2e-2, "bfloat16": 6e-2}

Results = Mapping[str, np.ndarray[Any, Any]]


class Kept:
    """Outcomes of models that were run before, in a file that grows with each; without a file, none are kept.

    Args:
        path: its lines are JSON.
        what: the runtime and its version; outcomes of others do not count.
    """

    def __init__(self, path: Path | None, what: str) -> None:
        self._path, self._what = path, what
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = {key: (kind, words) for key, kind, words in map(json.loads, lines)}

    def known(self, trial: Trial) -> Outcome | None:
        found = self._known.get(self._key(trial))
        return None if found is None else replace(_outcome(trial, "refused", ""), kind=found[0], words=found[1])

    def add(self, trial: Trial, outcome: Outcome) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([self._key(trial), outcome.kind, outcome.words]) + "\n")

    def _key(self, trial: Trial) -> str:
        content = hashlib.sha256(f"{self._what} {trial.operator}".encode())
        content.update(trial.model.SerializeToString(deterministic=True))
        for name, array in trial.feeds.items():
            content.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        return content.hexdigest()


def outcomes_of(name: str, tried: Sequence[Trial], kept: Kept) -> list[Outcome]:
    """What became of each model."""
    known = [kept.known(trial) for trial in tried]
    missing = [trial for trial, outcome in zip(tried, known, strict=True) if outcome is None]
    found = []
    for trial, result in zip(missing, _results(name, missing), strict=True):
        found.append(_compared(trial, result))
        kept.add(trial, found[-1])
    rest = iter(found)
    return [next(rest) if outcome is None else outcome for outcome in known]


def _results(name: str, tried: Sequence[Trial]) -> Iterator[Results | str]:
    """What each model gave, or why it gave nothing."""
    if name in browsing.PROVIDERS:
        jobs = [browsing.runs(t.model.SerializeToString(), t.feeds) for t in tried]
        for result in browsing.one_by_one(jobs, name, LONGEST_S):
            yield str(result) if isinstance(result, Exception) else result
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number, trial in enumerate(tried):
            onnx.save(trial.model, folder / f"{number}.onnx")
            np.savez(folder / f"{number}.npz", **trial.feeds)
        for number, said in _run_all(name, folder, len(tried)):
            if said != "done":
                yield said
                continue
            with np.load(folder / f"{number}.out.npz") as results:
                yield dict(results)


def _run_all(name: str, folder: Path, count: int) -> Iterator[tuple[int, str]]:
    """Number, and ``done`` or why not, of each model in turn."""
    first = 0
    while first < count:
        command = [str(RUNTIMES[name].python), str(HERE / "probing.py"), name, str(folder), str(first), str(count)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        why = ""
        try:
            for line in lines_of(process, LONGEST_S):
                word, _, rest = line.partition(" ")
                if word in ("done", "refused"):
                    number, _, reason = rest.partition(" ")
                    yield int(number), "done" if word == "done" else reason.strip() or "refused"
                    first = int(number) + 1
        except TimeoutError as error:
            why = str(error)
        if first < count:
            yield first, why or f"it crashed ({process.wait()})"
            first += 1


def _outcome(trial: Trial, kind: Any, words: str) -> Outcome:
    return Outcome(trial.operator, trial.facts, trial.magnitude, trial.label, kind, words)


def _compared(trial: Trial, found: Results | str) -> Outcome:
    if isinstance(found, str):
        return _outcome(trial, "refused", " ".join(found.split()))
    for name, expected in trial.expected.items():
        if name not in found:
            return _outcome(trial, "wrong", f"gives no {name}, but {', '.join(found)}")
        if trial.operator == "Loop" and expected.size == found[name].size == 0 and expected.ndim == found[name].ndim:
            continue  # of a loop of no turn: no words of ONNX say how large a turn's result would have been
        if trial.operator not in RANDOM and not _close(expected, found[name], _tolerance(trial)):
            return _outcome(trial, "wrong", f"{name}: {_few(found[name])}, not {_few(expected)}")
    return _outcome(trial, "right", "")


def _few(array: np.ndarray[Any, Any]) -> str:
    return f"{array.shape} {np.asarray(array).ravel()[:4].tolist()}"


def _tolerance(trial: Trial) -> float:
    """By the least precise type of the node."""
    return max((TOLERANCE.get(fact.split()[-1], 1e-3) for fact in trial.facts), default=1e-3)


def _close(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any], tolerance: float = 1e-3) -> bool:
    if expected.shape != found.shape:
        return False
    if expected.dtype.kind in "iubOUS":
        return bool((expected == found).all())
    a, b = expected.astype(np.float64), found.astype(np.float64)
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=1.0))
    return bool(np.allclose(b, a, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
