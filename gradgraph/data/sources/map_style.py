"""The user's own datasets with ``len(dataset)`` and ``dataset[i]``, such as those of PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array, BatchChecker, to_array
from gradgraph.data.arrays.padded import Padded
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.matching import Declared
from gradgraph.data.record.specs import Specs
from gradgraph.errors import DataError, listed, shown

log = logging.getLogger("gradgraph")


class MapStyle(Loadable):
    """A dataset whose items are dicts or tuples; see :func:`gradgraph.data.sources.sources.as_source`."""

    def __init__(self, dataset: Any, checker: BatchChecker, known: DataNames) -> None:
        self.dataset, self._checker = dataset, checker
        self._declared = Declared.of(dataset, checker.specs, known)
        self._told = False  # whether ignored fields were logged

    def __len__(self) -> int:
        return len(self.dataset)

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return the class names that the dataset declares."""
        return self._declared.names

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of stacked samples, or of padded ones, with the model's class indices."""
        for rows in batches:
            samples = [self.dataset[i] for i in rows]
            if isinstance(self.dataset, Padded):
                batch = self.dataset.batch(samples, list(specs))
            else:
                named = [self._checker.named(self._wanted_part(sample)) for sample in samples]
                batch = {name: _stack(name, [s[name] for s in named]) for name in specs}
            made: Any = self._checker.numbered(self._declared.numbered(batch), self._declared.names.classes)
            yield made

    def _wanted_part(self, sample: Any) -> Any:
        """Return a sample without fields that the step does not use, such as an identifier; log them once."""
        if not isinstance(sample, Mapping) or not self._checker.specs.keys() < sample.keys():
            return sample
        further = [name for name in sample if name not in self._checker.specs]
        if further and not self._told:
            log.info("fields of the dataset that are not inputs of the step are ignored: %s", listed(further))
            self._told = True
        return {name: sample[name] for name in self._checker.specs}


def _stack(name: str, values: Sequence[Any]) -> Array:
    try:
        return np.stack([to_array(name, v) for v in values])
    except ValueError:
        shapes = sorted({to_array(name, v).shape for v in values})
        raise DataError(
            f"the samples of '{shown(name)}' have different shapes ({shapes[0]} and {shapes[-1]}); pad them, such as "
            f"with gradgraph.Padded(dataset, {{'{shown(name)}': 0}})"
        ) from None
