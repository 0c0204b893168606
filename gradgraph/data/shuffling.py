"""Shuffled sample orders that depend only on seed and epoch, not on the version of NumPy, and generators of samples.

A run can therefore resume in the middle of an epoch without repeating its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradgraph.data.arrays.batch import Array

_POOL = 50  # number of batches in a window, within which samples of similar lengths are grouped


def permutation(seed: int, epoch: int, n: int) -> Array:
    """Return a permutation of range(n), sorted by a hash (SplitMix64) of seed, epoch and the sample's index."""
    # hashes are distinct, since every operation in them is invertible, so the sort need not be stable
    order: Array = np.argsort(_hashes(seed, epoch, n))
    return order


def displaced(seed: int, epoch: int, n: int, most: int) -> Array:
    """Return a permutation of range(n) that moves each element by less than ``most`` places."""
    places = np.arange(n) + (_hashes(seed, epoch, n) >> np.uint64(11)) * (most / (1 << 53))
    order: Array = np.argsort(places, kind="stable")
    return order


def by_length(shuffled: Array, lengths: Array, seed: int, epoch: int, batch_size: int) -> Array:
    """Reorder ``shuffled`` sample indices so that samples of similar ``lengths`` are in the same batch.

    Samples are sorted by length within windows of up to 50 batches (at most a quarter of all batches). Then whole
    batches are shuffled, except for an incomplete last one.
    """
    full = len(shuffled) // batch_size * batch_size
    size = max(1, min(_POOL, full // batch_size // 4)) * batch_size
    pools = (shuffled[first : min(first + size, full)] for first in range(0, full, size))
    sorted_ = [pool[np.argsort(lengths[pool], kind="stable")] for pool in pools]
    grouped = np.concatenate([*sorted_, shuffled[:0]]).reshape(-1, batch_size)
    order: Array = np.concatenate([grouped[permutation(seed, epoch, len(grouped))].ravel(), shuffled[full:]])
    return order


def generator(seed: Sequence[int], *further: int) -> np.random.Generator | None:
    """Return the random generator of a seed and further indices, such as a sample's; None if ``seed`` is empty."""
    return np.random.default_rng([*(s % (1 << 64) for s in seed), *further]) if seed else None


def _hashes(seed: int, epoch: int, n: int) -> Array:
    with np.errstate(over="ignore"):
        start = _mix(_mix(np.array([seed], np.int64).view(np.uint64)) + np.uint64(epoch))
        return _mix(start + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
