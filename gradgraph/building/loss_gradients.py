"""The gradients of a training step: one backward pass, or two if the optimizer is wrapped by SAM."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.autodiff.cancelled import cancelled
from gradgraph.autodiff.path import Path
from gradgraph.autodiff.recompute import Written, written_backward
from gradgraph.autodiff.select import find_path
from gradgraph.building.links import Link
from gradgraph.building.loss_scale import LossScale
from gradgraph.building.step_state import StepState
from gradgraph.errors import DifferentiationError, shown
from gradgraph.graph.builder import Var
from gradgraph.optim import Optimizer
from gradgraph.optim.transform import Transform, Vars
from gradgraph.passes.normal.functions.inline import copied


class Gradients:
    """The writer of a step's gradients, after the forward pass.

    Args:
        model: the model, with its loss.
        scale: the loss scale, for training in float16.
        takes_factors: start the backward pass from the constant factors of the optimizer's first transforms instead of
            1, which saves a multiplication for each weight.

    Attributes:
        passes: the backward passes that were written.
    """

    def __init__(self, model: ir.Model, state: StepState, scale: LossScale | None, takes_factors: bool) -> None:
        self._model, self._state, self._scale, self._takes_factors = model, state, scale, takes_factors
        self.passes: list[Written] = []

    def of(
        self, path: Path, params: Sequence[ir.Value], optimizer: Optimizer, links: Sequence[Link]
    ) -> tuple[Vars, Sequence[Transform]]:
        """Return the gradients of ``params`` along ``path``, and the transforms of ``optimizer`` to apply to them.

        For an optimizer with an ``ascent`` (SAM), the first gradients, transformed by ``links``, are used to perturb
        the weights, and the gradients at the perturbed weights are returned.
        """
        if optimizer.ascent is None:
            return self._at(path, params, optimizer.transforms)
        op, graph = self._state.op, self._model.graph
        forward = list(graph)
        slopes = self._backward(path, params, op.ones_like(op.wrap(path.targets[0])))
        for link in links:
            slopes = link.gradients(slopes)
        op.scope = "ascent"
        weights = [op.wrap(p) for p in params]
        away, _ = optimizer.ascent.update(op, slopes, {}, weights, self._state)
        moved = [(w + d).value for w, d in zip(weights, away, strict=True)]
        for value, p in zip(moved, params, strict=True):
            value.type, value.shape = p.type, p.shape
        copies, again = copied(forward, op.fresh, dict(zip(params, moved, strict=True)))
        op.nodes.extend(copies)
        op.finish(graph)
        return self._at(find_path(self._model, [again[path.targets[0]]], moved), moved, optimizer.transforms)

    def _at(
        self, path: Path, weights: Sequence[ir.Value], transforms: Sequence[Transform]
    ) -> tuple[Vars, Sequence[Transform]]:
        """Return the gradients at ``weights``, and the transforms that the backward pass has not yet applied.

        In half precision it applies none, because gradients that are scaled down early would underflow.
        """
        op, left = self._state.op, list(transforms)
        loss = op.wrap(path.targets[0])
        seed = op.ones_like(loss)
        op.scope = "update"
        wide = all(v.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) for v in (loss.value, *weights))
        while self._takes_factors and wide and left and (factor := left[0].factor) is not None:
            number = op.cast(factor(op, self._state), loss.dtype)
            seed = number if loss.shape == () and len(left) == len(transforms) else seed * number
            del left[0]
        return self._backward(path, weights, seed), left

    def _backward(self, path: Path, weights: Sequence[ir.Value], seed: Var) -> Vars:
        """Return the gradient of each weight; ``seed`` is the cotangent of the loss, unless there is a loss scale."""
        op, loss = self._state.op, path.targets[0]
        seed = seed if self._scale is None else self._scale.seed(op.wrap(loss))
        self.passes.append(written_backward(op, path, {loss: seed}, self._model.graph))
        gradients = self.passes[-1].gradients
        lost = [shown(w.name) for w in weights if w not in gradients]
        if lost:
            raise DifferentiationError(
                f"no gradient reaches '{lost[0]}': only operator inputs without a derivative, or of unknown type, read "
                f"it; freeze it{f' and {len(lost) - 1} more' if lost[1:] else ''}"
            )
        noise = cancelled(path, weights)
        found = [op.zeros_like(op.wrap(w)) if w in noise else gradients[w] for w in weights]
        return found if self._scale is None else self._scale.gradients(found)
