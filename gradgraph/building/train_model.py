"""Writing of train.onnx: the loss, its gradients, the optimizer's update, and the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.recomputation import as_recompute, bytes_of
from gradgraph.autodiff.select import find_path
from gradgraph.building.accumulation import Accumulation
from gradgraph.building.adversarial import Attack
from gradgraph.building.draft import Draft, Part
from gradgraph.building.group_starts import GroupStarts
from gradgraph.building.links import MasterWeights, Update, Weights
from gradgraph.building.loss_gradients import Gradients
from gradgraph.building.loss_scale import LossScale
from gradgraph.building.objective import own_results
from gradgraph.building.objective_results import Written
from gradgraph.building.optimizer_update import OptimizerUpdate
from gradgraph.building.pruning_masks import PruningMasks
from gradgraph.building.selection import as_input, frozen_values, how_to_freeze
from gradgraph.building.separate import Halves, cut, marked
from gradgraph.building.step_state import Slot, StepState
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import forget_detached
from gradgraph.optim.schedules import Schedule
from gradgraph.passes import randomness
from gradgraph.passes.draws import draw_from
from gradgraph.passes.modes import drop_in_loss, training_mode
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.step.manifest import LEARNING_RATE, column
from gradgraph.step.step import WRITTEN_KEY


def write_training(draft: Draft, part: Part) -> tuple[StepState, Halves | None]:
    """Turn the model of ``part`` into its train graph, in place, and write the initial values of its state.

    Returns:
        The state, and gradient.onnx and apply.onnx if the step is built with ``separate``.
    """
    model, graph, optimizer, options = part.model, part.model.graph, part.optimizer, part.options
    state = StepState(builder_for(model, named_operators=True), draft.init_model, part.name)
    written, minimised, statistics, source = _forward(draft, part, state)
    params = [graph.initializers[n] for n in part.trained]

    # the links between the backward pass and the optimizer
    groups = GroupStarts(state, optimizer.groups.resolve(graph, params) if optimizer.groups else [])
    masks = PruningMasks(state, optimizer.pruning, params) if optimizer.pruning else None
    scale = LossScale(state, draft.precision) if draft.precision.scales else None
    masters = MasterWeights(state) if optimizer.keeps_master else None

    separate = draft.options.separate
    takes_factors = not (draft.precision.dtype or options.accumulate or options.grad_norm or separate)
    slopes = Gradients(model, state, scale, takes_factors)
    path = find_path(model, list(dict.fromkeys([minimised, written.loss])), params, leave_out=how_to_freeze)
    zeroing = [link for link in (masks, groups) if link]
    gradients, transforms = slopes.of(path, params, optimizer, zeroing)
    marks = marked(state, params, gradients, written) if separate else None
    gradients = marks.gradients if marks else gradients
    if marks and (weight := marks.weight) is not None:
        written = written._replace(weight=lambda: weight)
    accumulation = Accumulation(state, written, options.grad_norm) if options.accumulate else None
    for link in zeroing:
        gradients = link.gradients(gradients)
    written = written._replace(loss=path.targets[-1])
    own_results(state.op, part.name, part.objective, written)

    norm = options.grad_norm and not options.accumulate
    update: Update = OptimizerUpdate(state, optimizer, transforms, groups, norm)
    for inner in (masks, scale, masters, accumulation):
        update = inner.around(update) if inner else update
    state.op.scope = "update"
    weights = Weights(params, [state.init_model.weight(p) for p in params], [state.op.wrap(p) for p in params])
    new = update(weights, gradients)
    if optimizer.groups and isinstance(optimizer.groups.base, Schedule):
        state.scheduled(optimizer.groups.base)  # the rate is reported even if no weight follows the schedule

    _carry(state, weights, new, statistics, source, part.seed)
    if scale is None:  # otherwise LossScale increments the counter, if the step is not skipped
        state.carry(state.next_step(accumulation.due if accumulation else None))

    results = [v.name or "" for v in written.results]
    _close(graph, state, [*written.results, *state.reports.values()])
    if recompute := as_recompute(options.recompute):
        held = (*graph.inputs, *graph.initializers.values(), *state.inputs)  # memory besides activations
        recompute.apply(model, state.op, slopes.passes, sum(bytes_of(v, recompute.sizes, 1) for v in held))
    forget_detached(nodes_of(model))  # the gradients are written
    halves = None
    if marks:
        moved = {v.name or "" for v in (*statistics, source.state.value)}
        halves = cut(model, marks.spec, state, results, moved)
    model.metadata_props[WRITTEN_KEY] = str(graph.num_nodes())
    clean_up(model)
    for written_model in (model, *(halves.models.values() if halves else ())):
        write_schedule(written_model, state)
    if part.name:  # a named step keeps only the inputs of the batch and of other steps' state that it uses
        _drop_unused_inputs(graph, state)
    return state, halves


def _forward(
    draft: Draft, part: Part, state: StepState
) -> tuple[Written, ir.Value, Mapping[ir.Value, Var], randomness.RandomSource]:
    """Put the model of ``part`` into training mode, append the loss, and feed it attacked inputs if requested.

    Returns the results, the value to minimise, the running statistics with their updated values, and the source of
    random numbers.
    """
    model, every = part.model, draft.trained
    frozen = frozen_values(model.graph, every)
    for name in every:
        if name not in part.trained and name in model.graph.initializers:
            as_input(model.graph, name)
    attack = None if part.options.adversarial is None else Attack(draft, part)
    source = randomness.RandomSource(state.new("rng", ir.DataType.INT64, (3,)))
    statistics: Mapping[ir.Value, Var] = training_mode(model, state.op, source.keep, frozen)
    draw_from(source, model, state.op)
    written = part.objective.emit(state.op, model.graph).without_rows()
    state.op.finish(model.graph)
    drop_in_loss(model, state.op, source.keep)
    draw_from(source, model, state.op)  # random numbers drawn by the loss
    minimised = written.loss
    if attack is not None:
        minimised, statistics = attack.apply(model, state, written, statistics, source)
    return written, minimised, statistics, source


def _carry(
    state: StepState,
    weights: Weights,
    new: Sequence[Var],
    statistics: Mapping[ir.Value, Var],
    source: randomness.RandomSource,
    seed: int,
) -> None:
    """Carry weights, running statistics, the optimizer's slots and the random-number state to the next step."""
    rows = zip(weights.params, new, weights.start, strict=True)
    state.carry(Slot(value, after, start, "parameter") for value, after, start in rows)
    state.carry(Slot(v, after, state.init_model.weight(v), "statistic") for v, after in statistics.items())
    state.carry(state.slots)
    if source.places:
        begin = state.start.const(randomness.initial_state(seed))
        state.carry([Slot(source.state.value, randomness.advance(state.op, source.state), begin, "counter")])


def _drop_unused_inputs(graph: ir.Graph, state: StepState) -> None:
    own = {*state.inputs, *(r.value for r in state.rates.values())}
    for value in [v for v in graph.inputs if v not in own and not v.uses()]:
        graph.inputs.remove(value)


def _close(graph: ir.Graph, state: StepState, results: Sequence[ir.Value]) -> None:
    """Declare the inputs and outputs of the train graph; trained weights and other state change to inputs."""
    state.op.finish(graph)
    for spec in state.specs:
        if spec.name in graph.initializers:
            graph.initializers.pop(spec.name).const_value = None
    fed = [r.value for r in state.rates.values()] + ([state.rate] if state.rate else [])
    graph.inputs.extend([*fed, *state.inputs])
    graph.outputs[:] = [*results, *state.outputs]


def write_schedule(model: ir.Model, state: StepState) -> None:
    """Write the schedule of ``state`` into a train graph, in place of the placeholder input for its rate.

    The rate becomes an output, unless the graph has an input ``learning_rate`` for another part of the optimizer. The
    nodes are written last, so that no pass optimises the schedule or folds a constant one, and ``step.fed_rate`` can
    turn it back into an input.
    """
    schedule, fed, clock = state.schedule, _input(model, state.rate), _input(model, state.counter)
    if schedule is None or fed is None or clock is None:
        return
    graph, op = model.graph, builder_for(model)
    is_fed = LEARNING_RATE in state.rates
    rate = _written(op, schedule, clock, f"update/{LEARNING_RATE}" if is_fed else column(state.name, LEARNING_RATE))
    if not is_fed:
        state.reports[rate.name or ""] = rate
        following = {s.next for s in state.specs}
        graph.outputs.insert(sum(o.name not in following for o in graph.outputs), rate)
    graph.inputs.remove(fed)
    fed.replace_all_uses_with(rate)
    op.finish(graph, before=graph[0])


def _written(op: Builder, schedule: Schedule, clock: ir.Value, name: str) -> ir.Value:
    """Return the learning rate after ``clock`` updates; ``op`` gets its nodes and constants, after clean-up."""
    op.scope = "update"
    own = ir.Value(name=clock.name, type=clock.type, shape=clock.shape)
    rate = op.Identity(schedule.emit(op, op.cast(op.wrap(own), ir.DataType.FLOAT)), name=name).value
    rate.shape = ir.Shape(())
    graph = ir.Graph([own], [rate], nodes=[], opset_imports={}, name="schedule")
    op.finish(graph)
    clean_up(ir.Model(graph, ir_version=10))
    rate = graph.outputs[0]
    op.nodes, op.constants = list(graph), list(graph.initializers.values())
    graph.remove(op.nodes)
    graph.initializers.clear()
    graph.outputs.clear()
    own.replace_all_uses_with(clock)
    return rate


def _input(model: ir.Model, like: ir.Value | None) -> ir.Value | None:
    """Return the input of ``model`` called like ``like``; None for one half of a step that does not need it."""
    return next((v for v in model.graph.inputs if like is not None and v.name == like.name), None)
