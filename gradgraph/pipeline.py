"""The one pipeline: normal form → modes → loss → gradients → optimizer → passes → step.

``build`` turns a model into a ``Step``: train.onnx, init.onnx, eval.onnx and their manifest.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from gradgraph import optim
from gradgraph.arguments import NAMES, TEXT, WHOLE, checked
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.review import log_findings, review
from gradgraph.backends import named, step_backends
from gradgraph.backends.engine import write_for
from gradgraph.collector import paused_collection
from gradgraph.errors import BuildError
from gradgraph.eval_model import evaluation
from gradgraph.files import Source, to_proto
from gradgraph.losses import Loss
from gradgraph.manifest import Manifest, StateSpec, spec_of
from gradgraph.marks import is_marked_constant
from gradgraph.named import as_names, named_or_given
from gradgraph.normal import blaming, normalise, pass_quantization
from gradgraph.normal.simplifying.cse import merge_equal
from gradgraph.normal.simplifying.peepholes import simplify
from gradgraph.objective import Objective, output_of
from gradgraph.optim import Optimizer
from gradgraph.selection import is_default, parameters
from gradgraph.step import Step
from gradgraph.train_model import Training


@checked(train=NAMES, freeze=NAMES, output=TEXT.or_none(), target_name=TEXT, metrics=NAMES.or_none(), seed=WHOLE,
         backend=TEXT)  # fmt: skip
@paused_collection()
def build(
    model: Source,
    loss: str | Loss | None = "cross_entropy",
    optimizer: str | Optimizer = "adamw",
    *,
    train: str | Sequence[str] = "*",
    freeze: str | Sequence[str] = (),
    output: str | None = None,
    target_name: str = "target",
    metrics: str | Sequence[str] | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> Step:
    """A training step for ``model``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        loss: a name or a ``Loss`` from ``gradgraph.losses``; ``None`` if the model computes its own scalar loss.
        optimizer: a name or an ``Optimizer`` from ``gradgraph.optim``.
        train, freeze: names and globs of initializers; what ``train`` selects and ``freeze`` does not is trained.
            ``"*"`` means every trainable initializer: floating, on the way to the loss, neither running statistic
            nor buffer.
        output: what the loss reads: an output of the model, or an inner value such as the logits behind a Softmax;
            the first floating output by default.
        target_name: of the input that the loss compares with (another free name is found if it is taken).
        metrics: a name, or several, from ``gradgraph.losses.METRICS``; accuracy for losses on class numbers by default.
        seed: of what is drawn in training: the masks of Dropout, and the numbers of random operators.
        backend: what the step is written for: ``"auto"`` (gradient operators are functions, which every onnxruntime
            runs and a Trainer replaces by the best form of its machine), ``"portable"`` (standard nodes only),
            or another one of ``gradgraph.backends.step_backends()``.

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
        normal = _forward(model, [*as_names(train), *as_names(freeze)])
        plain = normal.clone()
        pass_quantization(normal)  # for training; what is evaluated and exported quantizes as the model did
        chosen_optimizer = named_or_given(
            "optimizer", optimizer, optim.by_name, Optimizer, "gradgraph.optim.adamw(1e-3)"
        )
        objective = Objective.of(normal.graph, loss, output, target_name, metrics)
        names = parameters(normal.graph, objective.output, train, freeze)
        found = review(normal.graph, [output_of(normal.graph, objective.output)], names, is_default(train, freeze))
        log_findings(found)
        targets = objective.target_specs(normal.graph)
        evaluated = evaluation(plain, objective, names)
        training = Training(normal, objective, names, chosen_optimizer, seed)
        manifest = Manifest(
            inputs=tuple(spec_of(v) for v in evaluated.inputs),
            targets=targets,
            outputs=tuple(dict.fromkeys(evaluated.outputs)),
            loss={"name": objective.name, "arguments": objective.arguments},
            loss_output=evaluated.loss,
            metrics=evaluated.metrics,
            optimizer={"name": chosen_optimizer.name, "arguments": dict(chosen_optimizer.arguments)},
            hyperparameters=training.hyperparameters,
            state=tuple(training.states),
            trainable=tuple(names),
            frozen=_frozen(evaluated.model.graph, training.states),
            backend=backend,
            machine=chosen_backend.machine(),
        )
        for written in (training.model, evaluated.model):
            write_for(written, chosen_backend)
        trained, initial, evaluating = map(_proto, (training.model, training.initial, evaluated.model))
        return Step(trained, initial, evaluating, manifest, findings=tuple(found))


def _forward(model: Source, parameters: Sequence[str]) -> ir.Model:
    """The forward pass, where nothing is computed twice: of equal nodes each would get a backward pass of its own."""
    return simplify(merge_equal(normalise(model, parameters=parameters, keep_quantization=True)))


def _frozen(graph: ir.Graph, states: Sequence[StateSpec]) -> tuple[str, ...]:
    moving = {s.name for s in states}
    return tuple(
        n for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v) and n not in moving
    )


def _proto(model: ir.Model) -> onnx.ModelProto:
    model.producer_name = "gradgraph"
    return to_proto(model)
