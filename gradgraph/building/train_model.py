"""Writing train.onnx: the loss, its gradients, the optimizer, and the state that they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.recomputation import as_recompute, bytes_of
from gradgraph.autodiff.select import find_path
from gradgraph.building.accumulation import Accumulation
from gradgraph.building.beginning import Beginning
from gradgraph.building.gradients import Gradients
from gradgraph.building.group_starts import GroupStarts
from gradgraph.building.links import MasterWeights, Update, Weights
from gradgraph.building.loss_scale import LossScale
from gradgraph.building.measured import Written
from gradgraph.building.objective import Objective, own_results
from gradgraph.building.optimizer_update import OptimizerUpdate
from gradgraph.building.pruning_masks import PruningMasks
from gradgraph.building.selection import as_input, frozen_values
from gradgraph.building.separate import Halves, cut, marked
from gradgraph.building.step_options import StepOptions
from gradgraph.building.step_state import Slot, StepState
from gradgraph.graph.builder import Var
from gradgraph.graph.marks import forget_detached
from gradgraph.optim import Optimizer
from gradgraph.passes import randomness
from gradgraph.passes.autocast import Precision
from gradgraph.passes.draws import draw_from
from gradgraph.passes.modes import drop_in_loss, training_mode
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.step.manifest import StateSpec, column
from gradgraph.step.step import WRITTEN_KEY


@dataclass(frozen=True)
class Plan:
    """How a step trains.

    Args:
        name: of the step, if it is one of several.
        trained, all_trained: the weights that this step trains, and those that any step trains.
        seed: of the numbers that it draws.
    """

    name: str
    options: StepOptions
    optimizer: Optimizer
    trained: Sequence[str]
    all_trained: Sequence[str]
    seed: int
    precision: Precision
    separate: bool


@dataclass(frozen=True)
class Training:
    """A train graph that is written.

    Attributes:
        states: the state tensors that it moves.
        reports: its outputs that say how it trains.
        averages: of weights, the state tensors that evaluation reads in their place.
        scale_names: the state tensors of loss scaling, by their columns.
        halves: the same step in two files, if it is separate.
    """

    model: ir.Model
    states: Sequence[StateSpec]
    reports: Sequence[str]
    hyperparameters: Mapping[str, float]
    averages: Mapping[str, str]
    scale_names: Mapping[str, str]
    halves: Halves | None

    @property
    def inputs(self) -> list[str]:
        """The names of all that it takes."""
        return [v.name or "" for v in self.model.graph.inputs]


@dataclass(frozen=True)
class Forward:
    """A forward pass in training mode.

    Attributes:
        statistics: running statistics, and what they become.
        source: of random numbers.
    """

    written: Written
    statistics: Mapping[ir.Value, Var]
    source: randomness.RandomSource


def write_training(model: ir.Model, objective: Objective, plan: Plan, beginning: Beginning) -> Training:
    """Make ``model`` the train graph of a step, in place; ``beginning`` gets the starts of its state."""
    graph, optimizer, options = model.graph, plan.optimizer, plan.options
    state = StepState(builder_for(model, named_operators=True), beginning, plan.name)
    forward = _forward(model, objective, plan, state)
    written, params = forward.written, [graph.initializers[n] for n in plan.trained]

    # the links between the backward pass and the optimizer
    groups = GroupStarts(state, optimizer.groups.resolve(graph, params) if optimizer.groups else [])
    masks = PruningMasks(state, optimizer.pruning, params) if optimizer.pruning else None
    scale = LossScale(state, plan.precision) if plan.precision.scales else None
    masters = MasterWeights(state) if optimizer.keeps_master else None
    accumulation = Accumulation(state, written, options.grad_norm) if options.accumulate else None

    takes_factors = not (plan.precision.dtype or options.accumulate or options.grad_norm or plan.separate)
    slopes = Gradients(model, state, scale, takes_factors)
    path = find_path(model, [written.loss], params)
    zeroing = [link for link in (masks, groups) if link]
    gradients, transforms = slopes.of(path, params, optimizer, zeroing)
    marks = marked(state, params, gradients, written) if plan.separate else None
    gradients = marks.gradients if marks else gradients
    for link in zeroing:
        gradients = link.gradients(gradients)
    written = written._replace(loss=path.targets[0])
    results = [written.loss, *written.metrics, *(sums for _, sums in written.measures)]
    own_results(state.op, plan.name, objective, written)

    norm = options.grad_norm and not options.accumulate
    update: Update = OptimizerUpdate(state, optimizer, transforms, groups, norm)
    for inner in (masks, scale, masters, accumulation):
        update = inner.around(update) if inner else update
    state.op.scope = "update"
    weights = Weights(params, [beginning.weight(p) for p in params], [state.op.wrap(p) for p in params])
    new = update(weights, gradients)

    for value, start, after in zip(params, weights.start, new, strict=True):
        state.carry(Slot(value, after, start, "parameter"))
    for value, after in forward.statistics.items():
        state.carry(Slot(value, after, beginning.weight(value), "statistic"))
    for slot in state.slots:
        state.carry(slot)
    rng = forward.source.state
    if forward.source.places:
        begin = state.start.const(randomness.initial_state(plan.seed))
        state.carry(Slot(rng.value, randomness.advance(state.op, rng), begin, "counter"))
    if scale is None:  # which counts the steps that it does not skip
        for slot in state.next_step(accumulation.due if accumulation else None):
            state.carry(slot)

    reports = [v.name or "" for v in state.reports]
    _close(model, state, [*results, *state.reports])
    if recompute := as_recompute(options.recompute):
        beside = (*graph.inputs, *graph.initializers.values(), *state.inputs)  # weights, state, the next, what is fed
        recompute.apply(model, state.op, slopes.passes, sum(bytes_of(v, recompute.sizes, 1) for v in beside))
    forget_detached(nodes_of(model))  # the gradients are written
    halves = None
    if marks:
        moved = {v.name or "" for v in (*forward.statistics, rng.value)}
        halves = cut(model, marks.spec, [v.name or "" for v in results], state.specs, moved, [*state.hyperparameters])
    model.metadata_props[WRITTEN_KEY] = str(graph.num_nodes())
    clean_up(model)
    if plan.name:  # of the batch, and of the state of other steps, it takes only what it needs
        own = {*state.inputs, *(r.value for r in state.rates.values())}
        for value in [v for v in graph.inputs if v not in own and not v.uses()]:
            graph.inputs.remove(value)
    scale_names = {column(plan.name, name): tensor for name, tensor in scale.names.items()} if scale else {}
    return Training(model, state.specs, reports, state.hyperparameters, state.averages, scale_names, halves)


def _forward(model: ir.Model, objective: Objective, plan: Plan, state: StepState) -> Forward:
    """Put ``model`` into training mode and write the loss behind it."""
    frozen = frozen_values(model.graph, plan.all_trained)
    for name in plan.all_trained:
        if name not in plan.trained and name in model.graph.initializers:
            as_input(model.graph, name)
    source = randomness.RandomSource(state.new("rng", ir.DataType.INT64, (3,)))
    statistics = training_mode(model, state.op, source.keep, frozen)
    draw_from(source, model, state.op)
    written = objective.emit(state.op, model.graph)
    state.op.finish(model.graph)
    drop_in_loss(model, state.op, source.keep)
    draw_from(source, model, state.op)  # what the loss draws
    return Forward(written, statistics, source)


def _close(model: ir.Model, state: StepState, results: Sequence[ir.Value]) -> None:
    """Give the graph its inputs and outputs; state is no longer stored in it."""
    graph = model.graph
    state.op.finish(graph)
    for spec in state.specs:
        if spec.name in graph.initializers:
            graph.initializers.pop(spec.name).const_value = None
    graph.inputs.extend([*(r.value for r in state.rates.values()), *state.inputs])
    graph.outputs[:] = [*results, *state.outputs]
