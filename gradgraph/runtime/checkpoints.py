"""The state of a trainer: reading and replacing it, and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gradgraph.arguments import FLAG, checked, instance
from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.column_assignment import fitting
from gradgraph.runtime.execution.locking import Turns, synchronized
from gradgraph.runtime.execution.state import State
from gradgraph.runtime.exports import Exports
from gradgraph.runtime.saved.checkpoint import load_newest
from gradgraph.runtime.saved.partial import Loaded, OfModel, Stored, read_values


class Checkpoints(Exports):
    """The methods of a Trainer that read, replace, save or load its state."""

    turns: Turns
    _resumed_at: int | None  # a fit that begins at this step continues the one of a checkpoint

    @property
    @synchronized
    def state(self) -> State:
        """The state tensors, in device memory."""
        return self._session.state

    @property
    @synchronized
    def parameters(self) -> dict[str, Array]:
        """Copies of the trained weights, by name."""
        return OfModel(self._session.state.read(self._session.manifest.trainable))

    @synchronized
    def close_sessions(self) -> None:
        """Close all sessions to free their memory; the next step, evaluation or prediction opens its own."""
        self._session.close_sessions()

    @synchronized
    def state_dict(self) -> dict[str, Array]:
        """Return copies of all state tensors: parameters, running statistics, optimizer slots, counters."""
        return OfModel(self._session.read())

    @checked(values=instance(Mapping | str | os.PathLike, "a dict of arrays by name, or the path of one"), strict=FLAG)
    def load_state_dict(self, values: Mapping[str, Array] | str | os.PathLike[str], strict: bool = True) -> Loaded:
        """Replace the state, or some of its weights.

        Args:
            values: arrays by name, or the path of a file: safetensors (such as a checkpoint), ``.npz``, or an ``.onnx``
                with its weights. A checkpoint or a model also provides the names of columns and classes.
            strict: require exactly the tensors of the state. Otherwise, weights and running statistics whose name and
                shape match are loaded (floating-point types are converted), and the optimizer's copies of them, such
                as averages and master weights, are reset to the loaded values; everything else is unchanged.

        Returns:
            The names of tensors that were loaded, missing, unexpected or mismatched; print it.

        Raises:
            CheckpointError: if a tensor is missing, unknown, or of a different shape or dtype; with ``strict=False``,
                if no tensor matches. The state is unchanged.
            BusyError: if ``fit`` is running in another thread.
        """
        stored = Stored(values) if isinstance(values, Mapping) else read_values(values)
        given, names = stored.values, stored.names
        names = fitting(names, self._session.manifest.inputs, self._session.manifest.targets)
        with self.turns.trained("load_state_dict"):
            loaded = self._session.take(given, strict)
            self._session.data.learn(names)
            self._unread = None
            return loaded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, atomically.

        Raises:
            OutputError: if ``path`` cannot be written. An older checkpoint at ``path`` stays intact.
        """
        self._session.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load state and progress from a checkpoint, or from a run's folder (its best checkpoint, else its last one).

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or of another step. Nothing is changed.
            BusyError: if ``fit`` is running in another thread, or this is called in a callback of ``fit``.
        """
        values, progress = self._session.team.from_first(lambda: load_newest(path, self._session.manifest.state))
        with self.turns.trained("load", in_callbacks=False):
            self._session.stand_at(values, progress)
            self._resumed_at = progress.steps
            self._unread = None
