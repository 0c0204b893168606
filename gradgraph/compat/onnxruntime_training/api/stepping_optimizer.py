"""The optimizer: updates parameters by the accumulated gradients of a module."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.arguments import PATH, checked
from gradgraph.compat.onnxruntime_training.api.bound_run import BoundRun
from gradgraph.compat.onnxruntime_training.api.training_state import Held, placed, zeros
from gradgraph.compat.onnxruntime_training.graphs import value_names as names
from gradgraph.compat.onnxruntime_training.graphs.optimizer_graph import (
    ParameterSpec,
    is_of_sequences,
    optimizer_graph,
    slots_in,
    slots_of,
)
from gradgraph.compat.onnxruntime_training.saved.checkpoint_file import GROUP, OptimizerGroup
from gradgraph.errors import CheckpointError, shown
from gradgraph.files.models import load_model, to_proto
from gradgraph.runtime.execution.ort_values import to_ortvalue

if TYPE_CHECKING:
    from gradgraph.compat.onnxruntime_training.api.trained_module import Module

_FIRST_RATE = float(np.float32(1e-3))


class Optimizer:
    """The optimizer of a module's parameters.

    Args:
        optimizer_uri: the path of ``optimizer_model.onnx``, written by this package or by onnxruntime-training.
        module: the module with the parameters. If its checkpoint contained moments, these are used.

    Raises:
        ModelError: if the optimizer model cannot be read.
        CompatibilityError: if the file is not an optimizer model, or has nodes without a standard form.
        CheckpointError: if the state has moments of other parameters.
    """

    @checked(optimizer_uri=PATH)
    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        self._state, self._module = module._state._state, module
        model = to_proto(load_model(optimizer_uri))
        trained = self._state.trained()
        if is_of_sequences(model):
            self._slots = slots_of(model)
            specs = [ParameterSpec(h.name, ir.DataType.from_numpy(h.dtype), h.shape) for h in trained]
            self._model = optimizer_graph(model, specs)
        else:
            self._slots, self._model = slots_in(model, [h.name for h in trained]), model
        self._learning_rate = _FIRST_RATE
        self._run = BoundRun(self._model, module._placement, module._options)
        if not self._state.nominal:
            self._fill(trained)

    @property
    def _group(self) -> OptimizerGroup[ort.OrtValue]:
        return self._state.groups.setdefault(GROUP, OptimizerGroup())

    def _fill(self, trained: list[Held]) -> None:
        """Set all moments to zero if the state has none; otherwise check their shapes. Move them to the device."""
        moments = self._group.moments
        if not moments:
            for held in trained:
                moments[held.name] = {s: zeros(held.shape, held.dtype, self._state.placement) for s in self._slots}
        for held in trained:
            row = moments.get(held.name, {})
            if any(slot not in row or tuple(row[slot].shape()) != held.shape for slot in self._slots):
                raise CheckpointError(
                    f"the checkpoint has no moments of '{shown(held.name)}' that match this optimizer; to start with "
                    "new moments, load a checkpoint saved without optimizer state"
                )
            if self._state.placement.memory != "cpu":
                moments[held.name] = {s: placed(v.numpy(), self._state.placement) for s, v in row.items()}

    def step(self) -> None:
        """Update the parameters once with the accumulated gradients.

        Raises:
            CompatibilityError: if the state is nominal, and has no values yet.
        """
        state, group = self._state, self._group
        trained = state.trained()
        if not group.moments and not state.nominal:
            self._fill(trained)
        feeds = {
            names.LEARNING_RATE: to_ortvalue(np.array([self._learning_rate], np.float32)),
            names.STEP: to_ortvalue(np.array([group.step + 1], np.int64)),
        }
        for held in trained:
            feeds[held.name] = state.filled(held)
            if held.gradient is not None:
                feeds[names.buffer(held.name)] = held.gradient
            feeds |= {names.moment(held.name, slot): group.moments[held.name][slot] for slot in self._slots}
        found = self._run(feeds, {name: names.following(name) for name in feeds})
        for held in trained:
            held.value = found[names.following(held.name)]
            held.gradient = found.get(names.following(names.buffer(held.name)), held.gradient)
            row = group.moments[held.name]
            for slot in self._slots:
                row[slot] = found.get(names.following(names.moment(held.name, slot)), row[slot])
        group.step += 1

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next updates; initially 0.001, also after loading a checkpoint."""
        if isinstance(learning_rate, str | bytes):
            raise TypeError(f"the learning rate must be a number, not {learning_rate!r}")
        self._learning_rate = float(np.float32(learning_rate))

    def get_learning_rate(self) -> float:
        """Return the rate of the next update."""
        return self._learning_rate
