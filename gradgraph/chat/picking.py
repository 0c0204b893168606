"""How the next token is chosen by its score: the likeliest, or drawn from those that are likely."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from gradgraph.chat.sampling import Sampling
from gradgraph.runtime.data.batch import Array


def picked(scores: Array, sampling: Sampling, rng: np.random.Generator, seen: Collection[int] = ()) -> int:
    """The token that is chosen by ``scores`` ``[vocabulary]``, as ``generate`` of transformers does it.

    Temperature comes first, then ``top_k``, then ``top_p``.

    Args:
        rng: of this row alone.
        seen: the tokens that the row has already.
    """
    x = scores.astype(np.float64)
    if sampling.repetition_penalty != 1.0:
        there = np.array(sorted(set(seen)))
        x[there] = np.where(
            x[there] > 0, x[there] / sampling.repetition_penalty, x[there] * sampling.repetition_penalty
        )
    if sampling.temperature == 0:
        return int(x.argmax())
    p = probabilities(x, sampling)
    return int(min(np.searchsorted(p.cumsum(), rng.random(), side="right"), np.flatnonzero(p)[-1]))


def probabilities(scores: Array, sampling: Sampling) -> Array:
    """The probabilities ``[vocabulary]`` that a token is drawn by; those that are left out have 0."""
    x = scores.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < len(x):
        x[x < np.partition(x, -sampling.top_k)[-sampling.top_k]] = -np.inf
    p: Array = np.exp(x - x.max())
    p /= p.sum()
    if sampling.top_p < 1:
        order = np.argsort(-p, kind="stable")
        p[order[1:][p[order].cumsum()[:-1] >= sampling.top_p]] = 0
        p /= p.sum()
    return p
