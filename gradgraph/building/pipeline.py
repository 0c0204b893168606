"""``gradgraph.build``: turns a model into a ``Step``, that is train.onnx, init.onnx, eval.onnx and their manifest.

The stages are listed in ``STAGES``, in the order in which they run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import onnx
import onnx_ir as ir

from gradgraph import optim
from gradgraph.arguments import as_names
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.review import log_findings, review, review_integers
from gradgraph.autodiff.separate_buffers import separate_buffers
from gradgraph.backends import named, step_backends
from gradgraph.backends.engine import write_for, write_init_for
from gradgraph.backends.missing_kernels import write_missing_kernels
from gradgraph.building.draft import Draft, Part
from gradgraph.building.eval_model import eval_graph
from gradgraph.building.interface import write_interface
from gradgraph.building.named_steps import (
    averages_of_all,
    keep_needed,
    part_specs,
    parts_of,
    states_of_all,
    targets_of_all,
    untrained,
)
from gradgraph.building.objective import objectives_of
from gradgraph.building.option import called_with
from gradgraph.building.outputs import make_outputs
from gradgraph.building.selection import frozen_below, is_default, parameters_of
from gradgraph.building.selection_report import matches_of_globs
from gradgraph.building.step_options import BuildOptions, check_names
from gradgraph.building.train_model import write_training
from gradgraph.data.preprocess.column_nodes import cut_off
from gradgraph.data.record.column_assignment import fitting
from gradgraph.data.record.data_names import NAMES_KEY, DataNames
from gradgraph.data.record.image_preprocessing import learn_preprocessing
from gradgraph.data.record.label_names import names_beside
from gradgraph.data.record.specs import spec_of
from gradgraph.errors import BuildError, Finding
from gradgraph.files.models import load_model, to_proto
from gradgraph.graph.marks import is_marked_constant
from gradgraph.graph.weight_layouts import record_layouts
from gradgraph.machine.garbage_collection import paused_collection
from gradgraph.optim.recipes import RECIPES
from gradgraph.passes.autocast import METADATA_KEY, as_precision
from gradgraph.passes.half_products import align_product_ranks
from gradgraph.passes.mixed_precision import compute_low
from gradgraph.passes.normal import blaming, normalise, pass_quantization
from gradgraph.passes.normal.opsets.older import write_at
from gradgraph.passes.normal.simplifying.cse import merge_equal
from gradgraph.passes.normal.simplifying.peepholes import simplify
from gradgraph.passes.normal.sizes.fixed import fix_sizes
from gradgraph.step.bases import bases_of, to_proto_beside
from gradgraph.step.manifest import Manifest, alone_in, train_file
from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")
EVAL = "eval.onnx"


@called_with(BuildOptions)
def build(options: BuildOptions) -> Step:
    """Return a training step for ``model``.

    Raises:
        ArgumentError: if an argument has the wrong type.
        ModelError: if the model is damaged.
        BuildError: if the loss, optimizer or options do not match the model.
        UnknownNameError: if a name or glob matches nothing.
        DifferentiationError: if no gradient reaches a parameter.
        UnsupportedOperatorError: if an operator between a parameter and the loss has no gradient rule.
    """
    step = _built(options)
    if not options.separate and options.steps is None:
        step.built_apart = lambda: _built(replace(options, separate=True))
    return step


@paused_collection()
def _built(options: BuildOptions) -> Step:
    backend = named(options.backend, step_backends())
    if options.separate and options.steps is not None:
        raise BuildError(
            "named steps do not support separate files",
            remedy="build each step alone, or remove separate=True",
            shell="build each step alone, or remove --separate",
        )
    if options.steps is not None:
        check_names(options.steps)
        if options.of_step:
            raise BuildError(
                "the options of a step cannot be passed to build together with steps; move them into the "
                "gradgraph.StepOptions of each step"
            )
    precision = as_precision(options.precision)
    draft = Draft(options, parts_of(options), backend, precision)
    with blaming(options.model):
        for stage in STAGES:
            draft = stage(draft)
        return finished(draft)


def normal_form(draft: Draft) -> Draft:
    """Read the model and rewrite each of its operators in normal form."""
    source, parts = draft.options.model, draft.parts
    if draft.options.sizes:
        source = load_model(source)
        fix_sizes(source, draft.options.sizes)
    asked = [name for p in parts for name in (*as_names(p.options.train), *as_names(p.options.freeze))]

    def look(read: ir.Model) -> None:
        plan = DataNames.read_from(read.metadata_props).preprocess
        if plan is not None:
            cut_off(read, plan)
        for part in parts:
            part.below = frozen_below(read, part.options.freeze_below)

    draft.model = normalise(source, parameters=asked, keep_quantization=True, look=look)
    draft.bases = bases_of(draft.model)
    report = learn_preprocessing(draft.model, draft.options.model)
    draft.reported = [report] if report else []
    draft.data = DataNames.read_from(draft.model.metadata_props)
    if not draft.data.classes:
        draft.data = draft.data.updated(names_beside(draft.options.model))
    draft.model.metadata_props.pop(NAMES_KEY, None)  # the names are stored in the manifest instead
    return draft


def objectives(draft: Draft) -> Draft:
    """Determine the loss and optimizer of each part; inner values that the losses read become outputs of the model."""
    for part in draft.parts:
        part.model = draft.model if draft.is_alone else draft.model.clone()
        part.objective_for, part.doubts = objectives_of(part.options, part.model)
        part.optimizer = RECIPES.given(part.options.optimizer)
        if part.options.ema is not None:
            part.optimizer = optim.ema(part.optimizer, part.options.ema)
    for part in draft.parts:
        make_outputs(draft.model, [v.name or "" for v in part.model.graph.outputs])
    return draft


def equal_nodes_merged(draft: Draft) -> Draft:
    """Merge equal nodes, so that each is differentiated only once."""
    simplify(merge_equal(draft.model))
    return draft


def low_precision(draft: Draft) -> Draft:
    """Convert the model to the requested precision.

    Raises:
        BuildError: if this does not change the model.
    """
    precision, model = draft.precision, draft.model
    stored = {v.dtype for v in model.graph.initializers.values()}
    if precision.dtype is not None and not compute_low(model, precision) and precision.dtype not in stored:
        raise BuildError(
            f"the precision {precision.name} has no effect: the model has no product of float32 tensors outside loops",
            remedy="remove the argument precision",
            shell="remove --precision",
        )
    return draft


def models_of_parts(draft: Draft) -> Draft:
    """Give each part its own model to train; the model of the draft becomes eval.onnx.

    Quantization nodes remain in eval.onnx only; in training, gradients pass through them (straight-through estimator).
    """
    trained, draft.model = draft.model, draft.model.clone()
    pass_quantization(trained)
    for part in draft.parts:
        part.model = trained if draft.is_alone else trained.clone()
    return draft


def weights(draft: Draft) -> Draft:
    """Select the weights that each part trains, and log warnings and notes about the selection."""
    found = dict[Finding, None]()
    for part in draft.parts:
        record_layouts(part.model.graph)
        own = part.options
        part.objective = part.objective_for(part.model.graph)
        part.read = part.objective.read(part.model.graph)
        part.trained = parameters_of(part.model, part.read, own.train, own.freeze, part.below)
        _keep_frozen_pairs(draft.model, part)
        by_default = is_default(own.train, (*as_names(own.freeze), *part.below))
        found |= dict.fromkeys(part.doubts)
        found |= dict.fromkeys(review(part.model.graph, part.read, part.trained, by_default))
    every = draft.parts[0].model.graph.initializers
    draft.trained = [name for name in every if any(name in part.trained for part in draft.parts)]
    served = review_integers(draft.model.graph)
    draft.findings = [*found, *served, *([] if draft.is_alone else untrained(draft.parts, draft.trained))]
    log_findings(draft.findings)
    draft.reported = [*draft.reported, *matches_of_globs(draft)]
    for line in draft.reported:
        log.info("%s", line)
    return draft


def _keep_frozen_pairs(model: ir.Model, part: Part) -> None:
    """Restore the quantization nodes of ``model``, the model of ``part`` before ``pass_quantization``, that are frozen.

    No gradient passes through them, and onnxruntime computes what is between them in integers.
    """
    if _pairs(model) == _pairs(part.model):
        return
    part.model = model.clone()
    pass_quantization(part.model, part.trained)
    record_layouts(part.model.graph)
    part.objective = part.objective_for(part.model.graph)
    part.read = part.objective.read(part.model.graph)


def _pairs(model: ir.Model) -> int:
    return sum(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph)


def train_graphs(draft: Draft) -> Draft:
    """Write the train graph of each part, and init.onnx with them."""
    for part in draft.parts:
        if not draft.is_alone:
            keep_needed(part)
        part.state, part.halves = write_training(draft, part)
    return draft


def manifest(draft: Draft) -> Draft:
    """Write the manifest, which records the role of each input, output and state tensor."""
    parts, precision, halves = draft.parts, draft.precision, draft.parts[0].halves
    inputs, targets = tuple(spec_of(v) for v in draft.inputs), targets_of_all(parts)
    states = states_of_all(parts, draft.trained)
    moving = {s.name for s in states}
    specs = part_specs(parts, {s.name for s in (*inputs, *targets)}, moving)
    stored = draft.model.graph.initializers.items()
    scales = {column: tensor for part in parts for column, tensor in part.state.scale_names.items()}
    steps: dict[str, Any] = alone_in(specs[""]) if draft.is_alone else {"steps": specs}
    draft.manifest = Manifest(
        inputs=inputs,
        targets=targets,
        outputs=tuple(dict.fromkeys(draft.outputs)),
        **steps,
        state=states,
        averages=averages_of_all(parts),
        precision={} if precision.dtype is None else {
            "name": precision.name, "arguments": dict(precision.arguments), "state": scales,
        },
        trainable=tuple(draft.trained),
        frozen=tuple(n for n, v in stored if carries(v) and not is_marked_constant(v) and n not in moving),
        backend=draft.options.backend,
        machine=draft.backend.machine(),
        separate=halves.spec if halves else None,
        data=fitting(draft.data, inputs, targets),
        opset=draft.opset,
    )  # fmt: skip
    return draft


def for_backend(draft: Draft) -> Draft:
    """Rewrite all graphs for the backend, at the requested opset."""
    graphs = {train_file(part.name): part.model for part in draft.parts} | {EVAL: draft.model}
    graphs |= {f"{name}.onnx": half for name, half in draft.halves.items()}
    for file, graph in graphs.items():
        if draft.precision.dtype is not None:
            graph.metadata_props[METADATA_KEY] = draft.precision.name
        written = write_for(align_product_ranks(write_missing_kernels(graph)), draft.backend, file, spare=file == EVAL)
        separate_buffers(write_interface(write_at(written, draft.opset), draft.manifest))
    return draft


STAGES: tuple[Callable[[Draft], Draft], ...] = (
    normal_form,
    objectives,
    equal_nodes_merged,
    low_precision,
    models_of_parts,
    weights,
    eval_graph,
    train_graphs,
    manifest,
    for_backend,
)


def finished(draft: Draft) -> Step:
    """Return the step, with its models as protobuf; large external weights stay in the files of the user's model."""

    def proto(model: ir.Model) -> onnx.ModelProto:
        model.producer_name = "gradgraph"
        return to_proto_beside(model, draft.bases) if draft.bases else to_proto(model)

    trains = {part.name: proto(part.model) for part in draft.parts}
    init = write_interface(
        write_at(write_init_for(draft.init_model.model(), draft.backend), draft.opset), draft.manifest
    )
    halves = {name: proto(half) for name, half in draft.halves.items()}
    return Step(trains[""] if draft.is_alone else cast("Any", trains), proto(init),
                proto(draft.model), draft.manifest, bases=draft.bases, findings=tuple(draft.findings),
                taken=tuple(draft.reported), separate=halves)  # fmt: skip
