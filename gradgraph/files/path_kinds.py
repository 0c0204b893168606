"""Kinds of paths: a model, a step folder, a run folder, a checkpoint, a recipe.

Where a step, a checkpoint or a trained model is expected, all commands accept a run folder (``gradgraph train --run
FOLDER``) and use the run's step, checkpoint or model. Files that the run wrote elsewhere are found through its recipe.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

from gradgraph.errors import CheckpointError, ModelError, shown
from gradgraph.files.untrusted.documents import toml_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes

STEP, RECIPE, MODEL = "step", "recipe.toml", "trained.onnx"
LAST, BEST = "run.ckpt", "run.best.ckpt"
MANIFEST = "manifest.json"  # of a step folder


class Kind(enum.Enum):
    """The kinds of path; each value is a description for messages."""

    STEP = "a step folder"
    RUN = "the folder of a run"
    FOLDER = "a folder"
    MODEL = "a model"
    CHECKPOINT = "a checkpoint"
    RECIPE = "a recipe"
    FILE = "a file"
    NOTHING = "nothing"


_BY_SUFFIX = {".onnx": Kind.MODEL, ".ckpt": Kind.CHECKPOINT, ".toml": Kind.RECIPE}


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """Return the kind of ``path``: for a folder, by its content; for a file, by its extension."""
    path = Path(path)
    try:
        if (path / MANIFEST).is_file():
            return Kind.STEP
        if (path / RECIPE).is_file():
            return Kind.RUN
        if path.is_dir():
            return Kind.FOLDER
        there = path.exists()
    except (OSError, ValueError):  # not a valid file name
        return Kind.NOTHING
    return _BY_SUFFIX.get(path.suffix.lower(), Kind.FILE) if there else Kind.NOTHING


def wrong_kind(path: Path, *wanted: Kind) -> str:
    """Return an error message about the kind of ``path`` and the kinds to pass; "" if it is ``wanted`` or unknown."""
    kind = kind_of(path)
    if kind in wanted or kind in (Kind.FILE, Kind.NOTHING):
        return ""
    run = f", or '{shown(path.parent)}', the folder of its run" if kind_of(path.parent) is Kind.RUN else ""
    return f"'{shown(path)}' is {kind.value}; give {' or '.join(w.value for w in wanted)}{run}"


def step_of(path: str | os.PathLike[str]) -> Path:
    """Return the step of the run if ``path`` is a run folder; otherwise ``path`` itself.

    Raises:
        ModelError: if the step of the run no longer exists.
    """
    path = Path(path)
    if kind_of(path) is not Kind.RUN:
        return path
    own, named = path / STEP, named_by_run(path, "output", "step")
    found = [p for p in (own, named, named_by_run(path, "model", "path")) if p is not None and kind_of(p) is Kind.STEP]
    if not found:
        where = f" '{shown(named)}'" if named is not None else ""
        raise ModelError(f"the step{where} that the run '{shown(path)}' trained does not exist; give its folder")
    return found[0]


def model_of(path: str | os.PathLike[str]) -> Path:
    """Return the trained model of the run if ``path`` is a run folder; otherwise ``path`` itself.

    Raises:
        ModelError: if the run has not written its trained model yet.
    """
    path = Path(path)
    if kind_of(path) is not Kind.RUN:
        return path
    found = named_by_run(path, "output", "export") or path / MODEL
    if not found.is_file():
        raise ModelError(
            f"the run '{shown(path)}' has written no trained model yet",
            remedy=f"finish it, or call gradgraph.export.save_inference({str(path)!r}, 'trained.onnx')",
            shell=f"finish it, or write one with `gradgraph export {shown(path)} -o trained.onnx`",
        )
    return found


def last_checkpoint_of(path: str | os.PathLike[str]) -> Path | None:
    """Return the last checkpoint to resume from in a run folder, or in the step folder in it; None if there is none."""
    run = _run_of(Path(path))
    if run is None:
        return None
    last = named_by_run(run, "output", "checkpoint") or run / LAST
    return last if last.is_file() else None


def checkpoint_of(path: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint of a run's best epoch or, by default, its last one; None if the run has no checkpoint."""
    last = last_checkpoint_of(path)
    if last is None:
        return None
    best = last.with_name(f"{last.stem}.best{last.suffix}")
    return best if best.is_file() else last


def weights_of(path: str | os.PathLike[str], last: bool = False) -> Path:
    """Return the best (or, with ``last``, the last) checkpoint of a run folder; any other path is returned unchanged.

    Raises:
        CheckpointError: if the run has no checkpoint.
    """
    path = Path(path)
    if kind_of(path) is not Kind.RUN:
        return path
    found = last_checkpoint_of(path) if last else checkpoint_of(path)
    if found is None:
        raise CheckpointError(f"the run '{shown(path)}' has saved no checkpoint yet; let it finish an epoch")
    return found


def _run_of(path: Path) -> Path | None:
    if kind_of(path) is Kind.RUN:
        return path
    run = path.parent if path.name else path.absolute().parent
    return run if path.absolute().name == STEP and kind_of(run) is Kind.RUN else None


def named_by_run(run: Path, table: str, key: str) -> Path | None:
    """Return the path at ``table.key`` in a run's recipe; None if it is missing, or the recipe is unreadable."""
    try:
        tables: dict[str, Any] = toml_of(regular_bytes(run / RECIPE, 1 << 20))
        value = tables.get(table, {}).get(key)
    except (UnreadableError, AttributeError):
        return None
    return run / value if isinstance(value, str) else None
