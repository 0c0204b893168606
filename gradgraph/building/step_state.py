"""The state of a training step while its graphs are built: each tensor, its next value, and its initial value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from gradgraph.building.init_model import InitModel, owned
from gradgraph.data.record.specs import spec_of
from gradgraph.errors import BuildError
from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Vars
from gradgraph.step.manifest import StateKind, StateSpec, column


class Slot(NamedTuple):
    """A state tensor other than a weight, with its next value and its initial value in init.onnx."""

    value: ir.Value
    new: Var
    begin: Var
    kind: StateKind = "optimizer"


class StepState:
    """The state of one step while it is built: the ``optim.transform.Context`` of the optimizer's transforms.

    Args:
        op: the builder of train.onnx.
        init_model: the writer of init.onnx.
        name: the name of the step, if there are several.

    Attributes:
        slots: the state tensors of the optimizer so far.
        rates: the scalar inputs for hyperparameters, by name.
        hyperparameters: the defaults of these inputs, by the name of the input.
        reports: outputs to log during training, by name.
        scale_names: the names of the state tensors of loss scaling, by history column.
        averages: for each averaged weight, the name of the state tensor that evaluation reads instead.
        schedule: the learning-rate schedule in the graph, if any.
        rate: the placeholder for the learning rate of the schedule, until ``write_schedule`` replaces it.
        held: values that must keep their names.
        inputs, outputs, specs: the inputs, outputs and descriptions of the state tensors added by :meth:`carry`.
    """

    def __init__(self, op: Builder, init_model: InitModel, name: str = "") -> None:
        self.op, self.init_model, self.start, self.name = op, init_model, init_model.op, name
        self.slots: list[Slot] = []
        self.rates: dict[str, Var] = {}
        self.hyperparameters: dict[str, float] = {}
        self.reports: dict[str, ir.Value] = {}
        self.scale_names: dict[str, str] = {}
        self.averages: dict[str, str] = {}
        self.held: list[ir.Value] = []
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.specs: list[StateSpec] = []
        self.schedule: Schedule | None = None
        self.rate: ir.Value | None = None
        self._counter: Var | None = None

    # used by transforms (optim.transform.Context)

    def step(self) -> Var:
        if self._counter is None:
            self._counter = self.new("step", ir.DataType.INT64, ())
        return self._counter

    def hyperparameter(self, name: str, default: float) -> Var:
        if name not in self.rates:
            self.rates[name] = self._input(name, ir.DataType.FLOAT, ())
        known = self.hyperparameters.setdefault(self.rates[name].value.name or name, float(default))
        if known != default:
            raise BuildError(
                f"two parts of the optimizer have different defaults for the input '{name}': {known} and "
                f"{float(default)}",
                remedy="use only one of them, or give one a schedule such as gradgraph.optim.constant(...)",
            )
        return self.rates[name]

    def scheduled(self, by: Schedule, leads: bool = True) -> Var:
        done = self.step()
        if self.schedule is None and leads:  # with several, the first
            self.schedule = by
            self.rate = self._input("update/scheduled_rate", ir.DataType.FLOAT, ()).value
        if self.rate is None or by is not self.schedule:
            return by.emit(self.op, self.op.cast(done, ir.DataType.FLOAT))
        return self.op.wrap(self.rate)

    def scalar(self, name: str, begin: float, advance: Callable[[Var], Var]) -> Var:
        number = self.new(name, ir.DataType.FLOAT, ())
        self.slots.append(Slot(number.value, advance(number), self.start.const(np.float32(begin))))
        return number

    # used by the builder

    @property
    def counter(self) -> ir.Value | None:
        """The step counter; None if nothing reads it."""
        return None if self._counter is None else self._counter.value

    def fed(self, name: str) -> Var:
        """Return the input of a hyperparameter, which the trainer feeds as ``name`` without a prefix."""
        value = self.hyperparameter(name, 1.0)
        if value.value.name != name:
            raise BuildError(
                f"the model has a value called '{name}', which is the name of an input for gradient accumulation; "
                "rename "
                "that value"
            )
        return value

    def new(self, name: str, dtype: ir.DataType, shape: Sequence[Any]) -> Var:
        """Return a new state tensor; with several named steps, its name is prefixed by this step's name."""
        return self._input(column(self.name, name), dtype, shape)

    def where(self, condition: Var, old: Vars, new: Vars, first: int) -> list[Var]:
        """Return ``new`` if the scalar ``condition`` is true, otherwise ``old``.

        The state tensors in ``slots[first:]`` also keep their old values if ``condition`` is false.
        """
        op = self.op
        self.slots[first:] = [s._replace(new=op.Where(condition, s.new, op.wrap(s.value))) for s in self.slots[first:]]
        return [op.Where(condition, now, was) for now, was in zip(new, old, strict=True)]

    def report(self, name: str, number: Var) -> None:
        """Make the scalar ``number`` an output, in float32, that is logged during training."""
        result = self.op.Identity(self.op.cast(number, ir.DataType.FLOAT), name=column(self.name, name)).value
        result.shape = ir.Shape(())
        self.reports[result.name or ""] = result

    def next_step(self, moves: Var | None = None) -> list[Slot]:
        """Return the slot that increments the step counter, or no slot if nothing reads the counter.

        ``moves``, a boolean scalar, limits the increment to steps in which it is true.
        """
        if self._counter is None:
            return []
        count = 1 if moves is None else self.op.cast(moves, ir.DataType.INT64)
        return [Slot(self._counter.value, self._counter + count, self.start.const(np.int64(0)), "counter")]

    def carry(self, slots: Iterable[Slot]) -> None:
        """Add tensors to the state: each becomes an input, an output ``<name>.next`` and an output of init.onnx."""
        for value, new, begin, kind in slots:
            after = owned(self.op, new, f"{value.name}.next", value, [*self.outputs, *self.held])
            self.inputs.append(value)
            self.outputs.append(after)
            self.init_model.add(value, begin)
            spec = spec_of(value)
            self.specs.append(StateSpec(spec.name, spec.dtype, spec.shape, next=after.name or "", kind=kind))

    def _input(self, name: str, dtype: ir.DataType, shape: Sequence[Any]) -> Var:
        return self.op.wrap(ir.Value(name=self.op.fresh(name), type=ir.TensorType(dtype), shape=ir.Shape(shape)))
