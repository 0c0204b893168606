"""The masks of pruned weights, as state of a step: zeros for what is pruned, in gradients and in new weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.building.loss_scale import NewInput, Slot
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.shapes import known_sizes, shape_of
from gradgraph.optim.pruning import Pruning, axis_of_inputs


class Masks:
    """Those of one step, written with ``op``.

    Args:
        op: writes train.onnx.
        start: writes init.onnx.
        pruning: says which weights have masks, and how these change.
        params: the weights that are trained.
        new_input: makes a state tensor, of a name, a type and a shape.
    """

    def __init__(
        self, op: Builder, start: Builder, pruning: Pruning, params: Sequence[ir.Value], new_input: NewInput
    ) -> None:
        self._op, self._start, self._pruning = op, start, pruning
        self._members = pruning.members(params)
        shapes = {i: known_sizes(shape_of(params[i])) for i in self._members}
        self._masks = {i: new_input(f"{params[i].name}.mask", ir.DataType.UINT8, s) for i, s in shapes.items()}
        self._begin = {i: start.full(start.const(np.array(s, np.int64)), 1, ir.DataType.UINT8)
                       for i, s in shapes.items()}  # fmt: skip
        self._now = dict(self._masks)
        self._axes = [axis_of_inputs(params[i]) for i in self._members]

    def masked(self, values: Sequence[Var]) -> list[Var]:
        """Values of all weights, with zeros where these are pruned now."""
        op, found = self._op, list(values)
        for i, mask in self._now.items():
            found[i] = op.Where(op.cast(mask, ir.DataType.BOOL), values[i], 0.0)
        return found

    def advance(self, weights: Sequence[Var], step: Var) -> list[Slot]:
        """Let the masks be those behind an update that gave ``weights``, where it is time."""
        op, old = self._op, [*self._masks.values()]
        mine = [weights[i] for i in self._members]
        then = op.graph([], lambda: self._pruning.masks(op, mine, old, self._axes, step), "prune")
        otherwise = op.graph([], lambda: old, "keep")
        results = all_of(op.If(self._pruning.due(op, step), then_branch=then, else_branch=otherwise, outputs=len(old)))
        for i, result, mask in zip(self._members, results, old, strict=True):
            result.value.type, result.value.shape = mask.value.type, mask.value.shape
            self._now[i] = result
        return [(self._masks[i].value, self._now[i], self._begin[i]) for i in self._members]
