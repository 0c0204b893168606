"""Masks for weight pruning, as state of a step: pruned weights and their gradients are set to zero."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.building.links import Link, Update, Weights
from gradgraph.building.step_state import Slot, StepState
from gradgraph.graph.builder import Var, all_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import known_sizes
from gradgraph.graph.weight_layouts import layout_of
from gradgraph.optim.pruning import Pruning
from gradgraph.optim.transform import Vars


class PruningMasks(Link):
    """A link (see ``links``) that applies the masks of ``pruning`` to the trained weights ``params``."""

    def __init__(self, state: StepState, pruning: Pruning, params: Sequence[ir.Value]) -> None:
        self._state, self._pruning = state, pruning
        self._members = pruning.members(params)
        shapes = {i: known_sizes(shape_of(params[i])) for i in self._members}
        self._masks = {i: state.new(f"{params[i].name}.mask", ir.DataType.UINT8, s) for i, s in shapes.items()}
        self._begin = {i: state.start.full(state.start.const(np.array(s, np.int64)), 1, ir.DataType.UINT8)
                       for i, s in shapes.items()}  # fmt: skip
        self._now = dict(self._masks)
        self._axes = [layout_of(params[i]).inputs for i in self._members]

    def gradients(self, gradients: Vars) -> Vars:
        """Return the gradients, with zeros for pruned weights."""
        return self._masked(gradients)

    def around(self, update: Update) -> Update:
        """Return an update that also sets pruned weights and their averages to zero."""

        def pruned(weights: Weights, gradients: Vars) -> list[Var]:
            new = update(weights, gradients)
            changed = self._advance(new)
            self._mask_averages(weights.params, new)
            self._state.slots += changed
            return self._masked(new)

        return pruned

    def _masked(self, values: Vars) -> list[Var]:
        """Return ``values``, one tensor per trained weight, with zeros where weights are pruned."""
        op, found = self._state.op, list(values)
        for i, mask in self._now.items():
            found[i] = op.Where(op.cast(mask, ir.DataType.BOOL), values[i], 0.0)
        return found

    def _advance(self, weights: Vars) -> list[Slot]:
        """Return the slots of the masks, recomputed from the updated ``weights`` when a pruning step is due."""
        op, step, old = self._state.op, self._state.step(), [*self._masks.values()]
        mine = [weights[i] for i in self._members]
        then = op.graph([], lambda: self._pruning.masks(op, mine, old, self._axes, step), "prune")
        otherwise = op.graph([], lambda: old, "keep")
        results = all_of(op.If(self._pruning.due(op, step), then_branch=then, else_branch=otherwise, outputs=len(old)))
        for i, result, mask in zip(self._members, results, old, strict=True):
            result.value.type, result.value.shape = mask.value.type, mask.value.shape
            self._now[i] = result
        return [Slot(self._masks[i].value, self._now[i], self._begin[i]) for i in self._members]

    def _mask_averages(self, params: Sequence[ir.Value], new: Vars) -> None:
        averages, slots = self._state.averages, self._state.slots
        places = {slot.value.name: k for k, slot in enumerate(slots)}
        mine = {i: places[averages[p.name or ""]] for i, p in enumerate(params) if p.name in averages}
        if mine:
            masked = self._masked([slots[mine[i]].new if i in mine else one for i, one in enumerate(new)])
            for i, place in mine.items():
                slots[place] = slots[place]._replace(new=masked[i])
