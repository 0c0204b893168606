"""Printing: results go to stdout, messages to stderr.

Names in a model are untrusted, so all printed text passes through ``escaped`` or ``escaped_json``, and rich markup is
off. rich decides about colour (none for ``NO_COLOR``, ``TERM=dumb`` and pipes) and is imported on demand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from gradgraph.errors import LONGEST_MESSAGE, Finding, cut, escaped, escaped_json, shown


@dataclass
class Talk:
    """The output settings and state of the running command.

    Attributes:
        debug: whether errors are printed with a traceback.
        quiet: whether only errors are printed on stderr.
        arguments: the command line as typed.
        answered: whether a JSON document has been printed on stdout.
        follows: whether this process is a rank other than 0, which does not print.
        ends_all: whether only this rank has failed, so that it must abort all other ranks.
    """

    debug: bool = False
    quiet: bool = False
    arguments: list[str] = field(default_factory=list)
    answered: bool = False
    follows: bool = False
    ends_all: bool = False

    def begin(self, arguments: Sequence[str]) -> None:
        self.debug = self.quiet = self.answered = False
        self.arguments = list(arguments)


talk = Talk()


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


# --- stderr --------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print ``text`` on stderr, unless ``--quiet`` is set. Write errors, such as a full disk, are ignored."""
    if not (talk.quiet or talk.follows):
        with contextlib.suppress(OSError):
            click.echo(lines_of(text), err=True)


def error(sentence: str) -> None:
    from rich.text import Text

    if talk.follows:
        return
    text = cut(escaped(sentence), LONGEST_MESSAGE)
    with contextlib.suppress(OSError):
        _console(stderr=True).print(Text.assemble(("error: ", "bold red"), text))


@contextlib.contextmanager
def notes() -> Iterator[None]:
    """Print warnings that the library logs on stderr, as ``note: …``."""
    handler = _Notes()
    logger = logging.getLogger("gradgraph")
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


@contextlib.contextmanager
def printed_log(name: str) -> Iterator[None]:
    """Print the INFO messages of the logger ``name`` on stderr; warnings are printed by ``notes``."""
    handler, logger = _Lines(), logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            say(record.getMessage())


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}")


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if stderr is a terminal; yield a function to call with the completed and the total number."""
    if talk.quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- stdout --------------------------------------------------------------------------------------------


def emit(text: str) -> None:
    if not talk.follows:
        click.echo(lines_of(text))


def emit_json(document: Any) -> None:
    """Print one JSON document on stdout; NaN and infinities, which JSON does not have, become null."""
    if not talk.follows:
        click.echo(escaped_json(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False)))
    talk.answered = True


def emit_failure(sentence: str, kind: str, remedy: str | None = None, findings: Iterable[Finding] = ()) -> None:
    """With ``--json``, print the failure as a JSON document on stdout, unless one has been printed already.

    Write errors are ignored, as they may be the failure itself, which is also printed on stderr.
    """
    if "--json" in talk.arguments and not talk.answered:
        parts = [dataclasses.asdict(finding) for finding in findings]
        with contextlib.suppress(OSError):
            emit_json({"error": sentence, "kind": kind, "remedy": remedy, "findings": parts})


def lines_of(text: str) -> str:
    """Return ``text`` with each line escaped for a terminal."""
    return "\n".join(map(escaped, text.split("\n")))


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[object]], numeric: Sequence[str] = ()) -> None:
    """Print a table with aligned columns, the ``numeric`` columns right-aligned; lines are not truncated or wrapped."""
    from gradgraph.runtime.saved.printed import text_table

    texts = [i for i, name in enumerate(columns) if name not in numeric]
    head, *lines = text_table([columns, *([shown(cell) for cell in row] for row in rows)], texts)
    is_coloured = _console(stderr=False).color_system is not None
    click.echo(click.style(head, bold=True) if is_coloured else head)
    for line in lines:
        click.echo(line)


def console() -> Any:
    """Return the console on stdout, in colour on a terminal."""
    return _console(stderr=False)


def _console(stderr: bool) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
