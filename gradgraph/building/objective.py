"""What a training step minimises: a loss on outputs of the model, an output itself, or what a function computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx_ir as ir

from gradgraph import losses
from gradgraph.arguments import as_names
from gradgraph.autodiff.path import carries, is_tensor
from gradgraph.building.loss_function import TracedLoss
from gradgraph.building.measured import Written
from gradgraph.building.same_sizes import named_sizes, same_sizes
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.frontend.loss import Spec
from gradgraph.frontend.reductions import sum
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, tensor, tracing, wrap
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import known_sizes
from gradgraph.losses import Loss
from gradgraph.step.manifest import TargetSpec, column, dtype_name

OWN_LOSS = "none"  # in manifests and on the command line, for loss=None: the model computes its own


class Objective(Protocol):
    """What a training step minimises.

    Attributes:
        name, arguments: for the manifest.
        outputs: the outputs of the model that it reads; an inner value among them becomes one.
        kept: inner values that are outputs only while a step is written.
        targets: the inputs that it adds.
    """

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...

    @property
    def outputs(self) -> Sequence[str]: ...

    @property
    def kept(self) -> Sequence[str]: ...

    @property
    def targets(self) -> tuple[TargetSpec, ...]: ...

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        """The floating values of the model that it reads."""
        ...

    def emit(self, op: Builder, graph: ir.Graph) -> Written:
        """Write loss and metrics into ``graph``; the targets become inputs of it."""
        ...


@dataclass(frozen=True)
class OwnLoss:
    """A scalar output of the model."""

    output: str
    name: str = OWN_LOSS
    arguments: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[TargetSpec, ...] = ()
    kept: Sequence[str] = ()

    @property
    def outputs(self) -> Sequence[str]:
        return (self.output,)

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        return [output_of(graph, self.output)]

    def emit(self, op: Builder, graph: ir.Graph) -> Written:
        prediction = op.wrap(output_of(graph, self.output))
        _check_own_loss(prediction)
        return Written(prediction.value)


@dataclass(frozen=True)
class NamedLoss:
    """A loss on some of the model's outputs.

    Attributes:
        specs: the targets, each with what its name will be.
    """

    loss: Loss
    outputs: tuple[str, ...]
    targets: tuple[TargetSpec, ...]
    metrics: tuple[str, ...]
    kept: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.loss.name

    @property
    def arguments(self) -> Mapping[str, Any]:
        return dict(self.loss.arguments)

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        return [output_of(graph, name) for name in self.outputs]

    def emit(self, op: Builder, graph: ir.Graph) -> Written:
        predictions = [op.wrap(output_of(graph, name)) for name in self.outputs]
        op.scope = "loss"
        targets = compared_with(op, graph, self.loss, predictions, self.targets, named_sizes(graph), {})
        with tracing(Trace({}, builder=op)):
            scalar = self.loss(*map(wrap, (*predictions, *targets))).traced
        loss = renamed(op, scalar, "loss")
        results = [losses.METRICS[m](op, predictions[0], targets[0], self.loss) for m in self.metrics]
        metrics = [renamed(op, x, m) for x, m in zip(results, self.metrics, strict=True)]
        return Written(
            loss,
            metrics,
            weight=lambda: written_weight(op, self.loss, (*predictions, *targets)),
            adds_up=adds_up(self.loss),
        )


def adds_up(loss: Loss) -> bool:
    return loss.arguments.get("reduction") == "sum"


def written_weight(op: Builder, loss: Loss, given: Sequence[Var]) -> Var:
    """What the loss of a batch is a mean over, as a float32 scalar."""
    with tracing(Trace({}, builder=op)):
        return op.cast(weight_of(loss, [wrap(x) for x in given]).traced, ir.DataType.FLOAT)


def weight_of(loss: Loss, given: Sequence[Tensor]) -> Tensor:
    """What the loss of a batch is a mean over: the shares of its labels, or its samples."""
    if loss.shares is not None and loss.arguments.get("reduction") == "mean":
        return sum(loss.shares(*given, **loss.arguments))
    first = given[0]
    return tensor(first.shape[0], ir.DataType.FLOAT) if first.ndim else tensor(1.0)


def chosen_loss(loss: Any) -> Loss | None:
    """The loss that is given or named."""
    return None if loss is None else losses.LOSSES.given(loss)


def objective_of(
    graph: ir.Graph,
    loss: Loss | TracedLoss | None,
    output: str | Sequence[str] | None,
    target: str,
    metrics: str | Sequence[str] | None,
) -> Objective:
    """``loss`` on the model's outputs."""
    if isinstance(loss, Loss):
        return named_loss(graph, loss, output, target, metrics)
    if isinstance(loss, TracedLoss):
        return loss
    names = [None] if output is None else as_names(output)
    if len(names) != 1:
        raise BuildError(f"a model's own loss is one of its outputs, and {len(names)} are named; name that one")
    return OwnLoss(output_name(graph, names[0]))


def named_loss(
    graph: ir.Graph, loss: Loss, output: str | Sequence[str] | None, target: str, metrics: str | Sequence[str] | None
) -> NamedLoss:
    """``loss`` on the model's outputs of these names; the first floating ones by default."""
    check_scalar(loss)
    reads = outputs_read(graph, loss, output)
    wanted = (["accuracy"] if loss.labels else []) if metrics is None else as_names(metrics)
    for metric in wanted:
        _check_metric(metric, loss)
    return NamedLoss(loss, reads, targets_of(graph, loss, reads, target, Builder(value_names(graph))), tuple(wanted))


def targets_of(
    graph: ir.Graph, loss: Loss, outputs: Sequence[str], target: str, free: Builder, prefix: str = ""
) -> tuple[TargetSpec, ...]:
    """The targets of ``loss`` on these outputs; ``free`` gives them names, the first ``target``."""
    specs = specs_of(loss, [free.wrap(output_of(graph, name)) for name in outputs])
    names = [free.fresh(target if i == 0 else prefix + t.name) for i, t in enumerate(loss.targets)]
    return tuple(
        TargetSpec(name, dtype_name(int(s.dtype)), tuple(s.shape), s.classes, s.ignore_index)
        for name, s in zip(names, specs, strict=True)
    )


def check_scalar(loss: Loss) -> None:
    """Raise BuildError for a loss that gives more than one number."""
    if loss.arguments.get("reduction") == "none":
        raise BuildError(
            f"{loss.name} without a reduction gives many numbers, and a step minimises one; reduce by 'mean' or 'sum'"
        )


def _check_metric(metric: str, loss: Loss | None) -> None:
    if metric not in losses.METRICS:
        raise BuildError(f"there is no metric '{shown(metric)}'{suggestion(metric, losses.METRICS)}")
    if loss is None or not loss.labels:
        raise BuildError(f"the metric '{metric}' needs a loss on class numbers, such as cross_entropy")


def outputs_read(graph: ir.Graph, loss: Loss, output: str | Sequence[str] | None) -> tuple[str, ...]:
    count = len(loss.reads)
    if output is None and count > 1:
        names = [v.name for v in graph.outputs if carries(v) and is_tensor(v) and v.name][:count]
    else:
        names = [output_name(graph, name) for name in ([None] if output is None else as_names(output))]
    if len(names) != count:
        raise BuildError(
            f"the loss {loss.name} reads {count} {'output' if count == 1 else 'outputs'} ({', '.join(loss.reads)}), "
            f"and {len(names)} {'is' if len(names) == 1 else 'are'} given",
            remedy=f"name them in this order: output={list(loss.reads)}" if count > 1 else "pass output='NAME'",
            shell="repeat --output, once for each in this order" if count > 1 else "give one --output",
        )
    return tuple(names)


def specs_of(loss: Loss, predictions: Sequence[Var]) -> list[Spec]:
    return [target.spec(predictions) for target in loss.targets]


def compared_with(
    op: Builder,
    graph: ir.Graph,
    loss: Loss,
    predictions: Sequence[Var],
    targets: Sequence[TargetSpec],
    checked: Collection[str],
    fed: dict[str, Var],
) -> list[Var]:
    """What ``loss`` compares with, as long as the predictions are; what is not among ``fed`` becomes an input.

    Args:
        checked: as for ``same_sizes``.
    """
    for spec, given in zip(specs_of(loss, predictions), targets, strict=True):
        if given.name not in fed:
            op.reserve(given.name)
            value = ir.Value(name=given.name, type=ir.TensorType(spec.dtype), shape=ir.Shape(spec.shape))
            graph.inputs.append(value)
            fed[given.name] = same_sizes(op.wrap(value), predictions[0], spec.axes, checked)
    return [fed[given.name] for given in targets]


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


def value_names(graph: ir.Graph) -> set[str]:
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


def own_results(op: Builder, step: str, objective: Objective, written: Written) -> None:
    """Call what a named step has written ``<step>.loss`` and so on; outputs of the model keep their names."""
    values = [written.loss, *written.metrics, *(sums for _, sums in written.measures)]
    for value in values if step else ():
        if value.name not in objective.outputs:
            before = value.name or ""
            value.name = op.fresh(column(step, before))
            op.release(before)  # for the next step that is written here


def renamed(op: Builder, var: Var, name: str) -> ir.Value:
    """A scalar result under its public name."""
    var.value.name = op.fresh(name)
    var.value.shape = ir.Shape(())
    return var.value
