"""The objective of a training step, a loss on one of the model's outputs or an output itself, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph import losses
from gradgraph.autodiff.path import carries, is_tensor
from gradgraph.builder import Builder, Var
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.losses import Loss
from gradgraph.manifest import TargetSpec, dtype_name
from gradgraph.named import as_names, named_or_given
from gradgraph.shapes import known_sizes

OWN_LOSS = "none"  # in manifests and on the command line, for loss=None: the model computes its own


@dataclass(frozen=True)
class Objective:
    """A step minimises this: a loss on one of the model's outputs, or that output itself (``loss`` is None)."""

    loss: Loss | None
    output: str
    target: str
    metrics: tuple[str, ...]

    @classmethod
    def of(
        cls,
        graph: ir.Graph,
        loss: str | Loss | None,
        output: str | None,
        target: str,
        metrics: str | Sequence[str] | None,
    ) -> Objective:
        example = "gradgraph.losses.mse()"
        chosen = None if loss is None else named_or_given("loss", loss, losses.by_name, Loss, example)
        name = output_name(graph, output)
        wanted = (
            (["accuracy"] if chosen is not None and chosen.labels else []) if metrics is None else as_names(metrics)
        )
        for metric in wanted:
            if metric not in losses.METRICS:
                raise BuildError(f"there is no metric '{shown(metric)}'{suggestion(metric, losses.METRICS)}")
            if chosen is None or not chosen.labels:
                raise BuildError(f"the metric '{metric}' needs a loss on class numbers, such as cross_entropy")
        return cls(chosen, name, Builder(_value_names(graph)).fresh(target), tuple(wanted))

    @property
    def name(self) -> str:
        return OWN_LOSS if self.loss is None else self.loss.name

    @property
    def arguments(self) -> dict[str, Any]:
        return {} if self.loss is None else dict(self.loss.arguments)

    def emit(self, op: Builder, graph: ir.Graph) -> tuple[ir.Value, list[ir.Value]]:
        """Write loss and metrics into ``graph``; the target becomes an input of it."""
        prediction = op.wrap(output_of(graph, self.output))
        if self.loss is None:
            _check_own_loss(prediction)
            return prediction.value, []
        dtype, shape = self.loss.target_type(prediction)
        target = ir.Value(name=self.target, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
        graph.inputs.append(target)
        op.scope = "loss"
        scalar = _renamed(op, self.loss.emit(op, prediction, op.wrap(target)), "loss")
        results = [_renamed(op, losses.METRICS[m](op, prediction, op.wrap(target), self.loss), m) for m in self.metrics]
        return scalar, results

    def target_specs(self, graph: ir.Graph) -> tuple[TargetSpec, ...]:
        if self.loss is None:
            return ()
        prediction = Builder().wrap(output_of(graph, self.output))
        dtype, shape = self.loss.target_type(prediction)
        classes = self.loss.classes(prediction)
        return (TargetSpec(self.target, dtype_name(int(dtype)), tuple(shape or ()), classes, self.loss.ignore_index),)


def output_name(graph: ir.Graph, output: str | None) -> str:
    """The output that the loss reads; an inner value (logits behind a Softmax, say) becomes an output."""
    floating = [v.name for v in graph.outputs if carries(v) and is_tensor(v) and v.name]
    if output is None:
        if not floating:
            raise BuildError("the model has no floating output that a loss could read")
        return floating[0]
    if output not in floating:
        inner = next((v for n in graph for v in n.outputs if v.name == output and carries(v) and is_tensor(v)), None)
        if inner is None:
            raise UnknownNameError(f"the model has no floating output '{shown(output)}'{suggestion(output, floating)}")
        graph.outputs.append(inner)
    return output


def _value_names(graph: ir.Graph) -> set[str]:
    """The names of all values, also in bodies."""
    named = (
        (*g.inputs, *g.initializers.values(), *(y for node in g for y in node.outputs))
        for g in (graph, *graph.subgraphs())
    )
    return {v.name for values in named for v in values if v.name}


def output_of(graph: ir.Graph, name: str) -> ir.Value:
    return next(v for v in graph.outputs if v.name == name)


def _check_own_loss(prediction: Var) -> None:
    shape = prediction.shape
    if shape is not None and any(d != 1 for d in known_sizes(shape)):
        raise BuildError(
            f"a model's own loss is a scalar output, but '{shown(prediction.value.name)}' has shape {list(shape)}; "
            "name a loss such as 'cross_entropy', or another output"
        )


def _renamed(op: Builder, var: Var, name: str) -> ir.Value:
    """A scalar result under its public name."""
    var.value.name = op.fresh(name)
    var.value.shape = ir.Shape(())
    return var.value
