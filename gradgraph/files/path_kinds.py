"""The kind of thing that a path is: a model, a step folder, the folder of a run, a checkpoint, a recipe.

Every door asks here. The folder of a run (``gradgraph train --run FOLDER``) stands for each of the things in it: its
step, its checkpoint, its trained model, whichever is asked for. Files that the run was told to write elsewhere are
those that its recipe names.
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
    """The kinds of path, in words."""

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
    """The kind of thing at ``path``; of a file, what its extension says."""
    path = Path(path)
    try:
        if (path / MANIFEST).is_file():
            return Kind.STEP
        if (path / RECIPE).is_file():
            return Kind.RUN
        if path.is_dir():
            return Kind.FOLDER
        there = path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return Kind.NOTHING
    return _BY_SUFFIX.get(path.suffix.lower(), Kind.FILE) if there else Kind.NOTHING


def mistaken(path: Path, *wanted: Kind) -> str:
    """A sentence on what ``path`` is and what to give, where it is of no kind that is ``wanted``; or else nothing."""
    kind = kind_of(path)
    if kind in wanted or kind in (Kind.FILE, Kind.NOTHING):
        return ""
    run = f", or '{shown(path.parent)}', the folder of its run" if kind_of(path.parent) is Kind.RUN else ""
    return f"'{shown(path)}' is {kind.value}; give {' or '.join(w.value for w in wanted)}{run}"


def step_of(path: str | os.PathLike[str]) -> Path:
    """The step folder that ``path`` stands for: of a run's folder, the step that it trained; else ``path`` itself.

    Raises:
        ModelError: the step of the run is not there any more.
    """
    path = Path(path)
    if kind_of(path) is not Kind.RUN:
        return path
    own, named = path / STEP, named_by_run(path, "output", "step")
    found = [p for p in (own, named, named_by_run(path, "model", "path")) if p is not None and kind_of(p) is Kind.STEP]
    if not found:
        where = f" '{shown(named)}'" if named is not None else ""
        raise ModelError(f"the step{where} that the run '{shown(path)}' has trained is not there; give its folder")
    return found[0]


def model_of(path: str | os.PathLike[str]) -> Path:
    """The model that ``path`` stands for: of a run's folder, the one that it has trained; else ``path`` itself.

    Raises:
        ModelError: the run has written none.
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
    """The checkpoint of a run's folder, or of the run that a step folder lies in, to go on from; None without one."""
    run = _run_of(Path(path))
    if run is None:
        return None
    last = named_by_run(run, "output", "checkpoint") or run / LAST
    return last if last.is_file() else None


def checkpoint_of(path: str | os.PathLike[str]) -> Path | None:
    """Likewise, the one whose weights count: of the best epoch, where one was looked for."""
    last = last_checkpoint_of(path)
    if last is None:
        return None
    best = last.with_name(f"{last.stem}.best{last.suffix}")
    return best if best.is_file() else last


def weights_of(path: str | os.PathLike[str], last: bool = False) -> Path:
    """The checkpoint that ``path`` stands for: of a run's folder, the one whose weights count, or the ``last`` one;
    else ``path`` itself.

    Raises:
        CheckpointError: the run has none.
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
    """The path that the recipe of a run has there, if any. One that is not readable names none."""
    try:
        tables: dict[str, Any] = toml_of(regular_bytes(run / RECIPE, 1 << 20))
        value = tables.get(table, {}).get(key)
    except (UnreadableError, AttributeError):
        return None
    return run / value if isinstance(value, str) else None
