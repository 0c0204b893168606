"""The progress record of a run in a checkpoint: written as JSON, and validated when it is read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.errors import shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.runtime.saved.history import History, as_history

Checked = TypeVar("Checked")

VERSION = 2  # 2 added the digest
LARGEST_COUNT = 1 << 53


class NewerRecordError(Exception):
    """Raised for a record of a newer format version."""


@dataclass
class Progress:
    """The progress of a run, from which it can be resumed.

    Attributes:
        steps: steps done since the state was initialized.
        epoch, batch: finished epochs, and batches done in the current one.
        seed: seed of the data order.
        fit_epoch, fit_step: epoch and step at which the current (or last) ``fit`` began.
        order: settings that determine the samples of each batch: rows, batch_size, shuffle, drop_last.
        sums, weight: loss and metrics summed over the samples (or labels) since the last history row, and the number of
            these samples (or labels).
        totals: for metrics computed from sums, the sums since the last history row.
        best, stale: best value of the monitored column, and the number of history rows after it.
        hyperparameters: hyperparameters of the last step, including learning rates of schedules in the graph.
        sizes: sizes of the symbolic dimensions for which the training session was created; None before the first step.
            A resumed run must use these sizes, since another session may round differently.
        history: one row per finished epoch of this fit, or per ``eval_every`` steps.
        counts: number of runs of each named step.
        weights: ``weight`` of each named step, if there are several.
        turns, place: with several named steps, the finished batches, and the steps done on the current batch.
        names: column and class names of the training data, which later data must match.
        eval_every: steps between history rows; 0 for one row per epoch.
        rowed: number of batches of the current epoch that earlier history rows cover.
        beside: arrays that differ between ranks, stored as tensors of the checkpoint.
        kernels: kernels of the last step: the name of a native library, or onnxruntime's; "" if there is no choice.
    """

    steps: int = 0
    epoch: int = 0
    batch: int = 0
    seed: int = 0
    fit_epoch: int = 0
    fit_step: int = 0
    order: dict[str, Any] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    weight: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    best: float | None = None
    stale: int = 0
    hyperparameters: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] | None = None
    history: History = field(default_factory=History)
    counts: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    place: int = 0
    names: DataNames = NO_NAMES
    eval_every: int = 0
    rowed: int = 0
    kernels: str = ""
    beside: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def epochs_of_fit(self, epochs: int, resume: bool) -> range:
        """Return the remaining epochs, counted as ``epoch``, of a fit that starts or resumes now."""
        first = self.epoch if resume else self.epoch + bool(self.batch)
        return range(first, (self.fit_epoch if resume else first) + epochs)


# omitted if empty
_IF_ANY = ("totals", "counts", "weights", "turns", "place", "names", "eval_every", "rowed", "kernels")


@dataclass(frozen=True)
class Record:
    """The record of a run in a checkpoint's metadata.

    Attributes:
        body: the text that ``digest`` covers.
        digest: digest of ``body`` and the tensors; None for version 1.
    """

    version: int
    progress: Progress
    body: str
    digest: str | None


def body_of(progress: Progress) -> str:
    """Return ``progress`` as JSON, without the arrays in ``beside``; columns and names keep their order."""
    data = {**dataclasses.asdict(dataclasses.replace(progress, beside={})), "names": progress.names.as_data()}
    del data["beside"]
    for name in _IF_ANY:
        if not data[name]:
            del data[name]
    return json.dumps({"version": VERSION, **data}, default=np.ndarray.tolist)


def to_text(body: str, digest: str) -> str:
    """Return the record as JSON: ``body`` with the digest added."""
    return json.dumps({**json_of(body, finite=False), "digest": digest})


def from_text(text: str) -> Record:
    """Parse a record and validate every field.

    Raises:
        NewerRecordError: if the record has a newer format version.
        ValueError: if a field is missing, unknown, of the wrong type, or inconsistent with others.
    """
    try:
        data = dict(json_of(text, finite=False))
        digest = data.pop("digest", None)
        body = json.dumps(data)
        version = _whole("version", data.pop("version"), 1)
        if version > VERSION:
            raise NewerRecordError(f"has version {version}, but this gradgraph reads up to {VERSION}")
        _require(version == 1 or isinstance(digest, str), "its digest is missing")
        names = DataNames.from_data(data.get("names", {}))
        progress = Progress(**{**data, "history": as_history(data["history"]), "names": names})
        _check(progress)
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return Record(version, progress, body, digest if version > 1 else None)


# --- validation -------------------------------------------------------------------------------------------------


def _check(p: Progress) -> None:
    for name in ("steps", "epoch", "batch", "fit_epoch", "fit_step", "weight", "stale", "turns", "place", "eval_every",
                 "rowed"):  # fmt: skip
        _whole(name, getattr(p, name))
    p.counts, p.weights = _each("counts", p.counts, _whole), _each("weights", p.weights, _whole)
    _whole("seed", p.seed, -(1 << 63), (1 << 63) - 1)
    p.sums, p.hyperparameters = _each("sums", p.sums, _number), _each("hyperparameters", p.hyperparameters, _number)
    for name, value in p.hyperparameters.items():
        _require(math.isfinite(value), f"the hyperparameter {shown(name)} is {value}")
    _require(isinstance(p.kernels, str), f"kernels is {_brief(p.kernels)}")
    p.totals = _each("totals", p.totals, _array)
    p.best = None if p.best is None else _number("best", p.best)
    if p.sizes is not None:
        p.sizes = {str(name): _whole(f"the size {shown(name)}", size, 1) for name, size in p.sizes.items()}
    _check_order(p.order)
    _check_together(p)


def _check_order(order: Mapping[str, Any]) -> None:
    kinds = {"rows": (int, type(None)), "batch_size": int, "shuffle": bool, "drop_last": bool, "steps": str}
    _require(isinstance(order, dict) and order.keys() <= kinds.keys(), "order has unknown keys")
    for name, value in order.items():
        if kinds[name] in (bool, str):
            _require(type(value) is kinds[name], f"{name} is {shown(repr(value))}")
        elif value is not None or name == "batch_size":
            _whole(name, value, 1)


def _check_together(p: Progress) -> None:
    """Raise ValueError if fields contradict each other, such as sums without batches."""
    _require(p.fit_step <= p.steps, f"fit_step is {p.fit_step} of {p.steps} steps")
    _require(p.fit_epoch <= p.epoch, f"fit_epoch is {p.fit_epoch} of {p.epoch} epochs")
    _require(p.epoch + bool(p.batch) <= p.steps, f"epoch is {p.epoch} after {p.steps} steps")
    _require(p.batch <= p.steps, f"batch is {p.batch} after {p.steps} steps")
    _require(p.rowed <= p.batch and bool(p.eval_every or not p.rowed), f"rowed is {p.rowed} after {p.batch} batches")
    begun = bool(p.batch - p.rowed or p.place)
    _require(begun == bool(p.weight) == bool(p.sums), "sums and number of batches of the epoch are inconsistent")
    _require(p.turns + p.place <= p.steps, f"turns is {p.turns} after {p.steps} steps")
    rows = len(p.history)
    most, of = (p.steps - p.fit_step, "steps") if p.eval_every else (p.epoch - p.fit_epoch, "epochs")
    _require(rows <= most, f"the history has {rows} rows of {most} {of}")
    _require(p.stale <= rows, f"stale is {p.stale} after {rows} rows")


def _whole(name: str, value: Any, least: int = 0, most: int = LARGEST_COUNT) -> int:
    _require(type(value) is int and least <= value <= most, f"{name} is {_brief(value)}")
    return int(value)


def _number(name: str, value: Any) -> float:
    _require(type(value) in (int, float), f"{name} is {_brief(value)}")
    return float(value)


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    array = np.array(value)
    _require(array.dtype.kind in "if", f"{name} contains no numbers")
    return array.astype(np.float64)


def _each(what: str, values: Any, checked: Callable[[str, Any], Checked]) -> dict[str, Checked]:
    _require(isinstance(values, dict), f"{what} is {_brief(values)}")
    return {str(name): checked(f"{shown(name)} of {what}", value) for name, value in values.items()}


def _brief(value: Any) -> str:
    """Format ``value`` for a message, even an integer of thousands of digits, which Python does not print."""
    is_huge = type(value) is int and value.bit_length() > 1000
    return f"a number of {value.bit_length()} bits" if is_huge else shown(repr(value))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
