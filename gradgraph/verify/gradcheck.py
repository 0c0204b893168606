"""Gradcheck as one inner product per tensor: ⟨u, g⟩ against a central difference along u, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Feeds = Mapping[str, np.ndarray]
EPSILON = 1e-5  # truncation ~ε²f'''/6 and cancellation ~1e-16/ε are both near 1e-11


@dataclass(frozen=True)
class Finding:
    """One tensor's check: the directional derivative from the gradient, and from central differences."""

    name: str
    analytic: float
    numeric: float
    scale: float

    @property
    def error(self) -> float:
        """The difference relative to the size of the terms that were added up (0 when both are NaN-free and equal)."""
        gap = abs(self.analytic - self.numeric)
        return gap / self.scale if np.isfinite(gap) else float("inf")


def directional(
    f: Callable[[Feeds], float], feeds: Feeds, gradients: Feeds, rng: np.random.Generator, epsilon: float = EPSILON
) -> list[Finding]:
    """Check every tensor in ``gradients`` against ``f`` along one random direction each.

    Args:
        f: the scalar function, in float64.
        feeds: the point; tensors to be checked are float64.
        gradients: ∂f by name, with the shape of the tensor.
        rng: draws the directions.
        epsilon: step of the central difference, relative to a direction with entries near 1.
    """
    return [_along(f, feeds, name, g, rng, epsilon) for name, g in gradients.items()]


def _along(
    f: Callable[[Feeds], float], feeds: Feeds, name: str, g: np.ndarray, rng: np.random.Generator, epsilon: float
) -> Finding:
    x = feeds[name]
    if g.shape != x.shape:
        raise AssertionError(f"the gradient of '{name}' has shape {g.shape}, the tensor {x.shape}")
    u = rng.uniform(0.5, 1.5, x.shape) * rng.choice([-1.0, 1.0], x.shape)
    up, down = (f({**feeds, name: x + sign * epsilon * u}) for sign in (1.0, -1.0))
    numeric = (up - down) / (2 * epsilon)
    terms = np.abs(u * g)
    return Finding(name, float(np.sum(u * g)), numeric, 1.0 + float(terms.sum()) + abs(numeric))


def inner(weights: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> float:
    """Σᵢ ⟨wᵢ, vᵢ⟩ in float64."""
    return float(sum(np.sum(np.asarray(w, np.float64) * v) for w, v in zip(weights, values, strict=True)))
