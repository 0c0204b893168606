"""Extreme numbers: where an output is right in float32 or float16, and its gradient could be, the gradient is finite.

Every case of every rule, one input after the other: large numbers whose squares overflow, small ones whose inverses or
squares do not fit, zeros, and, element by element, the largest number there is. The judge is the rule in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.registry import Rule
from gradgraph.verify.cases import Trial, _vjp, trial
from gradgraph.verify.reference import Oracle

Array = np.ndarray[Any, Any]
ROOM = 32  # sums of a few products of such numbers fit; where even the sums do not, a gradient may be infinite
SIZES = {
    np.float32: (1e4, 1e15, 1e19, float(np.finfo(np.float32).max) / ROOM, 1e-20, 1e-42, 0.0),
    np.float16: (12.0, 300.0, float(np.finfo(np.float16).max) / ROOM, 1e-4, 6e-8, 0.0),
}
ELEMENTWISE = ("rules.activation", "rules.elementwise", "composites.gated_units")  # which add nothing up
CASES = [pytest.param(r, i, id=f"{r.op_type}-{i}") for r in rules_with_cases() for i in range(len(r.cases))]
PRODUCTS = "between the operators of the graph a product overflows, whose other factor is 0: as in PyTorch"
ALL, HALF = tuple(SIZES), (np.float16,)
EXCEPTIONS: dict[str, tuple[range, tuple[type, ...], str]] = {  # the cases of a rule, in which precision, and why
    "Loop": (range(99), ALL, PRODUCTS),
    "Scan": (range(99), ALL, PRODUCTS),
    "SequenceConstruct": (range(3, 4), ALL, PRODUCTS),
    "GRU": (range(23, 24), HALF, "states without bound grow until they overflow, and slopes of 0 stand beside them"),
    "Range": (range(99), ALL, "the numbers are how many there are"),
    "RoiAlign": (range(99), ALL, "the numbers are how many samples a box has"),
    "MaxRoiPool": (range(2, 3), ALL, "the numbers are which image is read"),
    "Det": (range(99), HALF, "the ReferenceEvaluator has none"),
    "LayerNormalization": (range(8, 12), HALF, "its second output is no float16, and the trial would declare it so"),
}


@pytest.mark.sweep(0.003)
@pytest.mark.parametrize("dtype", SIZES, ids=lambda d: d.__name__)
@pytest.mark.parametrize(("rule", "at"), CASES)
def test_extreme_numbers_have_finite_gradients(rule: Rule, at: int, dtype: type[np.floating[Any]]) -> None:
    cases, dtypes, reason = EXCEPTIONS.get(rule.op_type, (range(0), (), ""))
    if at in cases and dtype in dtypes:
        pytest.skip(reason)
    with np.errstate(all="ignore"):
        narrow, wide = (_Runs(trial(rule, rule.cases[at], dtype=d)) for d in (dtype, np.float64))
        whole = rule.emit.__module__.endswith(ELEMENTWISE)
        sizes = (*SIZES[dtype], *([float(np.finfo(dtype).max)] if whole else []))
        own = narrow.trial.feeds
        tried = [(n, x) for n in narrow.trial.wrt for x in _extremes(own[n], sizes)]
        sentences = [_not_finite(narrow, wide, {**own, n: x}, f"{n} = {x.ravel()[:3]}") for n, x in tried]
    assert [s for s in sentences if s] == []


def test_the_exceptions_are_of_rules_that_exist() -> None:
    assert EXCEPTIONS.keys() <= {r.op_type for r in rules_with_cases()}


class _Runs:
    """A case and its gradient, in one precision."""

    def __init__(self, t: Trial) -> None:
        self.trial = t
        self.forward, self.backward = Oracle(t.model), Oracle(_vjp(t.model, t.read, t.wrt))

    def outputs(self, feeds: dict[str, Array]) -> list[Array]:
        results = self.forward(self._typed(feeds))
        return [np.asarray(results[name]) for name in self.trial.read]

    def gradients(self, feeds: dict[str, Array], ys: list[Array]) -> list[Array]:
        """For cotangents of 0.5, 0.75 and 1 in turns."""
        cotangents = {
            f"{name}.cotangent": np.resize([0.5, 0.75, 1.0], y.shape).astype(y.dtype)
            for name, y in zip(self.trial.read, ys, strict=True)
        }
        results = self.backward({**self._typed(feeds), **cotangents})
        return list(results.values())[-len(self.trial.wrt) :]

    def _typed(self, feeds: dict[str, Array]) -> dict[str, Array]:
        return {name: np.asarray(a, self.trial.feeds[name].dtype) for name, a in feeds.items()}


def _extremes(x: Array, sizes: tuple[float, ...]) -> Iterator[Array]:
    """``x`` with one number of each size, or all of it, of one sign and of both."""
    for size in sizes if x.size else ():
        one = x.copy()
        one.flat[0] = size
        yield from (one, np.full_like(x, size), np.asarray(np.sign(x) * x.dtype.type(size), x.dtype))


def _not_finite(narrow: _Runs, wide: _Runs, feeds: dict[str, Array], where: str) -> str:
    """A sentence about a gradient that is not finite and could be; "" where all is well."""
    ys, exact = narrow.outputs(feeds), wide.outputs(feeds)
    if not all(map(_right, ys, exact)):
        return ""
    found = narrow.gradients(feeds, ys)
    if all(np.isfinite(g).all() for g in found):
        return ""
    for name, g, t in zip(narrow.trial.wrt, found, wide.gradients(feeds, exact), strict=True):
        fits = np.abs(t) < float(np.finfo(g.dtype).max) / 2
        if not np.isfinite(g[fits]).all():
            return f"at {where} the gradient of {name} is {g[fits][:3]}, not {t[fits][:3]}"
    return ""


def _right(y: Array, exact: Array) -> bool:
    """Is an output finite, and within a hundredth of the largest number of the exact one?"""
    gap, most = np.abs(y.astype(np.float64) - exact), np.abs(exact).max(initial=0.0)
    return bool(np.isfinite(most) and (gap <= 0.01 * most).all())
