"""Local steps: each rank trains by itself, and the weights of all ranks are combined after every few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gradgraph.arguments import Kind, checked
from gradgraph.data.arrays.batch import Array
from gradgraph.parallel.compressions import COMPRESSIONS, Compression, Messages

_EVERY = Kind("a whole number above 0", lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0)
_RATE = Kind("a number above 0", lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v > 0)
_MOMENTUM = Kind("a number from 0 and below 1", lambda v: isinstance(v, int | float) and 0 <= v < 1)


class LocalSteps(Compression):
    """Rounds of local steps, in which each rank uses its own gradients and optimizer state.

    Args:
        every: the number of steps in a round, which also ends before an evaluation.
        outer_lr, momentum: learning rate and momentum of the outer step; with 1 and 0 it sets the weights to their
            mean.
    """

    remembers = True

    def __init__(self, every: int, outer_lr: float, momentum: float) -> None:
        super().__init__()
        self.every, self.outer_lr, self.momentum = every, outer_lr, momentum

    @property
    def steps(self) -> int:
        """The number of steps in this round so far."""
        return int(self.memory["round"][0]) if "round" in self.memory else 0

    @steps.setter
    def steps(self, steps: int) -> None:
        self.memory["round"] = np.array([steps], np.int64)

    def add_up(self, part: str, flat: Array, tensors: Mapping[str, Array], team: Messages) -> None:
        """Leave the gradients of this rank unchanged: they are not sent."""

    def is_shared(self, name: str) -> bool:
        return name.startswith(("round", "start/", "velocity/"))

    def begin(self, weights: Mapping[str, Array]) -> None:
        """Start a fit, and save ``weights``, which are equal on all ranks, as the start of the first round."""
        self.steps = 0
        self.memory |= {f"start/{name}": array.copy() for name, array in weights.items()}

    def meet(self, weights: Mapping[str, Array], averages: Mapping[str, Array], team: Messages) -> None:
        """End a round: overwrite the weights with the combined weights, and ``averages`` of weights with their mean.

        The outer gradient is the difference between the weights θ₀ at the start of the round and the mean over ranks, Δ
        = θ₀ − mean θ. The velocity is v ← μv + Δ, and the new weights are θ₀ − lr·(Δ + μv), Nesterov's momentum.
        """
        self.steps = 0
        for name, array in {**weights, **averages}.items():
            mean = np.array(array)
            team.all_reduce(mean)
            mean /= mean.dtype.type(team.ranks)
            if name in weights and (self.outer_lr, self.momentum) != (1.0, 0.0):
                start = self.memory[f"start/{name}"]
                gradient = start - mean
                velocity = self.memory.get(f"velocity/{name}", 0) * mean.dtype.type(self.momentum) + gradient
                self.memory[f"velocity/{name}"] = velocity
                step = gradient + mean.dtype.type(self.momentum) * velocity
                mean = start - mean.dtype.type(self.outer_lr) * step
            array[...] = mean
        self.memory |= {f"start/{name}": array.copy() for name, array in weights.items()}


def mean_of(arrays: Sequence[Array]) -> Array:
    """Return the mean of floating-point arrays, exact if all are equal; for integer arrays, the first one."""
    first = arrays[0]
    if first.dtype.kind in "iub":
        return first
    wide = first.astype(np.float64)
    wide += sum(array.astype(np.float64) - wide for array in arrays[1:]) / len(arrays)
    return wide.astype(first.dtype)


@checked(every=_EVERY)
def local_sgd(every: int = 8) -> Compression:
    """Average the weights after ``every`` local steps instead of sending gradients (Stich, arXiv 1805.09767)."""
    return LocalSteps(every, 1.0, 0.0)


@checked(every=_EVERY, outer_lr=_RATE, momentum=_MOMENTUM)
def diloco(every: int = 100, outer_lr: float = 0.7, momentum: float = 0.9) -> Compression:
    """Take local steps, then an outer step from the last common weights towards the mean.

    The outer step uses Nesterov momentum (Douillard et al., arXiv 2311.08105, algorithm 1).
    """
    return LocalSteps(every, float(outer_lr), float(momentum))


for _make in (local_sgd, diloco):
    COMPRESSIONS.add(_make.__name__, _make)
