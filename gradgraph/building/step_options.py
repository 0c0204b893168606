"""The build options, each defined once: ``gradgraph.build``, recipes, help and documentation read the fields below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, fields
from typing import TYPE_CHECKING, Any

from gradgraph.arguments import FLAG, NAMES, NUMBER, TEXT, WHOLE, Kind, instance
from gradgraph.building.option import Shell, check_options, default_of, option, options
from gradgraph.errors import BuildError

if TYPE_CHECKING:
    from gradgraph.autodiff.recomputation import Keep
    from gradgraph.building.loss_function import LossFunction
    from gradgraph.building.pgd import PGD
    from gradgraph.building.terms import MaskSpec
    from gradgraph.files.models import Source
    from gradgraph.frontend.loss import Loss
    from gradgraph.frontend.lowering import Spec
    from gradgraph.optim.transform import Optimizer
    from gradgraph.passes.autocast import Precision
    from gradgraph.passes.normal.sizes.fixed import Sizes

_MASK = Kind(
    "True, a shape, or a dict of these or of numbers of axes by output, such as {'boxes': 2}",
    lambda value: (
        all(isinstance(k, str) and (WHOLE.fits(v) or _is_mask(v)) for k, v in value.items())
        if isinstance(value, Mapping)
        else _is_mask(value)
    ),
)


def _is_mask(value: Any) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, Sequence) and not isinstance(value, str))


_TARGETS = instance(Mapping, "a dict of names and shapes, such as {'target': ('batch', 4)}")
STEPS = Kind(
    "a dict of names and options, such as {'generator': gradgraph.StepOptions(loss, optimizer)}",
    lambda value: isinstance(value, Mapping) and all(isinstance(o, StepOptions) for o in value.values()),
)


@options
class StepOptions:
    """One of several named steps that share their state: ``gradgraph.build(model, steps={"name": StepOptions(...)})``.

    The arguments are those of ``gradgraph.build``.

    Args:
        seed: the seed of the random numbers of this step; by default derived from the seed of ``gradgraph.build``.

    Raises:
        ArgumentError: if an argument has the wrong type.
    """

    loss: str | Loss | LossFunction | Mapping[Any, Any] | None = option(
        "a name, a call such as ``\"focal(gamma=3)\"``, or a ``Loss`` from ``gradgraph.losses``; ``None`` if the "
        "model computes its own scalar loss; or a function ``loss(out, batch)`` of traced tensors that returns a "
        "scalar tensor, or a dict of them, which are added up. ``out`` has the model's outputs by name, and its "
        "inputs, inner values and weights; ``batch`` has its inputs and the ``targets``. A dict ``{output: loss}`` "
        "or ``{output: (loss, weight)}`` adds several up; the target of an output is then called "
        "``<output>_target``, and each loss has a column ``<output>_loss``. A list of losses for the same output and "
        "target has columns ``<output>_<loss>``.",
        None,
        Shell("loss", "The loss, such as mse or 'focal(gamma=3)'; none if the model computes its own. Several are "
                      "added up: OUTPUT=NAME or OUTPUT=NAME:WEIGHT, repeatable, also for the same output.",
              "list", key="name", names=("losses:LOSSES", "none"), default=["cross_entropy"]),
        Shell("loss", "An argument of the loss, or OUTPUT.KEY=VALUE of one of several; repeatable.",
              "arguments", "loss_option", key="options", of="loss"),
        default="cross_entropy",
    )  # fmt: skip
    optimizer: str | Optimizer = option(
        "a name, a call such as ``\"sgd(momentum=0.9)\"``, or an ``Optimizer`` from ``gradgraph.optim``.",
        None,
        Shell("optimizer", "The optimizer, such as adamw or 'sgd(momentum=0.9)'.",
              key="name", names=("optim.recipes:RECIPES",), default="adamw"),
        Shell("optimizer", "Learning rate; by default the optimizer's own.", "number", "lr", in_runs=True),
        Shell("optimizer", "An argument of the optimizer; repeatable.", "arguments", "optimizer_option", key="options",
              of="optimizer"),
        Shell("optimizer", "Optimizer arguments of a parameter group, such as 'head.*:lr=1e-3'; repeatable.",
              "groups", "group", key="groups", of="optimizer"),
        Shell("optimizer", "Parameters without weight decay: a glob, or norm_and_bias; repeatable.",
              "list", "no_decay", metavar="GLOB"),
        Shell("optimizer", "Layer-wise learning-rate decay: factor for each layer above.",
              "number", "layer_decay", metavar="FACTOR"),
        Shell("optimizer", "Clip gradients to this global norm.",
              "number", "clip_norm", metavar="NORM"),
        Shell("optimizer", "Adaptive gradient clipping: limit relative to the norm of each unit's weights, such as "
                           "0.01.",
              "number", "clip_units", metavar="SHARE"),
        Shell("optimizer", "Lookahead: every so many steps, move the slow weights halfway to the fast ones and "
                           "restart there.", "count", "lookahead", metavar="STEPS"),
        Shell("optimizer", "Sharpness-aware minimisation with this radius, such as 0.05; two passes per step.",
              "number", "sam", metavar="RHO"),
        Shell("optimizer", "Magnitude pruning to this share of zeros, such as 0.9; or 2:4, two of four.",
              "text", "sparsity", metavar="PART"),
        Shell("optimizer", "Arguments of --sparsity: begin, end, every, target, scope; repeatable.",
              "arguments", "sparsity_option"),
        Shell("optimizer", "Keep and update float32 copies of float16 weights.", "flag", "master_weights"),
        Shell("schedule", "Learning-rate schedule, in Python syntax: cosine, 'warmup(100, cosine(1e-3, 1000))'.",
              "text", "schedule", key="name", metavar="SCHEDULE", names=("optim.schedules:SCHEDULES",)),
        default="adamw",
    )  # fmt: skip
    _: KW_ONLY
    train: str | Sequence[str] = option(
        'names and globs of initializers to train, except those that ``freeze`` matches. ``"*"`` means every '
        "trainable initializer: floating, on the way to the loss, neither running statistic nor buffer; for a model "
        "with adapters (``gradgraph.lora``), those of the adapters.",
        NAMES,
        Shell("model", "Parameters to train; repeatable. All by default.", "list", metavar="GLOB"),
        default="*",
    )
    freeze: str | Sequence[str] = option(
        "names and globs of initializers to freeze, even if ``train`` matches them.",
        NAMES,
        Shell("model", "Parameters to freeze; repeatable.", "list", metavar="GLOB"),
        default=(),
    )
    freeze_below: str | Sequence[str] = option(
        'values of the model, such as ``"features"``: parameters upstream of them are frozen, too.',
        NAMES,
        Shell("model", "A value of the model; parameters upstream of it are frozen. Repeatable.",
              "list", metavar="NAME"),
        default=(),
    )  # fmt: skip
    output: str | Sequence[str] | None = option(
        "what the loss reads: an output of the model, or an inner value such as the logits behind a Softmax; the first "
        "floating-point output that depends on an input by default. A loss that reads several takes a list.",
        NAMES.or_none(),
        Shell("model", "The model output that the loss reads; repeatable. The first by default.",
              "list", key="outputs", metavar="NAME"),
        default=None,
    )  # fmt: skip
    target_name: str = option(
        "the name of the loss's target input (or the next free name, if it is taken).",
        TEXT,
        Shell("model", "The name of the loss's target input.", metavar="NAME", default="target"),
        default="target",
    )
    targets: Mapping[str, Spec] = option(
        "further inputs of a loss function: names, and shapes (float32) or ``gradgraph.frontend.Input(shape, "
        "dtype)``. One with the name of a value of the model gets the suffix ``_target``.",
        _TARGETS,
        default_factory=dict,
    )
    sample_weight: bool | Sequence[int | str | None] = option(
        "an input ``sample_weight``, one number per sample: the loss is then ``Σ w·loss / Σ w``, and 0 if all "
        "weights are 0. Pass a shape instead of ``True`` to weight further leading axes of the losses.",
        None,
        Shell("data", "Weight samples by the array `sample_weight` of the data.", "flag"),
        default=False,
    )
    mask: MaskSpec = option(
        'an input ``mask``, booleans shaped like the targets, True for elements to include; the loss is as with '
        '``sample_weight``. A dict masks the losses of single outputs: ``mask={"boxes": 2}`` is an input '
        '``boxes_mask`` over two axes of the target.',
        _MASK,
        Shell("data", "Mask the loss by the array `mask` of the data.", "flag"),
        Shell("data", "Mask the losses on OUTPUT by the array `OUTPUT_mask`, over all axes of the target or this "
                      "many; repeatable.", "list", "mask_of", metavar="OUTPUT[:AXES]"),
        default=False,
    )  # fmt: skip
    metrics: Any = option(
        "a name, a ``Metric`` of ``gradgraph.metrics``, or several; or a dict of these by output, if there are "
        "several losses; or functions ``metric(out, batch)`` of traced tensors, in a dict by column or by their own "
        "names. Accuracy for losses on class indices by default.",
        None,
        Shell("loss", "Metrics, such as f1, 'top_k(k=3)' or OUTPUT=f1; repeatable. Accuracy for class indices by "
                      "default.", "list", "metric", key="metrics", names=("metrics:METRICS",)),
        default=None,
    )  # fmt: skip
    adversarial: str | PGD | None = option(
        'adversarial training: the loss at inputs that an attack in each step has moved to increase it, such as '
        '``gradgraph.PGD(epsilon=0.03, bounds=(0, 1))`` or ``"pgd(epsilon=0.03)"``. Losses and metrics of the step are '
        'those at the moved inputs; evaluation uses the original ones.',
        "building.pgd:GIVEN",
        Shell("loss", "Adversarial training, such as 'pgd(epsilon=0.03, n=7, bounds=(0, 1))': train on inputs that an "
                      "attack in each step has moved to increase the loss.",
              metavar="ATTACK", names=("building.pgd:ATTACKS",)),
        default=None,
    )  # fmt: skip
    grad_norm: bool = option(
        'report the global norm of the gradient, before clipping, as ``"grad_norm"``: a column of the history and of '
        'logs. (With gradient accumulation, that of the mean so far.)',
        FLAG,
        Shell("loss", "Report the global norm of the gradient, before clipping.",
              "flag"),
        default=False,
    )  # fmt: skip
    ema: float | None = option(
        "keep an exponential moving average of the weights with this decay, such as 0.999, for evaluation, "
        "prediction and export: ``gradgraph.optim.ema``.",
        NUMBER.or_none(),
        Shell("optimizer", "Keep an exponential moving average of the weights, such as 0.999, for evaluation and "
                           "export.", "number",
              metavar="DECAY"),
        default=None,
    )  # fmt: skip
    accumulate: bool = option(
        "support gradient accumulation: ``fit(accumulate=n)`` and ``step(batch, update=0)`` sum the gradients of "
        "several batches before an update. Costs one more state tensor per weight.",
        FLAG,
        Shell("training", "Support gradient accumulation over several batches.", "flag", in_runs=True),
        default=False,
    )
    seed: int | None = option(
        "of the random numbers in training: Dropout masks and random operators.",
        WHOLE.or_none(),
        default=None,
    )
    recompute: Keep = option(
        'recompute activations in the backward pass instead of storing them, bit for bit (a Trainer with native '
        'kernels fuses differently: up to rounding): ``"sqrt"`` for the least memory; ``"attention"`` for attention '
        'probabilities only; names and globs of values to store; a memory limit for a step, such as ``"500MB"`` or '
        '``500_000_000``; or ``gradgraph.Recompute(...)``, to specify sizes.',
        "autodiff.recomputation:KEEP",
        Shell("model", "Recompute activations in the backward pass instead of storing them: sqrt for the least "
                       "memory, attention for attention probabilities only, a memory limit such as '500MB batch=32', "
                       "or values to store (names or globs; repeatable).", "list", metavar="WHAT"),
        default=None,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if not self.target_name:
            raise BuildError(
                "the target input of the loss requires a name",
                remedy="pass one, such as target_name='target'",
                shell="pass one, such as --target-name target",
            )


@options
class _Model:
    """The first argument of ``gradgraph.build``."""

    model: Source = option("a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.")


@options
class BuildOptions(StepOptions, _Model):
    """The arguments of ``gradgraph.build``: a model, the options of its step, and those of the whole build."""

    _: KW_ONLY
    seed: int = option(
        "of the random numbers in training: Dropout masks and random operators.",
        WHOLE,
        Shell("training", "Random seed.", "whole", span=(0, (1 << 63) - 1), default=0, in_runs=True),
        default=0,
    )
    backend: str = option(
        'the runtime to build for: ``"auto"`` (named operators are functions, which every onnxruntime runs and a '
        'Trainer replaces with the best form for its machine), ``"portable"`` (standard nodes only), or another one of '
        '``gradgraph.backends.step_backends()``.',
        TEXT,
        Shell("model", "The runtime to build for; auto runs wherever ONNX functions do, portable everywhere.",
              names=("backends:step_backends",), strict=True, default="auto"),
        default="auto",
    )  # fmt: skip
    opset: int | None = option(
        "opset of the files, 17 to 21, with a matching IR version, for older runtimes; by default 21, or the newest "
        "that the runtime supports.",
        WHOLE.or_none(),
        Shell("model", "ONNX opset of the files. 21 by default, or the newest that the runtime supports.",
              "whole", span=(17, 21)),
        default=None,
    )  # fmt: skip
    precision: str | Precision = option(
        '``"float16"`` or ``"bfloat16"`` for mixed precision: products are computed in it, parameters stay float32, '
        'and in float16 the loss is scaled dynamically. Use ``gradgraph.Precision(...)`` for details.',
        "passes.autocast:GIVEN",
        Shell("model", "Compute precision; parameters stay float32.",
              names=("passes.autocast:PRECISIONS",), default="float32"),
        Shell("model", "Nodes or operators that stay in float32 with --precision; repeatable.",
              "list", "keep_float32", metavar="GLOB"),
        default="float32",
    )  # fmt: skip
    steps: Mapping[str, StepOptions] | None = option(
        "several named steps over one state, each with options of its own, in place of all other arguments except "
        "``seed``, ``backend``, ``opset`` and ``precision``: "
        '``{"discriminator": gradgraph.StepOptions(loss, optimizer, train=...), ...}``.',
        STEPS.or_none(),
        default=None,
    )
    separate: bool = option(
        "also write the step in two files: gradient.onnx computes the gradients, apply.onnx updates the weights with "
        "them. For gradients that are accumulated or averaged in between, on one machine or on many.",
        FLAG,
        Shell("model", "Also write gradient.onnx and apply.onnx: the step in two files.", "flag"),
        default=False,
    )
    sizes: Sizes | None = option(
        'values of symbolic sizes, such as ``{"batch": 32}``; or, by the name of an input, all its sizes. The step '
        'supports these sizes only, and dependent values are folded.',
        "passes.normal.sizes.fixed:GIVEN",
        Shell("model", "The value of a symbolic size, such as batch=32, or all sizes of an input, such as "
                       "x=1,3,224,224; repeatable.", "sizes", "size"),
        default=None,
    )  # fmt: skip

    @property
    def of_step(self) -> dict[str, Any]:
        """The options of the step itself (those of ``StepOptions``) that differ from their defaults."""
        own = {f.name: (getattr(self, f.name), default_of(f)) for f in fields(StepOptions) if f.name != "seed"}
        return {name: value for name, (value, default) in own.items() if value != default}


def check_names(steps: Mapping[str, StepOptions]) -> None:
    """Raise BuildError unless each name of a step can be part of a column name and a file name."""
    if not steps:
        raise BuildError("steps is empty; add at least one step, or remove the argument steps")
    seen = dict[str, str]()
    for name in steps:
        if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
            raise BuildError(
                f"a step is called {name!r}; a name must begin with a letter and contain only letters, digits and "
                "underscores"
            )
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise BuildError(
                f"the step names '{other}' and '{name}' differ only in case, so on some systems their files would have "
                "the same name; rename one of them"
            )
