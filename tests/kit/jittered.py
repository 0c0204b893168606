"""A dataset whose samples are augmented anew in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs
from gradgraph.data.shuffling import generator


class Jittered(Loadable):
    """Arrays with noise that depends on seed, epoch and sample.

    Args:
        data: arrays by name; noise is added to ``x``.
        mixes: mix each batch with its reverse, as mixup does.
        every: repeat the noise of the first ``every`` epochs; None for different noise in each.
    """

    def __init__(self, data: Mapping[str, Array], mixes: bool = False, every: int | None = None) -> None:
        self.data, self.mixes, self.every = dict(data), mixes, every

    @property
    def augments(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, i: int) -> dict[str, Array]:
        return {name: array[i] for name, array in self.data.items()}

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        return NO_NAMES

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        if seed and self.every is not None:
            seed = (seed[0], seed[1] % self.every)
        for numbers in batches:
            batch = {name: self.data[name][list(numbers)] for name in specs}
            batch["x"] = np.stack([self._with_noise(x, seed, i) for x, i in zip(batch["x"], numbers, strict=True)])
            rng = generator(seed, numbers[0], 1)
            if self.mixes and rng is not None:
                share = np.float32(rng.random())
                batch["x"] = share * batch["x"] + (1 - share) * batch["x"][::-1]
            yield batch

    @staticmethod
    def _with_noise(x: Array, seed: Sequence[int], i: int) -> Array:
        rng = generator(seed, i)
        return x if rng is None else x + rng.standard_normal(x.shape).astype(np.float32)
