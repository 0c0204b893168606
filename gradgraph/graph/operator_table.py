"""Tables of functions by operator, filled by decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F")


class OperatorTable(dict[str, F]):
    """Functions by operator; the decorator ``@table("Conv", "Gemm")`` adds a function for these operators."""

    def __call__(self, *op_types: str) -> Callable[[F], F]:
        def register(function: F) -> F:
            self.update(dict.fromkeys(op_types, function))
            return function

        return register
