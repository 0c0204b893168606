"""The folder of a fine-tuning run: what it contains, the options that a resumed run must repeat, and the result."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gradgraph.chat.chat_recipe import STOPS_ONLY, Recipe
from gradgraph.errors import DataError, GradgraphError, OutputError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.trainer import Trainer

BEGAN = "began"  # the key of the start time in a run's record
TRAINING = "training"  # the folder with what is needed to resume
CHECKPOINT, RECIPE, HISTORY, LOG = "run.ckpt", "recipe.json", "history.csv", "log.jsonl"


@dataclass
class Finetuned:
    """The result of a fine-tuning run, finished or stopped.

    Attributes:
        folder: the output folder.
        history: a row per evaluation.
        figures: numbers about data, training and results, as in the model card.
        samples: the prompts of ``sample`` and the model's answers after the run.
        trainer: the trainer after the run.
    """

    folder: Path
    history: History
    figures: dict[str, Any]
    samples: dict[str, str]
    trainer: Trainer


def check_place(place: Path, resume: bool) -> None:
    """Raise OutputError unless ``place`` is an empty folder, or to ``resume`` one that contains a run."""
    if resume:
        if not (place / TRAINING).is_dir():
            raise OutputError(f"'{shown(place)}' has no run to resume; start one first")
    elif place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise OutputError(
            f"'{shown(place)}' is not an empty folder",
            remedy="pass another one, or resume=True to resume the run in it",
            shell="pass another one, or --resume to resume the run in it",
        )


def recorded(place: Path, resume: bool) -> Mapping[str, Any] | None:
    """Return the recorded options of a resumed run; None for a new run, or a run that stopped before it wrote them."""
    file = place / TRAINING / RECIPE
    if not resume or not (file.is_file() or (place / TRAINING / CHECKPOINT).is_file()):
        return None
    try:
        found = json_of(regular_bytes(file))
    except UnreadableError as error:
        raise DataError(f"'{shown(file)}' cannot be read ({error}); start a new run") from None
    return found if isinstance(found, Mapping) else {}


def began_at(place: Path, resume: bool) -> datetime:
    """Return the start time of the run, also when it is resumed, since a chat template may insert the date."""
    told = (recorded(place, resume) or {}).get(BEGAN)
    try:
        return datetime.fromisoformat(str(told))
    except ValueError:
        return datetime.now().replace(microsecond=0)


def begin(place: Path, recipe: Recipe, digests: Mapping[str, str], began: datetime, resume: bool) -> None:
    """Record the options of a new run; for a resumed run, raise DataError if they differ from the record."""
    file, before = place / TRAINING / RECIPE, recorded(place, resume)
    now = json_of(json.dumps({**asdict(recipe), **digests, BEGAN: began.isoformat()}))  # in the form that is read back
    if before is not None:
        other = [name for name in now if name not in (*STOPS_ONLY, BEGAN) and before.get(name) != now[name]]
        if other:
            raise DataError(
                f"the run in '{shown(place)}' began with other values of {', '.join(other)}; use those, or start a "
                "new run in another folder"
            )
        return
    create(file.parent)
    write_atomically(file, json.dumps(now, indent=1).encode())


@contextlib.contextmanager
def removed_unless_begun(out: Path, resume: bool) -> Iterator[None]:
    """Return a context that removes what a new run wrote to ``out`` if it fails before its first checkpoint.

    The output folder of a refused model, or of data that cannot be read, is then free for another attempt.
    """
    was_there = out.is_dir()
    try:
        yield
    except (GradgraphError, KeyboardInterrupt, SystemExit):
        if not resume and out.is_dir() and not any((out / TRAINING).glob("*.ckpt")):
            for path in list(out.iterdir()) if was_there else [out]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def create(folder: Path) -> None:
    """Create ``folder`` and its parents; raise OutputError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"'{shown(folder)}' cannot be created ({error.strerror}); choose another folder") from None
