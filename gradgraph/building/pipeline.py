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
from gradgraph.arguments import FLAG, TEXT, WHOLE, as_names, checked, instance, named_or_given
from gradgraph.autodiff.apart import keep_memory_apart
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.recomputation import Keep, as_recompute
from gradgraph.autodiff.review import log_findings, review
from gradgraph.backends import named, step_backends
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import heed, opset_for, write_for
from gradgraph.building.distillation import taught
from gradgraph.building.eval_model import evaluation
from gradgraph.building.loss_function import LossFunction, TracedLoss, make_outputs
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
from gradgraph.building.selection import frozen_below, is_default, parameters_of
from gradgraph.building.step_options import STEPS, StepOptions, check_names
from gradgraph.building.train_model import Among, Beginning, Training
from gradgraph.building.weighted_losses import MaskSpec, weighted
from gradgraph.building.with_metrics import split, with_metrics
from gradgraph.errors import BuildError, Finding
from gradgraph.files.models import Source, load_model, to_proto
from gradgraph.frontend.lowering import Spec
from gradgraph.graph.marks import is_marked_constant
from gradgraph.losses import LOSSES, Loss
from gradgraph.machine.collector import paused_collection
from gradgraph.optim import Optimizer
from gradgraph.passes.autocast import FLOAT32, METADATA_KEY, Precision
from gradgraph.passes.autocast import by_name as precision_by_name
from gradgraph.passes.mixed_precision import compute_low
from gradgraph.passes.normal import blaming, normalise, pass_quantization
from gradgraph.passes.normal.opsets.older import write_at
from gradgraph.passes.normal.simplifying.cse import merge_equal
from gradgraph.passes.normal.simplifying.peepholes import simplify
from gradgraph.passes.normal.sizes.fixed import SIZES, Sizes, fix_sizes
from gradgraph.step.bases import Base, bases_of, to_proto_beside
from gradgraph.step.manifest import Manifest, StateSpec, alone_in, spec_of
from gradgraph.step.step import Step

PRECISION = instance(
    str | Precision, "'float32' (the default), another name such as 'float16', or gradgraph.Precision(...)"
)


@checked(seed=WHOLE, backend=TEXT, opset=WHOLE.or_none(), separate=FLAG, sizes=SIZES.or_none(), steps=STEPS.or_none(),
         precision=PRECISION)  # fmt: skip
@paused_collection()
def build(
    model: Source,
    loss: str | Loss | LossFunction | Mapping[Any, Any] | None = "cross_entropy",
    optimizer: str | Optimizer = "adamw",
    *,
    train: str | Sequence[str] = "*",
    freeze: str | Sequence[str] = (),
    freeze_below: str | Sequence[str] = (),
    output: str | Sequence[str] | None = None,
    target_name: str = "target",
    targets: Mapping[str, Spec] = {},
    sample_weight: bool | Sequence[int | str | None] = False,
    mask: MaskSpec = False,
    metrics: Any = None,
    seed: int = 0,
    backend: str = "auto",
    opset: int | None = None,
    ema: float | None = None,
    accumulate: bool = False,
    grad_norm: bool = False,
    precision: str | Precision = FLOAT32,
    steps: Mapping[str, StepOptions] | None = None,
    separate: bool = False,
    sizes: Sizes | None = None,
    recompute: Keep = None,
) -> Step:
    """A training step for ``model``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        loss: a name or a ``Loss`` from ``gradgraph.losses``; ``None`` if the model computes its own scalar loss; or a
            function ``loss(out, batch)`` of traced tensors that gives a scalar tensor, or a dict of them, which are
            added up. ``out`` has the model's outputs by name, and its inputs, inner values and weights; ``batch`` has
            its inputs and the ``targets``. A dict ``{output: loss}`` or ``{output: (loss, weight)}`` adds several up;
            the target of an output is then called ``<output>_target``, and each loss is a column ``<output>_loss``. A
            list of these in place of one, on the same output and target, gives columns ``<output>_<loss>``.
        optimizer: a name or an ``Optimizer`` from ``gradgraph.optim``.
        train, freeze: names and globs of initializers; what ``train`` selects and ``freeze`` does not is trained.
            ``"*"`` means every trainable initializer: floating, on the way to the loss, neither running statistic
            nor buffer; of a model with adapters (``gradgraph.lora``), those of the adapters.
        freeze_below: values of the model, such as ``"features"``: the weights that they are computed from are not
            trained, either.
        output: what the loss reads: an output of the model, or an inner value such as the logits behind a Softmax;
            the first floating output by default. A loss that reads several takes a list.
        target_name: of the input that the loss compares with (another free name is found if it is taken).
        targets: what a function reads of a batch beside the model's inputs: names, and shapes (of float32 numbers) or
            ``gradgraph.frontend.Input(shape, dtype)``. One that has the name of a value of the model is fed under that
            name with ``_target`` behind it.
        sample_weight, mask: an input ``sample_weight`` (a number a sample) or ``mask`` (booleans as targets are, True
            where an element counts); the loss is then ``Σ w·loss / Σ w``, and 0 where nothing counts. A shape in place
            of ``True`` says for which of the first axes of the losses there is a weight. A dict masks the losses of one
            output alone: ``mask={"boxes": 2}`` is an input ``boxes_mask`` over two axes of the target.
        metrics: a name, a ``Metric`` of ``gradgraph.metrics``, or several; or a dict of these by output, where there
            are several losses; or functions ``metric(out, batch)`` of traced tensors, in a dict by column or by their
            own names. Accuracy for losses on class numbers by default.
        seed: of what is drawn in training: the masks of Dropout, and the numbers of random operators.
        backend: what the step is written for: ``"auto"`` (named operators are functions, which every onnxruntime
            runs and a Trainer replaces by the best form of its machine), ``"portable"`` (standard nodes only),
            or another one of ``gradgraph.backends.step_backends()``.
        opset: of the files, 17 to 21, with the IR version of that opset's time, for runtimes that end there; by default
            21, or the newest that the runtime takes.
        ema: keep an average of the weights with this decay, such as 0.999, which evaluation, prediction and export
            read: ``gradgraph.optim.ema``.
        accumulate: let ``fit(accumulate=n)`` and ``step(batch, update=0)`` add up the gradients of several batches
            before the weights move. It costs one more tensor of state for each weight.
        grad_norm: give the norm of the gradient, over all weights and before clipping, as ``"grad_norm"`` beside the
            loss: a column of the history and of logs. (Where gradients accumulate, that of their mean so far.)
        precision: ``"float16"`` or ``"bfloat16"`` for mixed precision: products are computed in it, weights stay
            float32, and in float16 the loss is scaled dynamically. ``gradgraph.Precision(...)`` says it in detail.
        steps: several steps by name over one state, each with options of its own, in place of all other arguments but
            ``seed``, ``backend``, ``opset`` and ``precision``:
            ``{"discriminator": gradgraph.StepOptions(loss, optimizer, train=...), ...}``.
        separate: the step in two files as well: gradient.onnx gives the gradients, apply.onnx moves the weights by
            them. For gradients that are added up or averaged on the way, on one machine or on many.
        sizes: numbers for sizes that the model leaves open, such as ``{"batch": 32}``; or by the name of an input all
            its sizes. The step takes these only, and what follows from them is computed now.
        recompute: keep less of the forward pass, and compute it again in the backward pass, to the same bits:
            ``"sqrt"`` for the least memory; ``"attention"`` for the weights of attentions alone; names and globs of the
            values that are kept; a number of bytes, such as ``"500MB"`` or ``500_000_000``, that a step may take; or
            ``gradgraph.Recompute(...)``, which says sizes.

    Raises:
        ArgumentError: an argument is of the wrong kind.
        ModelError: the model is damaged.
        BuildError: loss, optimizer or options do not fit the model.
        UnknownNameError: a name or glob matches nothing.
        DifferentiationError, UnsupportedOperatorError: no gradient reaches a parameter.
    """
    options = StepOptions(loss, optimizer, train=train, freeze=freeze, freeze_below=freeze_below, output=output,
                          target_name=target_name,
                          targets=targets, sample_weight=sample_weight, mask=mask, metrics=metrics, ema=ema,
                          accumulate=accumulate, grad_norm=grad_norm, recompute=recompute)  # fmt: skip
    chosen_backend = named(backend, step_backends())
    if separate and (accumulate or steps is not None):
        raise BuildError(
            "a step adds up gradients inside, or gives them in a file of its own; leave accumulate or separate out"
            if accumulate
            else "several named steps have no separate files; build each step alone, or leave separate out",
            shell="leave --accumulate or --separate out",
        )
    if steps is not None:
        check_names(steps)
        if options != StepOptions():
            raise BuildError(
                "build was given options beside steps, and each of several steps has its own; put them into the "
                "gradgraph.StepOptions of the steps"
            )
    chosen_precision = named_or_given(
        "precision", precision, precision_by_name, Precision, "gradgraph.Precision('float16')"
    )
    with blaming(model):
        return _written(
            _sized(model, sizes), {"": options} if steps is None else steps, seed, backend, chosen_backend,
            chosen_precision, separate, opset_for(chosen_backend, opset),
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
        self.optimizer = named_or_given(
            "optimizer", options.optimizer, optim.by_name, Optimizer, "gradgraph.optim.adamw(1e-3)"
        )
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
