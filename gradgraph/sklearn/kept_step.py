"""A step with its trainer that can be pickled and copied, unlike a Trainer itself."""

from __future__ import annotations

from typing import Any

from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.data_names import DataNames
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step


class KeptStep:
    """A step with its trainer, which is created on first use; pickles and copies contain only the trainer's state.

    Args:
        seed, device, options: as for ``Trainer``.
    """

    def __init__(self, step: Step, seed: int, device: Any, options: RuntimeOptions, names: DataNames) -> None:
        self.step, self._seed, self._device, self._options, self._names = step, seed, device, options, names
        self._values: dict[str, Array] | None = None
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer, with the current state."""
        if self._trainer is None:
            self._trainer = Trainer(self.step, device=self._device, seed=self._seed, options=self._options)
            self._trainer.names = self._names
            if self._values is not None:
                self._trainer.load_state_dict(self._values)
                self._values = None
        return self._trainer

    def __getstate__(self) -> dict[str, Any]:
        values = self._values if self._trainer is None else self._trainer.state_dict()
        return {**vars(self), "_values": values, "_trainer": None}
