"""The step in two files: gradient.onnx computes loss and gradients, apply.onnx updates the weights with them.

Both are cut from the train graph, so together they compute the same results as train.onnx. In between, gradients can be
accumulated over several batches or averaged over several machines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from gradgraph.building.objective_results import Written
from gradgraph.building.step_state import StepState
from gradgraph.errors import BuildError, shown
from gradgraph.graph.builder import Var
from gradgraph.graph.prune import prune
from gradgraph.optim.transform import Vars
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.step.manifest import BATCH_WEIGHT, HalfSpec, SeparateSpec, StateSpec


@dataclass(frozen=True)
class Halves:
    """The models "gradient" and "apply", and their description in the manifest."""

    models: Mapping[str, ir.Model]
    spec: SeparateSpec


@dataclass(frozen=True)
class Marks:
    """The values at which a train graph is cut.

    Attributes:
        gradients: the gradients, in the order of the trained weights.
        weight: the divisor of the loss, if known.
        spec: the names of these values, for the manifest.
    """

    gradients: list[Var]
    weight: Var | None
    spec: SeparateSpec


def marked(state: StepState, params: Sequence[ir.Value], gradients: Vars, written: Written) -> Marks:
    """Return the gradients of ``params`` and the divisor of the loss, named so that ``cut`` finds them."""
    op = state.op
    found = [op.Identity(op.cast(g, p.dtype or g.dtype), name=f"{p.name}.grad")
             for p, g in zip(params, gradients, strict=True)]  # fmt: skip
    for mark, p in zip(found, params, strict=True):
        mark.value.type, mark.value.shape = p.type, p.shape
    state.held += [mark.value for mark in found]
    weight = None
    if written.weight is not None and not written.adds_up:
        weight = op.Identity(written.weight(), name=BATCH_WEIGHT)
        weight.value.shape = ir.Shape(())
    name = "" if weight is None else weight.value.name or ""
    names = {p.name or "": mark.value.name or "" for p, mark in zip(params, found, strict=True)}
    spec = SeparateSpec(names, weight=name, adds_up=written.adds_up, differs=written.differs)
    return Marks(found, weight, replace(spec, every_label=written.every_label))


def cut(
    model: ir.Model, spec: SeparateSpec, state: StepState, results: Sequence[str], moved: Collection[str]
) -> Halves:
    """Cut a train graph, before it is cleaned up, into gradient.onnx and apply.onnx.

    Args:
        model: the train graph.
        spec: the names of the gradients and of the divisor of the loss.
        results: the names of the outputs of the forward pass.
        moved: the names of the state tensors that the forward pass updates: running statistics, random-number state.

    Raises:
        BuildError: if the update reads values of the batch, besides gradients and state.
    """
    gradient, apply = model.clone(), model.clone()
    nexts, rates = {s.next: s for s in state.specs}, {*state.hyperparameters}
    ahead = [n for n, s in nexts.items() if s.name in moved]
    scheduled = {state.rate.name or ""} if state.rate else set[str]()  # becomes nodes of the update
    weight = [spec.weight] if spec.weight else []
    made = _values(gradient)
    gradient.graph.outputs[:] = [made[name] for name in (*results, *weight, *spec.gradients.values(), *ahead)]
    apply.graph.outputs[:] = [o for o in apply.graph.outputs if o.name not in {*results, *ahead}]
    _feed(apply, [*spec.gradients.values(), *weight])
    states = {s.name for s in state.specs}
    for half in (gradient, apply):
        clean_up(prune(half))
    _leave_unread(gradient, states | rates | scheduled)
    _leave_unread(apply, {v.name or "" for v in apply.graph.inputs} - {*spec.gradients.values()})
    rates |= {*weight}  # fed to an update that accumulates gradients
    known = {*spec.gradients.values(), *states, *rates, *scheduled}
    if stray := [v for v in apply.graph.inputs if v.name not in known]:
        raise BuildError(
            f"the optimizer reads '{shown(stray[0].name)}' of the batch, so the update cannot be in a separate file",
            remedy="remove separate=True",
            shell="remove --separate",
        )
    first, second = (_half(half, nexts, states, rates) for half in (gradient, apply))
    return Halves({"gradient": gradient, "apply": apply}, replace(spec, gradient=first, apply=second))


def _values(model: ir.Model) -> dict[str, ir.Value]:
    return {v.name or "": v for node in model.graph for v in node.outputs}


def _feed(model: ir.Model, names: Iterable[str]) -> None:
    """Turn the values called ``names`` into inputs of the graph."""
    made = _values(model)
    for name in names:
        old = made[name]
        fed = ir.Value(name=name, type=old.type, shape=old.shape)
        old.name = f"{name}.computed"
        old.replace_all_uses_with(fed)
        model.graph.inputs.append(fed)


def _leave_unread(model: ir.Model, names: Collection[str]) -> None:
    for value in [v for v in model.graph.inputs if v.name in names and not v.uses() and not v.is_graph_output()]:
        model.graph.inputs.remove(value)


def _half(model: ir.Model, nexts: Mapping[str, StateSpec], state: Collection[str], rates: Collection[str]) -> HalfSpec:
    taken = [v.name or "" for v in model.graph.inputs]
    return HalfSpec(
        reads=tuple(n for n in taken if n in state),
        writes=tuple(nexts[o.name].name for o in model.graph.outputs if o.name and o.name in nexts),
        hyperparameters=tuple(n for n in taken if n in rates),
    )
