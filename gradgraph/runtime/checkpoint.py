"""Checkpoints: the state of a run and where it stands, in one safetensors file.

The tensors carry the names of the manifest's state. The metadata entry ``gradgraph`` is JSON: the format's version and
the fields of :class:`Progress`. Nothing else is needed to go on bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from gradgraph.errors import CheckpointError, shown
from gradgraph.files import write_atomically
from gradgraph.manifest import StateSpec
from gradgraph.runtime.history import History, as_history
from gradgraph.runtime.state import check_values

VERSION = 1
METADATA_KEY = "gradgraph"

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        steps: steps done since the state was initialised.
        epoch, batch: epochs finished, and batches done in the one that is under way.
        seed: of the order of the data.
        fit_epoch, fit_step: epoch and step at which the current (or last) ``fit`` began.
        order: what decides which samples batch number i holds: rows, batch_size, shuffle, drop_last.
        sums, weight: sums over the samples of this epoch so far of loss and metrics, and their number.
        best, stale: the best value of the monitored quantity, and the epochs since.
        hyperparameters: those fed to the last step.
        sizes: of the symbolic dimensions, for which the training session is made; None before the first step. (A
            resumed run must choose the same one, since another may round differently.)
        history: one row per finished epoch of this fit.
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
    best: float | None = None
    stale: int = 0
    hyperparameters: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] | None = None
    history: History = field(default_factory=History)


def encode_checkpoint(state: Mapping[str, np.ndarray[Any, Any]], progress: Progress) -> bytes:
    """The bytes of a checkpoint file: the same state and progress always give the same bytes."""
    record = json.dumps({"version": VERSION, **dataclasses.asdict(progress)}, sort_keys=True)
    return bytes(safetensors.numpy.save(dict(sorted(state.items())), metadata={METADATA_KEY: record}))


def save_checkpoint(
    path: str | os.PathLike[str], state: Mapping[str, np.ndarray[Any, Any]], progress: Progress
) -> None:
    """Write a checkpoint atomically.

    Raises:
        OutputError: ``path`` cannot be written; an older checkpoint there is intact.
    """
    write_atomically(path, encode_checkpoint(state, progress))


def load_checkpoint(path: str | os.PathLike[str], specs: Iterable[StateSpec]) -> tuple[Arrays, Progress]:
    """Read and check a checkpoint.

    Raises:
        CheckpointError: not there, damaged, of a newer version, or of another step than ``specs`` describe.
    """
    path = Path(path)
    _check_regular(path)
    try:
        with safetensors.safe_open(path, framework="np") as file:
            record = (file.metadata() or {}).get(METADATA_KEY)
            if record is None:
                raise CheckpointError(f"'{shown(path)}' holds tensors but is no gradgraph checkpoint; give one that "
                                      "training has saved")  # fmt: skip
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"'{shown(path)}' is damaged ({shown(error)}); use an older checkpoint") from None
    progress = _parsed(record, path)
    try:
        check_values({s.name: s for s in specs}, state)
    except CheckpointError as error:
        raise error.at(f"'{shown(path)}' does not fit") from None
    return state, progress


def _check_regular(path: Path) -> None:
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise CheckpointError(f"cannot read '{shown(path)}' ({error.strerror}); check the path") from None
    if not regular:
        raise CheckpointError(f"'{shown(path)}' is not a regular file; give a checkpoint file")


def _parsed(record: str, path: Path) -> Progress:
    try:
        data = json.loads(record)
        version = data.pop("version")
        if version > VERSION:
            raise CheckpointError(
                f"'{shown(path)}' has version {version}, but this gradgraph reads up to {VERSION}; upgrade gradgraph"
            )
        progress = Progress(**{**data, "history": as_history(data["history"])})
        for name in ("steps", "epoch", "batch", "seed", "fit_epoch", "fit_step", "weight", "stale"):
            if not isinstance(getattr(progress, name), int) or (name != "seed" and getattr(progress, name) < 0):
                raise ValueError(f"{name} is {getattr(progress, name)!r}")
        progress.sums = {str(k): float(v) for k, v in progress.sums.items()}
        progress.hyperparameters = {str(k): float(v) for k, v in progress.hyperparameters.items()}
        progress.order = dict(progress.order)
        if progress.sizes is not None:
            progress.sizes = {str(k): int(v) for k, v in progress.sizes.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"'{shown(path)}' is damaged ({shown(error)}); use an older checkpoint") from None
    return progress


# --- keeping some of them ---------------------------------------------------------------------------------


class CheckpointKeeper:
    """A callback for ``fit``: a checkpoint after each epoch, of which the last ``keep`` stay, and the best one.

    Args:
        folder: where ``step-00000042.ckpt`` and ``best.ckpt`` go; made if missing.
        keep: how many of the last to keep.
        monitor: column of the history; by default ``val_loss`` if there is one, else ``loss``.
        mode: ``"min"`` or ``"max"``: what is better.
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep: int = 3, monitor: str | None = None, mode: str = "min"
    ) -> None:
        self.folder = Path(folder)
        self.keep, self.monitor = keep, monitor
        self._sign = -1.0 if mode == "max" else 1.0
        self.best_value = math.inf

    @property
    def best(self) -> Path:
        return self.folder / "best.ckpt"

    def on_epoch(self, trainer: Any, row: Mapping[str, float]) -> None:
        """Save; raises CheckpointError if ``monitor`` is no column of the history, OutputError if writing fails."""
        name = self.monitor or ("val_loss" if "val_loss" in row else "loss")
        if name not in row:
            raise CheckpointError(f"the history has no column '{shown(name)}'; it has {', '.join(map(shown, row))}")
        self.folder.mkdir(parents=True, exist_ok=True)
        trainer.save(self.folder / f"step-{trainer.progress.steps:08d}.ckpt")
        if self._sign * row[name] < self.best_value:
            self.best_value = self._sign * row[name]
            trainer.save(self.best)
        for old in sorted(self.folder.glob("step-*.ckpt"))[: -self.keep or None]:
            old.unlink()
