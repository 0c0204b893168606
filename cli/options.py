"""Options that several commands share, and the recipe that the build options make."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradgraph.cli import output
from gradgraph.errors import BuildError, OutputError, shown

if TYPE_CHECKING:
    from gradgraph.optim import Optimizer, Plateau, Schedule
    from gradgraph.step import Step

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)


class BatchSize(click.ParamType[int | str]):
    """Samples of a batch: a number, or ``auto`` with a limit on memory or without."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, str) and value.startswith("auto"):
            return value
        return click.IntRange(min=1).convert(value, param, ctx)


BATCH_SIZE = BatchSize()


class Listed(click.Choice[str]):
    """One of some names, which are read from their table when they are asked for: importing it takes time."""

    def __init__(self, read: Callable[[], Iterable[str]]) -> None:
        self._read = read
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self._read())

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if param is not None and value == param.default:  # which need not be looked up
            return value
        return super().convert(value, param, ctx)


def _backends() -> Iterable[str]:
    from gradgraph.backends import BACKENDS

    return BACKENDS


def _step_backends() -> Iterable[str]:
    from gradgraph.backends import step_backends

    return step_backends()


def _checked_backends() -> Iterable[str]:
    from gradgraph.backends import checked_backends

    return checked_backends()


OPSET = click.option(
    "--opset",
    type=click.IntRange(17, 21),
    help="The ONNX opset of what is written. 21 by default, or the newest that the runtime takes.",
)


class Briefly(Listed):
    """Likewise, with names too many for one line."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME"


class Suggested(Briefly):
    """Names of which others are refused where they are looked up, as in Python."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value


class Named(click.Option):
    """An option whose help ends with the names that it takes."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or not isinstance(self.type, Listed):
            return record
        return record[0], f"{record[1]}  One of {', '.join(self.type.choices)}."


BACKENDS, STEP_BACKENDS, CHECKED_BACKENDS = Briefly(_backends), Briefly(_step_backends), Briefly(_checked_backends)


def _losses() -> Iterable[str]:
    from gradgraph.losses import LOSSES
    from gradgraph.objective import OWN_LOSS

    return (*LOSSES, OWN_LOSS)


def _metrics() -> Iterable[str]:
    from gradgraph.metrics import METRICS

    return METRICS


def _precisions() -> Iterable[str]:
    from gradgraph.autocast import PRECISIONS

    return PRECISIONS


def _optimizers() -> Iterable[str]:
    from gradgraph.optim.recipes import RECIPES

    return RECIPES


def arguments(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """``momentum=0.9``: a name and a JSON value (``True``, ``False`` and ``None`` are understood, too)."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.rpartition(".")[2].isidentifier():
            example = "generator=5" if parameter.name == "every" else "momentum=0.9"
            raise click.BadParameter(
                f"'{shown(text)}' should be {parameter.metavar}, such as {example}", ctx, parameter
            )
        found[key] = _value(value)
    return found


def _groups(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """``head.*:lr=1e-3,betas=[0.8,0.9]``: a glob, and names with JSON values; ``lr`` may be a schedule."""
    groups: dict[str, dict[str, Any]] = {}
    for text in given:
        glob, colon, _ = text.partition("=")[0].rpartition(":")
        pairs = [part.partition("=") for part in _split(text[len(glob) + 1 :])]
        if not colon or not glob or not all(equals and key.isidentifier() for key, equals, _ in pairs):
            raise click.BadParameter(
                f"'{shown(text)}' should be GLOB:KEY=VALUE, such as head.*:lr=1e-3", ctx, parameter
            )
        groups.setdefault(glob, {}).update({key: _value(value) for key, _, value in pairs})
    return groups


def _split(text: str) -> list[str]:
    """At the commas that stand in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _sizes(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, int | tuple[int, ...]]:
    """``batch=32``: a dimension and its number; or ``x=1,3,224,224``: an input and all its sizes."""
    found: dict[str, int | tuple[int, ...]] = {}
    for text in given:
        name, equals, numbers = text.rpartition("=")
        try:
            sizes = tuple(int(n) for n in numbers.split(","))
        except ValueError:
            equals = ""
        if not equals or not name:
            raise click.BadParameter(f"'{shown(text)}' should be {parameter.metavar}, such as batch=32", ctx, parameter)
        found[name] = sizes if len(sizes) > 1 else sizes[0]
    return found


SIZE = click.option("--size", multiple=True, metavar="NAME=NUMBER", callback=_sizes,
                    help="A number for a size that the model leaves open, such as batch=32, or all sizes of an input, "
                    "such as x=1,3,224,224; repeatable.")  # fmt: skip
STORE = click.option("--store", type=click.Choice(["float32", "float16"]), default="float32", show_default=True,
                     help="How weights lie in the file; float16 is half as large, and they are float32 again where "
                     "the file is opened.")  # fmt: skip


def _value(text: str) -> Any:
    python = {"True": True, "False": False, "None": None}
    if text in python:
        return python[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


# --- the recipe ----------------------------------------------------------------------------------------

_BUILD_OPTIONS = [
    click.option("--loss", cls=Named, type=Suggested(_losses), multiple=True, default=["cross_entropy"],
                 show_default=True,
                 help="What is minimised; none if the model computes its own loss. Several are added up: "
                 "OUTPUT=NAME or OUTPUT=NAME:WEIGHT, repeatable, also for one output."),
    click.option("--loss-option", multiple=True, metavar="KEY=VALUE", callback=arguments,
                 help="An argument of the loss, or OUTPUT.KEY=VALUE of one of several; repeatable."),
    click.option("--metric", cls=Named, type=Suggested(_metrics), multiple=True,
                 help="What is reported beside the loss, such as f1, 'top_k(k=3)' or OUTPUT=f1; repeatable. Accuracy "
                 "for class numbers by default."),
    click.option("--grad-norm", is_flag=True,
                 help="Report the norm of the gradient, over all weights and before clipping, beside the loss."),
    click.option("--sample-weight", is_flag=True, help="Weigh samples by the array `sample_weight` of the data."),
    click.option("--mask", is_flag=True, help="Count only what the array `mask` of the data says."),
    click.option("--optimizer", cls=Named, type=Suggested(_optimizers), default="adamw", show_default=True,
                 help="How weights follow their gradients."),
    click.option("--optimizer-option", multiple=True, metavar="KEY=VALUE", callback=arguments,
                 help="An argument of the optimizer; repeatable."),
    click.option("--schedule", metavar="SCHEDULE",
                 help="How the learning rate moves, as in Python: cosine, 'warmup(100, cosine(1e-3, 1000))'."),
    click.option("--group", multiple=True, metavar="GLOB:KEY=VALUE,…", callback=_groups,
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
    click.option("--precision", cls=Named, type=Suggested(_precisions), default="float32", show_default=True,
                 help="What products are computed in; weights stay float32."),
    click.option("--keep-float32", multiple=True, metavar="GLOB",
                 help="Nodes or operators that --precision leaves in float32; repeatable."),
    click.option("--recompute", multiple=True, metavar="WHAT",
                 help="Compute values of the forward pass again rather than keep them: sqrt for the least memory, a "
                 "number of bytes such as '500MB batch=32', or values that are kept (names or globs; repeatable)."),
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


@dataclass(frozen=True)
class Recipe:
    """How to build a step, as typed on the command line."""

    loss: Sequence[str]
    optimizer: str
    lr: float | None
    train: Sequence[str]
    freeze: Sequence[str]
    freeze_below: Sequence[str]
    output: Sequence[str]
    target_name: str
    backend: str
    seed: int
    opset: int | None = None
    metric: Sequence[str] = ()
    sample_weight: bool = False
    mask: bool = False
    master_weights: bool = False
    loss_option: Mapping[str, Any] = field(default_factory=dict)
    optimizer_option: Mapping[str, Any] = field(default_factory=dict)
    schedule: str | None = None
    group: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    no_decay: Sequence[str] = ()
    layer_decay: float | None = None
    clip_norm: float | None = None
    clip_units: float | None = None
    ema: float | None = None
    grad_norm: bool = False
    lookahead: int | None = None
    sam: float | None = None
    sparsity: str | None = None
    sparsity_option: Mapping[str, Any] = field(default_factory=dict)
    accumulate: bool = False
    separate: bool = False
    size: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "float32"
    keep_float32: Sequence[str] = ()
    recompute: Sequence[str] = ()

    def rate(self, total_steps: Callable[[], int | None] = lambda: None) -> Schedule | Plateau | float | None:
        """The learning rate; None for the optimizer's own.

        Args:
            total_steps: gives how long the run takes, if that is known.

        Raises:
            BuildError: the schedule makes no sense.
        """
        if self.schedule is None:
            return self.lr
        from gradgraph.optim.recipes import RECIPES
        from gradgraph.optim.written import schedule_from

        steps = total_steps()
        known: dict[str, Any] = {} if steps is None else {"total_steps": steps}
        usual = inspect.signature(RECIPES[self.optimizer]).parameters["lr"] if self.optimizer in RECIPES else None
        if self.lr is not None or usual is not None:
            known["lr"] = self.lr if usual is None or self.lr is not None else usual.default
        return schedule_from(self.schedule, known)

    def _grouping(self) -> dict[str, Any]:
        """What recipes take besides their own arguments, where it is given."""
        from gradgraph.optim.recipes import RECIPES
        from gradgraph.optim.written import schedule_from

        groups = {}
        for glob, given in self.group.items():
            groups[glob] = _checked(f"the group '{shown(glob)}'", RECIPES.get(self.optimizer), {
                key: value for key, value in given.items() if key != "lr"})  # fmt: skip
            if "lr" in given:
                rate = given["lr"]
                groups[glob]["lr"] = schedule_from(rate, {}) if isinstance(rate, str) else rate
        grouping = {"groups": groups, "no_decay": self.no_decay, "layer_decay": self.layer_decay}
        return {name: value for name, value in grouping.items() if value}

    def build(self, model: Path, rate: Schedule | Plateau | float | None = None) -> Step:
        """The step for ``model``, with this learning rate; raises what ``gradgraph.build`` raises."""
        from gradgraph import optim
        from gradgraph.optim.recipes import RECIPES
        from gradgraph.pipeline import build
        from gradgraph.runtime.loop.reporter import told_if_slow

        chosen = self._loss()
        arguments = _checked(f"the optimizer {self.optimizer}", RECIPES.get(self.optimizer), self.optimizer_option)
        if rate is not None:
            arguments["lr"] = rate.lr if isinstance(rate, optim.Plateau) else rate
        optimizer = optim.by_name(self.optimizer, **arguments, **self._grouping())
        clips = [optim.clip_by_unit_norm(self.clip_units)] if self.clip_units is not None else []
        clips += [optim.clip_by_global_norm(self.clip_norm)] if self.clip_norm is not None else []
        if clips:
            optimizer = optim.chain(*clips, optimizer)
        if self.sam is not None:
            optimizer = optim.sam(optimizer, self.sam)
        if self.lookahead is not None:
            optimizer = optim.lookahead(optimizer, self.lookahead)
        optimizer = self._pruned(optimizer)
        with told_if_slow("building the step …", output.say):
            return build(
                model,
                chosen,
                optim.master_weights(optimizer) if self.master_weights else optimizer,
                train=self.train or "*",
                freeze=self.freeze,
                freeze_below=self.freeze_below,
                output=self.output or None,
                target_name=self.target_name,
                sample_weight=self.sample_weight,
                mask=self.mask,
                metrics=self._metrics(),
                seed=self.seed,
                backend=self.backend,
                opset=self.opset,
                ema=self.ema,
                grad_norm=self.grad_norm,
                accumulate=self.accumulate,
                separate=self.separate,
                sizes=self.size or None,
                precision=self._precision(),
                recompute=one_or_all(self.recompute),
            )

    def _pruned(self, optimizer: Optimizer) -> Optimizer:
        from gradgraph.optim import magnitude_pruning

        if self.sparsity is None:
            if self.sparsity_option:
                raise BuildError("--sparsity-option says when and what --sparsity prunes; add that, such as 0.9")
            return optimizer
        given = _checked("--sparsity", magnitude_pruning, self.sparsity_option)
        if stray := given.keys() - {"begin", "end", "every", "target", "scope"}:
            raise BuildError(f"--sparsity-option {shown(min(stray))} is none of begin, end, every, target, scope")
        part = self.sparsity if ":" in self.sparsity else _number(self.sparsity)
        return magnitude_pruning(optimizer, part, **given)

    def _precision(self) -> Any:
        from gradgraph.autocast import FLOAT32, Precision

        if self.keep_float32 and self.precision == FLOAT32:
            raise BuildError("--keep-float32 says what --precision leaves alone; add --precision float16 or bfloat16")
        return Precision(self.precision, float32=self.keep_float32)

    def _loss(self) -> Any:
        """The loss, or several by output."""
        from gradgraph.objective import OWN_LOSS

        if len(self.loss) > 1 or "=" in self.loss[0]:
            return self._losses()
        (name,) = self.loss
        if name != OWN_LOSS:
            return _named_loss(name, self.loss_option)
        if self.loss_option:
            raise BuildError(f"--loss {OWN_LOSS} reads the model's own scalar, so it takes no --loss-option")
        return None

    def _losses(self) -> dict[str, Any]:
        by_output: dict[str, list[tuple[str, float]]] = {}
        for text in self.loss:
            output, equals, rest = text.partition("=")
            name, _, weight = rest.partition(":")
            if not equals:
                raise BuildError(f"'{shown(text)}' names no output; of several losses write each as --loss OUTPUT=NAME")
            try:
                by_output.setdefault(output, []).append((name, float(weight or 1)))
            except ValueError:
                raise BuildError(f"the weight in '{shown(text)}' is no number; write --loss OUTPUT=NAME:0.5") from None
        taken: set[str] = set()
        chosen: dict[str, Any] = {}
        for output, named in by_output.items():
            own = {k.rpartition(".")[2]: v for k, v in self.loss_option.items() if k.rpartition(".")[0] == output}
            parts = []
            for name, factor in named:
                options = own if len(named) == 1 else {k: v for k, v in own.items() if k in _arguments_of(name)}
                taken |= {f"{output}.{key}" for key in options}
                parts.append((_named_loss(name, options), factor))
            chosen[output] = parts[0] if len(parts) == 1 else parts
        if stray := [k for k in self.loss_option if k not in taken]:
            raise BuildError(f"--loss-option {shown(stray[0])} belongs to none of the losses; write OUTPUT.KEY=VALUE")
        return chosen

    def _metrics(self) -> Any:
        """As ``gradgraph.build`` takes them: those of each output, if they name one."""
        if not self.metric:
            return None
        by_output: dict[str, list[str]] = {}
        for text in self.metric:
            output, equals, name = text.partition("=")
            is_output = equals and "(" not in output
            by_output.setdefault(output if is_output else "", []).append(name if is_output else text)
        if "" in by_output and len(by_output) > 1:
            raise BuildError(f"--metric '{shown(by_output[''][0])}' names no output, and others do; write OUTPUT=NAME")
        return by_output.get("") or by_output


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _arguments_of(loss: str) -> Mapping[str, Any]:
    from gradgraph.losses import LOSSES

    return inspect.signature(LOSSES[loss]).parameters if loss in LOSSES else {}


def _named_loss(name: str, options: Mapping[str, Any]) -> Any:
    from gradgraph import losses

    return losses.by_name(name, **_checked(f"the loss {name}", losses.LOSSES.get(name), options))


def _checked(what: str, recipe: Callable[..., Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as a dict, each of the kind of its default: text never passes for a number, nor "no" for False."""
    known: Mapping[str, inspect.Parameter] = {} if recipe is None else inspect.signature(recipe).parameters
    for key, value in given.items():
        if key in known and not _same_kind(value, known[key].default):
            raise BuildError(f"{what} takes {_KINDS[_kind(known[key].default)]} for {key}, not {json.dumps(value)}")
        if key in known and known[key].annotation in (int, "int") and not isinstance(value, int):
            raise BuildError(f"{what} takes a whole number for {key}, not {json.dumps(value)}")
    return dict(given)


_KINDS = {
    "bool": "true or false",
    "number": "a number",
    "text": "a name",
    "list": "a list such as [0.9,0.999]",
    "any": "a number or a list of numbers",
}


def _kind(value: Any) -> str:
    kinds = {bool: "bool", int: "number", float: "number", str: "text", list: "list", tuple: "list"}
    return kinds.get(type(value), "any")


def _same_kind(value: Any, default: Any) -> bool:
    kind, wanted = _kind(value), _kind(default)
    if kind == "list" and not all(_kind(v) == "number" for v in value):
        return False
    return kind == wanted or (wanted == "any" and (value is None or kind in ("number", "list")))


def one_or_all(given: Sequence[str]) -> str | Sequence[str] | None:
    """What was given to an option that may be repeated: nothing, one, or several."""
    return given[0] if len(given) == 1 else given or None


def typed_by_user(ctx: click.Context, names: Sequence[str]) -> list[str]:
    """The options among ``names`` that stand on the command line or in a recipe, as they are typed."""
    default = click.core.ParameterSource.DEFAULT
    return [f"--{n.replace('_', '-')}" for n in names if ctx.get_parameter_source(n) not in (default, None)]


BUILD_OPTION_NAMES = (
    "loss", "loss_option", "metric", "sample_weight", "mask", "optimizer", "optimizer_option", "schedule", "group",
    "no_decay", "layer_decay", "clip_norm", "clip_units", "ema", "lookahead", "sam", "sparsity", "sparsity_option",
    "grad_norm", "precision",
    "keep_float32", "recompute", "master_weights", "train", "freeze", "freeze_below", "output", "target_name",
    "backend", "opset",
)  # fmt: skip


# --- stdin ----------------------------------------------------------------------------------------------


STDIO = Path("-")


@contextlib.contextmanager
def from_stdin(path: Path) -> Iterator[Path]:
    """``path``, or where it is "-" an ``.npz`` from stdin: in a temporary file, as a zip file is read from its end."""
    if path != STDIO:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stdin.npz"
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        yield copy


# --- output paths ----------------------------------------------------------------------------------------


def check_output(path: Path | None, *inputs: Path) -> None:
    """Refuse before the work begins what could not be written after it.

    Raises:
        OutputError: the folder is missing or may not be written to, ``path`` is a folder or no name for a file, or it
            is one of the files that are read.
    """
    from gradgraph.atomic import check_writable

    if path is None:
        return
    if path.is_dir():
        raise OutputError(f"'{shown(path)}' is a folder, and a file is to be written there; add a file name")
    target = path.resolve()  # a symlink's target is what will be written
    if not target.parent.is_dir():
        where = target.parent if path.is_symlink() else path.parent
        raise OutputError(f"there is no folder '{shown(where)}' to write '{shown(target.name)}' to; create it first")
    if any(path.exists() and file.samefile(path) for i in inputs for file in _read(i)):
        raise OutputError(f"'{shown(path)}' is what the command reads; write to another path")
    check_writable(path)


def _read(path: Path) -> list[Path]:
    """The files that are read where ``path`` is an input: itself, or those of a step folder or a folder of arrays."""
    from gradgraph.step_folder import ALL_FILES

    if not path.is_dir():
        return [path] if path.exists() else []
    return [file for glob in (*ALL_FILES, "*.npy") for file in path.glob(glob)]
