"""Checkpoints: the state and progress of a run in one safetensors file.

Tensors have the names of the state in the manifest. The metadata entry ``gradgraph`` contains the progress record
(``record.py``), with a digest of the record and the tensors. This suffices to resume with bitwise identical results.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import PATH, TEXT, WHOLE, Kind, checked
from gradgraph.data.arrays.batch import to_array
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import CheckpointError, OutputError, listed, shown
from gradgraph.files.atomic import explain_errors, link_atomically
from gradgraph.files.digest import Digest
from gradgraph.files.mapped import pieces
from gradgraph.files.path_kinds import Kind as Place
from gradgraph.files.path_kinds import kind_of, weights_of, wrong_kind
from gradgraph.files.streamed import Bytes, safetensors_pieces
from gradgraph.files.untrusted.array_files import safetensors_mapped
from gradgraph.files.untrusted.regular import reason_of
from gradgraph.runtime.saved.monitor import MODE, Monitor
from gradgraph.runtime.saved.record import NewerRecordError, Progress, body_of, from_text, to_text
from gradgraph.step.manifest import StateSpec

log = logging.getLogger("gradgraph")

METADATA_KEY = "gradgraph"
BESIDE = "beside/"  # prefix of tensors that are not state of the step

Arrays = dict[str, np.ndarray[Any, Any]]


class DamagedError(CheckpointError):
    """Raised for a checkpoint whose content differs from the content written."""


def checkpoint_pieces(
    state: Mapping[str, np.ndarray[Any, Any]],
    progress: Progress,
    beside: Mapping[str, np.ndarray[Any, Any]] = {},
) -> Bytes:
    """Return the content of a checkpoint file in pieces; the bytes depend only on the arguments.

    ``beside`` are arrays that differ between ranks, by name.
    """
    tensors = {**state, **{f"{BESIDE}{name}": array for name, array in beside.items()}}
    body, tensors = body_of(progress), dict(sorted(tensors.items()))
    metadata = {METADATA_KEY: to_text(body, _digest(body, tensors))}  # one entry, as safetensors shuffles several
    return safetensors_pieces(tensors, metadata)


def load_checkpoint(path: str | os.PathLike[str], specs: Iterable[StateSpec]) -> tuple[Arrays, Progress]:
    """Read and check a checkpoint of the state tensors ``specs``; large tensors are memory-mapped.

    Raises:
        CheckpointError: if the file does not exist, is damaged, has a newer version, or does not match ``specs``.
    """
    path = Path(path)
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read '{shown(path)}' ({reason_of(error)}); check the path") from None
    if not regular:
        raise CheckpointError(f"'{shown(path)}' is not a regular file; give a checkpoint file")
    try:
        state, metadata = safetensors_mapped(path)
        if METADATA_KEY not in metadata:
            raise CheckpointError(f"'{shown(path)}' contains tensors but is not a gradgraph checkpoint; give a "
                                  "checkpoint saved by training")  # fmt: skip
        record = from_text(metadata[METADATA_KEY])
    except NewerRecordError as error:
        raise CheckpointError(f"'{shown(path)}' {error}; upgrade gradgraph") from None
    except ValueError as error:
        if kind_of(path) in (Place.MODEL, Place.RECIPE):
            raise CheckpointError(wrong_kind(path, Place.CHECKPOINT)) from None
        raise _damaged(path, error) from None
    known, whole = {s.name: s for s in specs}, state
    beside = {n: a for n, a in whole.items() if n.startswith(BESIDE) and n not in known}
    state = {n: a for n, a in whole.items() if n not in beside}
    try:
        check_values(known, state)
    except CheckpointError as error:
        raise error.at(f"'{shown(path)}' does not match the step") from None
    if record.digest is None:
        log.warning("'%s' was written by a version without checkpoint digests, so damage to numbers is not detected",
                    shown(path))  # fmt: skip
    elif record.digest != _digest(record.body, whole):
        raise _damaged(path, "its content does not match its digest")
    record.progress.beside = {name.removeprefix(BESIDE): np.array(array) for name, array in beside.items()}
    return state, record.progress


def check_values(specs: Mapping[str, StateSpec], values: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise CheckpointError unless ``values`` match ``specs`` exactly."""
    unknown = [name for name in values if name not in specs]
    if unknown:
        raise CheckpointError(
            f"the state contains {listed(unknown)}, which this step does not have; load it into the step that saved it"
        )
    missing = [name for name in specs if name not in values]
    if missing:
        raise CheckpointError(f"the state lacks {listed(missing)}; load a state that this step saved")
    for name, spec in specs.items():
        value = to_array(name, values[name])
        if value.shape != spec.shape or value.dtype != numpy_dtype(spec.dtype):
            raise CheckpointError(
                f"'{shown(name)}' is {value.dtype}{list(value.shape)} in the state, but {spec.dtype}{list(spec.shape)} "
                "in this step; load it into the step that saved it"
            )


def _damaged(path: Path, reason: object) -> DamagedError:
    return DamagedError(f"'{shown(path)}' is damaged ({shown(reason)}); use an older checkpoint")


def _digest(body: str, tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return a digest of the progress record ``body`` and the tensors, regardless of their order in the file."""
    digest = Digest()
    digest.update_text(body)
    for name in sorted(tensors):
        array = tensors[name]
        digest.update_text(f"{array.dtype.name}{list(array.shape)} {name}")
        for piece in pieces(array):
            digest.update(piece)
    return digest.text()


# --- the newest intact one --------------------------------------------------------------------------------


def load_newest(path: str | os.PathLike[str], specs: Iterable[StateSpec]) -> tuple[Arrays, Progress]:
    """Load the checkpoint at ``path``; if it is damaged, log a warning and load the newest intact older one.

    For ``run.ckpt``, the older checkpoint is ``run.previous.ckpt``; for a file of a :class:`CheckpointKeeper`, the
    files of fewer steps. If ``path`` is the folder of a keeper, its last checkpoint is loaded; for a run folder,
    ``run.best.ckpt`` if it exists, else the last checkpoint.

    Raises:
        CheckpointError: as for :func:`load_checkpoint`. If no older checkpoint is intact, the error is about the
            requested file.
    """
    PATH.check("the checkpoint", path)
    first, *older = _candidates(weights_of(path))
    specs = list(specs)
    try:
        return load_checkpoint(first, specs)
    except DamagedError as error:
        for other in older:
            try:
                values, progress = load_checkpoint(other, specs)
            except CheckpointError:
                continue
            log.warning("%s: continuing from '%s' (step %d)", str(error).rpartition(";")[0], shown(other),
                        progress.steps)  # fmt: skip
            return values, progress
        raise


def previous_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the previous checkpoint: ``run.previous.ckpt`` for ``run.ckpt``."""
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: str | os.PathLike[str]) -> None:
    """Keep the checkpoint at ``path`` as ``run.previous.ckpt``, a hard link, before the next checkpoint replaces it.

    On file systems without hard links, this has no effect.
    """
    with contextlib.suppress(OutputError):
        link_atomically(path, previous_path(path))


def _candidates(path: Path) -> list[Path]:
    """Return the requested checkpoint, then older ones to fall back on, newest first; raises CheckpointError."""
    try:
        is_folder = path.is_dir()
    except OSError:  # an invalid file name; reading it raises the error
        return [path]
    if is_folder:
        kept = _kept_in(path)
        if not kept:
            raise CheckpointError(f"'{shown(path)}' is a folder without checkpoints (step-….ckpt); give a checkpoint "
                                  "file")  # fmt: skip
        return kept
    is_kept = _STEP_FILE.fullmatch(path.name)
    older = [p for p in _kept_in(path.parent) if _steps_of(p) < _steps_of(path)] if is_kept else []
    return [path, *(p for p in (previous_path(path), *older) if p.is_file())]


# files are ordered by their steps, not their times, since clocks may be changed
_STEP_FILE = re.compile(r"step-[0-9]{8,}\.ckpt")


def _kept_in(folder: Path) -> list[Path]:
    """Return the files ``step-….ckpt`` of a :class:`CheckpointKeeper` in ``folder``, newest first."""
    names = [p for p in folder.iterdir() if _STEP_FILE.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(names, key=_steps_of, reverse=True)


def _steps_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


# --- keeping several --------------------------------------------------------------------------------------


class CheckpointKeeper:
    """A callback for ``fit`` that saves a checkpoint after each epoch, and keeps the best and the last ``keep`` ones.

    If saving fails, it logs an error, training continues, and the next epoch tries again; if the last save fails,
    ``fit`` raises OutputError. A resumed run keeps its best checkpoint until there is a better one; the best checkpoint
    of another run is replaced.

    Args:
        folder: folder for ``step-00000042.ckpt`` and ``best.ckpt``; created if missing.
        keep: number of last checkpoints to keep.
        monitor: column of the history; by default ``val_loss`` if it exists, else ``loss``.
        mode: whether lower (``"min"``) or higher (``"max"``) is better; by default derived from the column name.

    Raises:
        ArgumentError: if ``keep`` or ``mode`` is invalid.
    """

    @checked(folder=PATH, keep=Kind("a whole number above zero", lambda value: WHOLE.fits(value) and value > 0),
             monitor=TEXT.or_none(), mode=MODE)  # fmt: skip
    def __init__(
        self, folder: str | os.PathLike[str], keep: int = 3, monitor: str | None = None, mode: str | None = None
    ) -> None:
        self.folder = Path(folder)
        self.keep, self.monitor = keep, monitor
        self._monitor = Monitor(monitor, mode)
        self._sign = self._monitor.sign
        self.best_value = math.inf
        self._failed: OutputError | None = None
        self._has_looked = False

    @property
    def best(self) -> Path:
        """The path of the best checkpoint, whether or not it exists yet."""
        return self.folder / "best.ckpt"

    def check(self, columns: Collection[str]) -> None:
        """Raise CheckpointError if the history will have several losses and ``monitor`` is None; called by ``fit``."""
        losses = [name for name in columns if name.endswith(".loss")]
        if self.monitor is None and "loss" not in columns and losses:
            raise CheckpointError(
                f"the history will have several losses ({', '.join(map(shown, losses))}), but no column 'loss'",
                remedy=f"choose the column for the best checkpoint: CheckpointKeeper(..., monitor='{losses[0]}')",
                shell=f"choose the column for the best checkpoint: --monitor {shown(losses[0])}",
            )

    def on_epoch(self, trainer: Any, row: Mapping[str, float]) -> None:
        """Save a checkpoint after an epoch with this history row.

        Raises:
            CheckpointError: if ``monitor`` is not a column of the history.
        """
        name, steps = self._monitor.of(row), trainer.progress.steps
        if name not in row:
            raise CheckpointError(f"the history has no column '{shown(name)}'; it has {', '.join(map(shown, row))}")
        if not self._has_looked:
            self._has_looked = True
            self._look_at_folder(trainer, name)
        value = self._sign * row[name]
        try:
            with explain_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            trainer.save(self.folder / f"step-{steps:08d}.ckpt")
            if value < self.best_value:
                trainer.save(self.best)
                self.best_value = value
            ours = [path for path in _kept_in(self.folder) if _steps_of(path) <= steps]
            for old in ours[self.keep :]:
                with contextlib.suppress(OSError):
                    old.unlink()
            self._failed = None
        except OutputError as error:
            self._failed = error
            log.error("%s; training continues", error)

    def on_end(self, trainer: Any, history: Mapping[str, list[float]]) -> None:
        """Raise OutputError if the last epoch's checkpoint could not be written."""
        if self._failed is not None:
            raise self._failed

    def _look_at_folder(self, trainer: Any, name: str) -> None:
        """Read a resumed run's best value of the column ``name`` from ``best.ckpt``; warn about later checkpoints."""
        history, steps = trainer.progress.history, trainer.progress.steps
        with contextlib.suppress(CheckpointError):
            found = load_checkpoint(self.best, trainer.manifest.state)[1]
            before = dict(zip(history["step"][:-1], history[name][:-1], strict=True))
            if found.steps in before and found.history.row().get(name) == before[found.steps]:
                self.best_value = self._sign * before[found.steps]
        later = [path for path in _kept_in(self.folder) if _steps_of(path) > steps]
        if later:
            log.warning("'%s' contains checkpoints of later steps (%s), from another run or from before this run was "
                        "set back; remove them or choose another folder, since resuming from the folder loads the last",
                        shown(self.folder), shown(later[0].name))  # fmt: skip
