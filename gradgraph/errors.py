"""The exception hierarchy.

::

    GradgraphError                 anything this package refuses to do, said in one sentence
    ├── ModelError                 the model file or graph is broken, or uses something we cannot read
    ├── UnknownNameError           a name or glob matches nothing (also a LookupError)
    ├── UnsupportedOperatorError   no gradient rule for an operator on the path
    ├── DifferentiationError       the request makes no sense: non-scalar target, integer `wrt`, no path
    ├── BuildError                 loss, optimizer or options do not fit the model
    ├── DataError                  a batch or a data file does not fit the step
    ├── DivergedError              the loss is NaN or infinite
    ├── CheckpointError            a checkpoint does not fit the step, or is damaged
    ├── RuntimeUnavailableError    an execution provider or optional package is not there
    └── OutputError                an artefact could not be written (also an OSError)

Every message names the thing at fault, what was expected and the remedy, in one sentence.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from gradgraph.findings import Finding

LONGEST_MESSAGE = 2000  # characters
_SHOWN_LENGTH = 120


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
    # every category C (control, format, surrogate, unassigned) and the separators other than the plain blank
    return "".join(_escaped(c) if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in text)


def suggestion(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` if something known is close to ``name``, else the first few names there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean '{shown(close[0])}'?"
    return f"; there is {', '.join(shown(n) for n in names[:8])}{' …' if len(names) > 8 else ''}" if names else ""


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


class GradgraphError(Exception):
    """Base of every error raised on purpose by gradgraph.

    Args:
        message: one sentence; the middle of one longer than LONGEST_MESSAGE is left out.
        findings: what it says of single nodes and tensors, where there may be several such things.
    """

    def __init__(self, message: object = "", findings: Iterable[Finding] = ()) -> None:
        super().__init__(cut(str(message), LONGEST_MESSAGE))
        self.findings = tuple(findings)


class ModelError(GradgraphError):
    """The model file or graph is damaged, or outside what can be read."""


class UnknownNameError(GradgraphError, LookupError):
    """A name or glob matches nothing in the model."""


class UnsupportedOperatorError(GradgraphError):
    """One or more operators on the gradient path have no rule."""


class DifferentiationError(GradgraphError):
    """The gradient asked for does not exist."""


class BuildError(GradgraphError):
    """The loss, optimizer or options do not fit the model."""


class DataError(GradgraphError):
    """A batch or data file does not fit the step."""


class DivergedError(GradgraphError):
    """The loss is NaN or infinite.

    Attributes:
        batch, hyperparameters: what the step was given. The state is that before it, so
            ``trainer.step(error.batch, **error.hyperparameters)`` repeats it, masks included.
    """

    def __init__(
        self, message: str, batch: Mapping[str, Any] | None = None, hyperparameters: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(message)
        self.batch = dict(batch or {})
        self.hyperparameters = dict(hyperparameters or {})


class CheckpointError(GradgraphError):
    """A checkpoint does not fit the step, or is damaged."""


class RuntimeUnavailableError(GradgraphError):
    """An execution provider or optional package is missing."""


class OutputError(GradgraphError, OSError):
    """An artefact could not be written; what was there before is intact."""
