"""Options that several commands share, in the words of their help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gradgraph.cli.choices import LOSSES, METRICS, OPTIMIZERS, PATH, PRECISIONS, STEP_BACKENDS, Named
from gradgraph.cli.key_values import arguments, groups, sizes

F = TypeVar("F", bound=Callable[..., Any])

OPSET = click.option(
    "--opset",
    type=click.IntRange(17, 21),
    help="The ONNX opset of what is written. 21 by default, or the newest that the runtime takes.",
)
SIZE = click.option("--size", multiple=True, metavar="NAME=NUMBER", callback=sizes,
                    help="A number for a size that the model leaves open, such as batch=32, or all sizes of an input, "
                    "such as x=1,3,224,224; repeatable.")  # fmt: skip
STORE = click.option("--store", type=click.Choice(["float32", "float16"]), default="float32", show_default=True,
                     help="How weights lie in the file; float16 is half as large, and they are float32 again where "
                     "the file is opened.")  # fmt: skip

_BUILD_OPTIONS = [
    click.option("--loss", cls=Named, type=LOSSES, multiple=True, default=["cross_entropy"],
                 show_default=True,
                 help="What is minimised; none if the model computes its own loss. Several are added up: "
                 "OUTPUT=NAME or OUTPUT=NAME:WEIGHT, repeatable, also for one output."),
    click.option("--loss-option", multiple=True, metavar="KEY=VALUE", callback=arguments,
                 help="An argument of the loss, or OUTPUT.KEY=VALUE of one of several; repeatable."),
    click.option("--metric", cls=Named, type=METRICS, multiple=True,
                 help="What is reported beside the loss, such as f1, 'top_k(k=3)' or OUTPUT=f1; repeatable. Accuracy "
                 "for class numbers by default."),
    click.option("--grad-norm", is_flag=True,
                 help="Report the norm of the gradient, over all weights and before clipping, beside the loss."),
    click.option("--sample-weight", is_flag=True, help="Weigh samples by the array `sample_weight` of the data."),
    click.option("--mask", is_flag=True, help="Count only what the array `mask` of the data says."),
    click.option("--mask-of", multiple=True, metavar="OUTPUT[:AXES]",
                 help="Count of the losses on OUTPUT only what the array `OUTPUT_mask` says, over all axes of the "
                 "target or so many; repeatable."),
    click.option("--optimizer", cls=Named, type=OPTIMIZERS, default="adamw", show_default=True,
                 help="How weights follow their gradients."),
    click.option("--optimizer-option", multiple=True, metavar="KEY=VALUE", callback=arguments,
                 help="An argument of the optimizer; repeatable."),
    click.option("--schedule", metavar="SCHEDULE",
                 help="How the learning rate moves, as in Python: cosine, 'warmup(100, cosine(1e-3, 1000))'."),
    click.option("--group", multiple=True, metavar="GLOB:KEY=VALUE,…", callback=groups,
                 help="Weights whose optimizer has other arguments, such as 'head.*:lr=1e-3'; repeatable."),
    click.option("--no-decay", multiple=True, metavar="GLOB",
                 help="Weights without weight decay: a glob, or norm_and_bias; repeatable."),
    click.option("--layer-decay", type=float, metavar="FACTOR",
                 help="Multiply the learning rate by this for each layer behind a weight's."),
    click.option("--clip-norm", type=float, metavar="NORM",
                 help="Clip gradients to this norm, taken over all of them."),
    click.option("--clip-units", type=float, metavar="SHARE",
                 help="Clip gradients to this share of the norm of each unit's weights, such as 0.01."),
    click.option("--ema", type=float, metavar="DECAY",
                 help="Keep an average of the weights, such as 0.999, for evaluation and export."),
    click.option("--lookahead", type=click.IntRange(min=1), metavar="STEPS",
                 help="Keep slow weights, go half the way to the fast ones and start again there every so many steps."),
    click.option("--sam", type=float, metavar="RHO",
                 help="Take gradients this far uphill, such as 0.05, for flat minima; two passes a step."),
    click.option("--sparsity", metavar="PART",
                 help="Zero the smallest weights, this part of them in the end, such as 0.9; or 2:4, two of four."),
    click.option("--sparsity-option", multiple=True, metavar="KEY=VALUE", callback=arguments,
                 help="When and what --sparsity prunes: begin, end, every, target, scope; repeatable."),
    click.option("--precision", cls=Named, type=PRECISIONS, default="float32", show_default=True,
                 help="What products are computed in; weights stay float32."),
    click.option("--keep-float32", multiple=True, metavar="GLOB",
                 help="Nodes or operators that --precision leaves in float32; repeatable."),
    click.option("--recompute", multiple=True, metavar="WHAT",
                 help="Compute values of the forward pass again rather than keep them: sqrt for the least memory, "
                 "attention for the weights of attentions alone, a number of bytes such as '500MB batch=32', or values "
                 "that are kept (names or globs; repeatable)."),
    click.option("--master-weights", is_flag=True, help="Keep and update float32 copies of float16 weights."),
    click.option("--train", multiple=True, metavar="GLOB", help="Weights to train; repeatable. All by default."),
    click.option("--freeze", multiple=True, metavar="GLOB", help="Weights to keep as they are; repeatable."),
    click.option("--freeze-below", multiple=True, metavar="NAME",
                 help="A value of the model; the weights that it is computed from stay as they are. Repeatable."),
    click.option("--output", multiple=True, metavar="NAME",
                 help="The model output that the loss reads; repeatable. The first by default."),
    click.option("--target-name", default="target", show_default=True, metavar="NAME",
                 help="The name of the input that the loss compares with."),
    click.option("--backend", cls=Named, type=STEP_BACKENDS, default="auto", show_default=True,
                 help="The runtime to build for; auto runs wherever ONNX functions do, portable everywhere."),
    OPSET,
]  # fmt: skip


LR = click.option("--lr", type=float, help="Learning rate; the optimizer's own by default.")


def seed_option(what: str) -> Callable[[F], F]:
    """``--seed``, of ``what``."""
    kind = click.IntRange(0, (1 << 63) - 1)
    return click.option("--seed", type=kind, default=0, show_default=True, help=f"Of {what}.")


SEED = seed_option("everything random")
CHECKPOINT = click.option(
    "--checkpoint", type=PATH, help="The run of the step; without it, the weights are those before training."
)
NOT_AVERAGED = click.option(
    "--not-averaged", is_flag=True, help="The weights that were trained, where the step keeps averages of them."
)


def device_option(what: str) -> Callable[[F], F]:
    """``--device``, where to do ``what``."""
    kinds = click.Choice(["auto", "cpu", "cuda"])
    return click.option("--device", type=kinds, default="auto", show_default=True, help=f"Where to {what}.")


def _register(ctx: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> None:
    for path in paths:
        from gradgraph.extend import library

        library(path)


# not exposed, so that no recipe can name a library
CUSTOM_OPS = click.option("--custom-ops", type=PATH, multiple=True, expose_value=False, callback=_register,
                          help="A library of operators that onnxruntime lacks, whose code runs as you do; "
                          "repeatable.")  # fmt: skip
SHARE_WEIGHTS = click.option("--share-weights", is_flag=True,
                             help="Let the step folder refer to the model's external data, by relative path and "
                             "digest, instead of copying large weights.")  # fmt: skip
FORCE = click.option("--force", is_flag=True, help="Replace what an earlier run has written.")


def build_options(command: F) -> F:
    """The options that say how a step is built, in the order in which help lists them."""
    for option in reversed(_BUILD_OPTIONS):
        command = option(command)
    return command


def _names() -> tuple[str, ...]:
    def without() -> None: ...

    build_options(without)
    return tuple(option.name for option in reversed(vars(without)["__click_params__"]))


BUILD_OPTION_NAMES = _names()
"""The arguments that a command with the build options is called with, as are the fields of a ``Recipe``."""


def one_or_all(given: Sequence[str]) -> str | Sequence[str] | None:
    """What was given to an option that may be repeated: nothing, one, or several."""
    return given[0] if len(given) == 1 else given or None


def typed_by_user(ctx: click.Context, names: Sequence[str]) -> list[str]:
    """The options among ``names`` that stand on the command line or in a recipe, as they are typed."""
    default = click.core.ParameterSource.DEFAULT
    return [f"--{n.replace('_', '-')}" for n in names if ctx.get_parameter_source(n) not in (default, None)]
