"""Writing train.onnx and init.onnx: the loss, its gradients, the optimizer, and the state that they carry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.path import Path
from gradgraph.autodiff.recomputation import Recompute, bytes_of
from gradgraph.autodiff.recompute import Written, written_backward
from gradgraph.autodiff.select import find_path
from gradgraph.building.loss_scale import LossScale
from gradgraph.building.objective import Objective, own_results
from gradgraph.building.second_pass import SecondPass
from gradgraph.building.selection import as_input, frozen_values
from gradgraph.building.separate import Halves, cut, marked
from gradgraph.building.weight_masks import Masks
from gradgraph.errors import BuildError, DifferentiationError, shown
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.marks import forget_detached
from gradgraph.graph.prune import prune
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.optim import Optimizer
from gradgraph.optim.modifiers import global_norm
from gradgraph.optim.transform import Context, Slots, Transform, Vars, joined
from gradgraph.optim.weight_groups import GroupContext
from gradgraph.passes import randomness
from gradgraph.passes.autocast import Precision
from gradgraph.passes.draws import draw_from
from gradgraph.passes.modes import drop_in_loss, training_mode
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.step.manifest import BATCH_WEIGHT, UPDATE, SeparateSpec, StateSpec, column, spec_of
from gradgraph.step.step import WRITTEN_KEY


class Beginning:
    """Writes init.onnx: the first values of all state tensors, each once, whichever train graph moves it."""

    def __init__(self) -> None:
        self.op = Builder(scope="init")
        self._copies: dict[str, ir.Value] = {}
        self._values: dict[str, ir.Value] = {}

    def weight(self, value: ir.Value, number: Any) -> Var:
        """The starting value of a weight, as an initializer."""
        name = value.name or ""
        if name not in self._copies:
            self._copies[name] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=number)
        return self.op.wrap(self._copies[name])

    def add(self, value: ir.Value, begin: Var) -> None:
        """Let the state tensor ``value`` begin as ``begin``."""
        name = value.name or ""
        if name not in self._values:
            is_weight = begin.value.name in self._copies
            self._values[name] = begin.value if is_weight else owned(self.op, begin, name, value, self._values.values())

    def model(self) -> ir.Model:
        graph = ir.Graph((), [*self._values.values()], nodes=(), name="init", opset_imports={"": OPSET})
        for weight in self._copies.values():
            graph.register_initializer(weight)
        self.op.finish(graph)
        return prune(ir.Model(graph, ir_version=IR_VERSION, producer_name="gradgraph"))


def owned(op: Builder, var: Var, name: str, like: ir.Value, taken: Collection[ir.Value]) -> ir.Value:
    """``var`` as a value of its own called ``name``; those ``taken`` are others."""
    node = var.value.producer()
    if node is None or node.graph is not None or var.value in taken:
        var = op.Identity(var, name=name)
    else:
        var.value.name = op.fresh(name)
    var.value.type, var.value.shape = like.type, like.shape
    return var.value


@dataclass(frozen=True)
class Among:
    """One of several named steps.

    Args:
        name: of this one.
        trained: what all of them train.
        beginning: of the state that they share.
    """

    name: str = ""
    trained: Sequence[str] = ()
    beginning: Beginning = field(default_factory=Beginning)


class Training:
    """Writes train.onnx (``model``), and beside it what init.onnx has of its state.

    Attributes:
        states: the state tensors that it moves.
        inputs: the names of all that it takes.
        halves: the same step in two files, if ``separate``.
    """

    def __init__(
        self,
        model: ir.Model,
        objective: Objective,
        trained: Sequence[str],
        optimizer: Optimizer,
        seed: int,
        accumulates: bool = False,
        grad_norm: bool = False,
        among: Among | None = None,
        precision: Precision | None = None,
        separate: bool = False,
        recompute: Recompute | None = None,
    ) -> None:
        self.model, self.objective, self.trained, self.optimizer, self.seed = model, objective, trained, optimizer, seed
        self.accumulates, self.grad_norm, self.precision = accumulates, grad_norm, precision
        self._separates = separate
        self._recompute, self._passes = recompute, list[Written]()
        self.beginning = among.beginning if among else Beginning()
        self._name, self._all_trained = (among.name, among.trained) if among else ("", trained)
        self.reports: list[str] = []
        self.states: list[StateSpec] = []
        self.hyperparameters: dict[str, float] = {}
        self.averages: dict[str, str] = {}
        self.op = builder_for(model, named_operators=True)  # writes train.onnx
        self.start = self.beginning.op  # writes init.onnx
        self.scale_names: dict[str, str] = {}
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._slots: list[tuple[ir.Value, Var, Var]] = []
        self._rates: dict[str, Var] = {}
        self._step: Var | None = None
        self._begun: dict[int, Var] = {}  # by the start of a group
        self._due: Var | None = None  # whether this step moves the weights, where it may only add up gradients
        self._scale: LossScale | None = None
        self._marks: dict[str, Var] = {}  # the gradients of weights, where the graph is cut
        self._batch_weight = ""  # what the loss is a mean over
        self.halves: Halves | None = None
        self._write(model.graph)
        self._finish(model.graph)

    def _write(self, graph: ir.Graph) -> None:
        frozen = frozen_values(graph, self._all_trained)
        for name in self._all_trained:
            if name not in self.trained and name in graph.initializers:
                as_input(graph, name)
        rng = self._free_state("rng", ir.DataType.INT64, (3,))
        source = randomness.RandomSource(rng)
        statistics = training_mode(self.model, self.op, source.keep, frozen)
        draw_from(source, self.model, self.op)
        written = self._written = self.objective.emit(self.op, graph)
        loss = written.loss
        self.op.finish(graph)
        drop_in_loss(self.model, self.op, source.keep)
        draw_from(source, self.model, self.op)  # what the loss draws
        self._weights = {v: v.const_value for v in graph.initializers.values()}
        params = [graph.initializers[n] for n in self.trained]
        groups = self.optimizer.groups
        self._groups = [] if groups is None else groups.resolve(graph, params)
        pruning = self.optimizer.pruning
        self._masks = Masks(self.op, self.start, pruning, params, self._free_state) if pruning else None
        if self.precision is not None and self.precision.scales:
            self._scale = LossScale(self.op, self.start, self.precision, self._free_state)
            self.scale_names = {column(self._name, name): tensor for name, tensor in self._scale.names.items()}
        path = find_path(self.model, [loss], params)
        (loss,) = path.targets
        gradients, transforms = self._gradients(path, loss, params)
        if self._separates:
            self._marks = marked(self.op, params, gradients)
            gradients = [*self._marks.values()]
            if written.weight is not None and not written.adds_up:
                self._batch_weight = self.op.Identity(written.weight(), name=BATCH_WEIGHT).value.name or ""
        gradients = self._awake(gradients)
        self._results = [loss, *written.metrics, *(sums for _, sums in written.measures)]
        own_results(self.op, self._name, self.objective, written._replace(loss=loss))
        self._forward = [*self._results]
        updated = (self._accumulate if self.accumulates else self._update)(params, gradients, transforms)
        for value, new in zip(params, updated, strict=True):
            self._carry(value, new, "parameter", self._weight(value))
        for value, new in statistics.items():
            self._carry(value, new, "statistic", self._weight(value))
        self._moved_forward = {v.name or "" for v in (*statistics, rng.value)}
        for value, new, begin in self._slots:
            counts = self._scale is not None and value.dtype == ir.DataType.INT64  # steps: made, skipped, in a row
            self._carry(value, new, "counter" if counts else "optimizer", begin)
        if source.places:
            begin = self.start.const(randomness.initial_state(self.seed))
            self._carry(rng.value, randomness.advance(self.op, rng), "counter", begin)
        if self._step is not None and self._scale is None:
            done = 1 if self._due is None else self.op.cast(self._due, ir.DataType.INT64)
            self._carry(self._step.value, self._step + done, "counter", self.start.const(np.int64(0)))

    def _gradients(
        self, path: Path, loss: ir.Value, params: Sequence[ir.Value]
    ) -> tuple[list[Var], Sequence[Transform]]:
        """The gradients that the optimizer gets, and what is left of its chain."""
        if self.optimizer.ascent is None:
            return self._gradients_at(path, loss, params)
        again = SecondPass(self.model.graph, loss)
        slopes = self._backward(path, loss, params, self.op.ones_like(self.op.wrap(loss)))
        slopes = self._awake(slopes)
        self.op.scope = "ascent"
        weights = [self.op.wrap(p) for p in params]
        away, _ = self.optimizer.ascent.update(self.op, slopes, {}, weights, self)
        moved = [(w + d).value for w, d in zip(weights, away, strict=True)]
        for value, p in zip(moved, params, strict=True):
            value.type, value.shape = p.type, p.shape
        self.op.finish(self.model.graph)
        there = again.write(self.op, dict(zip(params, moved, strict=True)))
        path = find_path(self.model, [there], moved)
        return self._gradients_at(path, path.targets[0], moved)

    def _gradients_at(
        self, path: Path, loss: ir.Value, weights: Sequence[ir.Value]
    ) -> tuple[list[Var], Sequence[Transform]]:
        seed, transforms = self._seed(self.op.wrap(loss), weights)
        return self._backward(path, loss, weights, seed), transforms

    def _backward(self, path: Path, loss: ir.Value, weights: Sequence[ir.Value], seed: Var) -> list[Var]:
        """The gradient of each of ``weights``; where the loss is scaled, the seed is the factor."""
        seed = seed if self._scale is None else self._scale.seed(self.op.wrap(loss))
        self._passes.append(written_backward(self.op, path, {loss: seed}, self.model.graph))
        gradients = self._passes[-1].gradients
        _check_reached(weights, gradients)
        found = [gradients[w] for w in weights]
        return found if self._scale is None else self._scale.unscaled(found)

    def _seed(self, loss: Var, params: Sequence[ir.Value]) -> tuple[Var, Sequence[Transform]]:
        """The loss's cotangent, with the factors of the optimizer's first transforms in it, and the other transforms.

        Not in half precision, where gradients that are scaled early would vanish.
        """
        seed, transforms = self.op.ones_like(loss), list(self.optimizer.transforms)
        self.op.scope = "update"
        wide = all(v.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) for v in (loss.value, *params))
        wide = wide and self.precision is None
        wide = wide and not self.accumulates  # the rate is that of the step that moves the weights
        wide = wide and not self.grad_norm  # which is that of the gradient itself
        wide = wide and not self._separates  # likewise
        while wide and transforms and (factor := transforms[0].factor) is not None:
            number = self.op.cast(factor(self.op, self), loss.dtype)
            seed = number if loss.shape == () and len(transforms) == len(self.optimizer.transforms) else seed * number
            del transforms[0]
        return seed, transforms

    def _update(
        self, params: Sequence[ir.Value], gradients: Sequence[Var], transforms: Sequence[Transform]
    ) -> list[Var]:
        """Pass the gradients through what is left of the optimizer's chain; return the new parameters."""
        self.op.scope = "update"
        first_slot = len(self._slots)
        finite = None if self._scale is None else self._scale.are_finite(gradients)
        begin = [self._master_start(p) for p in params]
        old = [self._master(p, first) for p, first in zip(params, begin, strict=True)]
        gradients = [self.op.cast(g, p.dtype) for g, p in zip(gradients, old, strict=True)]
        if self.grad_norm and not self.accumulates:
            self._report("grad_norm", global_norm(self.op, gradients))
        if self.optimizer.groups is None:
            new = self._moved(transforms, params, begin, old, gradients, self)
        else:
            for transform in transforms:
                gradients = self._through(transform, params, begin, old, gradients, self)
            new = list(old)
            for group in self._groups:
                context = GroupContext(self, self.optimizer.groups.rate, group.start)
                first_of_group = len(self._slots)
                mine = [params[i] for i in group.members]
                first, was, slope = ([many[i] for i in group.members] for many in (begin, old, gradients))
                moved = self._moved(group.transforms, mine, first, was, slope, context)
                if group.start:
                    moved = self._where(self._has_begun(group.start), was, moved, first_of_group)
                for i, value in zip(group.members, moved, strict=True):
                    new[i] = value
        for transform in self.optimizer.after:
            new = self._through(transform, params, begin, old, new, self)
        if self._masks is not None:
            new = self._pruned(self._masks, params, new)
        if finite is not None:
            new = self._unless_skipped(finite, old, new, first_slot)
        updates = zip(params, old, new, begin, strict=True)
        self._slots += [(was.value, now, first) for p, was, now, first in updates if was.value is not p]
        return [self.op.cast(now, p.dtype or now.dtype) for p, now in zip(params, new, strict=True)]

    def _pruned(self, masks: Masks, params: Sequence[ir.Value], new: Vars) -> list[Var]:
        """``new`` without what is pruned; so are the averages."""
        slots = masks.advance(new, self.step())
        averages = {self.averages[p.name or ""]: i for i, p in enumerate(params) if p.name in self.averages}
        places = {averages[v.name or ""]: k for k, (v, _, _) in enumerate(self._slots) if v.name in averages}
        if places:
            values = [self._slots[places[i]][1] if i in places else one for i, one in enumerate(new)]
            for i, average in enumerate(masks.masked(values)):
                if i in places:
                    value, _, begin = self._slots[places[i]]
                    self._slots[places[i]] = (value, average, begin)
        self._slots += slots
        return masks.masked(new)

    def _unless_skipped(self, finite: Var, old: Vars, new: Vars, first_slot: int) -> list[Var]:
        """``new``; but ``old`` where a gradient is not finite, and then all that the optimizer keeps stays, too."""
        op = self.op
        assert self._scale is not None
        kept = self._where(finite, old, new, first_slot)
        self._slots += self._scale.advanced(finite)
        if self._step is not None:
            done = self._step + op.cast(finite, ir.DataType.INT64)
            self._slots.append((self._step.value, done, self.start.const(np.int64(0))))
        return kept

    def _where(self, condition: Var, old: Vars, new: Vars, first_slot: int) -> list[Var]:
        """``new``, or ``old`` where the condition does not hold, as then the slots from ``first_slot`` on stay."""
        op, rows = self.op, self._slots[first_slot:]
        self._slots[first_slot:] = [(v, op.Where(condition, now, op.wrap(v)), begin) for v, now, begin in rows]
        return [op.Where(condition, now, was) for now, was in zip(new, old, strict=True)]

    def _has_begun(self, start: int) -> Var:
        """Whether the weights of a group that begins after so many updates move."""
        if start not in self._begun:
            self._begun[start] = self.step() >= np.int64(start)
        return self._begun[start]

    def _awake(self, gradients: Sequence[Var]) -> list[Var]:
        """The gradients, with zeros for weights whose group has not begun, and for those that are pruned."""
        gradients = self._masks.masked(gradients) if self._masks else gradients
        starts = {i: group.start for group in self._groups if group.start for i in group.members}
        if not starts:
            return list(gradients)
        self.op.scope = "update"
        return [self.op.Where(self._has_begun(starts[i]), g, 0.0) if i in starts else g
                for i, g in enumerate(gradients)]  # fmt: skip

    def _accumulate(
        self, params: Sequence[ir.Value], gradients: Sequence[Var], transforms: Sequence[Transform]
    ) -> list[Var]:
        """``_update`` with the weighted mean of the gradients since the last one, in a branch that runs when it is due.

        A loss says what it is a mean over, or ``batch_weight`` is fed; of losses that sum, gradients add up.
        """
        op = self.op
        op.scope = "update"
        due = self._due = self._named(UPDATE) > 0.5
        weight = None if self._written.adds_up else (self._written.weight or partial(self._named, BATCH_WEIGHT))()
        total = None if weight is None else self._added("accumulated_weight", ir.DataType.FLOAT, (), weight, due)
        sums = []
        for p, g in zip(params, gradients, strict=True):
            wide = ir.DataType.FLOAT if p.dtype == ir.DataType.FLOAT16 else g.dtype
            term = op.cast(g, wide) if weight is None else op.cast(g, wide) * op.cast(weight, wide)
            sums.append(self._added(f"{p.name}.accumulated", wide, self._weight(p).shape or (), term, due))
        if self.grad_norm:
            norm = global_norm(op, sums)
            self._report("grad_norm", norm if total is None else norm / total)
        first = len(self._slots)

        def update() -> list[Var]:
            mean = [s if total is None else s / op.cast(total, s.dtype) for s in sums]
            slopes = [op.cast(s, g.dtype) for s, g in zip(mean, gradients, strict=True)]
            return [*self._update(params, slopes, transforms), *(new for _, new, _ in self._slots[first:])]

        then = op.graph([], update, "update")
        old = [*params, *(value for value, _, _ in self._slots[first:])]
        otherwise = op.graph([], lambda: [op.wrap(value) for value in old], "keep")
        results = all_of(op.If(due, then_branch=then, else_branch=otherwise, outputs=len(old)))
        for result, value in zip(results, old, strict=True):
            result.value.type, result.value.shape = value.type, value.shape
        rows = zip(self._slots[first:], results[len(params) :], strict=True)
        self._slots[first:] = [(value, new, begin) for (value, _, begin), new in rows]
        return results[: len(params)]

    def _report(self, name: str, number: Var) -> None:
        """Make ``number`` an output."""
        result = self.op.Identity(number, name=column(self._name, name)).value
        self._results.append(result)
        self.reports.append(result.name or "")

    def _added(self, name: str, dtype: ir.DataType, shape: Sequence[Any], term: Var, due: Var) -> Var:
        """State that adds up ``term`` and begins anew when an update is due: the sum, this term in it."""
        before = self._free_state(name, dtype, shape)
        total = before + term
        begin = self.start.full(self.start.const(np.array(shape, np.int64)), 0, dtype)
        self._slots.append((before.value, self.op.Where(due, 0.0, total), begin))
        return total

    def _named(self, name: str) -> Var:
        """A hyperparameter that who runs the step looks up by its name."""
        value = self.hyperparameter(name, 1.0)
        if value.value.name != name:
            raise BuildError(
                f"accumulation feeds '{name}', but the model has a value of this name; give it another one"
            )
        return value

    def _moved(
        self,
        transforms: Sequence[Transform],
        params: Sequence[ir.Value],
        begin: Vars,
        old: Vars,
        gradients: Vars,
        context: Context,
    ) -> list[Var]:
        """The new parameters, behind all ``transforms``."""
        in_float32 = all(p.dtype == ir.DataType.FLOAT for p in old)  # numbers of updates written at once are
        links, last = joined(transforms) if in_float32 else (transforms, None)
        for transform in links:
            gradients = self._through(transform, params, begin, old, gradients, context)
        if last is not None:
            return self._through(last, params, begin, old, gradients, context)
        return [p + g for p, g in zip(old, gradients, strict=True)]

    def _through(
        self,
        transform: Transform,
        params: Sequence[ir.Value],
        begin: Vars,
        old: Vars,
        gradients: Vars,
        context: Context,
    ) -> list[Var]:
        """The result of one transform; its slots, named after ``params``, become state."""
        starts = transform.init(self.start, begin)
        slots = self._slot_inputs(params, starts)
        given, after = transform.update(self.op, gradients, slots, old, context)
        for slot, values in after.items():
            rows = zip(slots[slot], values, starts[slot], strict=True)
            self._slots += [(v.value, new, first) for v, new, first in rows if v is not None]
        if transform.averages is not None:
            self._take_averages(params, slots[transform.averages])
        return list(given)

    def _take_averages(self, params: Sequence[ir.Value], slot: Sequence[Var | None]) -> None:
        for param, average in zip(params, slot, strict=True):
            assert average is not None  # an average is one of every weight
            if average.dtype == ir.DataType.FLOAT16 or average.dtype != param.dtype:
                raise BuildError(
                    f"'{shown(param.name)}' is float16, in which an average of it would stand still; "
                    "store the weights in float32 to average them"
                )
            if param.name in self.averages:
                raise BuildError("an optimizer that averages weights needs no ema; take one of them")
            self.averages[param.name or ""] = average.value.name or ""

    def _master_start(self, param: ir.Value) -> Var:
        """The start of the optimizer's first step: the weight, in float32 if the optimizer keeps such copies."""
        is_narrow = self.optimizer.keeps_master and param.dtype == ir.DataType.FLOAT16
        weight = self._weight(param)
        return self.start.cast(weight, ir.DataType.FLOAT) if is_narrow else weight

    def _master(self, param: ir.Value, start: Var) -> Var:
        """The tensor that the optimizer updates: the parameter, or the float32 copy that it is rounded from."""
        if start.dtype == param.dtype:
            return self.op.wrap(param)
        return self._free_state(f"{param.name}.master", start.dtype, start.shape or ())

    def _slot_inputs(self, params: Sequence[ir.Value], starts: Slots) -> dict[str, list[Var | None]]:
        return {
            slot: [
                None if s is None else self._free_state(f"{p.name}.{slot}", s.dtype, s.shape or ())
                for p, s in zip(params, values, strict=True)
            ]
            for slot, values in starts.items()
        }

    @property
    def inputs(self) -> list[str]:
        return [v.name or "" for v in self.model.graph.inputs]

    # what transforms ask for (optim.transform.Context)

    def step(self) -> Var:
        if self._step is None:
            self._step = self._free_state("step", ir.DataType.INT64, ())
        return self._step

    def run_step(self) -> Var:
        return self.step()

    def hyperparameter(self, name: str, default: float) -> Var:
        if name not in self._rates:
            self._rates[name] = self._free_input(name, ir.DataType.FLOAT, ())
        known = self.hyperparameters.setdefault(self._rates[name].value.name or name, float(default))
        if known != default:
            raise BuildError(
                f"two parts of the optimizer ask for '{name}', one with {known} and one with {float(default)}",
                remedy="chain one of them only, or give one a schedule such as gradgraph.optim.constant(...)",
            )
        return self._rates[name]

    def scalar(self, name: str, begin: float, advance: Callable[[Var], Var]) -> Var:
        number = self._free_state(name, ir.DataType.FLOAT, ())
        self._slots.append((number.value, advance(number), self.start.const(np.float32(begin))))
        return number

    # state

    def _free_input(self, name: str, dtype: ir.DataType, shape: Sequence[Any]) -> Var:
        return self.op.wrap(ir.Value(name=self.op.fresh(name), type=ir.TensorType(dtype), shape=ir.Shape(shape)))

    def _free_state(self, name: str, dtype: ir.DataType, shape: Sequence[Any]) -> Var:
        """A new state tensor, which of several steps belongs to this one."""
        return self._free_input(column(self._name, name), dtype, shape)

    def _weight(self, value: ir.Value) -> Var:
        """The starting value of a weight, as an initializer of init.onnx."""
        return self.beginning.weight(value, self._weights[value])

    def _carry(self, value: ir.Value, new: Var, kind: str, begin: Var) -> None:
        """Make ``value`` a state tensor: read as an input, written as ``<name>.next``, started from ``begin``."""
        taken = [*self._outputs, *(mark.value for mark in self._marks.values())]
        after = owned(self.op, new, f"{value.name}.next", value, taken)
        self._inputs.append(value)
        self._outputs.append(after)
        self.beginning.add(value, begin)
        spec = spec_of(value)
        self.states.append(StateSpec(spec.name, spec.dtype, spec.shape, next=after.name or "", kind=kind))  # type: ignore[arg-type]

    def _finish(self, graph: ir.Graph) -> None:
        self.op.finish(graph)
        for spec in self.states:
            if spec.name in graph.initializers:
                graph.initializers.pop(spec.name).const_value = None
        rates = [r.value for r in self._rates.values()]
        graph.inputs.extend([*rates, *self._inputs])
        graph.outputs[:] = [*self._results, *self._outputs]
        if self._recompute is not None:
            self._recompute.apply(self.model, self.op, self._passes, self._beside(graph))
        forget_detached(nodes_of(self.model))  # the gradients are written
        if self._separates:
            self.halves = self._cut()
        self.model.metadata_props[WRITTEN_KEY] = str(graph.num_nodes())
        clean_up(self.model)
        if self._name:
            self._leave_unread(graph)

    def _beside(self, graph: ir.Graph) -> int:
        """The bytes of weights and state, of their next values, and of what is fed."""
        sizes = self._recompute.sizes if self._recompute is not None else {}
        fed = sum(bytes_of(v, sizes, 1) for v in (*graph.inputs, *graph.initializers.values()))
        return fed + sum(bytes_of(v, sizes, 1) for v in self._inputs)

    def _cut(self) -> Halves:
        marks = {name: var.value.name or "" for name, var in self._marks.items()}
        spec = SeparateSpec(marks, weight=self._batch_weight, adds_up=self._written.adds_up)
        return cut(self.model, spec, [v.name or "" for v in self._forward], self.states, self._moved_forward,
                   [*self.hyperparameters])  # fmt: skip

    def _leave_unread(self, graph: ir.Graph) -> None:
        """Take only what is needed of the batch, and of the state of other steps."""
        own = {*self._inputs, *(r.value for r in self._rates.values())}
        for value in [v for v in graph.inputs if v not in own and not v.uses()]:
            graph.inputs.remove(value)


def _check_reached(params: Sequence[ir.Value], gradients: Mapping[ir.Value, Var]) -> None:
    lost = [shown(p.name) for p in params if p not in gradients]
    if lost:
        raise DifferentiationError(
            f"no gradient reaches '{lost[0]}': it is read only through inputs that have no derivative, or whose type "
            f"is unknown; freeze it{f' and {len(lost) - 1} more' if lost[1:] else ''}"
        )
