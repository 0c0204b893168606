"""The exception hierarchy, findings, and how names are shown.

::

    GradgraphError                 anything this package refuses to do, said in one sentence
    ├── ModelError                 the model file or graph is broken, or uses something we cannot read
    ├── UnknownNameError           a name or glob matches nothing (also a LookupError)
    ├── UnsupportedOperatorError   no gradient rule for an operator on the path
    ├── DifferentiationError       the request makes no sense: non-scalar target, integer `wrt`, no path
    ├── ArgumentError              an argument of a Python call is of the wrong kind (also a TypeError)
    ├── BuildError                 loss, optimizer or options do not fit the model
    ├── DataError                  a batch or a data file does not fit the step
    ├── DivergedError              the loss is NaN or infinite
    ├── CheckpointError            a checkpoint does not fit the step, or is damaged
    ├── BusyError                  another thread trains the same trainer
    ├── ParallelError              processes that train together differ, or one of them does not answer
    ├── CompatibilityError         a drop-in for another package cannot do what that one did (also a RuntimeError)
    ├── RuntimeUnavailableError    an execution provider or optional package is not there
    └── OutputError                an artefact could not be written (also an OSError)

Every message names the thing at fault, what was expected and the remedy, in one sentence: ``problem; remedy``. A remedy
that only Python has (an argument, a call) comes with that of the command line, which has options instead::

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
    """One sentence in its parts: ``<subject> <what>, and <expected>; <remedy>``.

    Names from files in them have passed ``errors.shown``.

    Attributes:
        subject: the node, tensor or file, as ``node '/head/Gemm' (Gemm)`` or ``tensor 'w'``.
        what: what is the matter with it, as words that follow the subject: ``has 4 inputs``.
        expected: what was expected instead, a clause of its own: ``this operator takes 2 to 3``; empty where ``what``
            tells.
        remedy: what to do about it: ``export the model again``.
        severity: ``error`` for what is refused, ``warning`` for what works and may not be what was meant.
    """

    subject: str
    what: str
    expected: str = ""
    remedy: str = ""
    severity: Literal["error", "warning"] = "error"

    @property
    def problem(self) -> str:
        """The sentence without its remedy."""
        return f"{self.subject} {self.what}" + (f", and {self.expected}" if self.expected else "")

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}" if self.remedy else self.problem


def shown(name: object) -> str:
    """``name`` as it may stand in a message: control and bidirectional characters escaped, long ones cut in the middle.

    Names come from files that anybody may have written; what reaches the terminal must not steer it.
    """
    return escaped(cut(str(name), _SHOWN_LENGTH))


def cut(text: str, length: int) -> str:
    """``text``, or its two ends around "…"."""
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def escaped(text: str) -> str:
    """``text`` in full, of one line, as it may reach a terminal."""
    return text if text.isprintable() else "".join(_escaped(c) if _steers(c) else c for c in text)


def escaped_json(document: str) -> str:
    """``document``, which is JSON, with all that could steer a terminal written as numbers: the same values."""
    return "\n".join(
        line if line.isprintable() else "".join(_json_escaped(c) if _steers(c) else c for c in line)
        for line in document.split("\n")
    )


def suggestion(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` if something known is close to ``name``, else the first few names there are.

    Capitals and the signs between words do not count: ``CrossEntropy`` is ``cross_entropy``, ``adamW`` is ``adamw``.
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
    """``'a', 'b' and 3 more``: names as they may stand in a message, the first ``most`` of them."""
    every = list(names)
    quoted = ", ".join(f"'{shown(n)}'" for n in every[:most])
    return quoted + (f" and {len(every) - most} more" if len(every) > most else "")


def readable_bytes(size: float) -> str:
    """``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def bare(name: object) -> str:
    """``name`` without capitals and signs between words."""
    text = str(name)
    return "".join(c for c in text.casefold() if c.isalnum()) or text


def _steers(char: str) -> bool:
    """Every category C (control, format, surrogate, unassigned), and the separators other than the plain blank."""
    return unicodedata.category(char)[0] in "CZ" and char != " "


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _json_escaped(char: str) -> str:
    """JSON has escapes of four digits only: two of them beyond 16 bits."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


class Remedies(TypedDict):
    """Keywords of an error: what to do in Python, and on the command line."""

    remedy: str
    shell: str


_QUOTED = re.compile(r"(?<!\w)'[^']*'")


class GradgraphError(Exception):
    """Base of every error raised on purpose by gradgraph.

    Args:
        sentence: what is wrong, and what was expected; it may end in ``"; "`` and a remedy that helps everywhere. The
            middle of one longer than LONGEST_MESSAGE is left out.
        findings: what it says of single nodes and tensors, where there may be several such things.
        remedy: what to do about it in Python; ``str(error)`` ends with it.
        shell: what to do about it on the command line, where that is something else.
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

    @property
    def problem(self) -> str:
        """The sentence without its remedy."""
        remedy = self.remedy
        return str(self) if remedy is None else str(self)[: -len(remedy) - 2]

    @property
    def remedy(self) -> str | None:
        """The remedy in Python; None if the sentence names none."""
        if self._remedy is not None:
            return self._remedy
        sentence = str(self)  # names stand in quotes, and may hold anything
        _, semicolon, last = _QUOTED.sub(lambda quoted: "'" * len(quoted[0]), sentence).rpartition("; ")
        return sentence[-len(last) :] if semicolon and last else None

    @property
    def shell_remedy(self) -> str | None:
        """The remedy on the command line; None if the sentence names none."""
        return self.remedy if self._shell is None else self._shell

    def in_shell(self) -> str:
        """The sentence for those who typed a command, in one line: what ``str`` gives, but with ``shell_remedy``."""
        return " ".join((str(self) if self._shell is None else _sentence(self.problem, self._shell)).split())

    def at(self: E, place: str) -> E:
        """The same error, with the place where it happened in front: ``batch 3: …``."""
        moved = copy.copy(self)
        moved.args = (_sentence(f"{place}: {self.problem}", self.remedy),)
        return moved


def _sentence(problem: str, remedy: str | None) -> str:
    """Both, of LONGEST_MESSAGE characters at most; the remedy is kept, so that it can be read."""
    if not remedy:
        return cut(problem, LONGEST_MESSAGE)
    remedy = cut(remedy, LONGEST_MESSAGE // 2)
    return f"{cut(problem, LONGEST_MESSAGE - len(remedy) - 2)}; {remedy}"


class ModelError(GradgraphError):
    """The model file or graph is damaged, or outside what can be read."""


class UnknownNameError(GradgraphError, LookupError):
    """A name or glob matches nothing in the model."""


class UnsupportedOperatorError(GradgraphError):
    """One or more operators on the gradient path have no rule."""


class DifferentiationError(GradgraphError):
    """The gradient asked for does not exist."""


class ArgumentError(GradgraphError, TypeError):
    """An argument of a Python call is of a kind that the function does not take."""


class BuildError(GradgraphError):
    """The loss, optimizer or options do not fit the model."""


class DataError(GradgraphError):
    """A batch or data file does not fit the step."""


class UnmatchedError(DataError):
    """Data have other names of columns or classes than those that the model was trained on."""


class DivergedError(GradgraphError):
    """The loss is NaN or infinite.

    Attributes:
        batch, hyperparameters: what the step was given. The state is that before it, so
            ``trainer.step(error.batch, **error.hyperparameters)`` repeats it, masks included.
        step: the name of the step, where there are several.
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
    """A checkpoint does not fit the step, or is damaged."""


class BusyError(GradgraphError):
    """Another thread trains the same trainer."""


class ParallelError(GradgraphError):
    """Processes that train together differ, or one of them does not answer."""


class CompatibilityError(GradgraphError, RuntimeError):
    """A drop-in for another package cannot do what that package did, or refuses what it refused."""


class RuntimeUnavailableError(GradgraphError):
    """An execution provider or optional package is missing."""


def refused(first: Finding, *others: Finding) -> ModelError:
    """The error that says the first finding, tells of others and holds all."""
    more = f" (and {len(others)} more: `gradgraph check` lists them)" if others else ""
    return ModelError(f"{first.problem}{more}" + (f"; {first.remedy}" if first.remedy else ""), [first, *others])


class OutputError(GradgraphError, OSError):
    """An artefact could not be written; what was there before is intact."""
