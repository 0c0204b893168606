"""``gradgraph train --run FOLDER``: all that a run makes, in one folder with a page that explains it.

The page is written before the first step and again at the end, so that a run that was killed says how to go on. What
lies in the folder already is the user's: without ``--force`` a run begins in an empty one, and one that goes on keeps
its recipe, the command that it began with, and a page that somebody else wrote. Later commands are added to a list.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradgraph.cli import output, toml
from gradgraph.errors import DataError, OutputError, RuntimeUnavailableError, escaped, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.path_kinds import BEST, LAST, RECIPE, STEP
from gradgraph.files.untrusted.regular import MissingFileError, UnreadableError, regular_bytes

if TYPE_CHECKING:
    from gradgraph.runtime.saved.history import History
    from gradgraph.runtime.trainer import Trainer

PAGE, COMMANDS = "README.md", "commands.txt"
PLOT, DRAWING = "plot.png", "plot.svg"  # by matplotlib, or else by hand
MISTAKES = "mistakes.html"
_TRAINED = "Trained by gradgraph"  # what a page begins with, after its title
FILES = {  # options that name a file: the file in the folder, and what it holds
    "export_to": ("trained.onnx", "the trained model, for any runtime"),
    "checkpoint": (LAST, "weights, optimizer and progress of the last epoch: to go on from"),
    "history": ("history.csv", "loss and metrics of each epoch"),
    "logs": ("log.jsonl", "figures of every few steps, as JSON lines"),
    "out": (STEP, "the training step: its graphs, and a manifest that says what is what"),
}
OTHERS = {
    BEST: "the state of the best epoch, where `--patience` looks for one",
    **dict.fromkeys((PLOT, DRAWING), "the curves of the history"),
    "tokenizer.json": "the tokenizer by which the model reads texts",
    MISTAKES: "the held-out images that it gets wrong, and which classes it takes for which",
    COMMANDS: "the commands that trained it, each with the time (UTC) and the steps done before it",
    RECIPE: "every option of this run; `gradgraph train` takes it in place of a model",
}
LARGEST_LIST = 1 << 20  # bytes of commands
LARGEST_DIGESTED = 1 << 30  # bytes: larger files are named by their size alone


@dataclass
class RunFolder:
    """The folder of a run.

    Args:
        path: where it is, or will be.
        recipe: all options, as tables of TOML.
        read: the files that the run reads, by what they are.
        resume: the run goes on.
    """

    path: Path
    recipe: Mapping[str, Mapping[str, Any]]
    read: Mapping[str, Path]
    resume: bool = False
    _first: str = ""  # the command that the run began with

    def fill(self, given: dict[str, Any], builds: bool) -> None:
        """Name the files that were not named, in place; a step folder is written by a run that ``builds`` one."""
        for option, (name, _) in FILES.items():
            if option != "out" or builds:
                path = self.path / name
                given[option] = given[option] or ((path,) if option == "logs" else path)

    def check(self, force: bool) -> None:
        """Raise OutputError if a run would write over what is no run's."""
        if force or not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if self.resume and not (self.path / RECIPE).is_file():
            raise OutputError(f"the folder '{shown(self.path)}' holds no run to go on with, as there is no {RECIPE}; "
                              "give --run the folder of one, or an empty one")  # fmt: skip
        if not self.resume and not (self.path / LAST).exists():  # of a checkpoint, more is said where it is looked at
            raise OutputError(f"the folder '{shown(self.path)}' is not empty; give --run another one, or add --force "
                              "to write over what lies there")  # fmt: skip

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Make the folder, and remove it afterwards if nothing was written.

        Raises:
            OutputError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"the folder '{shown(self.path)}' cannot be made ({error.strerror}); give --run another path"
            ) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def begin(self, trainer: Trainer) -> None:
        """Write the recipe, and the page of a run that is not done.

        Raises:
            OutputError: they cannot be written.
        """
        if not self.resume:
            for name in (BEST, PLOT, DRAWING, MISTAKES, COMMANDS):  # of a run that this one replaces
                (self.path / name).unlink(missing_ok=True)
        if not (self.resume and (self.path / RECIPE).exists()):
            write_atomically(self.path / RECIPE, toml.written(self.recipe).encode() + b"\n")
        command = shlex.join(["gradgraph", *output.talk.arguments])
        before = self._commands()
        self._first = before[0] if before else command
        with (self.path / COMMANDS).open("a", encoding="utf-8") as file:
            file.write(f"# {_now()}, after {trainer.progress.steps:,} steps\n{escaped(command)}\n")
        self._write(trainer, ["It is not done: it runs, or was stopped."])

    def show_mistakes(self, trainer: Trainer, held_out: Any) -> None:
        """Write a page of the images that a classifier gets wrong; nothing where it is none, or has no images."""
        from gradgraph.export import save_mistakes

        if held_out is not None and any(len(spec.shape) == 4 for spec in trainer.manifest.inputs):
            with contextlib.suppress(DataError):
                save_mistakes(trainer, held_out, self.path / MISTAKES, title=self.path.name)

    def finish(self, trainer: Trainer, history: History) -> None:
        """Draw the curves, and write the page anew, with the results."""
        drawing = self._draw(history) if history else []
        restored = history.restored
        row = history.row(-1 if restored is None else restored) if history else {}
        what = "the last epoch" if restored is None else "the best epoch, whose weights were kept"
        self._write(
            trainer,
            [f"Of {what}:", "", *_table(["column", "value"], ((k, f"{v:.6g}") for k, v in row.items())), *drawing],
        )

    def draw(self, history: History) -> None:
        """Draw the curves of a run that was stopped."""
        if history:
            self._draw(history)

    def _draw(self, history: History) -> list[str]:
        """Draw the curves, and return the lines of the page that show them."""
        name = PLOT
        try:
            history.plot(self.path / PLOT)
        except RuntimeUnavailableError:
            history.to_svg(self.path / DRAWING)
            name = DRAWING
        return ["", f"![The curves of loss and metrics over the epochs]({name})"]

    def _commands(self) -> list[str]:
        """The commands in the list so far."""
        try:
            lines = regular_bytes(self.path / COMMANDS, LARGEST_LIST).decode("utf-8", "replace").splitlines()
        except UnreadableError:
            return []
        return [line for line in lines if line and not line.startswith("#")]

    def _write(self, trainer: Trainer, result: Iterable[str]) -> None:
        import onnxruntime

        if self.resume and not self._wrote_page():
            return
        step = trainer.definition
        lines = [
            f"# {shown(self.path.name)}",
            "",
            f"{_TRAINED} {step.manifest.gradgraph} with onnxruntime {onnxruntime.__version__} "
            f"({trainer.described}) and Python {platform.python_version()} on {platform.system()}, "
            f"{_now()}.",
            "",
            *_code([self._first]),
            "## Result",
            "",
            f"{trainer.progress.steps:,} steps, {trainer.progress.epoch:,} epochs.",
            *result,
            "",
            "## What was trained",
            "",
            f"- {shown(step)}",
            *(f"- {what}: {_identified(path)}" for what, path in self.read.items()),
            "",
            "## Files",
            "",
            *_table(
                ["file", "what it is"],
                ((f"`{n}`", w) for n, w in (*FILES.values(), *OTHERS.items()) if (self.path / n).exists()),
            ),
            "",
            "## What next",
            "",
            *_code(self._next_commands()),
        ]
        write_atomically(self.path / PAGE, "\n".join(lines).encode())

    def _wrote_page(self) -> bool:
        """Is the page that is there, if there is one, a run's?"""
        try:
            return _TRAINED.encode() in regular_bytes(self.path / PAGE)[:1000]
        except MissingFileError:
            return True
        except UnreadableError:
            return False

    def _next_commands(self) -> list[str]:
        run, data = str(self.path), str(self.read.get("validation", self.read["data"]))
        commands = {
            "go on, for more epochs": ["train", run, "--resume"],
            "what it gets wrong": ["evaluate", run, "--data", data, "--worst", "10"],
            "what it says": ["predict", run, "--data", data],
            "it, and others beside it": ["runs", str(self.path.parent)],
        }
        return [f"{shlex.join(['gradgraph', *words])}    # {why}" for why, words in commands.items()]


def _now() -> str:
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"


def _code(lines: Iterable[str]) -> list[str]:
    return ["```sh", *lines, "```", ""]


def _table(head: list[str], rows: Iterable[tuple[str, str]]) -> list[str]:
    cells = ([name.replace("|", r"\|") for name in row] for row in rows)
    return [f"| {' | '.join(head)} |", "|---|---|", *(f"| {' | '.join(row)} |" for row in cells)]


def _identified(path: Path) -> str:
    """A file with its size and its digest, by which it can be known again."""
    if not path.is_file():
        return f"`{shown(path)}`"
    size = path.stat().st_size
    if size > LARGEST_DIGESTED:
        return f"`{shown(path)}`, {size:,} bytes"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"`{shown(path)}`, {size:,} bytes, sha256 {digest}"
