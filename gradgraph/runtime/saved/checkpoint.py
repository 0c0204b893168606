"""Checkpoints: the state of a run and where it stands, in one safetensors file.

The tensors carry the names of the manifest's state. The metadata entry ``gradgraph`` is the record of ``record.py``,
with a digest of itself and the tensors. Nothing else is needed to go on bit for bit.
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
from gradgraph.errors import CheckpointError, OutputError, listed, shown
from gradgraph.files.atomic import explain_errors, link_atomically
from gradgraph.files.digest import Digest
from gradgraph.files.mapped import pieces
from gradgraph.files.path_kinds import Kind as Place
from gradgraph.files.path_kinds import kind_of, weights_of, wrong_kind
from gradgraph.files.streamed import Bytes, safetensors_pieces
from gradgraph.files.untrusted.array_files import safetensors_mapped
from gradgraph.files.untrusted.regular import reason_of
from gradgraph.runtime.data.batch import to_array
from gradgraph.runtime.saved.monitor import MODE, Monitor
from gradgraph.runtime.saved.record import NewerRecordError, Progress, body_of, from_text, to_text
from gradgraph.step.manifest import StateSpec, numpy_dtype

log = logging.getLogger("gradgraph")

METADATA_KEY = "gradgraph"
BESIDE = "beside/"  # begins the names of tensors that are no state of the step

Arrays = dict[str, np.ndarray[Any, Any]]


class DamagedError(CheckpointError):
    """A checkpoint is damaged: it is not what was written."""


def checkpoint_pieces(
    state: Mapping[str, np.ndarray[Any, Any]],
    progress: Progress,
    beside: Mapping[str, np.ndarray[Any, Any]] = {},
) -> Bytes:
    """The content of a checkpoint file, piece by piece: the same state and progress always give the same bytes.

    ``beside`` are arrays that each of several processes has for itself.
    """
    tensors = {**state, **{f"{BESIDE}{name}": array for name, array in beside.items()}}
    body, tensors = body_of(progress), dict(sorted(tensors.items()))
    metadata = {METADATA_KEY: to_text(body, _digest(body, tensors))}  # one entry: safetensors shuffles several
    return safetensors_pieces(tensors, metadata)


def load_checkpoint(path: str | os.PathLike[str], specs: Iterable[StateSpec]) -> tuple[Arrays, Progress]:
    """Read and check a checkpoint; large tensors are what is mapped of its file.

    Raises:
        CheckpointError: not there, damaged, of a newer version, or of another step than ``specs`` describe.
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
            raise CheckpointError(f"'{shown(path)}' holds tensors but is no gradgraph checkpoint; give one that "
                                  "training has saved")  # fmt: skip
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
        raise error.at(f"'{shown(path)}' does not fit") from None
    if record.digest is None:
        log.warning("'%s' was written before checkpoints had digests, so damage to its numbers would not be seen",
                    shown(path))  # fmt: skip
    elif record.digest != _digest(record.body, whole):
        raise _damaged(path, "its contents are not those that were written")
    record.progress.beside = {name.removeprefix(BESIDE): np.array(array) for name, array in beside.items()}
    return state, record.progress


def check_values(specs: Mapping[str, StateSpec], values: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise CheckpointError unless ``values`` are exactly the state that ``specs`` describe."""
    unknown = [name for name in values if name not in specs]
    if unknown:
        raise CheckpointError(
            f"the state has {listed(unknown)}, which this step does not know; load it into the step that it was saved "
            "from"
        )
    missing = [name for name in specs if name not in values]
    if missing:
        raise CheckpointError(f"the state lacks {listed(missing)}; load one that this step has saved")
    for name, spec in specs.items():
        value = to_array(name, values[name])
        if value.shape != spec.shape or value.dtype != numpy_dtype(spec.dtype):
            raise CheckpointError(
                f"'{shown(name)}' is {value.dtype}{list(value.shape)} in the state, but {spec.dtype}{list(spec.shape)} "
                "in this step; load it into the step that it was saved from"
            )


def _damaged(path: Path, reason: object) -> DamagedError:
    return DamagedError(f"'{shown(path)}' is damaged ({shown(reason)}); use an older checkpoint")


def _digest(body: str, tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """The digest of all that a checkpoint says; the order of tensors in its file does not matter."""
    digest = Digest()
    digest.update_text(body)
    for name in sorted(tensors):
        array = tensors[name]
        digest.update_text(f"{array.dtype.name}{list(array.shape)} {name}")
        for piece in pieces(array):
            digest.update(piece)
    return digest.text()


# --- the newest whole one ---------------------------------------------------------------------------------


def load_newest(path: str | os.PathLike[str], specs: Iterable[StateSpec]) -> tuple[Arrays, Progress]:
    """The checkpoint at ``path``, or, if that is damaged, the newest whole one that was kept beside it.

    For ``run.ckpt`` that is ``run.previous.ckpt``; for one of a :class:`CheckpointKeeper`, those of fewer steps. A
    folder stands for the last checkpoint that such a keeper wrote there, that of a run for the one whose weights count
    (``run.best.ckpt``, if there is one). A warning says which file is used.

    Raises:
        CheckpointError: as for :func:`load_checkpoint`; if no whole one is left, about the file that was asked for.
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
            log.warning("%s: going on from '%s' of step %d", str(error).rpartition(";")[0], shown(other),
                        progress.steps)  # fmt: skip
            return values, progress
        raise


def previous_path(path: str | os.PathLike[str]) -> Path:
    """The path of the checkpoint before: ``run.previous.ckpt`` for ``run.ckpt``."""
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: str | os.PathLike[str]) -> None:
    """Let the checkpoint at ``path`` stay as ``run.previous.ckpt`` when the next one takes its place.

    It costs no writing; where the file system has no hard links, nothing is kept.
    """
    with contextlib.suppress(OutputError):
        link_atomically(path, previous_path(path))


def _candidates(path: Path) -> list[Path]:
    """The checkpoint that was asked for, then those that may take its place, the newest first."""
    try:
        is_folder = path.is_dir()
    except OSError:  # a name that no file can have: reading it says so
        return [path]
    if is_folder:
        kept = _kept_in(path)
        if not kept:
            raise CheckpointError(f"'{shown(path)}' is not a regular file, and as a folder it holds no step-….ckpt; "
                                  "give a checkpoint file")  # fmt: skip
        return kept
    is_kept = _STEP_FILE.fullmatch(path.name)
    older = [p for p in _kept_in(path.parent) if _steps_of(p) < _steps_of(path)] if is_kept else []
    return [path, *(p for p in (previous_path(path), *older) if p.is_file())]


# steps and not clocks, which jump, say what is newer
_STEP_FILE = re.compile(r"step-[0-9]{8,}\.ckpt")


def _kept_in(folder: Path) -> list[Path]:
    """The checkpoints of a keeper, the newest first."""
    names = [p for p in folder.iterdir() if _STEP_FILE.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(names, key=_steps_of, reverse=True)


def _steps_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


# --- keeping some of them ---------------------------------------------------------------------------------


class CheckpointKeeper:
    """A callback for ``fit``: a checkpoint after each epoch, of which the last ``keep`` stay, and the best one.

    One that cannot be written is logged as an error, and training goes on; the next epoch tries again. If it was the
    last one, ``fit`` ends with its OutputError. After a resume, the best one that lies there stays until a better one
    comes; that of another run is replaced.

    Args:
        folder: where ``step-00000042.ckpt`` and ``best.ckpt`` go; made if missing.
        keep: how many of the last to keep.
        monitor: column of the history; by default ``val_loss`` if there is one, else ``loss``.
        mode: ``"min"`` or ``"max"``: what is better; by default what the column's name says.

    Raises:
        ArgumentError: ``keep`` or ``mode`` is none of these.
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
        """The path of the best checkpoint so far; None without one."""
        return self.folder / "best.ckpt"

    def check(self, columns: Collection[str]) -> None:
        """Raise CheckpointError if no ``monitor`` was given and the history will have several losses; ``fit`` asks."""
        losses = [name for name in columns if name.endswith(".loss")]
        if self.monitor is None and "loss" not in columns and losses:
            raise CheckpointError(
                f"the history will have no column 'loss', but {', '.join(map(shown, losses))}",
                remedy=f"say which one the best checkpoint is chosen by: CheckpointKeeper(..., monitor='{losses[0]}')",
                shell=f"say which one the best checkpoint is chosen by: --monitor {shown(losses[0])}",
            )

    def on_epoch(self, trainer: Any, row: Mapping[str, float]) -> None:
        """Save; raises CheckpointError if ``monitor`` is no column of the history."""
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
            log.error("%s; training goes on", error)

    def on_end(self, trainer: Any, history: Mapping[str, list[float]]) -> None:
        """Raise OutputError if the last epoch's checkpoint could not be written."""
        if self._failed is not None:
            raise self._failed

    def _look_at_folder(self, trainer: Any, name: str) -> None:
        """Take over the best of this run, if it was resumed, from the folder; warn of files of another run there."""
        history, steps = trainer.progress.history, trainer.progress.steps
        with contextlib.suppress(CheckpointError):
            found = load_checkpoint(self.best, trainer.manifest.state)[1]
            before = dict(zip(history["step"][:-1], history[name][:-1], strict=True))
            if found.steps in before and found.history.row().get(name) == before[found.steps]:
                self.best_value = self._sign * before[found.steps]
        later = [path for path in _kept_in(self.folder) if _steps_of(path) > steps]
        if later:
            log.warning("'%s' has checkpoints of more steps (%s), of another run or from before this one went back; "
                        "remove them or choose another folder, since who resumes from the folder gets the last one",
                        shown(self.folder), shown(later[0].name))  # fmt: skip
