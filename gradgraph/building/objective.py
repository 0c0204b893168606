"""The objective of a training step: losses on model outputs, a model output itself, or a custom function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.building.distillation import check_imitation, imitated
from gradgraph.building.logits import logits_behind, reading
from gradgraph.building.loss_columns import added_up, column_of, parts_of
from gradgraph.building.loss_function import TracedLoss
from gradgraph.building.loss_quotients import Quotient, quotients
from gradgraph.building.metric_columns import MetricColumns, default_metrics, wanted
from gradgraph.building.objective_results import Measure, Written, renamed
from gradgraph.building.outputs import make_outputs, output_of, value_names
from gradgraph.building.same_sizes import named_sizes
from gradgraph.building.step_options import StepOptions
from gradgraph.building.terms import OWN, Term, chosen_loss, factor_input, factors_of, terms_of, weighed
from gradgraph.data.record.column_assignment import MASK, SAMPLE_WEIGHT
from gradgraph.data.record.specs import TargetSpec
from gradgraph.errors import BuildError, Finding, shown
from gradgraph.files.model_metadata import Imitation, imitation_in
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.trace import Trace, op, tracing, wrap
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.losses import LOSSES, Loss
from gradgraph.metrics import Metric
from gradgraph.rivals.objects import library_of
from gradgraph.step.manifest import column


@dataclass(frozen=True)
class Objective:
    """The loss and metrics of a step: a weighted sum of losses or a function, optionally with distillation.

    Attributes:
        terms: the losses to sum.
        plain: whether there is a single loss without weights, whose value the graph outputs as a number. Otherwise the
            graph also outputs sums, from which the loss of all samples is computed.
        function: a custom loss, instead of ``terms``.
        factors: the inputs with sample weights and masks.
        metrics: the metrics.
        imitation: the distillation from a teacher; it is the whole loss if there are no terms and no function.
        logits: the inner values that terms read in place of probabilities.
    """

    terms: tuple[Term, ...] = ()
    plain: bool = False
    function: TracedLoss | None = None
    factors: tuple[TargetSpec, ...] = ()
    metrics: MetricColumns = field(default_factory=MetricColumns)
    imitation: Imitation | None = None
    logits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the loss, for the manifest."""
        if self.function is not None:
            return self.function.name
        if not self.terms:
            return "distillation"
        first, *others = self.terms
        return "several" if others else first.loss.name

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the loss, by output if there are several losses, for the manifest."""
        found: dict[str, Any] = dict(self.terms[0].loss.arguments) if len(self.terms) == 1 else {}
        if len(self.terms) > 1:
            keys = [", ".join(t.outputs) for t in self.terms]
            for key, t in zip(keys, self.terms, strict=True):
                name = key if keys.count(key) == 1 else f"{key}: {t.loss.name}"
                found[name] = {"name": t.loss.name, "arguments": dict(t.loss.arguments), "weight": t.weight}
        if self.imitation is not None:
            found["distillation"] = {"temperature": self.imitation.temperature, "alpha": self.imitation.alpha}
        return found

    @property
    def outputs(self) -> list[str]:
        """The model outputs that the objective reads."""
        found = [name for term in self.terms for name in term.outputs]
        return list(dict.fromkeys([*found, *(self.imitation.values if self.imitation else ())]))

    @property
    def kept(self) -> list[str]:
        """The names of inner values that are graph outputs only while the step is built."""
        teacher = self.imitation
        beside = [n for n in teacher.values if n not in teacher.own] if teacher else []
        return [*(self.function.kept if self.function else ()), *self.metrics.kept, *beside, *self.logits]

    @property
    def names_read(self) -> set[str]:
        """The names of the model values that the objective reads."""
        return {*self.outputs, *self.metrics.read, *(self.function.names_read if self.function else ())}

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        """The inputs that the objective adds to the graph: targets, sample weights and masks."""
        if self.function is not None:
            return self.function.targets
        return tuple(dict.fromkeys([*(spec for term in self.terms for spec in term.targets), *self.factors]))

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        """Return the floating-point model values that the objective reads."""
        found = self.function.read(graph) if self.function else []
        students = [mine for mine, _ in self.imitation.pairs] if self.imitation else []
        names = [*(name for term in self.terms for name in term.outputs), *students]
        return list(dict.fromkeys([*found, *(output_of(graph, name) for name in names)]))

    def emit(self, builder: Builder, graph: ir.Graph) -> Written:
        """Add loss and metrics to ``graph``, with the targets as inputs."""
        return self.emit_and_read(builder, graph)[0]

    def emit_and_read(self, builder: Builder, graph: ir.Graph) -> tuple[Written, list[str]]:
        """Add loss and metrics as ``emit`` does; also return the names of the values that metric functions read."""
        inputs, checked = {v.name: v.name for v in graph.inputs if v.name}, named_sizes(graph)
        written: Written | None = None
        if self.function is not None:
            written = self.function.emit(builder, graph)
        elif self.terms:
            written = (self._one_number if self.plain else self._sums)(builder, graph, checked)
        measures, read = list[Measure](), list[str]()
        if self.metrics.sums:
            own = self.function.names if self.function else {}
            fed = {**inputs, **{s.name: s.name for s in self.targets}, **own}
            measures, read = self.metrics.write_sums(builder, graph, self.terms, fed)
        if self.imitation is not None:
            written = self._taught(self.imitation, builder, graph, written, checked)
        assert written is not None
        return self._added_up(builder, graph, written._replace(measures=[*written.measures, *measures])), read

    def _one_number(self, builder: Builder, graph: ir.Graph, checked: Collection[str]) -> Written:
        (term,) = self.terms
        if term.loss is OWN:
            output = output_of(graph, term.outputs[0])
            shape = shape_of(output)
            if shape is not None and any(d not in (1, None) for d in shape):
                raise BuildError(
                    f"a loss that the model computes itself must be a scalar output, but '{shown(output.name)}' has "
                    f"shape {list(shape)}; pass a loss such as 'cross_entropy', or another output"
                )
            return Written(output)
        builder.scope = "loss"
        tensors = term.tensors(builder, graph, checked, {})
        with tracing(Trace({}, builder=builder)):
            loss = renamed(builder, term.loss(*tensors).traced, "loss")
        return Written(loss, self.metrics.write_numbers(builder, term, tensors))

    def _sums(self, builder: Builder, graph: ir.Graph, checked: Collection[str]) -> Written:
        fed: dict[str, Var] = {}
        builder.scope = "loss"
        tensors = [term.tensors(builder, graph, checked, fed) for term in self.terms]
        factors = {spec: factor_input(spec) for spec in self.factors}
        graph.inputs.extend(factors.values())
        for spec in self.targets:
            builder.reserve(spec.name)
        with tracing(Trace({}, builder=builder)):
            values = [
                term.value(given, [wrap(builder.wrap(factors[f])) for f in term.factors], checked)
                for term, given in zip(self.terms, tensors, strict=True)
            ]
            total = None
            for term, value in zip(self.terms, values, strict=True):
                part = value if term.weight == 1.0 else value * term.weight
                total = part if total is None else total + part
            assert total is not None
            loss = renamed(builder, op.Identity(total).traced, "loss")
            columns = [
                parts_of(builder, graph, value.traced, term.samples(given).traced)
                for term, given, value in zip(self.terms, tensors, values, strict=True)
            ]
            named = [(t.column, found) for t, found in zip(self.terms, columns, strict=True) if t.column != "loss"]
            measures = [column_of(builder, name, [(found, 1.0)]) for name, found in named]
            weights = [term.weight for term in self.terms]
            measures.append(column_of(builder, "loss", list(zip(columns, weights, strict=True))))
        return Written(loss, (), measures)

    def _added_up(self, builder: Builder, graph: ir.Graph, written: Written) -> Written:
        """Return ``written`` with the divisor of the loss, for gradient accumulation.

        Losses whose divisor is not a number of elements also get columns computed from sums.
        """
        terms = [term for term in self.terms if term.loss is not OWN]
        losses = written.metrics[:1] if self.imitation else written.metrics if self.function else ()
        if losses:  # reported next to the loss
            known = {measure.name for measure, _ in written.measures}
            found = {v: quotients(builder, graph, v) or () for v in losses if v.name not in known}
            sums = [v for v, parts in found.items() if any(q.varies and not q.counts_elements for q in parts)]
            columns = [column_of(builder, v.name or "", [(found[v], 1.0)]) for v in sums]
            written = written._replace(measures=[*columns, *written.measures])

        def samples() -> Var:
            given = [output_of(graph, name) for name in terms[0].outputs]
            fed = {v.name: v for v in graph.inputs}
            read = [*given, *(fed[t.name] for t in terms[0].targets)]
            with tracing(Trace({}, builder=builder)):
                return terms[0].samples([wrap(builder.wrap(v)) for v in read]).traced

        first = terms[0].loss if terms else None
        counts_labels = self.plain and first is not None and first.labels and first.arguments.get("weight") is None
        counts_samples = all(spec.ignore_index is None for spec in self.targets)
        return added_up(builder, graph, written, samples if terms else None, counts_labels, counts_samples)

    def _taught(
        self,
        imitation: Imitation,
        builder: Builder,
        graph: ir.Graph,
        written: Written | None,
        checked: Collection[str],
    ) -> Written:
        """Return ``written``, if any, plus the distillation loss."""
        if written is None:
            graph.inputs.extend(map(factor_input, self.factors))
        builder.scope = "distillation"
        factors = [spec for spec in self.targets if spec.name in (SAMPLE_WEIGHT, MASK)]
        with tracing(Trace({}, builder=builder)):
            parts = imitated(imitation, builder, graph, self.terms, factors, checked)
            value = None
            for above, below, factor in parts:
                part = above / below if factor == 1.0 else above / below * factor
                value = part if value is None else value + part
            assert value is not None
            total = value * imitation.alpha
            if written is not None:
                hard = cast(wrap(builder.wrap(written.loss)), total.dtype)
                total = hard * (1 - imitation.alpha) + total
                written.loss.name = builder.fresh("student_loss")
                builder.release("loss")
            loss = renamed(builder, op.Identity(total).traced, "loss")
        terms = [([Quotient(above.traced, below.traced)], factor) for above, below, factor in parts]
        column = column_of(builder, "distillation_loss", terms)
        if written is None:
            return Written(loss, (), [column])
        measures = [(replace(m, name="student_loss") if m.name == "loss" else m, v) for m, v in written.measures]
        return written._replace(loss=loss, metrics=[written.loss, *written.metrics], measures=[*measures, column])


def own_results(op: Builder, step: str, objective: Objective, written: Written) -> None:
    """Rename the results of a named step to ``<step>.loss`` and so on; outputs of the model keep their names."""
    for value in written.results if step else ():
        if value.name not in objective.outputs:
            before = value.name or ""
            value.name = op.fresh(column(step, before))
            op.release(before)  # so that the next step in this graph can use the name


# --- user input -------------------------------------------------------------------------------------------


def objectives_of(options: StepOptions, model: ir.Model) -> tuple[Callable[[ir.Graph], Objective], Sequence[Finding]]:
    """Return a function from a graph to its objective, and findings about the values that objectives read.

    The function accepts the graph of ``model`` or of a copy. Inner values that the objective reads become outputs of
    ``model``.
    """
    weighs = bool(options.sample_weight or options.mask)
    loss = _given_loss(options, model, weighs)
    metrics = None if options.metrics is None else wanted(options.metrics)
    imitation = imitation_in(model.metadata_props)
    if imitation is not None:
        check_imitation(model.graph, imitation, loss is OWN, options.mask)
    elif loss is OWN and weighs:
        raise BuildError(
            "a loss that the model computes itself cannot be weighted by sample; remove the sample weights"
        )
    function = loss if isinstance(loss, TracedLoss) else None
    outputs = [v.name for v in model.graph.outputs if v.name and v.name not in (function.kept if function else ())]
    taken, findings, behind = dict[str, str](), list[Finding](), tuple[str, ...]()
    if not isinstance(loss, TracedLoss) and loss is not OWN:
        own = list(model.graph.outputs)
        tried = terms_of(model.graph, loss, options.output, options.target_name)
        taken, findings = logits_behind(model.graph, tried, options.output is not None or isinstance(loss, Mapping))
        named = [v.name for v in model.graph.outputs if v not in own and v.name]
        model.graph.outputs[:] = own
        behind = tuple(make_outputs(model, [*taken.values(), *named]))  # inner values that became outputs

    def objective(graph: ir.Graph, read: Sequence[str], kept: Sequence[str]) -> Objective:
        terms: tuple[Term, ...] = ()
        factors: tuple[TargetSpec, ...] = ()
        if imitation is not None and loss is OWN:
            logits = shape_of(output_of(graph, imitation.pairs[0][0])) or ()
            free = Builder(value_names(graph))
            mask = False if isinstance(options.mask, Mapping) else options.mask
            factors = factors_of(options.sample_weight, mask, logits[:1], logits[:-1], free)
        elif not isinstance(loss, TracedLoss):
            terms = reading(terms_of(graph, loss, options.output, options.target_name), taken)
            if weighs:
                terms, factors = weighed(graph, terms, options.sample_weight, options.mask)
        plain = isinstance(loss, Loss) and not weighs
        chosen = default_metrics(terms) if metrics is None else metrics
        numbers = [m for m in chosen if plain and terms and terms[0].loss.labels and m.is_number]
        columns = MetricColumns(numbers, [m for m in chosen if m not in numbers], outputs, read, kept)
        return Objective(terms, plain, function, factors, columns, imitation, behind)

    read, kept = list[str](), list[str]()
    if any(not isinstance(m.metric, Metric) for m in metrics or ()):
        trial = model.clone()
        _, read = objective(trial.graph, (), ()).emit_and_read(builder_for(trial), trial.graph)
        kept = make_outputs(model, read)
    return (lambda graph: objective(graph, read, kept)), findings


def _given_loss(options: StepOptions, model: ir.Model, weighs: bool) -> Loss | TracedLoss | Mapping[Any, Any]:
    """Return the loss in ``options``: a ``Loss``, a dict of losses by output, or the traced loss function."""
    loss: Any = options.loss
    is_function = callable(loss) and not isinstance(loss, Loss | type) and loss not in LOSSES.values()
    is_function = is_function and not library_of(loss)
    if options.targets and not is_function:
        raise BuildError(
            "the argument targets declares inputs of a loss function, but the loss is not a function; remove targets"
        )
    if options.output is not None and (is_function or isinstance(loss, Mapping)):
        raise BuildError(
            "the argument output applies to a single loss that is not a function; remove output (a loss function reads "
            "out['NAME'], and a dict of losses has outputs as keys)"
        )
    if is_function and weighs:
        raise BuildError(
            "sample_weight and mask do not apply to a loss function; remove them, declare such inputs in targets, and "
            "use them in the function"
        )
    if is_function:
        return TracedLoss(loss, model, options.targets)
    return loss if isinstance(loss, Mapping) else chosen_loss(loss)
