"""Gradient compression, by name: alternatives to sending gradients as float32.

Each is a class that sums the gradients of all ranks, with the same bits on each. The error of a lossy method is kept
and added to the gradients of the next step (error feedback: Stich et al., arXiv 1809.07599, algorithm 1; Karimireddy et
al., arXiv 1901.09847). These errors are part of the state: checkpoints contain the errors of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from gradgraph.arguments import FLAG, Kind, Makers, checked
from gradgraph.data.arrays.batch import Array

_RATIO = Kind("a share above 0 and at most 1", lambda v: isinstance(v, int | float) and 0 < v <= 1)
_RANK = Kind("a whole number above 0", lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0)


class Messages(Protocol):
    """The collective operations between ranks.

    Attributes:
        rank: the rank of this process.
        ranks: the number of ranks.
    """

    rank: int
    ranks: int

    def all_reduce(self, array: Array) -> None:
        """Sum ``array`` over all ranks, in place."""

    def all_gather(self, array: Array, counts: Sequence[int]) -> None:
        """Fill ``array`` with the parts of all ranks, by rank; rank r sends ``counts[r]`` elements."""

    def all_to_all(self, sent: Array, got: Array) -> None:
        """Send one equal part of ``sent`` to each rank; write the parts received from all ranks to ``got``."""


class Compression:
    """A method to sum gradients over ranks.

    Attributes:
        remembers: whether it has state, which a resumed run needs.
        memory: its state on this rank, by name.
        after: new values for ``memory`` from ``add_up``, which are applied once the step succeeds.
    """

    remembers = False

    def __init__(self) -> None:
        self.memory: dict[str, Array] = {}
        self.after: dict[str, Array] = {}

    def add_up(self, part: str, flat: Array, tensors: Mapping[str, Array], team: Messages) -> None:
        """Replace the gradients of this rank, in ``flat``, with the sum over all ranks.

        ``part`` names the array ``flat``, which has all gradients of one type; ``tensors`` are views of it, by weight.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Apply the pending changes of the state after a successful step."""
        self.memory |= self.after
        self.after = {}

    def take(self, ranks: Sequence[Mapping[str, Array]], rank: int, count: int) -> None:
        """Restore the state of ``rank`` from a checkpoint with the states ``ranks``, for a run of ``count`` ranks.

        If the number of ranks has changed, each rank gets an equal part of the total error.
        """
        if len(ranks) == count:
            self.memory = dict(ranks[rank])
            return
        names = ranks[0]
        self.memory = {n: a if self.is_shared(n) else sum(r[n] for r in ranks) / a.dtype.type(count)
                       for n, a in names.items()}  # fmt: skip

    def is_shared(self, name: str) -> bool:
        """Return whether the state tensor ``name`` is equal on all ranks."""
        return False


class SixteenBits(Compression):
    """Rounding to 16 bits: each number is rounded, sent, summed in full precision, rounded again and sent back."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self._dtype = np.dtype(dtype)

    def add_up(self, part: str, flat: Array, tensors: Mapping[str, Array], team: Messages) -> None:
        chunk = -(-len(flat) // team.ranks)
        wire = np.zeros(team.ranks * chunk, self._dtype)
        wire[: len(flat)] = flat
        got = np.empty_like(wire)
        team.all_to_all(wire.view(np.uint16), got.view(np.uint16))
        total = got.reshape(team.ranks, chunk).astype(flat.dtype).sum(axis=0)
        wire[team.rank * chunk : (team.rank + 1) * chunk] = total
        team.all_gather(wire.view(np.uint16), [chunk] * team.ranks)
        flat[...] = wire[: len(flat)]


class TopK(Compression):
    """Sparsification: each rank sends only its largest gradients, with indices (Stich et al., arXiv 1809.07599,
    algorithm 1).
    """

    remembers = True

    def __init__(self, ratio: float, feedback: bool) -> None:
        super().__init__()
        self.ratio, self.feedback = ratio, feedback

    def add_up(self, part: str, flat: Array, tensors: Mapping[str, Array], team: Messages) -> None:
        count = max(1, math.ceil(self.ratio * sum(t.size for t in tensors.values())))
        known = self.memory.get(part) if self.feedback else None
        wanted = flat.copy() if known is None else flat + known
        places = np.sort(np.argpartition(np.abs(wanted), -count)[-count:])
        whole = np.int32 if flat.itemsize == 4 else np.int64
        message = np.empty((team.ranks, 2, count), whole)
        message[team.rank] = places, wanted[places].view(whole)
        team.all_gather(message.reshape(-1), [2 * count] * team.ranks)
        wanted[places] = 0
        if self.feedback:
            self.after[part] = wanted
        flat[...] = 0
        for its_places, numbers in message:
            flat[its_places] += numbers.view(flat.dtype)


class PowerSGD(Compression):
    """Low-rank compression of each gradient matrix (Vogels et al., arXiv 1905.13727, algorithms 1 and 2).

    The approximation is computed by one step of power iteration, which starts from the result of the previous step.
    Gradients that this would not make smaller are sent uncompressed.
    """

    remembers = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def is_shared(self, name: str) -> bool:
        return name.endswith(".basis")

    def add_up(self, part: str, flat: Array, tensors: Mapping[str, Array], team: Messages) -> None:
        matrices = {n: _matrix(t) for n, t in tensors.items() if self._is_worth_it(_matrix(t))}
        errors = {n: self.memory.get(f"{n}.error", 0) for n in matrices}
        wanted = {n: m + errors[n] for n, m in matrices.items()}
        whole = [t for n, t in tensors.items() if n not in matrices]
        sides = [m @ self._basis(n, m) for n, m in wanted.items()]
        _add_up([*sides, *whole], team)
        left = dict(zip(wanted, (np.linalg.qr(side)[0] for side in sides), strict=True))
        right = {n: m.T @ left[n] for n, m in wanted.items()}
        for n, m in wanted.items():
            self.after[f"{n}.error"] = m - left[n] @ right[n].T
        _add_up(list(right.values()), team)
        for n, matrix in matrices.items():
            matrix[...] = left[n] @ right[n].T
            self.after[f"{n}.basis"] = right[n]

    def _is_worth_it(self, matrix: Array) -> bool:
        return matrix.ndim == 2 and sum(matrix.shape) * self.rank < matrix.size

    def _basis(self, name: str, matrix: Array) -> Array:
        known = self.memory.get(f"{name}.basis")
        if known is not None:
            return known
        return np.random.default_rng(0).normal(size=(matrix.shape[1], self.rank)).astype(matrix.dtype)


def _matrix(tensor: Array) -> Array:
    return tensor.reshape(len(tensor), -1) if tensor.ndim > 2 and tensor.size else tensor


def _add_up(arrays: Sequence[Array], team: Messages) -> None:
    """Sum ``arrays`` over all ranks in one message, in place."""
    if not arrays:
        return
    message = np.concatenate([a.ravel() for a in arrays])
    team.all_reduce(message)
    first = 0
    for array in arrays:
        array[...] = message[first : first + array.size].reshape(array.shape)
        first += array.size


COMPRESSIONS: Makers[Compression] = Makers(
    "compression", Compression, "gradgraph.parallel.compressions", "top_k(ratio=0.01)"
)


def float16() -> Compression:
    """Send gradients in float16 and sum them in float32. Above 65,504 they overflow, and below 6e-8 they become 0."""
    return SixteenBits(np.float16)


def bfloat16() -> Compression:
    """Send gradients in bfloat16, with the range of float32 and 8 bits of precision."""
    return SixteenBits(ml_dtypes.bfloat16)


@checked(ratio=_RATIO, feedback=FLAG)
def top_k(ratio: float = 0.01, feedback: bool = True) -> Compression:
    """Send only the largest gradients of each rank, a share ``ratio`` of all, with their indices.

    With ``feedback``, the others are added to the gradients of the next step (Stich et al., arXiv 1809.07599, algorithm
    1).
    """
    return TopK(float(ratio), bool(feedback))


@checked(rank=_RANK)
def power_sgd(rank: int = 2) -> Compression:
    """Send two thin matrices per gradient, whose product approximates it with rank ``rank``.

    See Vogels et al., arXiv 1905.13727.
    """
    return PowerSGD(int(rank))


for _make in (float16, bfloat16, top_k, power_sgd):
    COMPRESSIONS.add(_make.__name__, _make)
