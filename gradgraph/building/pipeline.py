"""The one pipeline: normal form → modes → loss → gradients → optimizer → passes → step.

``build`` turns a model into a ``Step``: train.onnx, init.onnx, eval.onnx and their manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph import optim
from gradgraph.arguments import as_names
from gradgraph.autodiff.apart import keep_memory_apart
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.recomputation import as_recompute
from gradgraph.autodiff.review import log_findings, review
from gradgraph.backends import named, step_backends
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import heed, opset_for, write_for
from gradgraph.building.distillation import taught
from gradgraph.building.eval_model import evaluation
from gradgraph.building.loss_function import TracedLoss, make_outputs
from gradgraph.building.named_steps import (
    averages_of_all,
    keep_needed,
    parts_of,
    seed_of,
    states_of_all,
    targets_of_all,
    untrained,
)
from gradgraph.building.objective import Objective, chosen_loss, objective_of
from gradgraph.building.option import called_with
from gradgraph.building.selection import frozen_below, is_default, parameters_of
from gradgraph.building.step_options import BuildOptions, StepOptions, check_names
from gradgraph.building.train_model import Among, Beginning, Training
from gradgraph.building.weighted_losses import weighted
from gradgraph.building.with_metrics import split, with_metrics
from gradgraph.errors import BuildError, Finding
from gradgraph.files.models import Source, load_model, to_proto
from gradgraph.frontend.lowering import Spec
from gradgraph.graph.marks import is_marked_constant
from gradgraph.losses import LOSSES, Loss
from gradgraph.machine.collector import paused_collection
from gradgraph.optim.recipes import RECIPES
from gradgraph.passes.autocast import METADATA_KEY, Precision, as_precision
from gradgraph.passes.mixed_precision import compute_low
from gradgraph.passes.normal import blaming, normalise, pass_quantization
from gradgraph.passes.normal.opsets.older import write_at
from gradgraph.passes.normal.simplifying.cse import merge_equal
from gradgraph.passes.normal.simplifying.peepholes import simplify
from gradgraph.passes.normal.sizes.fixed import Sizes, fix_sizes
from gradgraph.step.bases import Base, bases_of, to_proto_beside
from gradgraph.step.manifest import Manifest, StateSpec, alone_in, spec_of
from gradgraph.step.step import Step


@called_with(BuildOptions)
@paused_collection()
def build(options: BuildOptions) -> Step:
    """A training step for ``model``.

    Raises:
        ArgumentError: an argument is of the wrong kind.
        ModelError: the model is damaged.
        BuildError: loss, optimizer or options do not fit the model.
        UnknownNameError: a name or glob matches nothing.
        DifferentiationError, UnsupportedOperatorError: no gradient reaches a parameter.
    """
    backend = named(options.backend, step_backends())
    if options.separate and (options.accumulate or options.steps is not None):
        raise BuildError(
            "a step adds up gradients inside, or gives them in a file of its own; leave accumulate or separate out"
            if options.accumulate
            else "several named steps have no separate files; build each step alone, or leave separate out",
            shell="leave --accumulate or --separate out",
        )
    if options.steps is not None:
        check_names(options.steps)
        if options.of_step:
            raise BuildError(
                "build was given options beside steps, and each of several steps has its own; put them into the "
                "gradgraph.StepOptions of the steps"
            )
    precision = as_precision(options.precision)
    with blaming(options.model):
        return _written(
            _sized(options.model, options.sizes), {"": options} if options.steps is None else options.steps,
            options.seed, options.backend, backend, precision, options.separate, opset_for(backend, options.opset),
        )  # fmt: skip


def _sized(model: Source, sizes: Sizes | None) -> Source:
    """``model``, or a copy with these sizes."""
    if not sizes:
        return model
    copy = load_model(model)
    fix_sizes(copy, sizes)
    return copy


class _Draft:
    """A step before anything is written: its options, what it minimises, and how that is written."""

    def __init__(self, options: StepOptions, model: ir.Model, below: Sequence[str]) -> None:
        """``model`` is in normal form; inner values that losses and metrics read become outputs of it. The weights
        ``below`` are those of ``freeze_below``.
        """
        self.options, self.model, self._below = options, model, below
        weighed = bool(options.sample_weight or options.mask)
        chosen = _loss(options.loss, model, options.output, options.targets, weighed)
        scalars, beside = split(options.metrics, chosen, weighed)

        def objective_for(graph: ir.Graph) -> Objective:
            if isinstance(chosen, Mapping) or weighed:
                return weighted(graph, chosen, options.output, options.target_name, options.sample_weight, options.mask)
            return objective_of(graph, chosen, options.output, options.target_name, scalars)

        hidden = chosen.kept if isinstance(chosen, TracedLoss) else ()
        write = with_metrics(model, objective_for, beside, hidden)
        self._write = taught(model, write, options.loss is None, options.sample_weight, options.mask)
        self.optimizer = RECIPES.given(options.optimizer)
        if options.ema is not None:
            self.optimizer = optim.ema(self.optimizer, options.ema)

    def choose(self, model: ir.Model) -> None:
        """Set what this step minimises and trains in ``model``, which is written on from here."""
        self.model = model
        self.objective = self._write(model.graph)
        self.read = self.objective.read(model.graph)
        self.names = parameters_of(model, self.read, self.options.train, self.options.freeze, self._below)

    def findings(self) -> list[Finding]:
        default = is_default(self.options.train, (*as_names(self.options.freeze), *self._below))
        return review(self.model.graph, self.read, self.names, default)


def _written(
    model: Source,
    steps: Mapping[str, StepOptions],
    seed: int,
    backend: str,
    chosen_backend: Backend,
    precision: Precision,
    separate: bool,
    opset: int,
) -> Step:
    """The step of these options, or several over one state; one that is the only one is called ""."""
    alone = "" in steps
    named = [name for options in steps.values() for name in (*as_names(options.train), *as_names(options.freeze))]
    below = dict[str, list[str]]()
    normal = normalise(model, parameters=named, keep_quantization=True, look=lambda read: below.update(
        {name: frozen_below(read, options.freeze_below) for name, options in steps.items()}))  # fmt: skip
    bases = bases_of(normal)
    drafts = {
        name: _Draft(options, normal if alone else normal.clone(), below[name]) for name, options in steps.items()
    }
    for draft in drafts.values():
        make_outputs(normal, [v.name or "" for v in draft.model.graph.outputs])
    simplify(merge_equal(normal))  # of equal nodes each would get a backward pass of its own
    _compute_low(normal, precision)
    plain = normal.clone()
    pass_quantization(normal)  # for training; what is evaluated and exported quantizes as the model did
    for draft in drafts.values():
        draft.choose(normal if alone else normal.clone())
    trained = [n for n in normal.graph.initializers if any(n in draft.names for draft in drafts.values())]
    found = list(dict.fromkeys(f for draft in drafts.values() for f in draft.findings()))
    if not alone:
        found += untrained([(d.model.graph, d.read) for d in drafts.values()], steps, trained)
    log_findings(found)
    objectives = {name: draft.objective for name, draft in drafts.items()}
    evaluated = evaluation(plain, objectives, trained)
    beginning, trainings = Beginning(), dict[str, Training]()
    for number, (name, draft) in enumerate(drafts.items()):
        if not alone:
            keep_needed(draft.model, draft.objective)
        drawn = seed_of(draft.options, number, seed)
        trainings[name] = Training(draft.model, draft.objective, draft.names, draft.optimizer, drawn,
                                   draft.options.accumulate, draft.options.grad_norm,
                                   Among(name, trained, beginning), precision if precision.dtype else None,
                                   separate, as_recompute(draft.options.recompute))  # fmt: skip
    inputs, targets = tuple(spec_of(v) for v in evaluated.inputs), targets_of_all(objectives)
    states = states_of_all(trainings, trained)
    taken = {s.name for s in (*inputs, *targets)}
    optimizers = {name: draft.optimizer for name, draft in drafts.items()}
    halves = trainings[""].halves if alone else None
    parts = parts_of(trainings, objectives, optimizers, evaluated, taken, {s.name for s in states})
    manifest = Manifest(
        inputs=inputs,
        targets=targets,
        outputs=tuple(dict.fromkeys(evaluated.outputs)),
        **(alone_in(parts[""]) if alone else {"steps": parts}),
        state=states,
        averages=averages_of_all(trainings),
        precision=_described(precision, trainings),
        trainable=tuple(trained),
        frozen=_frozen(evaluated.model.graph, states),
        backend=backend,
        machine=chosen_backend.machine(),
        separate=halves.spec if halves else None,
        opset=opset,
    )
    apart = halves.models if halves else {}
    for written in (*(training.model for training in trainings.values()), evaluated.model, *apart.values()):
        if precision.dtype is not None:
            written.metadata_props[METADATA_KEY] = precision.name
        keep_memory_apart(write_at(write_for(written, chosen_backend), opset))
    proto = partial(_proto, bases=bases)
    trains: Any = {name: proto(training.model) for name, training in trainings.items()}
    first = beginning.model()
    heed(chosen_backend, first)
    init = write_at(first, opset)
    return Step(trains[""] if alone else trains, proto(init), proto(evaluated.model), manifest, bases=bases,
                findings=tuple(found), separate={name: proto(half) for name, half in apart.items()})  # fmt: skip


def _compute_low(model: ir.Model, precision: Precision) -> None:
    """Let ``model`` be computed in ``precision``, in place.

    Raises:
        BuildError: it would change nothing.
    """
    stored = {v.dtype for v in model.graph.initializers.values()}
    if precision.dtype is not None and not compute_low(model, precision) and precision.dtype not in stored:
        raise BuildError(
            f"the model has nothing that {precision.name} would compute: no product of float32 tensors outside loops",
            remedy="leave precision out",
            shell="leave --precision out",
        )


def _described(precision: Precision, trainings: Mapping[str, Training]) -> dict[str, Any]:
    """What the manifest says of it; nothing of float32."""
    if precision.dtype is None:
        return {}
    names = {column: tensor for training in trainings.values() for column, tensor in training.scale_names.items()}
    return {"name": precision.name, "arguments": dict(precision.arguments), "state": names}


def _loss(
    loss: Any, model: ir.Model, output: str | Sequence[str] | None, targets: Mapping[str, Spec], weighed: bool
) -> Loss | TracedLoss | Mapping[Any, Any] | None:
    """What ``loss`` stands for; a function is tried on the model."""
    is_function = callable(loss) and not isinstance(loss, Loss | type) and loss not in LOSSES.values()
    if targets and not is_function:
        raise BuildError("targets say what a loss function reads, and other losses know that; leave them out")
    if output is not None and (is_function or isinstance(loss, Mapping)):
        raise BuildError(
            "output says what a single named loss reads; a function reads out['NAME'], and a dict names it"
        )
    if is_function and weighed:
        raise BuildError("a loss function weighs samples itself; declare their weights in targets instead")
    if is_function:
        return TracedLoss(loss, model, targets)
    return loss if isinstance(loss, Mapping) else chosen_loss(loss)


def _frozen(graph: ir.Graph, states: Sequence[StateSpec]) -> tuple[str, ...]:
    moving = {s.name for s in states}
    return tuple(
        n for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v) and n not in moving
    )


def _proto(model: ir.Model, bases: Mapping[str, Base]) -> onnx.ModelProto:
    model.producer_name = "gradgraph"
    return to_proto_beside(model, bases) if bases else to_proto(model)
