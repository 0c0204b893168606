"""Symbolic sizes, as polynomials over named sizes.

For an input of shape ``("batch", ...)``, ``x.shape[0] * 8 + 1`` is the ``Dim`` ``8*batch + 1``. Arithmetic is symbolic,
equal formulas are equal sizes, and nodes that compute a size are written only where an operator needs the number. An
integer division that is not exact introduces a new name such as ``floor(width/2)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from gradgraph.errors import ModelError

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

Monomial: TypeAlias = tuple[str, ...]
Extent: TypeAlias = "int | Dim"


class Dim:
    """A size known only at run time: a sum of products of named sizes.

    Dims support ``+ - * // %`` with ints and other Dims, and are accepted wherever a traced function accepts a size or
    a number. Using a Dim as a Python number, as in ``if`` or ``range``, raises ``ModelError``.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: dict[Monomial, int] = dict(sorted(terms.items(), key=lambda t: (-len(t[0]), t[0])))

    @staticmethod
    def named(name: str) -> Dim:
        """Return the size called ``name`` as a ``Dim``."""
        return Dim({(name,): 1})

    @property
    def name(self) -> str | None:
        """The name of a single named size; None for other formulas."""
        ((monomial, coefficient), *rest) = self.terms.items()
        return monomial[0] if not rest and coefficient == 1 and len(monomial) == 1 else None

    def __str__(self) -> str:
        parts = []
        for monomial, coefficient in self.terms.items():
            number = [] if coefficient in (1, -1) and monomial else [str(abs(coefficient))]
            parts.append(("-" if coefficient < 0 else "") + "*".join([*number, *monomial]))
        return " + ".join(parts).replace("+ -", "- ")

    def __repr__(self) -> str:
        return f"Dim({self})"

    def same(self, other: Any) -> bool:
        """Whether ``other`` is a ``Dim`` with an equal formula."""
        return isinstance(other, Dim) and self.terms == other.terms

    # --- arithmetic ---

    def __add__(self, other: Any) -> Any:
        return _combine(self, other, 1) if isinstance(other, int | Dim) else self._tensor() + other

    def __radd__(self, other: Any) -> Any:
        return self + other if isinstance(other, int | Dim) else other + self._tensor()

    def __sub__(self, other: Any) -> Any:
        return _combine(self, other, -1) if isinstance(other, int | Dim) else self._tensor() - other

    def __rsub__(self, other: Any) -> Any:
        return -self + other if isinstance(other, int | Dim) else other - self._tensor()

    def __neg__(self) -> Any:
        return self * -1

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int | Dim):
            return self._tensor() * other
        terms: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            for n, d in _terms(other).items():
                key = tuple(sorted(m + n))
                terms[key] = terms.get(key, 0) + c * d
        return _simplified(terms)

    def __rmul__(self, other: Any) -> Any:
        return self * other if isinstance(other, int | Dim) else other * self._tensor()

    def __floordiv__(self, other: Any) -> Any:
        return floor_divide(self, other) if isinstance(other, int | Dim) else self._tensor() // other

    def __rfloordiv__(self, other: Any) -> Any:
        return floor_divide(other, self) if isinstance(other, int | Dim) else other // self._tensor()

    def __mod__(self, other: Any) -> Any:
        return self - (self // other) * other if isinstance(other, int | Dim) else self._tensor() % other

    def __truediv__(self, other: Any) -> Any:
        return self._tensor() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self._tensor()

    def __pow__(self, other: Any) -> Any:
        return self._tensor().float() ** other

    def __rpow__(self, other: Any) -> Any:
        return float(other) ** self._tensor().float()

    def _tensor(self) -> Tensor:
        from gradgraph.frontend.trace import tensor  # trace imports this module

        return tensor(self)

    # --- operations that require a number ---

    def __eq__(self, other: object) -> bool:
        if self.same(other):
            return True
        if isinstance(other, Dim | int):
            raise self._undecided(f"compared with {other}")
        return False

    def __hash__(self) -> int:
        return hash(tuple(self.terms.items()))

    def __bool__(self) -> bool:
        raise self._undecided("tested")

    def __index__(self) -> int:
        raise self._undecided("used as a Python integer")

    __int__ = __index__

    def __float__(self) -> float:
        raise self._undecided("used as a Python number")

    def __lt__(self, other: Any) -> bool:
        raise self._undecided(f"compared with {other}")

    __le__ = __gt__ = __ge__ = __lt__

    def _undecided(self, use: str) -> ModelError:
        return ModelError(
            f"size '{self}' is known only at run time and cannot be {use} while the graph is traced; set that input "
            "dimension to a number to fix it"
        )


def same(a: Extent, b: Extent) -> bool:
    """Whether two sizes are known to be equal."""
    return a.same(b) if isinstance(a, Dim) else isinstance(b, int) and a == b


def product(sizes: Iterable[Extent]) -> Extent:
    result: Extent = 1
    for size in sizes:
        result = result * size
    return result


def floor_divide(a: Extent, b: Extent) -> Extent:
    """Return ``a // b``: the quotient's formula if ``b`` divides ``a`` exactly, else a named size ``floor(a/b)``."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if isinstance(b, int) and b == 0:
        raise ModelError(f"size '{a}' is divided by zero")
    quotient = _exact_quotient(a, b)
    if quotient is None:
        name = f"floor({_grouped(a)}/{_grouped(b)})"
        QUOTIENTS[name] = a, b
        quotient = Dim.named(name)
    return quotient


QUOTIENTS: dict[str, tuple[Extent, Extent]] = {}  # the operands of each name floor(a/b)


def _exact_quotient(a: Extent, b: Extent) -> Extent | None:
    """Return ``a / b`` if ``a`` equals ``b``, or ``b`` is a single term that divides every term of ``a``; else None."""
    divisor = _terms(b)
    if len(divisor) > 1:
        return 1 if same(a, b) else None
    ((names, number),) = divisor.items()
    result: dict[Monomial, int] = {}
    for monomial, coefficient in _terms(a).items():
        rest = list(monomial)
        for name in names:
            if name not in rest:
                return None
            rest.remove(name)
        if coefficient % number:
            return None
        result[tuple(rest)] = coefficient // number
    return _simplified(result)


def _combine(a: Dim, b: Extent, sign: int) -> Extent:
    terms = dict(a.terms)
    for monomial, coefficient in _terms(b).items():
        terms[monomial] = terms.get(monomial, 0) + sign * coefficient
    return _simplified(terms)


def _terms(size: Extent) -> Mapping[Monomial, int]:
    return size.terms if isinstance(size, Dim) else {(): size}


def _simplified(terms: Mapping[Monomial, int]) -> Extent:
    rest = {m: c for m, c in terms.items() if c}
    if not rest:
        return 0
    return rest[()] if list(rest) == [()] else Dim(rest)


def _grouped(size: Extent) -> str:
    return f"({size})" if isinstance(size, Dim) and size.name is None else str(size)
