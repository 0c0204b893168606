"""Choice of the next token from scores: the most likely one, or a random draw."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from gradgraph.chat.sampling import Sampling
from gradgraph.data.arrays.batch import Array


def picked(scores: Array, sampling: Sampling, rng: np.random.Generator, seen: Collection[int] = ()) -> int:
    """Return the id of the next token, chosen by the scores as in ``generate`` of transformers.

    The repetition penalty is applied first, then temperature, ``top_k`` and ``top_p``.

    Args:
        scores: next-token scores ``[vocabulary]``.
        sampling: sampling options.
        rng: random generator of this row.
        seen: tokens already in the row.
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
    """Return the probabilities ``[vocabulary]`` to draw from; excluded tokens have 0."""
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
