"""The optimizer's update: its transforms turn gradients into updates, which are added to the weights."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.building.group_starts import GroupStarts
from gradgraph.building.links import Weights
from gradgraph.building.step_state import Slot, StepState
from gradgraph.errors import BuildError, shown
from gradgraph.graph.builder import Var
from gradgraph.optim import Optimizer
from gradgraph.optim.modifiers import global_norm
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Context, Transform, Vars, joined
from gradgraph.optim.weight_groups import GroupContext


class OptimizerUpdate:
    """A ``links.Update`` that updates the weights by the transforms of an optimizer.

    Args:
        transforms: the transforms of the optimizer that remain to be applied (the first ones may have been absorbed by
            the backward pass).
        groups: the parameter groups, with their start steps.
        reports_norm: whether to output the norm of the gradients.
    """

    def __init__(
        self,
        state: StepState,
        optimizer: Optimizer,
        transforms: Sequence[Transform],
        groups: GroupStarts,
        reports_norm: bool,
    ) -> None:
        self._state, self._optimizer, self._transforms = state, optimizer, transforms
        self._groups, self._reports_norm = groups, reports_norm

    def __call__(self, weights: Weights, gradients: Vars) -> list[Var]:
        state = self._state
        gradients = [state.op.cast(g, p.dtype) for g, p in zip(gradients, weights.old, strict=True)]
        if self._reports_norm:
            state.report("grad_norm", global_norm(state.op, gradients))
        if self._optimizer.groups is None:
            new = self._moved(self._transforms, weights, gradients, state)
        else:
            new = self._moved_in_groups(weights, gradients, self._optimizer.groups.base)
        for transform in self._optimizer.after:
            new = self._through(transform, weights, new, state)
        return new

    def _moved_in_groups(self, weights: Weights, gradients: Vars, base: float | Schedule) -> list[Var]:
        for transform in self._transforms:
            gradients = self._through(transform, weights, gradients, self._state)
        new = list(weights.old)
        for group in self._groups.groups:
            mine, first = weights.some(group.members), len(self._state.slots)
            context = GroupContext(self._state, base, group.start)
            moved = self._moved(group.transforms, mine, [gradients[i] for i in group.members], context)
            for i, value in zip(group.members, self._groups.moved(group, mine, moved, first), strict=True):
                new[i] = value
        return new

    def _moved(self, transforms: Sequence[Transform], weights: Weights, gradients: Vars, context: Context) -> list[Var]:
        """Return the new weights after applying all ``transforms``."""
        in_float32 = all(p.dtype == ir.DataType.FLOAT for p in weights.old)  # only then, transforms can be fused
        links, last = joined(transforms) if in_float32 else (transforms, None)
        for transform in links:
            gradients = self._through(transform, weights, gradients, context)
        if last is not None:
            return self._through(last, weights, gradients, context)
        return [p + g for p, g in zip(weights.old, gradients, strict=True)]

    def _through(self, transform: Transform, weights: Weights, given: Vars, context: Context) -> list[Var]:
        """Return the result of one transform; its slots, such as moments, become state tensors ``<weight>.<slot>``."""
        state, starts = self._state, transform.init(self._state.start, weights.start)
        slots = {
            slot: [
                None if s is None else state.new(f"{p.name}.{slot}", s.dtype, s.shape or ())
                for p, s in zip(weights.params, values, strict=True)
            ]
            for slot, values in starts.items()
        }
        result, after = transform.update(state.op, given, slots, weights.old, context)
        for slot, values in after.items():
            rows = zip(slots[slot], values, starts[slot], strict=True)
            state.slots += [Slot(v.value, new, first) for v, new, first in rows if v is not None]
        if transform.averages is not None:
            self._take_averages(weights.params, slots[transform.averages])
        return list(result)

    def _take_averages(self, params: Sequence[ir.Value], slot: Sequence[Var | None]) -> None:
        averages = self._state.averages
        for param, average in zip(params, slot, strict=True):
            assert average is not None  # an average covers every weight
            if average.dtype == ir.DataType.FLOAT16 or average.dtype != param.dtype:
                raise BuildError(
                    f"the weight '{shown(param.name)}' is float16, whose precision is too low for a moving average; "
                    "store the weights in float32 to average them"
                )
            if param.name in averages:
                raise BuildError("the optimizer already averages weights; remove ema")
            averages[param.name or ""] = average.value.name or ""
