"""``gradgraph train --run FOLDER``: all files of a run in one folder, with a README.md that explains them.

README.md is written before the first step and again at the end, so that it also explains how to resume a run that was
killed. Existing files are not overwritten: without ``--force``, a run requires an empty folder. A resumed run keeps its
recipe, its first command, and a README.md that the user wrote. All commands are appended to commands.txt.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradgraph.errors import DataError, OutputError, escaped, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.path_kinds import BEST, LAST, RECIPE, STEP
from gradgraph.files.untrusted.regular import MissingFileError, UnreadableError, regular_bytes
from gradgraph.runs.run_options import Run
from gradgraph.runs.run_recipes import tables, written

if TYPE_CHECKING:
    from gradgraph.runtime.saved.history import History
    from gradgraph.runtime.trainer import Trainer

PAGE, COMMANDS = "README.md", "commands.txt"
PLOT = "plot.svg"
MISTAKES = "mistakes.html"
_TRAINED = "Trained by gradgraph"  # the first line of README.md, after its title
FILES = {  # options that name a file: its name in the folder, and its description
    "export": ("trained.onnx", "the trained model, for any runtime"),
    "checkpoint": (LAST, "weights, optimizer state and progress of the last epoch, to resume from"),
    "history": ("history.csv", "loss and metrics of each epoch"),
    "log": ("log.jsonl", "metrics every few steps, as JSON lines"),
    "out": (STEP, "the training step: its graphs, and a manifest that describes them"),
}
OTHERS = {
    BEST: "the state of the best epoch, with `--patience`",
    PLOT: "the learning curves",
    "tokenizer.json": "the model's tokenizer",
    MISTAKES: "the held-out images that the model misclassifies, and the classes that it confuses",
    COMMANDS: "the commands of this run, each with the time (UTC) and the step count at its start",
    RECIPE: "all options of this run; pass it to `gradgraph train` in place of a model",
}
LARGEST_LIST = 1 << 20  # at most these bytes of commands.txt are read
LARGEST_DIGESTED = 1 << 30  # bytes; for larger input files, README.md lists only the size


@dataclass
class RunFolder:
    """The output folder of a run.

    Args:
        path: the path of the folder.
        recipe: all options of the run, as recipe tables.
        read: the input files by role, such as "data".
        command: the command that starts or resumes the run.
        resume: whether the run is resumed.
    """

    path: Path
    recipe: Mapping[str, Mapping[str, Any]]
    read: Mapping[str, Path]
    command: str
    resume: bool = False
    _first: str = ""  # the command that started the run

    @classmethod
    def of(cls, run: Run, words: Sequence[str]) -> RunFolder | None:
        """Return the folder of ``run``, or None if ``run.run`` is unset.

        Args:
            run: the run.
            words: the command line as typed; empty in Python.
        """
        if run.run is None:
            return None
        read = {"model": run.model, "data": run.data, "validation": run.validation, "weights": run.weights}
        command = ["gradgraph", *(words or ["train", str(run.run / RECIPE), *(["--resume"] if run.resume else [])])]
        return cls(run.run, tables(run), {what: file for what, file in read.items() if file is not None},
                   shlex.join(command), run.resume)  # fmt: skip

    def filled(self, run: Run) -> Run:
        """Return ``run`` with unset output paths set to files in this folder.

        The path of the step folder is only set if the run builds a step.
        """
        names = [name for name in FILES if not getattr(run, name) and not (name == "out" and run.trains_step)]
        outputs: dict[str, Any] = {name: self.path / FILES[name][0] for name in names}
        outputs |= {"log": (outputs["log"],)} if "log" in outputs else {}
        return replace(run, **outputs)

    def check(self, force: bool) -> None:
        """Raise OutputError if the folder is not empty, unless ``force`` is set or the run in the folder is resumed."""
        if force or not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if self.resume and not (self.path / RECIPE).is_file():
            raise OutputError.of_options(
                f"the folder '{shown(self.path)}' contains no run to resume, as it has no {RECIPE}; pass the folder of "
                "a run, or an empty folder, to --run"
            )
        # an existing checkpoint is checked elsewhere, with a better message
        if not self.resume and not (self.path / LAST).exists():
            raise OutputError.of_options(
                f"the folder '{shown(self.path)}' is not empty; pass another folder to --run, or add --force to "
                "overwrite its contents"
            )

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Return a context for which the folder exists; it is removed at the end if still empty.

        Raises:
            OutputError: the folder cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError.of_options(
                f"the folder '{shown(self.path)}' cannot be created ({error.strerror}); pass another path to --run"
            ) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def begin(self, trainer: Trainer) -> None:
        """Write the recipe, commands.txt, and a README.md that describes an unfinished run.

        Raises:
            OutputError: if a file cannot be written.
        """
        if not self.resume:
            for name in (BEST, PLOT, MISTAKES, COMMANDS):  # left by the overwritten run
                (self.path / name).unlink(missing_ok=True)
        if not (self.resume and (self.path / RECIPE).exists()):
            write_atomically(self.path / RECIPE, written(self.recipe).encode() + b"\n")
        before = self._commands()
        self._first = before[0] if before else self.command
        with (self.path / COMMANDS).open("a", encoding="utf-8") as file:
            file.write(f"# {_now()}, after {trainer.progress.steps:,} steps\n{escaped(self.command)}\n")
        self._write(trainer, ["Not finished: still running, or stopped."])

    def show_mistakes(self, trainer: Trainer, held_out: Any) -> None:
        """Write mistakes.html, the misclassified images of ``held_out``, if the model classifies images."""
        from gradgraph.export import save_mistakes

        if held_out is not None and any(len(spec.shape) == 4 for spec in trainer.manifest.inputs):
            with contextlib.suppress(DataError):
                save_mistakes(trainer, held_out, self.path / MISTAKES, title=self.path.name)

    def finish(self, trainer: Trainer, history: History) -> None:
        """Draw the learning curves, and rewrite README.md with the results."""
        drawing = self._draw(history) if history else []
        restored = history.restored
        row = history.row(-1 if restored is None else restored) if history else {}
        what = "the last epoch" if restored is None else "the best epoch, whose weights were kept"
        self._write(
            trainer,
            [f"Of {what}:", "", *_table(["column", "value"], ((k, f"{v:.6g}") for k, v in row.items())), *drawing],
        )

    def draw(self, history: History) -> None:
        """Draw the learning curves of an interrupted run."""
        if history:
            self._draw(history)

    def _draw(self, history: History) -> list[str]:
        """Draw the learning curves, and return the README.md lines that embed the picture."""
        history.to_svg(self.path / PLOT)
        return ["", f"![The curves of loss and metrics over the epochs]({PLOT})"]

    def _commands(self) -> list[str]:
        """Return the commands currently in commands.txt."""
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
        """Whether README.md does not exist, or was written by a run and not by the user."""
        try:
            return _TRAINED.encode() in regular_bytes(self.path / PAGE)[:1000]
        except MissingFileError:
            return True
        except UnreadableError:
            return False

    def _next_commands(self) -> list[str]:
        run, data = str(self.path), str(self.read.get("validation", self.read["data"]))
        commands = {
            "train for more epochs": ["train", run, "--resume"],
            "show the samples with the largest losses": ["evaluate", run, "--data", data, "--worst", "10"],
            "write its predictions": ["predict", run, "--data", data],
            "compare it with other runs in the same folder": ["runs", str(self.path.parent)],
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
    """Return a line of README.md for an input file: its path, size and digest."""
    if not path.is_file():
        return f"`{shown(path)}`"
    size = path.stat().st_size
    if size > LARGEST_DIGESTED:
        return f"`{shown(path)}`, {size:,} bytes"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return f"`{shown(path)}`, {size:,} bytes, sha256 {digest.hexdigest()}"
