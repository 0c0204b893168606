"""Metrics beside a loss: by name, for what a loss compares, or functions of traced tensors, for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.arguments import described
from gradgraph.autodiff.append import builder_for
from gradgraph.building.loss_function import Batch, TracedLoss, Values, check_arguments, make_outputs
from gradgraph.building.measured import Written, measured
from gradgraph.building.objective import NamedLoss, Objective, output_of
from gradgraph.building.weighted_losses import MASK, WeightedLosses
from gradgraph.errors import BuildError, shown, suggestion
from gradgraph.frontend.metric_sums import Metric, Sums
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.reductions import sum
from gradgraph.frontend.shaping import stack
from gradgraph.frontend.trace import Trace, Value, op, tensor, tracing, wrap
from gradgraph.graph.builder import Builder
from gradgraph.losses import METRICS as SCALARS
from gradgraph.losses import Loss
from gradgraph.metrics import typed
from gradgraph.step.manifest import MeasureSpec, TargetSpec

Given = Any  # a name, a Metric, a function, a list of them, or a dict


@dataclass(frozen=True)
class Wanted:
    """A metric that is asked for.

    Attributes:
        column: of the history.
        metric: a ``Metric``, or a function of what the model has and what is fed.
        output: what a ``Metric`` looks at; None is what the loss reads.
    """

    column: str
    metric: Metric | Callable[..., Any]
    output: str | None = None


def wanted(metrics: Given) -> list[Wanted]:
    """The metrics that are given, each with its column.

    Raises:
        BuildError: one is none, or two have one column.
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
            if callable(value) and not isinstance(value, Metric):
                yield Wanted(str(key), _checked(value))
            else:
                yield from _wanted(value, str(key))
    elif isinstance(metrics, list | tuple | set):
        for metric in metrics:
            yield from _wanted(metric, output)
    elif callable(metrics) and not isinstance(metrics, Metric | type):
        name = getattr(metrics, "__name__", "")
        if not name.isidentifier():
            raise BuildError("a metric that is a function without a name needs a column; write {'column': function}")
        yield Wanted(name, _checked(metrics))
    else:
        metric = typed(metrics) if isinstance(metrics, str) else metrics
        if not isinstance(metric, Metric):
            raise BuildError(
                f"a metric is {described(metric)}",
                remedy="give a name, or what a call such as gradgraph.metrics.f1() gives",
                shell="give a name",
            )
        yield Wanted(metric.column if output is None else f"{output}_{metric.column}", metric, output)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    check_arguments(function, "metric")
    return function


@dataclass(frozen=True)
class Compared:
    """What a loss compares: an output, the loss, its target; and the mask that is of this output alone."""

    output: str
    loss: Loss
    target: str
    mask: str | None = None


def compared(objective: Objective) -> list[Compared]:
    """What metrics with a name can look at."""
    if isinstance(objective, NamedLoss):
        terms: Sequence[Any] = [objective]
    else:
        terms = objective.terms if isinstance(objective, WeightedLosses) else []
    masks = {o: m.name for o, m in objective.masks.items()} if isinstance(objective, WeightedLosses) else {}
    return [Compared(t.outputs[0], t.loss, t.targets[0].name, masks.get(t.outputs[0])) for t in terms if t.targets]


@dataclass(frozen=True)
class WithMetrics:
    """An objective, and metrics beside it, of which functions read values of these names."""

    objective: Objective
    metrics: Sequence[Wanted]
    own: Sequence[str]
    kept: Sequence[str] = ()
    reads: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.objective.name

    @property
    def arguments(self) -> Mapping[str, Any]:
        return self.objective.arguments

    @property
    def outputs(self) -> Sequence[str]:
        return self.objective.outputs

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        return self.objective.targets

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        return self.objective.read(graph)

    def emit(self, op: Builder, graph: ir.Graph) -> Written:
        return self.write(op, graph)[0]

    def write(self, builder: Builder, graph: ir.Graph) -> tuple[Written, list[str]]:
        """What is written, and the names of the values that functions have read."""
        inputs = {v.name: v.name for v in graph.inputs if v.name}
        written = self.objective.emit(builder, graph)
        names = self.objective.names if isinstance(self.objective, TracedLoss) else {}
        fed = {s.name: s.name for s in self.targets}
        out = Values(builder, graph, self.own)
        batch = Batch(builder, graph, {**inputs, **fed, **names}, {}, {})
        builder.scope = "metrics"
        found: list[tuple[MeasureSpec, ir.Value]] = []
        with tracing(Trace({}, builder=builder, before=graph)):
            for one in self.metrics:
                if isinstance(one.metric, Metric):
                    given = self._named(builder, graph, one)
                else:
                    given = _sums(one.column, one.metric(out, batch), graph, builder)
                found.append(measured(builder, one.column, given.sums, given.shape, given.finish, given.arguments))
        return written._replace(measures=[*written.measures, *found]), list(out.read)

    def _named(self, builder: Builder, graph: ir.Graph, one: Wanted) -> Sums:
        assert isinstance(one.metric, Metric)
        known = compared(self.objective)
        if not known:
            raise BuildError(
                f"the metric '{one.metric.name}' compares an output with a target, and this loss has none by name",
                remedy="write it as a function: metrics={'column': lambda out, batch: "
                f"gradgraph.metrics.{one.metric.name}()(out['…'], batch['…'])}}",
                shell="leave --metric out, or choose a loss that compares",
            )
        if one.output is None and len({c.output for c in known}) > 1:
            raise BuildError(
                f"there are several losses, and the metric '{one.metric.name}' may be of each",
                remedy=f"say which output it is of: metrics={{'{shown(known[0].output)}': '{one.metric.name}'}}",
                shell=f"say which output it is of: --metric {shown(known[0].output)}={one.metric.name}",
            )
        by_output = {c.output: c for c in reversed(known)}
        if one.output is not None and one.output not in by_output:
            raise BuildError(
                f"no loss compares '{shown(one.output)}' with a target{suggestion(one.output, by_output)}",
                remedy="write the metric as a function of (out, batch)",
            )
        chosen = known[0] if one.output is None else by_output[one.output]
        values = {v.name: v for v in graph.inputs}
        prediction = wrap(builder.wrap(output_of(graph, chosen.output)))
        every = MASK if MASK in {s.name for s in self.targets} else None
        mask = values.get(chosen.mask or every)
        target = wrap(builder.wrap(values[chosen.target]))
        if chosen.loss.middle:
            prediction = prediction - chosen.loss.middle  # metrics look at the side of 0
        one.metric.check_fits(chosen.loss)
        metric = one.metric.bound(chosen.loss.axis, chosen.loss.ignore_index)
        return metric(prediction, target, None if mask is None else wrap(builder.wrap(mask)))


def _sums(column: str, result: Any, graph: ir.Graph, builder: Builder) -> Sums:
    """What a function gave: sums, a numerator and a denominator, or a number that is averaged over the samples."""
    if isinstance(result, Sums):
        return result
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) not in (1, 2) or not all(isinstance(part, Value) for part in parts):
        raise BuildError(
            f"the metric '{shown(column)}' returned {described(result)}; return a scalar tensor, a pair of them "
            "(what is divided by what), or what a metric of gradgraph.metrics gives"
        )
    if any(size != 1 for part in parts for size in part.traced.shape or ()):
        raise BuildError(f"the metric '{shown(column)}' returned no scalar; reduce it with .mean() or .sum()")
    above, *below = (op.Reshape(cast(wrap(part.traced), "float32"), []) for part in parts)
    if not below:
        rows = next((v for v in graph.inputs if v.shape is not None and len(v.shape)), None)
        count = tensor(wrap(builder.wrap(rows)).shape[0], ir.DataType.FLOAT) if rows is not None else tensor(1.0)
        above, below = above * count, [count]
    return Sums(stack([above, sum(below[0])]), (2,), "ratio")


# --- beside a loss ---------------------------------------------------------------------------------------


def split(metrics: Given, loss: Any, weighed: bool) -> tuple[Sequence[str] | None, list[Wanted] | None]:
    """The scalars that a loss with a name has by itself, and the metrics beside it; None stands for the default."""
    if metrics is None:
        return None, None
    every = wanted(metrics)
    old = [m.column for m in every if isinstance(loss, Loss) and loss.labels and not weighed and _is_scalar(m)]
    return old, [m for m in every if m.column not in old]


def _is_scalar(one: Wanted) -> bool:
    """A metric without options of which a step has the mean as an output."""
    plain = isinstance(one.metric, Metric) and all(value is None for value in one.metric.arguments.values())
    return plain and one.output is None and one.column in SCALARS


def _by_default(objective: Objective) -> list[Wanted]:
    """Accuracy of each loss on class numbers, where several losses or weights of samples leave it out."""
    terms = objective.terms if isinstance(objective, WeightedLosses) else ()
    names = [t.outputs[0] for t in terms if t.loss.labels]
    return wanted(dict.fromkeys(names, "accuracy") if len(terms) > 1 else ["accuracy"] * len(names))


def with_metrics(
    model: ir.Model, write: Callable[[ir.Graph], Objective], metrics: Sequence[Wanted] | None, hidden: Sequence[str]
) -> Callable[[ir.Graph], Objective]:
    """How to write an objective with metrics; inner values that functions read become outputs of ``model``.

    Args:
        model: in normal form.
        write: gives the objective for a graph.
        metrics: None is what there is by default.
        hidden: outputs of ``model`` that are inner values of it.
    """
    own = [v.name for v in model.graph.outputs if v.name and v.name not in hidden]
    kept: list[str] = []
    read: list[str] = []
    if any(not isinstance(m.metric, Metric) for m in metrics or ()):
        trial = model.clone()
        _, read = WithMetrics(write(trial.graph), metrics or (), own).write(builder_for(trial), trial.graph)
        kept = make_outputs(model, read)

    def written(graph: ir.Graph) -> Objective:
        objective = write(graph)
        chosen = _by_default(objective) if metrics is None else metrics
        return WithMetrics(objective, chosen, own, [*objective.kept, *kept], read) if chosen else objective

    return written


def names_read(objective: Objective) -> set[str]:
    """The values of the model that an objective asks for by name."""
    found: set[str] = set()
    inner: Objective | None = objective
    while inner is not None:
        found.update(inner.outputs)
        if isinstance(inner, WithMetrics):
            found.update(inner.reads)
        elif isinstance(inner, TracedLoss):
            found.update(inner.names_read)
        inner = getattr(inner, "objective", None)
    return found
