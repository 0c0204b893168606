"""The optimizer: moves parameters by the gradients that a module has added up."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import PATH, checked
from gradgraph.compat.onnxruntime_training.api.bound_run import BoundRun
from gradgraph.compat.onnxruntime_training.api.held import Held, HeldGroup, placed, zeros
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
    """Moves the parameters of a module.

    Args:
        optimizer_uri: the optimizer model, ``optimizer_model.onnx``: of this package or of onnxruntime-training.
        module: whose parameters it moves. Moments are those of its state, where a checkpoint had some.

    Raises:
        ModelError: it cannot be read.
        CompatibilityError: it is no optimizer model, or has nodes that have no standard form.
        CheckpointError: the state has moments of other parameters.
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
    def _group(self) -> HeldGroup:
        first = OptimizerGroup()
        return self._state.groups.setdefault(GROUP, HeldGroup(first.step, first.initial_lr, {}))

    def _fill(self, trained: list[Held]) -> None:
        """Let moments that the state does not have be zeros."""
        moments = self._group.moments
        if not moments:
            for held in trained:
                moments[held.name] = {s: zeros(held.shape, held.dtype, self._state.placement) for s in self._slots}
        for held in trained:
            row = moments.get(held.name, {})
            if any(slot not in row or tuple(row[slot].shape()) != held.shape for slot in self._slots):
                raise CheckpointError(
                    f"the checkpoint has no moments of '{shown(held.name)}' that fit this optimizer; load one that was "
                    "saved without the optimizer's state to begin anew"
                )
            if self._state.placement.memory != "cpu":
                moments[held.name] = {s: placed(v.numpy(), self._state.placement) for s, v in row.items()}

    def step(self) -> None:
        """Move the parameters by one update with the gradients that have been added up.

        Raises:
            CompatibilityError: the state is nominal, and holds no numbers yet.
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
        """Set the rate of the next updates; it is 0.001 at first, also behind a checkpoint."""
        if isinstance(learning_rate, str | bytes):
            raise TypeError(f"the learning rate is a number, and {learning_rate!r} is given")
        self._learning_rate = float(np.float32(learning_rate))

    def get_learning_rate(self) -> float:
        """The rate of the next update."""
        return self._learning_rate
