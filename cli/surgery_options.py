"""The table of what ``gradgraph surgery`` does: each change, and the options that are its function's arguments.

Another argument of a function of ``gradgraph.surgery`` is one row here; a test holds rows against the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from gradgraph.cli.choices import PATH, Briefly, Named
from gradgraph.errors import shown


@dataclass(frozen=True)
class Option:
    """An option of the shell.

    Attributes:
        flag: the word that is typed.
        settings: arguments of ``click.option``.
        read: from all that was typed to the argument of a function; ValueError about what is none.
        such: an example, for the message about that.
    """

    flag: str
    settings: Mapping[str, Any]
    read: Callable[[Any], Any] = lambda given: list(given) if isinstance(given, tuple) else given
    such: str = ""

    @property
    def name(self) -> str:
        return self.flag.partition("/")[0].lstrip("-").replace("-", "_")

    def argument(self, ctx: click.Context, given: Any) -> Any:
        """The argument of a function.

        Raises:
            click.UsageError: what was typed cannot be read.
        """
        try:
            return self.read(given)
        except ValueError as error:
            raise click.UsageError(f"{self.flag} '{shown(error)}' should be {self.such}", ctx) from None


@dataclass(frozen=True)
class Change:
    """A change of the model.

    Attributes:
        function: its name in ``gradgraph.surgery``.
        said: the change in words; ``{load}`` is what was typed behind ``--load``.
        options: by the argument that each is; one that only asks for the change has a name in brackets.
        asks: how many of these, from the first on, ask for the change; the others go with it.
        each: every value of the first option is a change of its own, whose arguments are in it.
        reports: the argument that gets how far each module is off.
        keeps: whether the model stays as it is, as something else is written.
    """

    function: str
    said: str | Callable[[Mapping[str, Any]], str]
    options: Mapping[str, Option]
    asks: int = 1
    each: bool = False
    reports: str = ""
    keeps: bool = False

    @property
    def asking(self) -> list[Option]:
        return list(self.options.values())[: self.asks]


def _option(flag: str, help: str, **given: Any) -> Option:
    return Option(flag, {"help": help, "show_default": given.get("default") is not None, **given})


def _flag(flag: str, help: str, read: Callable[[bool], bool] = bool) -> Option:
    return Option(flag, {"help": help, "is_flag": True}, read)


def _several(flag: str, metavar: str, help: str, read: Callable[[Any], Any] = list, such: str = "") -> Option:
    return Option(flag, {"multiple": True, "metavar": metavar, "help": f"{help} Repeatable."}, read, such)


# --- what is typed as LEFT=RIGHT ----------------------------------------------------------------------------------


def _pairs(given: Sequence[str]) -> list[tuple[str, str]]:
    found = [text.rpartition("=") for text in given]
    for text, (left, _, right) in zip(given, found, strict=True):
        if not (left and right):
            raise ValueError(text)
    return [(left, right) for left, _, right in found]


def _table(given: Sequence[str]) -> dict[str, str]:
    return dict(_pairs(given))


def _numbers(given: Sequence[str], kind: Callable[[str], Any] = float) -> list[tuple[str, Any]]:
    for text, (_, number) in zip(given, _pairs(given), strict=True):
        try:
            kind(number)
        except ValueError:
            raise ValueError(text) from None
    return [(name, kind(number)) for name, number in _pairs(given)]


def _rows(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise ValueError
    return int(text)


def _axes(given: Sequence[str]) -> dict[str, dict[int, str]]:
    """``x:0=batch`` as ``{"x": {0: "batch"}}``."""
    axes: dict[str, dict[int, str]] = {}
    for text, (place, name) in zip(given, _pairs(given), strict=True):
        tensor, _, axis = place.rpartition(":")
        if not tensor or not axis.lstrip("-").isdigit():
            raise ValueError(text)
        axes.setdefault(tensor, {})[int(axis)] = name
    return axes


# --- the table ----------------------------------------------------------------------------------------------------

_TWO = "two names with = between them"
_SEED = _option("--seed", "Of new numbers.", type=int, default=0)
_NAME = _option("--name", "What adapters are called, where a model has several: of --lora, --adapter, --merge, "
                "--save-adapter and --switchable.")  # fmt: skip
_TRAINED = _option("--trained", "With --merge or --save-adapter: what training made of the weights.", type=PATH,
                   metavar="FILE")  # fmt: skip

_LAYERS = _several("--called", "LAYER=MODULE", "With --adapter or --save-adapter: what a layer is called in the "
                   "folder, where that cannot be derived; * stands for the same in both.", _table, _TWO)  # fmt: skip

CHANGES: Sequence[Change] = (
    Change("cut", "cut the model", {
        "inputs": _several("--input", "VALUE", "Cut: feed this inner value."),
        "outputs": _several("--output", "VALUE", "Cut: return this inner value."),
    }, asks=2),
    Change("name_weights", "named the weights", {
        "(name)": _flag("--name-weights", "Name anonymous weights by where they are used."),
    }),
    Change("load_weights", "took weights from {load}", {
        "weights": _option("--load", "Take weights by name from a .safetensors, .npz, .onnx or checkpoint.", type=PATH,
                           metavar="FILE"),
        "turned": _option("--turned/--not-turned", "With --load: square matrices are transposed there, as nn.Linear "
                          "stores them; or they are not.", default=None),
        "strict": _flag("--partly", "With --load: take what fits, and leave the rest as it is.",
                        lambda partly: not partly),
    }),
    Change("open_axes", "opened {open}", {
        "axes": _several("--open", "INPUT:AXIS=NAME", "Let an axis of an input take any size, such as x:0=batch.",
                         _axes, "such as x:0=batch"),
    }),
    Change("fix_inputs", "fixed {fix}", {
        "values": _several("--fix", "INPUT=VALUE", "Let an input have this number for good, such as "
                           "use_cache_branch=0; an If that it decides is its branch.",
                           lambda given: dict(_numbers(given)), "such as use_cache_branch=0"),
    }),
    Change("new_head", "a new last layer of {new_head} classes, {head_name}.weight: train it with --train "
           "'{head_name}.*'", {
        "classes": _option("--new-head", "A new last linear layer, untrained.", type=click.IntRange(min=1),
                           metavar="CLASSES"),
        "output": _option("--head-output", "With --new-head: the output that it computes; the first by default.",
                          metavar="NAME"),
        "name": _option("--head-name", "With --new-head: what its weights are called.", default="head"),
        "seed": _SEED,
    }),
    Change("resize_embedding", "{0} has {1} rows", {
        "(weight, rows)": _several("--resize-embedding", "WEIGHT=ROWS", "Another number of rows.",
                                   lambda given: _numbers(given, _rows),
                                   "such as wte=32000, where rows are a whole number above zero"),
    }, each=True),
    Change("reset_weights", "began {reset} anew", {
        "weights": _several("--reset", "GLOB", "Let these weights begin anew."),
        "seed": _SEED,
    }),
    Change("tie_weights", "{0} is {1}", {
        "(weight, to)": _several("--tie", "WEIGHT=OTHER", "Read OTHER instead of WEIGHT.", _pairs, _TWO),
    }, each=True),
    Change("untie_weights", "untied {untie}", {
        "weights": _several("--untie", "GLOB", "One for each module that reads it."),
    }),
    Change("untie_weights", "untied what was merged", {
        "(merged)": _flag("--untie-merged", "Untie what an exporter stored once because it began alike."),
    }),
    Change("lora", "adapters on {lora}: a step of this model trains them alone", {
        "target": _several("--lora", "GLOB", "Adapters on these layers."),
        "kind": _option("--kind", "With --lora.", cls=Named,
                        type=Briefly("surgery.adapter_kinds.adapter_table:KINDS"),
                        default="lora"),
        "rank": _option("--rank", "With --lora.", type=click.IntRange(min=1), default=8),
        "alpha": _option("--alpha", "With --lora: it counts alpha/rank times; twice the rank by default.", type=float),
        "dropout": _option("--dropout", "With --lora.", type=click.FloatRange(0, 1, max_open=True), default=0.0,
                           show_default=False),
        "feedforward": _several("--feedforward", "GLOB", "With ia3: of these, the input."),
        "name": _NAME,
        "seed": _SEED,
    }),
    Change("load_adapter", "adapters of {adapter}", {
        "folder": _option("--adapter", "Put in the adapters of a folder of PEFT.", type=PATH, metavar="FOLDER"),
        "name": _NAME,
        "names": _LAYERS,
    }),
    Change("use_adapters", "adapters count {use}", {
        "weights": _several("--use", "NAME=WEIGHT", "How often adapters count.", lambda given: dict(_numbers(given)),
                            "such as fr=0.5"),
    }),
    Change("save_adapter", "saved the adapters to {save_adapter}", {
        "folder": _option("--save-adapter", "Write the adapters, too: a folder of PEFT, or a file .onnx_adapter of "
                          "onnxruntime.", type=PATH, metavar="PATH"),
        "weights": _TRAINED,
        "name": _NAME,
        "family": _option("--family", "With --save-adapter: the names that Hugging Face has, for PEFT beside PyTorch.",
                          type=Briefly("surgery.peft_names:FAMILIES")),
        "names": _LAYERS,
    }, keeps=True),
    Change("merge_adapters", "merged the adapters", {
        "(merge)": _flag("--merge", "Make adapters part of the weights."),
        "requantise": _flag("--requantise", "With --merge: store weights that were quantised as they were."),
        "weights": _TRAINED,
        "names": _NAME,
    }, reports="errors"),
    Change("switchable", "adapters are optional inputs", {
        "(switch)": _flag("--switchable", "Make adapters optional inputs, for onnxruntime's LoraAdapter."),
        "required": _flag("--required-inputs", "With --switchable: inputs that each run must feed, for onnxruntime-web "
                          "and -node."),
        "name": _NAME,
    }),
    Change("qat", lambda typed: "the integers train" if typed["qat"] is None
           else f"rounding to {typed['weights']}, ranges from {typed['qat']}", {
        "data": _option("--qat", "Round weights and data as 8-bit runtimes do; ranges from DATA.", type=PATH,
                        metavar="DATA"),
        "(go on)": _flag("--qat-quantised", "Let the integers of a quantised model train; its pairs stay."),
        "weights": _option("--weights", "With --qat.", type=click.Choice(["int8", "int4"]), default="int8"),
        "activations": _option("--activations", "With --qat.", type=click.Choice(["uint8", "int8", "uint16"]),
                               default="uint8"),
        "target": _several("--qat-target", "GLOB", "With --qat or --qat-quantised: these layers only."),
        "ranges": _option("--ranges", "With --qat or --qat-quantised: scales found on data and weights, or trained "
                          "from there.", type=click.Choice(["observed", "learned"]), default="observed"),
    }, asks=2),
    Change("distill", "{teacher} is a frozen teacher: it is no part of what a run exports", {
        "teacher": _option("--teacher", "A frozen model that training makes this one imitate.", type=PATH,
                           metavar="FILE"),
        "temperature": _option("--temperature", "With --teacher.", type=click.FloatRange(0, min_open=True),
                               default=2.0),
        "alpha": _option("--teacher-share", "With --teacher: its part of what is minimised; with 1, `--loss none` "
                         "leaves only that.", type=click.FloatRange(0, 1), default=0.5),
        "match": _several("--match", "VALUE=OTHER", "With --teacher: let this inner value be like the teacher's.",
                          _table, _TWO),
        "inputs": _several("--teacher-input", "INPUT=OWN", "With --teacher: its input, and which one of the model "
                           "that is.", _table, _TWO),
    }),
    Change("language_model", "tokens in, scores out", {
        "(text)": _flag("--language-model", "Of a model that generates: tokens in, scores out, no past."),
    }),
    Change("in_float32", "computes in float32", {
        "(wide)": _flag("--in-float32", "Compute in float32 what the model computes in float16."),
    }),
    Change("forget_sizes", "forgot the sizes of inner values", {
        "(forget)": _flag("--forget-sizes", "Leave out declared sizes of inner values."),
    }),
)  # fmt: skip

_USED = [option for change in CHANGES for option in change.options.values() if option is not _SEED]
OPTIONS = {option.name: option for option in [*_USED, _SEED]}


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of all changes."""
    for option in reversed(OPTIONS.values()):
        command = click.option(option.flag, option.name, **option.settings)(command)
    return command
