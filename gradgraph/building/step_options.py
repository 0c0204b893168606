"""The build options, each written once: ``gradgraph.build``, recipes, help and documentation read the fields below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, fields
from typing import TYPE_CHECKING, Any

from gradgraph.arguments import FLAG, NAMES, NUMBER, TEXT, WHOLE, Kind, instance
from gradgraph.building.option import Shell, default_of, option, option_of, options
from gradgraph.errors import BuildError

if TYPE_CHECKING:
    from gradgraph.autodiff.recomputation import Keep
    from gradgraph.building.loss_function import LossFunction
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
    """One of several named steps over one state: ``gradgraph.build(model, steps={"name": StepOptions(...), ...})``.

    The arguments are those of ``gradgraph.build``.

    Args:
        seed: of what this step draws; by default each step gets one of its own from that of ``gradgraph.build``.

    Raises:
        ArgumentError: an argument is of the wrong kind.
    """

    loss: str | Loss | LossFunction | Mapping[Any, Any] | None = option(
        "a name, a call such as ``\"focal(gamma=3)\"``, or a ``Loss`` from ``gradgraph.losses``; ``None`` if the "
        "model computes its own scalar loss; or a function ``loss(out, batch)`` of traced tensors that gives a "
        "scalar tensor, or a dict of them, which are added up. ``out`` has the model's outputs by name, and its "
        "inputs, inner values and weights; ``batch`` has its inputs and the ``targets``. A dict ``{output: "
        "loss}`` or ``{output: (loss, weight)}`` adds several up; the target of an output is then called "
        "``<output>_target``, and each loss is a column ``<output>_loss``. A list of these in place of one, on "
        "the same output and target, gives columns ``<output>_<loss>``.",
        None,
        Shell("loss", "What is minimised, such as mse or 'focal(gamma=3)'; none if the model computes its own loss. "
              "Several are added up: OUTPUT=NAME or OUTPUT=NAME:WEIGHT, repeatable, also for one output.",
              "list", key="name", names=("losses:LOSSES", "none"), default=["cross_entropy"]),
        Shell("loss", "An argument of the loss, or OUTPUT.KEY=VALUE of one of several; repeatable.",
              "arguments", "loss_option", key="options", of="loss"),
        default="cross_entropy",
    )  # fmt: skip
    optimizer: str | Optimizer = option(
        "a name, a call such as ``\"sgd(momentum=0.9)\"``, or an ``Optimizer`` from ``gradgraph.optim``.",
        None,
        Shell("optimizer", "How weights follow their gradients, such as adamw or 'sgd(momentum=0.9)'.",
              key="name", names=("optim.recipes:RECIPES",), default="adamw"),
        Shell("optimizer", "Learning rate; the optimizer's own by default.", "number", "lr", in_runs=True),
        Shell("optimizer", "An argument of the optimizer; repeatable.", "arguments", "optimizer_option", key="options",
              of="optimizer"),
        Shell("optimizer", "Weights whose optimizer has other arguments, such as 'head.*:lr=1e-3'; repeatable.",
              "groups", "group", key="groups", of="optimizer"),
        Shell("optimizer", "Weights without weight decay: a glob, or norm_and_bias; repeatable.",
              "list", "no_decay", metavar="GLOB"),
        Shell("optimizer", "Multiply the learning rate by this for each layer behind a weight's.",
              "number", "layer_decay", metavar="FACTOR"),
        Shell("optimizer", "Clip gradients to this norm, taken over all of them.",
              "number", "clip_norm", metavar="NORM"),
        Shell("optimizer", "Clip gradients to this share of the norm of each unit's weights, such as 0.01.",
              "number", "clip_units", metavar="SHARE"),
        Shell("optimizer", "Keep slow weights, go half the way to the fast ones and start again there every so many "
              "steps.", "count", "lookahead", metavar="STEPS"),
        Shell("optimizer", "Take gradients this far uphill, such as 0.05, for flat minima; two passes a step.",
              "number", "sam", metavar="RHO"),
        Shell("optimizer", "Zero the smallest weights, this part of them in the end, such as 0.9; or 2:4, two of four.",
              "text", "sparsity", metavar="PART"),
        Shell("optimizer", "When and what --sparsity prunes: begin, end, every, target, scope; repeatable.",
              "arguments", "sparsity_option"),
        Shell("optimizer", "Keep and update float32 copies of float16 weights.", "flag", "master_weights"),
        Shell("schedule", "How the learning rate moves, as in Python: cosine, 'warmup(100, cosine(1e-3, 1000))'.",
              "text", "schedule", key="name", metavar="SCHEDULE", names=("optim.schedules:SCHEDULES",)),
        default="adamw",
    )  # fmt: skip
    _: KW_ONLY
    train: str | Sequence[str] = option(
        'names and globs of initializers; what ``train`` selects and ``freeze`` does not is trained. ``"*"`` means '
        "every trainable initializer: floating, on the way to the loss, neither running statistic nor buffer; of a "
        "model with adapters (``gradgraph.lora``), those of the adapters.",
        NAMES,
        Shell("model", "Weights to train; repeatable. All by default.", "list", metavar="GLOB"),
        default="*",
    )
    freeze: str | Sequence[str] = option(
        "names and globs of initializers that are not trained, whatever ``train`` selects.",
        NAMES,
        Shell("model", "Weights to keep as they are; repeatable.", "list", metavar="GLOB"),
        default=(),
    )
    freeze_below: str | Sequence[str] = option(
        "values of the model, such as ``\"features\"``: the weights that they are computed from are not trained, "
        "either.",
        NAMES,
        Shell("model", "A value of the model; the weights that it is computed from stay as they are. Repeatable.",
              "list", metavar="NAME"),
        default=(),
    )  # fmt: skip
    output: str | Sequence[str] | None = option(
        "what the loss reads: an output of the model, or an inner value such as the logits behind a Softmax; the first "
        "floating output that depends on an input by default. A loss that reads several takes a list.",
        NAMES.or_none(),
        Shell("model", "The model output that the loss reads; repeatable. The first by default.",
              "list", key="outputs", metavar="NAME"),
        default=None,
    )  # fmt: skip
    target_name: str = option(
        "of the input that the loss compares with (another free name is found if it is taken).",
        TEXT,
        Shell("model", "The name of the input that the loss compares with.", metavar="NAME", default="target"),
        default="target",
    )
    targets: Mapping[str, Spec] = option(
        "what a function reads of a batch beside the model's inputs: names, and shapes (of float32 numbers) or "
        "``gradgraph.frontend.Input(shape, dtype)``. One that has the name of a value of the model is fed under that "
        "name with ``_target`` behind it.",
        _TARGETS,
        default_factory=dict,
    )
    sample_weight: bool | Sequence[int | str | None] = option(
        "an input ``sample_weight``, a number a sample: the loss is then ``Σ w·loss / Σ w``, and 0 where nothing "
        "counts. A shape in place of ``True`` says for which of the first axes of the losses there is a weight.",
        None,
        Shell("data", "Weigh samples by the array `sample_weight` of the data.", "flag"),
        default=False,
    )
    mask: MaskSpec = option(
        "an input ``mask``, booleans as targets are, True where an element counts; the loss is as with "
        "``sample_weight``. A dict masks the losses of one output alone: ``mask={\"boxes\": 2}`` is an input "
        "``boxes_mask`` over two axes of the target.",
        _MASK,
        Shell("data", "Count only what the array `mask` of the data says.", "flag"),
        Shell("data", "Count of the losses on OUTPUT only what the array `OUTPUT_mask` says, over all axes of the "
              "target or so many; repeatable.", "list", "mask_of", metavar="OUTPUT[:AXES]"),
        default=False,
    )  # fmt: skip
    metrics: Any = option(
        "a name, a ``Metric`` of ``gradgraph.metrics``, or several; or a dict of these by output, where there are "
        "several losses; or functions ``metric(out, batch)`` of traced tensors, in a dict by column or by their own "
        "names. Accuracy for losses on class numbers by default.",
        None,
        Shell("loss", "What is reported beside the loss, such as f1, 'top_k(k=3)' or OUTPUT=f1; repeatable. Accuracy "
              "for class numbers by default.", "list", "metric", key="metrics", names=("metrics:METRICS",)),
        default=None,
    )  # fmt: skip
    grad_norm: bool = option(
        "give the norm of the gradient, over all weights and before clipping, as ``\"grad_norm\"`` beside the loss: a "
        "column of the history and of logs. (Where gradients accumulate, that of their mean so far.)",
        FLAG,
        Shell("loss", "Report the norm of the gradient, over all weights and before clipping, beside the loss.",
              "flag"),
        default=False,
    )  # fmt: skip
    ema: float | None = option(
        "keep an average of the weights with this decay, such as 0.999, which evaluation, prediction and export read: "
        "``gradgraph.optim.ema``.",
        NUMBER.or_none(),
        Shell("optimizer", "Keep an average of the weights, such as 0.999, for evaluation and export.", "number",
              metavar="DECAY"),
        default=None,
    )  # fmt: skip
    accumulate: bool = option(
        "let ``fit(accumulate=n)`` and ``step(batch, update=0)`` add up the gradients of several batches before the "
        "weights move. It costs one more tensor of state for each weight.",
        FLAG,
        Shell("training", "Let runs add up the gradients of several batches for one update.", "flag", in_runs=True),
        default=False,
    )
    seed: int | None = option(
        "of what is drawn in training: the masks of Dropout, and the numbers of random operators.",
        WHOLE.or_none(),
        default=None,
    )
    recompute: Keep = option(
        "keep less of the forward pass, and compute it again in the backward pass, to the same bits (a Trainer with "
        "native kernels fuses otherwise: to rounding): ``\"sqrt\"`` for "
        "the least memory; ``\"attention\"`` for the weights of attentions alone; names and globs of the values that "
        "are kept; a number of bytes, such as ``\"500MB\"`` or ``500_000_000``, that a step may take; or "
        "``gradgraph.Recompute(...)``, which says sizes.",
        "autodiff.recomputation:KEEP",
        Shell("model", "Compute values of the forward pass again rather than keep them: sqrt for the least memory, "
              "attention for the weights of attentions alone, a number of bytes such as '500MB batch=32', or values "
              "that are kept (names or globs; repeatable).", "list", metavar="WHAT"),
        default=None,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for f in fields(self):
            if (one := option_of(f)) is not None:
                one.check(f.name, getattr(self, f.name))
        if not self.target_name:
            raise BuildError(
                "the input that the loss compares with needs a name",
                remedy="pass one, such as target_name='target'",
                shell="give one, such as --target-name target",
            )


@options
class _Model:
    """The first argument of ``gradgraph.build``."""

    model: Source = option("a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.")


@options
class BuildOptions(StepOptions, _Model):
    """The arguments of ``gradgraph.build``: a model, the options of its step, and those of the whole."""

    _: KW_ONLY
    seed: int = option(
        "of what is drawn in training: the masks of Dropout, and the numbers of random operators.",
        WHOLE,
        Shell("training", "Of everything random.", "whole", span=(0, (1 << 63) - 1), default=0, in_runs=True),
        default=0,
    )
    backend: str = option(
        "what the step is written for: ``\"auto\"`` (named operators are functions, which every onnxruntime runs and a "
        "Trainer replaces by the best form of its machine), ``\"portable\"`` (standard nodes only), or another one of "
        "``gradgraph.backends.step_backends()``.",
        TEXT,
        Shell("model", "The runtime to build for; auto runs wherever ONNX functions do, portable everywhere.",
              names=("backends:step_backends",), strict=True, default="auto"),
        default="auto",
    )  # fmt: skip
    opset: int | None = option(
        "of the files, 17 to 21, with the IR version of that opset's time, for runtimes that end there; by default 21, "
        "or the newest that the runtime takes.",
        WHOLE.or_none(),
        Shell("model", "The ONNX opset of what is written. 21 by default, or the newest that the runtime takes.",
              "whole", span=(17, 21)),
        default=None,
    )  # fmt: skip
    precision: str | Precision = option(
        "``\"float16\"`` or ``\"bfloat16\"`` for mixed precision: products are computed in it, weights stay float32, "
        "and in float16 the loss is scaled dynamically. ``gradgraph.Precision(...)`` says it in detail.",
        "passes.autocast:GIVEN",
        Shell("model", "What products are computed in; weights stay float32.",
              names=("passes.autocast:PRECISIONS",), default="float32"),
        Shell("model", "Nodes or operators that --precision leaves in float32; repeatable.",
              "list", "keep_float32", metavar="GLOB"),
        default="float32",
    )  # fmt: skip
    steps: Mapping[str, StepOptions] | None = option(
        "several steps by name over one state, each with options of its own, in place of all other arguments but "
        '``seed``, ``backend``, ``opset`` and ``precision``: ``{"discriminator": gradgraph.StepOptions(loss, '
        "optimizer, train=...), ...}``.",
        STEPS.or_none(),
        default=None,
    )
    separate: bool = option(
        "the step in two files as well: gradient.onnx gives the gradients, apply.onnx moves the weights by them. For "
        "gradients that are added up or averaged on the way, on one machine or on many.",
        FLAG,
        Shell("model", "Write gradient.onnx and apply.onnx as well: the step in two files.", "flag"),
        default=False,
    )
    sizes: Sizes | None = option(
        "numbers for sizes that the model leaves open, such as ``{\"batch\": 32}``; or by the name of an input all its "
        "sizes. The step takes these only, and what follows from them is computed now.",
        "passes.normal.sizes.fixed:GIVEN",
        Shell("model", "A number for a size that the model leaves open, such as batch=32, or all sizes of an input, "
              "such as x=1,3,224,224; repeatable.", "sizes", "size"),
        default=None,
    )  # fmt: skip

    @property
    def of_step(self) -> dict[str, Any]:
        """The options that are not as they are by default, and that each of several steps has for itself."""
        own = {f.name: (getattr(self, f.name), default_of(f)) for f in fields(StepOptions) if f.name != "seed"}
        return {name: value for name, (value, default) in own.items() if value != default}


def check_names(steps: Mapping[str, StepOptions]) -> None:
    """Raise BuildError unless each name can be that of a column and of a file."""
    if not steps:
        raise BuildError("steps is empty; name at least one, or leave steps out")
    seen = dict[str, str]()
    for name in steps:
        if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
            raise BuildError(
                f"a step is called {name!r}; a name begins with a letter and has only letters, digits and underscores"
            )
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise BuildError(f"two steps are called '{other}' and '{name}', which are one file on some systems")
