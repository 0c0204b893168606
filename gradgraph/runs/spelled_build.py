"""Build options as strings and numbers, as in a command line or a recipe, and the step built from them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gradgraph.building.option import option_of, spellings
from gradgraph.building.step_options import BuildOptions
from gradgraph.errors import BuildError, shown

if TYPE_CHECKING:
    from gradgraph.files.models import Source
    from gradgraph.optim import Optimizer, Plateau, Schedule
    from gradgraph.step.step import Step

log = logging.getLogger("gradgraph.runs")

SPELLINGS = spellings(BuildOptions)
BUILDING = tuple(name for name, shell in SPELLINGS.items() if not shell.in_runs)
"The build options that do not apply when training an existing step."


class SpelledBuild:
    """The build options of a run or a command line.

    Args:
        typed: the values of options by parameter name; missing ones are unset. A value may also be an object that
            ``gradgraph.build`` accepts, such as an ``Optimizer``.
    """

    def __init__(self, typed: Mapping[str, Any]) -> None:
        self._typed = typed

    def __getattr__(self, name: str) -> Any:
        if name not in SPELLINGS:
            raise AttributeError(name)
        value = self._typed.get(name, SPELLINGS[name].unset)
        return (value,) if SPELLINGS[name].takes == "list" and isinstance(value, str) else value

    def rate(self, total_steps: Callable[[], int | None] = lambda: None) -> Schedule | Plateau | float | None:
        """Return the learning rate; None for the optimizer's default.

        Args:
            total_steps: a function that returns the number of updates of the run, or None if it is unknown.

        Raises:
            BuildError: the schedule is invalid.
        """
        lr: float | None = self.lr
        if self.schedule is None or not isinstance(self.schedule, str):
            return lr if self.schedule is None else self.schedule
        from gradgraph.optim.recipes import RECIPES
        from gradgraph.optim.written import schedule_from

        steps = total_steps()
        known: dict[str, Any] = {} if steps is None else {"total_steps": steps}
        name, arguments = self._optimizer_arguments()
        usual = inspect.signature(RECIPES.named(name)).parameters.get("lr")
        if "lr" in arguments or usual is not None:
            known["lr"] = arguments.get("lr", usual and usual.default)
        return schedule_from(self.schedule, known)

    def _optimizer_arguments(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the optimizer, and the arguments of --optimizer, --optimizer-option and --lr."""
        from gradgraph.optim.recipes import RECIPES

        rate = {} if self.lr is None else {"lr": self.lr}
        return RECIPES.written(self.optimizer, self.optimizer_option, rate)

    def _grouping(self) -> dict[str, Any]:
        """Return those of the optimizer arguments ``groups``, ``no_decay`` and ``layer_decay`` that are set."""
        from gradgraph.optim.written import schedule_from

        groups = {
            glob: {**given, **({"lr": schedule_from(lr, {})} if isinstance(lr := given.get("lr"), str) else {})}
            for glob, given in self.group.items()
        }
        grouping = {"groups": groups, "no_decay": self.no_decay, "layer_decay": self.layer_decay}
        return {name: value for name, value in grouping.items() if value}

    def build(self, model: Source, loss: Any = None, rate: Schedule | Plateau | float | None = None) -> Step:
        """Build the step for ``model``; raises the errors of ``gradgraph.build``.

        Args:
            model: a path or a model.
            loss: the default loss of the model, used unless a loss is given.
            rate: the learning rate, as returned by :meth:`rate`.
        """
        from gradgraph.building.pipeline import build
        from gradgraph.runtime.loop.reporter import told_if_slow

        made = {
            "loss": lambda: loss if loss is not None and "loss" not in self._typed else self._loss(),
            "optimizer": lambda: self._optimizer(rate),
            "mask": self._mask,
            "metrics": self._metrics,
            "precision": self._precision,
        }
        given: dict[str, Any] = {}
        for f in fields(BuildOptions):
            if f.name in made:
                given[f.name] = made[f.name]()
            elif f.name in self._typed and f.name not in SPELLINGS:
                given[f.name] = self._typed[f.name]
            elif (one := option_of(f)) is not None and one.shell:
                (spelling,) = one.shell
                if (value := self._typed.get(spelling.name or f.name)) not in (None, (), {}):
                    given[f.name] = one_or_all(value) if isinstance(value, tuple) else value
        with told_if_slow("building the step …", log.info):
            return build(model, **given)

    def _optimizer(self, rate: Schedule | Plateau | float | None) -> Optimizer:
        from gradgraph import optim

        optimizer = self.optimizer
        if isinstance(optimizer, str):
            name, arguments = self._optimizer_arguments()
            if rate is not None:
                arguments["lr"] = rate.lr if isinstance(rate, optim.Plateau) else rate
            optimizer = optim.by_name(name, **arguments, **self._grouping())
        elif rate is not None or self.optimizer_option or self._grouping():
            raise BuildError("the optimizer is an object, which has its own learning rate, arguments and groups; omit "
                             "these options, or pass the optimizer's name")  # fmt: skip
        clips = [optim.clip_by_unit_norm(self.clip_units)] if self.clip_units is not None else []
        clips += [optim.clip_by_global_norm(self.clip_norm)] if self.clip_norm is not None else []
        if clips:
            optimizer = optim.chain(*clips, optimizer)
        if self.sam is not None:
            optimizer = optim.sam(optimizer, self.sam)
        if self.lookahead is not None:
            optimizer = optim.lookahead(optimizer, self.lookahead)
        optimizer = self._pruned(optimizer)
        return optim.master_weights(optimizer) if self.master_weights else optimizer

    def _pruned(self, optimizer: Optimizer) -> Optimizer:
        from gradgraph.optim import magnitude_pruning

        if self.sparsity is None:
            if self.sparsity_option:
                raise BuildError.of_options("--sparsity-option requires --sparsity; add it, such as --sparsity 0.9")
            return optimizer
        given = self.sparsity_option
        if stray := given.keys() - {"begin", "end", "every", "target", "scope"}:
            raise BuildError.of_options(
                f"--sparsity-option has no argument '{shown(min(stray))}'; pass begin, end, every, target or scope"
            )
        part = self.sparsity if ":" in self.sparsity else _number(self.sparsity)
        return magnitude_pruning(optimizer, part, **given)

    def _precision(self) -> Any:
        from gradgraph.passes.autocast import FLOAT32, Precision

        if not isinstance(self.precision, str):
            return self.precision
        if self.keep_float32 and self.precision == FLOAT32:
            raise BuildError.of_options("--keep-float32 requires --precision float16 or bfloat16; add it")
        return Precision(self.precision, float32=self.keep_float32)

    def _loss(self) -> Any:
        """Return the argument ``loss`` of ``gradgraph.build``: a loss, or a dict of losses by output."""
        from gradgraph.building.terms import OWN_LOSS

        if not isinstance(self.loss, tuple | list) or not all(isinstance(text, str) for text in self.loss):
            return self.loss
        name, *others = map(str, self.loss)
        if others or _output_and_rest(name)[0]:
            return self._losses()
        if name != OWN_LOSS:
            return _named_loss(name, self.loss_option)
        if self.loss_option:
            raise BuildError.of_options(
                f"--loss-option does not apply to --loss {OWN_LOSS}, the model's own loss; omit it"
            )
        return None

    def _mask(self) -> Any:
        """Return the argument ``mask`` of ``gradgraph.build``, from --mask and --mask-of."""
        masks: dict[str, bool | int] = {}
        if not isinstance(self.mask, bool):
            return self.mask
        for text in self.mask_of:
            output, colon, axes = text.rpartition(":")
            if not (colon and axes.isdigit()):
                masks[text] = True
            elif int(axes):
                masks[output] = int(axes)
            else:
                raise BuildError.of_options(
                    f"--mask-of {shown(text)}: a mask needs at least one axis; pass for example {shown(output)}:1"
                )
        if masks and self.mask:
            raise BuildError.of_options(
                "--mask applies to every loss, and --mask-of to the losses of one output; give only one of them"
            )
        return masks or self.mask

    def _losses(self) -> dict[str, Any]:
        by_output: dict[str, list[tuple[str, float]]] = {}
        for text in self.loss:
            output, rest = _output_and_rest(text)
            name, colon, weight = rest.rpartition(":")
            if not colon or rest.endswith(")"):
                name, weight = rest, ""
            if not output:
                raise BuildError.of_options(
                    f"--loss '{shown(text)}' names no output; with several losses, write each as --loss OUTPUT=NAME"
                )
            try:
                by_output.setdefault(output, []).append((name, float(weight or 1)))
            except ValueError:
                raise BuildError.of_options(
                    f"the weight in '{shown(text)}' is not a number; write --loss OUTPUT=NAME:0.5"
                ) from None
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
            raise BuildError.of_options(
                f"--loss-option '{shown(stray[0])}' is not an argument of any of the losses; write OUTPUT.KEY=VALUE"
            )
        return chosen

    def _metrics(self) -> Any:
        """Return the argument ``metrics`` of ``gradgraph.build``, from --metric: names, or a dict by output."""
        if not self.metric:
            return self._typed.get("metrics")
        by_output: dict[str, list[str]] = {}
        for text in self.metric:
            output, name = _output_and_rest(text)
            by_output.setdefault(output, []).append(name)
        if "" in by_output and len(by_output) > 1:
            raise BuildError.of_options(
                f"--metric '{shown(by_output[''][0])}' names no output, but other metrics do; write OUTPUT=NAME"
            )
        return by_output.get("") or by_output


def one_or_all(given: Sequence[str]) -> str | Sequence[str] | None:
    """Return the values of a repeatable option: None for no value, a string for one, and ``given`` for several."""
    return given[0] if len(given) == 1 else given or None


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _output_and_rest(text: str) -> tuple[str, str]:
    """Split ``OUTPUT=NAME`` into output and name; the output is "" for a name alone, as in ``f1(average="macro")``."""
    output, equals, rest = text.partition("=")
    return (output, rest) if equals and "(" not in output else ("", text)


def _arguments_of(loss: str) -> Mapping[str, Any]:
    """Return the parameters of a loss given by name or as a call, such as ``focal(gamma=2)``; empty if unknown."""
    from gradgraph.losses import LOSSES

    name = loss.partition("(")[0]
    return inspect.signature(LOSSES[name]).parameters if name in LOSSES else {}


def _named_loss(text: str, options: Mapping[str, Any]) -> Any:
    from gradgraph.losses import LOSSES

    return LOSSES.typed(text, options)
