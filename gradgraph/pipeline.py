"""The one pipeline: normal form → modes → loss → gradients → optimizer → passes → step.

``build`` turns a model into a ``Step``: train.onnx, init.onnx, eval.onnx and their manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph import optim
from gradgraph.arguments import FLAG, NAMES, NUMBER, TEXT, WHOLE, checked, instance
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.review import log_findings, review
from gradgraph.backends import named, step_backends
from gradgraph.backends.engine import write_for
from gradgraph.collector import paused_collection
from gradgraph.errors import BuildError
from gradgraph.eval_model import evaluation
from gradgraph.files import Source, to_proto
from gradgraph.frontend.lowering import Spec
from gradgraph.loss_function import LossFunction, TracedLoss
from gradgraph.losses import LOSSES, Loss
from gradgraph.manifest import Manifest, StateSpec, spec_of
from gradgraph.marks import is_marked_constant
from gradgraph.named import as_names, named_or_given
from gradgraph.normal import blaming, normalise, pass_quantization
from gradgraph.normal.simplifying.cse import merge_equal
from gradgraph.normal.simplifying.peepholes import simplify
from gradgraph.objective import Objective, chosen_loss, objective_of
from gradgraph.optim import Optimizer
from gradgraph.selection import is_default, parameters
from gradgraph.step import Step
from gradgraph.train_model import Training
from gradgraph.weighted_losses import weighted
from gradgraph.with_metrics import split, with_metrics


@checked(train=NAMES, freeze=NAMES, output=NAMES.or_none(), target_name=TEXT, seed=WHOLE,
         targets=instance(Mapping, "a dict of names and shapes, such as {'target': ('batch', 4)}"),
         backend=TEXT, ema=NUMBER.or_none(), accumulate=FLAG, grad_norm=FLAG)  # fmt: skip
@paused_collection()
def build(
    model: Source,
    loss: str | Loss | LossFunction | Mapping[Any, Any] | None = "cross_entropy",
    optimizer: str | Optimizer = "adamw",
    *,
    train: str | Sequence[str] = "*",
    freeze: str | Sequence[str] = (),
    output: str | Sequence[str] | None = None,
    target_name: str = "target",
    targets: Mapping[str, Spec] = {},
    sample_weight: bool | Sequence[int | str | None] = False,
    mask: bool | Sequence[int | str | None] = False,
    metrics: Any = None,
    seed: int = 0,
    backend: str = "auto",
    ema: float | None = None,
    accumulate: bool = False,
    grad_norm: bool = False,
) -> Step:
    """A training step for ``model``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        loss: a name or a ``Loss`` from ``gradgraph.losses``; ``None`` if the model computes its own scalar loss; or a
            function ``loss(out, batch)`` of traced tensors that gives a scalar tensor, or a dict of them, which are
            added up. ``out`` has the model's outputs by name, and its inputs, inner values and weights; ``batch`` has
            its inputs and the ``targets``. A dict ``{output: loss}`` or ``{output: (loss, weight)}`` adds several up;
            the target of an output is then called ``<output>_target``, and each loss is a column ``<output>_loss``.
        optimizer: a name or an ``Optimizer`` from ``gradgraph.optim``.
        train, freeze: names and globs of initializers; what ``train`` selects and ``freeze`` does not is trained.
            ``"*"`` means every trainable initializer: floating, on the way to the loss, neither running statistic
            nor buffer.
        output: what the loss reads: an output of the model, or an inner value such as the logits behind a Softmax;
            the first floating output by default. A loss that reads several takes a list.
        target_name: of the input that the loss compares with (another free name is found if it is taken).
        targets: what a function reads of a batch beside the model's inputs: names, and shapes (of float32 numbers) or
            ``gradgraph.frontend.Input(shape, dtype)``. One that has the name of a value of the model is fed under that
            name with ``_target`` behind it.
        sample_weight, mask: an input ``sample_weight`` (a number a sample) or ``mask`` (booleans as targets are, True
            where an element counts); the loss is then ``Σ w·loss / Σ w``, and 0 where nothing counts. A shape in place
            of ``True`` says for which of the first axes of the losses there is a weight.
        metrics: a name, a ``Metric`` of ``gradgraph.metrics``, or several; or a dict of these by output, where there
            are several losses; or functions ``metric(out, batch)`` of traced tensors, in a dict by column or by their
            own names. Accuracy for losses on class numbers by default.
        seed: of what is drawn in training: the masks of Dropout, and the numbers of random operators.
        backend: what the step is written for: ``"auto"`` (named operators are functions, which every onnxruntime
            runs and a Trainer replaces by the best form of its machine), ``"portable"`` (standard nodes only),
            or another one of ``gradgraph.backends.step_backends()``.
        ema: keep an average of the weights with this decay, such as 0.999, which evaluation, prediction and export
            read: ``gradgraph.optim.ema``.
        accumulate: let ``fit(accumulate=n)`` and ``step(batch, update=0)`` add up the gradients of several batches
            before the weights move. It costs one more tensor of state for each weight.
        grad_norm: give the norm of the gradient, over all weights and before clipping, as ``"grad_norm"`` beside the
            loss: a column of the history and of logs. (Where gradients accumulate, that of their mean so far.)

    Raises:
        ArgumentError: an argument is of the wrong kind.
        ModelError: the model is damaged.
        BuildError: loss, optimizer or options do not fit the model.
        UnknownNameError: a name or glob matches nothing.
        DifferentiationError, UnsupportedOperatorError: no gradient reaches a parameter.
    """
    chosen_backend = named(backend, step_backends())
    if not target_name:
        raise BuildError(
            "the input that the loss compares with needs a name",
            remedy="pass one, such as target_name='target'",
            shell="give one, such as --target-name target",
        )
    with blaming(model):
        normal = normalise(model, parameters=[*as_names(train), *as_names(freeze)], keep_quantization=True)
        weighed = bool(sample_weight or mask)
        chosen = _loss(loss, normal, output, targets, weighed)
        scalars, beside = split(metrics, chosen, weighed)

        def objective_for(graph: ir.Graph) -> Objective:
            if isinstance(chosen, Mapping) or weighed:
                return weighted(graph, chosen, output, target_name, sample_weight, mask)
            return objective_of(graph, chosen, output, target_name, scalars)

        write = with_metrics(normal, objective_for, beside, chosen.kept if isinstance(chosen, TracedLoss) else ())
        simplify(merge_equal(normal))  # of equal nodes each would get a backward pass of its own
        plain = normal.clone()
        pass_quantization(normal)  # for training; what is evaluated and exported quantizes as the model did
        chosen_optimizer = named_or_given(
            "optimizer", optimizer, optim.by_name, Optimizer, "gradgraph.optim.adamw(1e-3)"
        )
        if ema is not None:
            chosen_optimizer = optim.ema(chosen_optimizer, ema)
        objective = write(normal.graph)
        read = objective.read(normal.graph)
        names = parameters(normal.graph, read, train, freeze)
        found = review(normal.graph, read, names, is_default(train, freeze))
        log_findings(found)
        evaluated = evaluation(plain, objective, names)
        training = Training(normal, objective, names, chosen_optimizer, seed, accumulate, grad_norm)
        manifest = Manifest(
            inputs=tuple(spec_of(v) for v in evaluated.inputs),
            targets=objective.targets,
            outputs=tuple(dict.fromkeys(evaluated.outputs)),
            loss={"name": objective.name, "arguments": dict(objective.arguments)},
            loss_output=evaluated.loss,
            metrics=evaluated.metrics,
            measures=evaluated.measures,
            reports=tuple(training.reports),
            optimizer={"name": chosen_optimizer.name, "arguments": dict(chosen_optimizer.arguments)},
            hyperparameters=training.hyperparameters,
            state=tuple(training.states),
            averages=training.averages,
            trainable=tuple(names),
            frozen=_frozen(evaluated.model.graph, training.states),
            backend=backend,
            machine=chosen_backend.machine(),
        )
        for written in (training.model, evaluated.model):
            write_for(written, chosen_backend)
        trained, initial, evaluating = map(_proto, (training.model, training.initial, evaluated.model))
        return Step(trained, initial, evaluating, manifest, findings=tuple(found))


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


def _proto(model: ir.Model) -> onnx.ModelProto:
    model.producer_name = "gradgraph"
    return to_proto(model)
