"""Gradient check in float64: for each tensor, ⟨u, g⟩ is compared with a central difference of the function along u.

Here g is the gradient, and u a random direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Feeds = Mapping[str, np.ndarray]
EPSILON = 1e-5  # at this step ε, truncation errors (ε²f'''/6) and cancellation (1e-16/ε) are both near 1e-11
# smaller steps cross fewer kinks, but are lost in rounding errors sooner
STEPS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11)
BENT = 0.25  # minimum change of slope at a kink, relative to the gap between gradient and difference


@dataclass(frozen=True)
class Finding:
    """The check of one tensor: the directional derivative from the gradient, and from central differences."""

    name: str
    analytic: float
    numeric: float
    scale: float

    @property
    def error(self) -> float:
        """The difference of both derivatives, relative to ``scale``; infinite if one of them is not finite."""
        gap = abs(self.analytic - self.numeric)
        return gap / self.scale if np.isfinite(gap) else float("inf")


def directional(
    f: Callable[[Feeds], float], feeds: Feeds, gradients: Feeds, rng: np.random.Generator, epsilon: float = EPSILON
) -> list[Finding]:
    """Return the comparison of each gradient with central differences of ``f`` along one random direction.

    Args:
        f: the scalar function, in float64.
        feeds: the point; tensors to be checked are float64.
        gradients: the gradients of ``f``, by the name of the tensor.
        rng: draws the directions.
        epsilon: the step of the central difference, relative to a direction with entries near 1.
    """
    return [_along(f, feeds, name, g, rng, epsilon) for name, g in gradients.items()]


def _along(
    f: Callable[[Feeds], float], feeds: Feeds, name: str, g: np.ndarray, rng: np.random.Generator, epsilon: float
) -> Finding:
    x = feeds[name]
    if g.shape != x.shape:
        raise AssertionError(f"the gradient of '{name}' has shape {g.shape}; expected {x.shape}")
    u = rng.uniform(0.5, 1.5, x.shape) * rng.choice([-1.0, 1.0], x.shape)
    up, down = (f({**feeds, name: x + sign * epsilon * u}) for sign in (1.0, -1.0))
    numeric = (up - down) / (2 * epsilon)
    terms = np.abs(u * g)
    return Finding(name, float(np.sum(u * g)), numeric, 1.0 + float(terms.sum()) + abs(numeric))


# --- kinks and faults ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quotients:
    """The forward (``ahead``) and backward (``behind``) difference quotient along a direction.

    ``noise`` is a bound of their rounding errors.
    """

    ahead: float
    behind: float
    noise: float

    @property
    def central(self) -> float:
        return (self.ahead + self.behind) / 2

    def bends(self, gap: float) -> bool:
        """Whether the one-sided slopes differ (a kink) by enough to explain an error ``gap`` of a derivative."""
        return abs(self.ahead - self.behind) > BENT * gap + 2 * self.noise


@dataclass(frozen=True)
class Judgement:
    """The result of comparing a directional derivative with differences.

    Attributes:
        verdict: "right" or "wrong"; or "kink" if the one-sided slopes differ, so that differences prove nothing about
            the gradient.
        analytic: the derivative from the gradient.
        numeric: the central difference at the last step.
        error: the gap between both, relative to the summed terms; infinite if one of them is not finite.
        resolved: whether the derivative is larger than the rounding errors of the difference.
        in_between: whether, at a kink, the gap is at most the difference of the one-sided slopes.
    """

    verdict: Literal["right", "kink", "wrong"]
    analytic: float
    numeric: float
    error: float
    resolved: bool
    in_between: bool


def judged(
    analytic: float,
    size: float,
    along: Callable[[float], Quotients],
    elsewhere: Callable[[float], Iterable[Quotients]],
    tolerance: float,
    steps: Sequence[float] = STEPS,
) -> Judgement:
    """Return the comparison of a derivative with central differences of decreasing step.

    It ends when a difference agrees or is too noisy. A disagreement due to curvature, or to a kink between the points
    of the difference, vanishes as the step shrinks; a disagreement due to a wrong gradient does not. If the point
    itself is on a kink, or kinks are too dense, the one-sided slopes differ at every step, in this direction or in
    another.

    Args:
        analytic: the derivative from the gradient.
        size: the sum of the absolute values of the terms of ``analytic``.
        along: returns the quotients at a step in the direction of ``analytic``.
        elsewhere: returns the quotients at a step in other directions, which are only searched for kinks.
        tolerance: the largest accepted relative error.
        steps: the steps, from large to small.
    """
    step, slopes = steps[0], along(steps[0])
    error, resolved = _compared(analytic, size, slopes, tolerance)
    for smaller in steps[1:]:
        if error <= tolerance or not np.isfinite(analytic):
            break
        tried = along(smaller)
        found = _compared(analytic, size, tried, tolerance)
        if not found[1] and np.isfinite(tried.central):  # otherwise the step left the domain
            break
        step, slopes, (error, resolved) = smaller, tried, found
    gap = abs(analytic - slopes.central)
    if error <= tolerance:
        return Judgement("right", analytic, slopes.central, error, resolved, False)
    bent = np.isfinite(gap) and (slopes.bends(gap) or any(q.bends(gap) for q in elsewhere(step)))
    between = gap <= abs(slopes.ahead - slopes.behind)
    return Judgement("kink" if bent else "wrong", analytic, slopes.central, error, resolved, between)


def _compared(analytic: float, size: float, slopes: Quotients, tolerance: float) -> tuple[float, bool]:
    """Return the relative error, and whether the derivative is larger than the rounding errors."""
    largest = max(size, abs(slopes.central))
    gap = abs(analytic - slopes.central)
    error = 0.0 if gap == 0.0 else gap / (largest + slopes.noise / tolerance) if np.isfinite(gap) else float("inf")
    return error, largest * tolerance > slopes.noise


def inner(weights: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> float:
    """Return Σᵢ ⟨wᵢ, vᵢ⟩ in float64."""
    return float(sum(np.sum(np.asarray(w, np.float64) * v) for w, v in zip(weights, values, strict=True)))
