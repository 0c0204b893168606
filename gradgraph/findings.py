"""Findings are data: each says what is wrong, or looks wrong, with one node or tensor of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
