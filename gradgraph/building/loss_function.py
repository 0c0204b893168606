"""Losses that are Python functions, called with traced tensors to write their nodes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from gradgraph.arguments import described
from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.path import Path, carries, is_tensor, reads
from gradgraph.building.objective_results import Written
from gradgraph.building.outputs import make_outputs
from gradgraph.data.record.specs import TargetSpec, spec_of
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.frontend.lowering import Spec, input_of
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, Value, op, tracing, wrap
from gradgraph.graph.builder import Builder
from gradgraph.graph.checks import DRAWING
from gradgraph.graph.prune import needed
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import names_of

LossFunction: TypeAlias = "Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor | Mapping[str, Tensor]]"


class Values(Mapping[str, Tensor]):
    """The first argument of a loss function: the values of a model by name.

    Iteration yields the outputs; inputs, inner values and weights can also be accessed.

    Attributes:
        read: the values that were accessed, by name, in order.
    """

    def __init__(self, builder: Builder, graph: ir.Graph, outputs: Sequence[str]) -> None:
        self._builder, self._graph, self._outputs = builder, graph, list(outputs)
        self.read: dict[str, ir.Value] = {}

    @functools.cached_property
    def _known(self) -> dict[str, ir.Value]:
        inner = {v.name: v for node in self._graph for v in node.outputs if v.name}
        return inner | {v.name: v for v in (*self._graph.inputs, *self._graph.initializers.values()) if v.name}

    def __getitem__(self, name: str) -> Tensor:
        value = self._known.get(name)
        if value is None:
            raise UnknownNameError(
                f"the loss function reads out['{shown(name)}'], but the model has no value of that "
                f"name{suggestion(name, self._outputs)}"
            )
        self.read[name] = value
        return wrap(self._builder.wrap(value))

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, name: object) -> bool:
        return name in self._known


class Batch(Mapping[str, Tensor]):
    """The second argument of a loss function: the inputs of the model and the targets, by name.

    A target becomes an input of the graph when the function first reads it.

    Args:
        inputs: the names of the model's inputs in the graph, by the names that the function uses.
        targets: the shapes of the targets, by the names that the function uses.
        names: the names of the targets in the graph, by the names that the function uses.

    Attributes:
        read: the targets that were read.
    """

    def __init__(
        self,
        builder: Builder,
        graph: ir.Graph,
        inputs: Mapping[str, str],
        targets: Mapping[str, Spec],
        names: dict[str, str],
    ) -> None:
        self._builder, self._graph, self._inputs = builder, graph, inputs
        self._targets, self._names = targets, names
        self.read: dict[str, ir.Value] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._targets and name not in self.read:
            value = input_of(self._names[name], self._targets[name])
            self._builder.reserve(self._names[name])
            self._graph.inputs.append(value)
            self.read[name] = value
        known = self._inputs.get(name)
        found = self.read.get(name) or next((v for v in self._graph.inputs if v.name == known), None)
        if found is None or (name not in self._targets and name not in self._inputs):
            raise UnknownNameError(
                f"the loss function reads batch['{shown(name)}'], which is neither an input of the model nor one of "
                f"its targets{suggestion(name, self)}",
                remedy=f"declare it when building: targets={{'{shown(name)}': gradgraph.frontend.Input(('batch',), "
                "'float32')}}, with an integer dtype for class labels",
            )
        return wrap(self._builder.wrap(found))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._inputs, *self._targets]))

    def __len__(self) -> int:
        return len(list(iter(self)))


class TracedLoss:
    """The objective of a loss function. The function is traced once on a copy of the model to find what it reads.

    Args:
        function: ``function(out, batch)`` returns a scalar tensor, or a dict of them. The tensor called "loss" is
            minimised and the others are reported; without a "loss", their sum is minimised.
        model: the model in normal form. Inner values that the function reads become outputs.
        targets: the shape or ``Input`` of each further input that the function reads from a batch, by name.

    Attributes:
        kept, targets: see ``Objective``.
        names: the names of the targets in the graph, by the names that the function uses.
        names_read: the names of the model's values that the function reads.
    """

    def __init__(self, function: Callable[..., Any], model: ir.Model, targets: Mapping[str, Spec]) -> None:
        check_arguments(function)
        self.function, self._targets = function, dict(targets)
        self._inputs = {v.name: v.name for v in model.graph.inputs if v.name}
        self._outputs = [v.name or "" for v in model.graph.outputs]
        free = Builder(names_of(model))
        self.names = {name: _input_name(name, free) for name in targets}
        trial = model.clone()
        builder = builder_for(trial)
        out, batch, (loss, *_) = self._trace(builder, trial.graph)
        _, behind = needed(builder.nodes, [loss], lambda node: node.outputs, reads)
        weights = [v for v in trial.graph.initializers.values() if carries(v)]
        path = Path([*trial.graph, *builder.nodes], [loss], weights)
        # if the loss uses the gradient of an output, it may depend on fewer weights than the output does
        self._read = [v.name or "" for v in weights if v in path.active] or [
            name for name, value in out.read.items() if value in behind
        ]
        self.names_read = tuple(out.read)
        self.kept = make_outputs(model, list(out.read))
        specs = map(spec_of, batch.read.values())
        self.targets = tuple(TargetSpec(spec.name, spec.dtype, spec.shape) for spec in specs)
        if unread := [name for name in targets if name not in batch.read]:
            raise BuildError(f"the loss never reads the target '{shown(unread[0])}'; remove it from targets")

    @property
    def name(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return name if name.isidentifier() else "function"

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        """Return the weights that the loss depends on, or, if there are none, the model's values in its formula."""
        known = {v.name: v for v in (*graph.inputs, *graph.initializers.values(), *graph.outputs)}
        values = (known[n] for n in self._read if n in known)
        return [v for v in values if carries(v) and is_tensor(v)]

    def emit(self, op: Builder, graph: ir.Graph) -> Written:
        """Write the loss and, as metrics, its other results after ``graph``."""
        _, _, found = self._trace(op, graph)
        return Written(found[0], found[1:])

    def _trace(self, builder: Builder, graph: ir.Graph) -> tuple[Values, Batch, list[ir.Value]]:
        out = Values(builder, graph, self._outputs)
        batch = Batch(builder, graph, self._inputs, self._targets, self.names)
        builder.scope = "loss"
        with tracing(Trace({}, builder=builder, before=graph)):
            parts = _parts(self.function(out, batch))
            total = parts.pop("loss", None)
            if total is None:
                (total, *rest) = parts.values()
                for part in rest:
                    total = total + part
            if not total.is_floating_point():
                raise BuildError(
                    f"the loss function returned a tensor of type {total.dtype.name.lower()}; a loss must be "
                    "floating-point"
                )
            results: list[ir.Value] = []
            for name, x in {"loss": total, **parts}.items():
                results.append(_named_result(builder, x, name, results))
            return out, batch, results


def _named_result(builder: Builder, x: Tensor, name: str, others: Sequence[ir.Value]) -> ir.Value:
    """Return the value of a scalar result, renamed to ``name``, or ``<name>_loss`` if the model has that name.

    If no node of the loss computes the value, an Identity node copies it.
    """
    if x.traced.rank:
        x = op.Squeeze(x)
    producer = x.traced.value.producer()
    ours = producer is not None and producer.graph is None and producer.op_type not in DRAWING
    if not ours or x.traced.value in others:  # random nodes are replaced in training
        x = op.Identity(x)
    taken = builder.fresh(name)
    value = x.traced.value
    value.name = taken if taken == name or name == "loss" else builder.fresh(f"{name}_loss")
    value.shape = ir.Shape(())
    return value


def check_arguments(function: Callable[..., Any], kind: str = "loss") -> None:
    """Raise BuildError unless ``function`` accepts two positional arguments."""
    try:
        inspect.signature(function).bind({}, {})
    except (TypeError, ValueError):  # some builtins have no signature
        raise BuildError(
            f"a {kind} function has two parameters, the model's values and the batch, but {described(function)} does "
            f"not; write def {kind}(out, batch): ..."
        ) from None


def _input_name(name: str, free: Builder) -> str:
    """Return ``name``, or an unused name derived from it if the model has a value of that name."""
    taken = free.fresh(name)
    return name if taken == name else free.fresh(f"{name}_target")


def _parts(result: Any) -> dict[str, Tensor]:
    """Return the scalars in a loss function's result by name, after checking it."""
    parts = dict(result) if isinstance(result, Mapping) else {"loss": result}
    if not parts:
        raise BuildError("the loss function returned nothing; return a scalar tensor, or a dict of scalar tensors")
    for name, part in parts.items():
        if not isinstance(part, Value):
            raise BuildError(
                f"the loss function returned {described(part)}; return a scalar tensor, or a dict of scalar tensors"
            )
        shape = shape_of(part.traced.value)
        if shape is None or any(d != 1 for d in shape):
            raise BuildError(
                f"the loss function returned '{shown(name)}' of shape {'unknown' if shape is None else list(shape)}, "
                "and a loss must be a scalar; reduce it with .mean() or .sum()"
            )
    return {str(name): wrap(part.traced) for name, part in parts.items()}
