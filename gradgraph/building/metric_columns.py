"""Metrics of a step: by name, for an output that a loss compares with a target, or as functions of traced tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.arguments import described
from gradgraph.autodiff.probabilities import probabilities
from gradgraph.building.loss_function import Batch, Values, check_arguments
from gradgraph.building.objective_results import Measure, measured, renamed
from gradgraph.building.outputs import output_of
from gradgraph.building.terms import Term
from gradgraph.errors import BuildError, shown, suggestion
from gradgraph.frontend import reductions
from gradgraph.frontend.metric_sums import Metric, Sums
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.reductions import argmax
from gradgraph.frontend.shaping import stack
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, Value, op, tensor, tracing, wrap
from gradgraph.graph.builder import Builder
from gradgraph.metrics import METRICS
from gradgraph.rivals.objects import library_of

Given = Any  # a name, a Metric, a function, a list of them, or a dict


@dataclass(frozen=True)
class Wanted:
    """A requested metric.

    Attributes:
        column: its column in the history.
        metric: a ``Metric``, or a function of the model's values and the batch.
        output: the model output that a ``Metric`` reads; None for the output that the loss reads.
    """

    column: str
    metric: Metric | Callable[..., Any]
    output: str | None = None

    @property
    def is_number(self) -> bool:
        """Whether the graph can compute the metric as one number per batch, if the step has a single, unweighted loss.

        This requires a ``Metric`` that supports it, without options or a chosen output.
        """
        return (
            isinstance(self.metric, Metric)
            and self.metric.as_number
            and self.output is None
            and all(value is None for value in self.metric.arguments.values())
        )


def wanted(metrics: Given) -> list[Wanted]:
    """Return the requested metrics with their columns.

    Raises:
        BuildError: if an entry is not a metric, or two metrics have the same column.
    """
    found = list(_wanted(metrics, None))
    seen: set[str] = set()
    for one in found:
        if one.column in seen:
            raise BuildError(f"two metrics are called '{shown(one.column)}'; name them in a dict")
        seen.add(one.column)
    return found


def _wanted(metrics: Given, output: str | None) -> Iterator[Wanted]:
    if isinstance(metrics, Mapping):
        for key, value in metrics.items():
            if callable(value) and not isinstance(value, Metric) and not library_of(value):
                yield Wanted(str(key), _checked(value))
            else:
                yield from _wanted(value, str(key))
    elif isinstance(metrics, list | tuple | set):
        for metric in metrics:
            yield from _wanted(metric, output)
    elif callable(metrics) and not isinstance(metrics, Metric | type) and not library_of(metrics):
        name = getattr(metrics, "__name__", "")
        if not name.isidentifier():
            raise BuildError("a metric function without a name needs a column; write {'column': function}")
        yield Wanted(name, _checked(metrics))
    else:
        metric = METRICS.given(metrics) if isinstance(metrics, str) or library_of(metrics) else metrics
        if not isinstance(metric, Metric):
            raise BuildError(
                f"{described(metric)} is not a metric",
                remedy="pass a name, or the result of a call such as gradgraph.metrics.f1()",
                shell="pass a name",
            )
        yield Wanted(metric.column if output is None else f"{output}_{metric.column}", metric, output)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    check_arguments(function, "metric")
    return function


@dataclass(frozen=True)
class MetricColumns:
    """The metrics of a step.

    Attributes:
        numbers: the metrics that the graph computes for each batch, as numbers.
        sums: the metrics that are computed over all samples from sums, which the graph outputs.
        outputs: the names of the model's outputs, which metric functions get.
        read: the names of the values that metric functions read.
        kept: the inner values among ``read``, which became outputs.
    """

    numbers: Sequence[Wanted] = ()
    sums: Sequence[Wanted] = ()
    outputs: Sequence[str] = ()
    read: Sequence[str] = ()
    kept: Sequence[str] = ()

    def write_numbers(self, builder: Builder, term: Term, tensors: Sequence[Tensor]) -> list[ir.Value]:
        """Write the metrics in ``numbers`` for the outputs and targets ``tensors`` of ``term``; return their values."""
        found = []
        with tracing(Trace({}, builder=builder)):
            for one in self.numbers:
                assert isinstance(one.metric, Metric)
                metric = one.metric.bound(term.loss.axis, term.loss.ignore_index)
                number = metric.number(tensors[0], tensors[len(term.outputs)])
                found.append(renamed(builder, number.traced, one.column))
        return found

    def write_sums(
        self, builder: Builder, graph: ir.Graph, terms: Sequence[Term], fed: Mapping[str, str]
    ) -> tuple[list[Measure], list[str]]:
        """Write the metrics in ``sums``, after the losses; return sums with columns, and values that functions read.

        ``fed`` are the names of the inputs in the graph, by the names that metric functions use.
        """
        out = Values(builder, graph, self.outputs)
        batch = Batch(builder, graph, fed, {}, {})
        builder.scope = "metrics"
        found = []
        with tracing(Trace({}, builder=builder, before=graph)):
            for one in self.sums:
                if isinstance(one.metric, Metric):
                    term = _term_of(one.metric, one.output, terms)
                    metric, prediction, target, mask = _compared(builder, graph, one.metric, term)
                    given = metric(prediction, target, mask)
                else:
                    given = _sums(one.column, one.metric(out, batch), graph, builder)
                found.append(measured(builder, one.column, *given))
        return found, list(out.read)


def _term_of(metric: Metric, output: str | None, terms: Sequence[Term]) -> Term:
    """Return the term of the loss whose prediction and target the metric compares."""
    known = [t for t in terms if t.targets]
    if not known:
        raise BuildError(
            f"the metric '{metric.name}' compares an output with a target, but the loss has no target of its own",
            remedy="write it as a function: metrics={'column': lambda out, batch: "
            f"gradgraph.metrics.{metric.name}()(out['…'], batch['…'])}}",
            shell="remove --metric, or choose a loss that has a target",
        )
    if output is None and len({t.outputs[0] for t in known}) > 1:
        first = shown(known[0].outputs[0])
        raise BuildError(
            f"there are several losses, and the metric '{metric.name}' could apply to each",
            remedy=f"name its output: metrics={{'{first}': '{metric.name}'}}",
            shell=f"name its output: --metric {first}={metric.name}",
        )
    by_output = {t.outputs[0]: t for t in reversed(known)}
    if output is not None and output not in by_output:
        raise BuildError(
            f"no loss compares '{shown(output)}' with a target{suggestion(output, by_output)}",
            remedy="write the metric as a function of (out, batch)",
        )
    return known[0] if output is None else by_output[output]


def _compared(
    builder: Builder, graph: ir.Graph, metric: Metric, term: Term
) -> tuple[Metric, Tensor, Tensor, Tensor | None]:
    """Return the metric with the options of the loss, and the prediction, target and mask of the term."""
    fed = {v.name: v for v in graph.inputs}
    prediction = wrap(builder.wrap(output_of(graph, term.outputs[0])))
    target = wrap(builder.wrap(fed[term.targets[0].name]))
    if metric.reads == "sequences" and term.loss.spelt:
        read = [wrap(builder.wrap(output_of(graph, name))) for name in term.outputs]
        read += [wrap(builder.wrap(fed[one.name])) for one in term.targets]
        prediction, target = term.loss.spelt(*read, **term.loss.arguments)
    if term.loss.middle and not metric.ranks:
        prediction = prediction - term.loss.middle  # metrics use the sign only
    metric.check_fits(term.loss)
    if term.loss.soft and metric.reads != "numbers":
        target = argmax(target, term.loss.axis)
    mask = wrap(builder.wrap(fed[term.mask])) if term.mask else None
    probable = metric.ranks and _is_probable(graph, term)
    return metric.bound(term.loss.axis, term.loss.ignore_index, probable), prediction, target, mask


def _is_probable(graph: ir.Graph, term: Term) -> bool:
    """Whether the output of the term is already probabilities, so that the metric needs no Softmax or Sigmoid."""
    found = probabilities(output_of(graph, term.outputs[0]))
    return bool(term.loss.middle) or (
        found is not None and found.kind == ("Softmax" if term.loss.labels else "Sigmoid")
    )


def _sums(column: str, result: Any, graph: ir.Graph, builder: Builder) -> Sums:
    """Return the sums for a metric function's result: ``Sums``, (numerator, denominator), or a scalar to average."""
    if isinstance(result, Sums):
        return result
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) not in (1, 2) or not all(isinstance(part, Value) for part in parts):
        raise BuildError(
            f"the metric '{shown(column)}' returned {described(result)}; return a scalar tensor, a pair of them "
            "(numerator, denominator), or the result of a metric from gradgraph.metrics"
        )
    if any(size != 1 for part in parts for size in part.traced.shape or ()):
        raise BuildError(f"the metric '{shown(column)}' did not return a scalar; reduce it with .mean() or .sum()")
    above, *below = (op.Reshape(cast(wrap(part.traced), "float32"), []) for part in parts)
    if not below:
        rows = next((v for v in graph.inputs if v.shape is not None and len(v.shape)), None)
        count = tensor(wrap(builder.wrap(rows)).shape[0], ir.DataType.FLOAT) if rows is not None else tensor(1.0)
        above, below = above * count, [count]
    return Sums(stack([above, reductions.sum(below[0])]), (2,), "ratio")


def default_metrics(terms: Sequence[Term]) -> list[Wanted]:
    """Return the default metrics: accuracy for each loss on class indices."""
    names = dict.fromkeys(t.outputs[0] for t in terms if t.loss.labels)
    return wanted(dict.fromkeys(names, "accuracy") if len(terms) > 1 else ["accuracy"] * len(names))
