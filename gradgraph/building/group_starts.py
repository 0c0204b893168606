"""Parameter groups that start training later than the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradgraph.building.links import Link, Weights
from gradgraph.building.step_state import StepState
from gradgraph.graph.builder import Var
from gradgraph.optim.transform import Group, Vars


class GroupStarts(Link):
    """A link (see ``links``) for parameter groups with a start step.

    Before that step, the gradients of the group are set to zero, and its weights are not updated.
    """

    def __init__(self, state: StepState, groups: Sequence[Group]) -> None:
        self._state, self.groups, self._begun = state, groups, dict[int, Var]()
        self._starts = {i: group.start for group in groups if group.start for i in group.members}

    def gradients(self, gradients: Vars) -> Vars:
        if not self._starts:
            return gradients
        op = self._state.op
        op.scope = "update"
        return [
            op.Where(self.has_begun(self._starts[i]), g, 0.0) if i in self._starts else g
            for i, g in enumerate(gradients)
        ]

    def moved(self, group: Group, weights: Weights, new: list[Var], first: int) -> list[Var]:
        """Return the new weights of ``group``, or the old weights before its start step.

        Before the start step, the state tensors ``slots[first:]`` also keep their values.
        """
        return self._state.where(self.has_begun(group.start), weights.old, new, first) if group.start else new

    def has_begun(self, start: int) -> Var:
        """Return a boolean scalar: whether at least ``start`` updates have been made."""
        if start not in self._begun:
            self._begun[start] = self._state.step() >= np.int64(start)
        return self._begun[start]
