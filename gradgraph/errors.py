"""The exception hierarchy, findings, and how names are shown.

::

    GradgraphError                 base class of all errors raised on purpose
    ├── ModelError                 the model file or graph is damaged, or uses an unsupported feature
    ├── UnknownNameError           a name or glob matches nothing (also a LookupError)
    ├── UnsupportedOperatorError   no gradient rule for an operator on the path
    ├── DifferentiationError       the gradient does not exist: non-scalar target, integer `wrt`, no path
    ├── ArgumentError              an argument of a Python call is of the wrong kind (also a TypeError)
    ├── BuildError                 loss, optimizer or options do not match the model
    ├── DataError                  a batch or a data file does not match the step
    ├── DivergedError              the loss is NaN or infinite
    ├── CheckpointError            a checkpoint does not match the step, or is damaged
    ├── BusyError                  another thread is using the same trainer
    ├── ParallelError              processes that train together differ, or one of them does not respond
    ├── CompatibilityError         a drop-in replacement does not support a call (also a RuntimeError)
    ├── RuntimeUnavailableError    an execution provider or optional package is missing
    └── OutputError                an output cannot be written (also an OSError)

Every message is one sentence, ``problem; remedy``, which names the faulty item, what was expected, and how to fix it.
If the remedy is a Python argument or call, ``shell`` is the remedy for the command line::

    raise OutputError(f"the folder '{name}' is not empty", remedy="pass force=True", shell="add --force")
"""

from __future__ import annotations

import copy
import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

E = TypeVar("E", bound="GradgraphError")

LONGEST_MESSAGE = 2000  # characters
_SHOWN_LENGTH = 120


@dataclass(frozen=True)
class Finding:
    """The parts of a message: ``<subject> <what>, and <expected>; <remedy>``.

    Names from files have been escaped by ``errors.shown``.

    Attributes:
        subject: the node, tensor or file, as ``node '/head/Gemm' (Gemm)`` or ``tensor 'w'``.
        what: the problem, as words that follow the subject: ``has 4 inputs``.
        expected: what was expected instead, a clause of its own: ``this operator takes 2 to 3``; may be
            empty.
        remedy: how to fix it: ``export the model again``.
        severity: ``error`` for rejected models, ``warning`` for models that work, but perhaps not as intended.
    """

    subject: str
    what: str
    expected: str = ""
    remedy: str = ""
    severity: Literal["error", "warning"] = "error"

    @property
    def problem(self) -> str:
        """The message without its remedy."""
        return f"{self.subject} {self.what}" + (f", and {self.expected}" if self.expected else "")

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}" if self.remedy else self.problem


def shown(name: object) -> str:
    """Return ``name`` for use in a message: control and bidirectional characters escaped, long names shortened.

    Names come from untrusted files and must not control the terminal.
    """
    return escaped(cut(str(name), _SHOWN_LENGTH))


def cut(text: str, length: int) -> str:
    """Return ``text``; if it is longer than ``length``, its beginning and its end around "…"."""
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def escaped(text: str) -> str:
    """Return ``text`` in full, escaped for one line of a terminal."""
    return text if text.isprintable() else "".join(_escaped(c) if _steers(c) else c for c in text)


def escaped_json(document: str) -> str:
    """Return a JSON ``document`` with terminal control characters as escapes, which does not change its values."""
    return "\n".join(
        line if line.isprintable() else "".join(_json_escaped(c) if _steers(c) else c for c in line)
        for line in document.split("\n")
    )


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` if a known name is similar to ``name``, else the first few known names.

    Case and word separators are ignored: ``CrossEntropy`` is ``cross_entropy``, ``adamW`` is ``adamw``.
    """
    names = list(known)
    alike: dict[str, str] = {}
    for known_name in names:
        alike.setdefault(bare(known_name), known_name)
    close = difflib.get_close_matches(bare(name), alike, n=1)
    if close:
        return f"; did you mean '{shown(alike[close[0]])}'?"
    return f"; there is {', '.join(shown(n) for n in names[:8])}{' …' if len(names) > 8 else ''}" if names else ""


def listed(names: Iterable[object], most: int = 8) -> str:
    """Return the first ``most`` names for use in a message: ``'a', 'b' and 3 more``."""
    every = list(names)
    quoted = ", ".join(f"'{shown(n)}'" for n in every[:most])
    return quoted + (f" and {len(every) - most} more" if len(every) > most else "")


def counted(count: int, noun: str) -> str:
    """Return ``1 input`` or ``3 inputs`` for use in a message; the plural of ``noun`` must end in s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def row_at(index: int, in_file: bool | None = None) -> str:
    """Return the position of a row for use in a message.

    Rows of files are counted from 1, without the header; rows of lists, arrays and data frames have indices from 0.

    Args:
        index: the index, from 0.
        in_file: whether the rows are those of a file: ``row 4``, else ``the row at index 3``. If None, they may be
            either, and the position is ``row 4 (index 3)``.
    """
    if in_file is None:
        return f"row {index + 1} (index {index})"
    return f"row {index + 1}" if in_file else f"the row at index {index}"


def readable_bytes(size: float) -> str:
    """Format a size as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def bare(name: object) -> str:
    """Return ``name`` in lower case without word separators."""
    text = str(name)
    return "".join(c for c in text.casefold() if c.isalnum()) or text


def _steers(char: str) -> bool:
    """Whether ``char`` may control a terminal or be invisible: Unicode categories C and Z, except the space."""
    return unicodedata.category(char)[0] in "CZ" and char != " "


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _json_escaped(char: str) -> str:
    r"""Escape a character as JSON does, such as ``\u00e9``; a character beyond 16 bits becomes two escapes."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


class Remedies(TypedDict):
    """Keyword arguments of an error: remedies in Python and on the command line."""

    remedy: str
    shell: str


_QUOTED = re.compile(r"(?<!\w)'[^']*'")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")


class GradgraphError(Exception):
    """Base of every error raised on purpose by gradgraph.

    Args:
        sentence: what is wrong, and what was expected; it may end in ``"; "`` and a remedy that applies everywhere. The
            middle of a sentence longer than LONGEST_MESSAGE is omitted.
        findings: the problems of single nodes and tensors, if there may be several.
        remedy: how to fix it in Python; ``str(error)`` ends with it.
        shell: how to fix it on the command line, if that differs.
    """

    def __init__(
        self,
        sentence: object = "",
        findings: Iterable[Finding] = (),
        *,
        remedy: str | None = None,
        shell: str | None = None,
    ) -> None:
        super().__init__(_sentence(str(sentence), remedy))
        self.findings = tuple(findings)
        self._remedy, self._shell = remedy, shell
        self._typed: GradgraphError | None = None

    @classmethod
    def of_options(cls: type[E], sentence: str, python: str = "") -> E:
        """Return an error about options that ``sentence`` names as flags, such as ``--log-every``.

        The sentence for Python is ``python``; by default it names them as arguments, such as ``log_every``.
        """
        error = cls(python or in_python(sentence))
        error._typed = GradgraphError(sentence)
        return error

    @property
    def problem(self) -> str:
        """The message without its remedy."""
        remedy = self.remedy
        return str(self) if remedy is None else str(self)[: -len(remedy) - 2]

    @property
    def remedy(self) -> str | None:
        """The remedy in Python; None if the message contains none."""
        if self._remedy is not None:
            return self._remedy
        sentence = str(self)  # names are quoted, and may contain anything
        _, semicolon, last = _QUOTED.sub(lambda quoted: "'" * len(quoted[0]), sentence).rpartition("; ")
        return sentence[-len(last) :] if semicolon and last else None

    @property
    def shell_remedy(self) -> str | None:
        """The remedy on the command line; None if the message contains none."""
        if self._typed is not None:
            return self._typed.remedy
        return self.remedy if self._shell is None else self._shell

    def in_shell(self) -> str:
        """Return the message on one line with the remedy for the command line."""
        if self._typed is not None:
            return self._typed.in_shell()
        return " ".join((str(self) if self._shell is None else _sentence(self.problem, self._shell)).split())

    def at(self: E, place: str) -> E:
        """Return the same error, prefixed with the place where it happened: ``batch 3: …``."""
        moved = copy.copy(self)
        moved.args = (_sentence(f"{place}: {self.problem}", self.remedy),)
        moved._typed = None if self._typed is None else self._typed.at(place)
        return moved


def in_python(text: str) -> str:
    """Return ``text`` with the names of arguments in place of flags: ``log_every`` for ``--log-every``."""
    return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)


def _sentence(problem: str, remedy: str | None) -> str:
    """Return ``problem; remedy`` in at most LONGEST_MESSAGE characters, of which the remedy gets at most half."""
    if not remedy:
        return cut(problem, LONGEST_MESSAGE)
    remedy = cut(remedy, LONGEST_MESSAGE // 2)
    return f"{cut(problem, LONGEST_MESSAGE - len(remedy) - 2)}; {remedy}"


class ModelError(GradgraphError):
    """Raised for a model file or graph that is damaged, or uses something that cannot be read."""


class UnknownNameError(GradgraphError, LookupError):
    """Raised for a name or glob that matches nothing in the model."""


class UnsupportedOperatorError(GradgraphError):
    """Raised for operators on the gradient path without a gradient rule."""


class DifferentiationError(GradgraphError):
    """Raised if the requested gradient does not exist."""


class ArgumentError(GradgraphError, TypeError):
    """Raised for an argument of the wrong type or value."""


class BuildError(GradgraphError):
    """Raised if the loss, optimizer or options do not match the model."""


class DataError(GradgraphError):
    """Raised if a batch or data file does not match the step."""


class UnmatchedError(DataError):
    """Raised if the names of columns or classes differ from those of the training data."""


class DivergedError(GradgraphError):
    """Raised if the loss is NaN or infinite.

    Attributes:
        batch, hyperparameters: the inputs of the step. The trainer still has the state before the step, so
            ``trainer.step(error.batch, **error.hyperparameters)`` repeats the step, dropout masks included.
        step: the name of the step, if there are several.
    """

    def __init__(
        self,
        sentence: str,
        batch: Mapping[str, Any] | None = None,
        hyperparameters: Mapping[str, float] | None = None,
        step: str | None = None,
        *,
        remedy: str | None = None,
        shell: str | None = None,
    ) -> None:
        super().__init__(sentence, remedy=remedy, shell=shell)
        self.step = step
        self.batch = dict(batch or {})
        self.hyperparameters = dict(hyperparameters or {})


class CheckpointError(GradgraphError):
    """Raised for a checkpoint that is damaged, or does not match the step."""


class BusyError(GradgraphError):
    """Raised if another thread is using the same trainer."""


class ParallelError(GradgraphError):
    """Raised if processes that train together differ, or one of them does not respond."""


class CompatibilityError(GradgraphError, RuntimeError):
    """Raised if a drop-in replacement does not support a call, or rejects a call that the original package rejected."""


class RuntimeUnavailableError(GradgraphError):
    """Raised if an execution provider or optional package is missing."""


def refused(first: Finding, *others: Finding) -> ModelError:
    """Return a ModelError with these findings; its message states the first finding and the number of others."""
    more = f" (and {len(others)} more: `gradgraph check` lists them)" if others else ""
    return ModelError(f"{first.problem}{more}" + (f"; {first.remedy}" if first.remedy else ""), [first, *others])


class OutputError(GradgraphError, OSError):
    """Raised if an output cannot be written; existing files are intact."""
