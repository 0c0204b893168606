"""The table of the changes that ``gradgraph surgery`` can make, and their options.

To expose another function of ``gradgraph.surgery``, or another argument, add a row; a test compares the rows with the
functions.
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
    """A command-line option.

    Attributes:
        flag: the option as typed, such as ``--new-head``.
        settings: the arguments of ``click.option``.
        read: a function that converts the typed value (for a repeatable option, all values) to the argument of the
            surgery function; it raises ValueError(text) for an invalid value.
        such: the expected form or an example, for the end of the error message.
    """

    flag: str
    settings: Mapping[str, Any]
    read: Callable[[Any], Any] = lambda given: list(given) if isinstance(given, tuple) else given
    such: str = ""

    @property
    def name(self) -> str:
        return self.flag.partition("/")[0].lstrip("-").replace("-", "_")

    def argument(self, ctx: click.Context, given: Any) -> Any:
        """Return the argument of the surgery function for the typed value.

        Raises:
            click.UsageError: if the value is invalid.
        """
        try:
            return self.read(given)
        except ValueError as error:
            raise click.UsageError(f"{self.flag} '{shown(error)}' should be {self.such}", ctx) from None


@dataclass(frozen=True)
class Change:
    """A change of the model that ``gradgraph surgery`` can make.

    Attributes:
        function: the name of the function in ``gradgraph.surgery`` that makes the change.
        said: the description of the change, for the output, or a function that returns it from the options; ``{load}``
            stands for the value of ``--load``.
        options: the command-line options, by argument of the function. For an option that only requests the change, and
            is not an argument, the key is in brackets.
        asks: how many of the first options request the change; further options refine it.
        each: whether each value of the first option is a separate change, with its positional arguments.
        reports: the name of the argument, a dict, in which the function stores an error of each module; "" if none.
        keeps: whether the model is not changed, and another file is written.
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


# --- values of the form LEFT=RIGHT --------------------------------------------------------------------------------


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
    """Parse ``x:0=batch`` as ``{"x": {0: "batch"}}``."""
    axes: dict[str, dict[int, str]] = {}
    for text, (place, name) in zip(given, _pairs(given), strict=True):
        tensor, _, axis = place.rpartition(":")
        if not tensor or not axis.lstrip("-").isdigit():
            raise ValueError(text)
        axes.setdefault(tensor, {})[int(axis)] = name
    return axes


# --- the table ----------------------------------------------------------------------------------------------------

_TWO = "two names joined by ="
_SEED = _option("--seed", "Random seed of new parameters.", type=int, default=0)
_NAME = _option("--name", "Adapter name, for a model with several: applies to --lora, --adapter, --merge, "
                          "--save-adapter and --switchable.")  # fmt: skip
_TRAINED = _option("--trained", "With --merge or --save-adapter: the trained weights to use.", type=PATH,
                   metavar="FILE")  # fmt: skip

_LAYERS = _several("--called", "LAYER=MODULE",
                   "With --adapter or --save-adapter: the layer's name in the adapter folder, if it cannot be "
                   "derived; * stands for the same text in both.", _table, _TWO)  # fmt: skip

CHANGES: Sequence[Change] = (
    Change("cut", "cut the model", {
        "inputs": _several("--input", "VALUE", "Cut: make this inner value an input."),
        "outputs": _several("--output", "VALUE", "Cut: make this inner value an output."),
    }, asks=2),
    Change("name_weights", "named the weights", {
        "(name)": _flag("--name-weights", "Name anonymous weights after the nodes that use them."),
    }),
    Change("load_weights", "loaded weights from {load}", {
        "weights": _option("--load", "Load weights from a .safetensors, .npz, .onnx, checkpoint or Hugging Face "
                                     "folder.", type=PATH, metavar="PATH"),
        "turned": _option("--turned/--not-turned", "With --load: whether square matrices in the file are transposed, "
                                                   "as in nn.Linear.", default=None),
        "strict": _flag("--partly", "With --load: load the tensors that match, and keep the others.",
                        lambda partly: not partly),
        "epsilon": _option("--epsilon", "With --load: epsilon of BatchNormalizations that layers of the model contain, "
                                        "such as 1e-5.",
                           type=click.FloatRange(0, 1, min_open=True, max_open=True)),
        "exported_from": _option("--exported-from", "With --load: the weights from which the model was exported, to "
                                                    "check each replaced weight.", type=PATH, metavar="PATH"),
    }, reports="errors"),
    Change("open_axes", "opened {open}", {
        "axes": _several("--open", "INPUT:AXIS=NAME", "Make an axis of an input dynamic, such as x:0=batch.",
                         _axes, "such as x:0=batch"),
    }),
    Change("fix_inputs", "fixed {fix}", {
        "values": _several("--fix", "INPUT=VALUE", "Fix an input to a number, such as use_cache_branch=0; an If that "
                                                   "depends on it becomes its branch.",
                           lambda given: dict(_numbers(given)), "such as use_cache_branch=0"),
    }),
    Change("new_head", "a new last layer of {new_head} classes, {head_name}.weight: train it with --train "
           "'{head_name}.*'", {
        "classes": _option("--new-head", "Replace the last linear layer with a new, untrained one with this many "
                                         "outputs.", type=click.IntRange(min=1),
                           metavar="CLASSES"),
        "output": _option("--head-output", "With --new-head: the output to compute. Default: the first one.",
                          metavar="NAME"),
        "name": _option("--head-name", "With --new-head: name prefix of its weights.", default="head"),
        "seed": _SEED,
    }),
    Change("resize_embedding", "{0} has {1} rows", {
        "(weight, rows)": _several("--resize-embedding", "WEIGHT=ROWS", "Resize an embedding to this many rows.",
                                   lambda given: _numbers(given, _rows),
                                   "such as wte=32000, where rows are a whole number above zero"),
    }, each=True),
    Change("reset_weights", "reinitialised {reset}", {
        "weights": _several("--reset", "GLOB", "Reinitialise these weights."),
        "seed": _SEED,
    }),
    Change("tie_weights", "tied {0} to {1}", {
        "(weight, to)": _several("--tie", "WEIGHT=OTHER", "Tie weights: use OTHER in place of WEIGHT.", _pairs, _TWO),
    }, each=True),
    Change("untie_weights", "untied {untie}", {
        "weights": _several("--untie", "GLOB", "Untie weights: give each module that uses them its own copy."),
    }),
    Change("untie_weights", "untied weights that were merged", {
        "(merged)": _flag("--untie-merged", "Untie weights that an exporter merged because their initial values were "
                                            "equal."),
    }),
    Change("lora", "added adapters to {lora}: only they are trained", {
        "target": _several("--lora", "GLOB", "Add LoRA adapters to these layers."),
        "kind": _option("--kind", "With --lora: kind of adapter.", cls=Named,
                        type=Briefly("surgery.adapter_kinds.adapter_table:KINDS"),
                        default="lora"),
        "rank": _option("--rank", "With --lora: adapter rank.", type=click.IntRange(min=1), default=8),
        "alpha": _option("--alpha", "With --lora: scaling is alpha/rank. Default: twice the rank.", type=float),
        "dropout": _option("--dropout", "With --lora: dropout before the adapters.",
                           type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=False),
        "feedforward": _several("--feedforward", "GLOB", "With ia3: the layers whose input is scaled."),
        "name": _NAME,
        "seed": _SEED,
    }),
    Change("load_adapter", "applied the adapters of {adapter}", {
        "folder": _option("--adapter", "Apply the adapters in a PEFT folder.", type=PATH, metavar="FOLDER"),
        "name": _NAME,
        "names": _LAYERS,
    }),
    Change("use_adapters", "set adapter weights to {use}", {
        "weights": _several("--use", "NAME=WEIGHT", "Weight of an adapter.", lambda given: dict(_numbers(given)),
                            "such as fr=0.5"),
    }),
    Change("save_adapter", "saved the adapters to {save_adapter}", {
        "folder": _option("--save-adapter", "Save the adapters as well: as a PEFT folder, or as an .onnx_adapter "
                                            "file for onnxruntime.", type=PATH, metavar="PATH"),
        "weights": _TRAINED,
        "name": _NAME,
        "family": _option("--family", "With --save-adapter: use Hugging Face parameter names, for PEFT in PyTorch.",
                          type=Briefly("surgery.peft_names:FAMILIES")),
        "names": _LAYERS,
    }, keeps=True),
    Change("merge_adapters", "merged the adapters into the weights", {
        "(merge)": _flag("--merge", "Merge adapters into the weights."),
        "requantise": _flag("--requantise", "With --merge: requantise the weights that were quantised, by GPTQ."),
        "weights": _TRAINED,
        "names": _NAME,
    }, reports="errors"),
    Change("switchable", "made the adapters optional inputs", {
        "(switch)": _flag("--switchable", "Make adapters optional inputs, for onnxruntime's LoraAdapter."),
        "required": _flag("--required-inputs", "With --switchable: make them inputs that each run must feed, for "
                                               "onnxruntime-web and -node."),
        "name": _NAME,
    }),
    Change("qat", lambda typed: "made the integer weights trainable" if typed["qat"] is None
           else f"added fake quantisation of {typed['weights']}, ranges from {typed['qat']}", {
        "data": _option("--qat", "Add fake quantisation of weights and activations to 8 bits; ranges are calibrated "
                                 "on DATA.", type=PATH,
                        metavar="DATA"),
        "(go on)": _flag("--qat-quantised", "Make the weights of a quantised model trainable, keeping its "
                                            "quantise/dequantise pairs."),
        "weights": _option("--weights", "With --qat: type of quantised weights.", type=click.Choice(["int8", "int4"]),
                           default="int8"),
        "activations": _option("--activations", "With --qat: type of quantised activations.",
                               type=click.Choice(["uint8", "int8", "uint16"]), default="uint8"),
        "target": _several("--qat-target", "GLOB", "With --qat or --qat-quantised: restrict it to these layers."),
        "ranges": _option("--ranges", "With --qat or --qat-quantised: compute scales from activations and weights, or "
                                      "train them.", type=click.Choice(["observed", "learned"]), default="observed"),
    }, asks=2),
    Change("distill", "added {teacher} as a frozen teacher, which exports omit", {
        "teacher": _option("--teacher", "Add a frozen teacher model for distillation.", type=PATH,
                           metavar="FILE"),
        "temperature": _option("--temperature", "With --teacher: softmax temperature of the distillation loss.",
                               type=click.FloatRange(0, min_open=True), default=2.0),
        "alpha": _option("--teacher-share", "With --teacher: weight of the distillation loss; with 1 and `--loss "
                                            "none`, it is the only loss.", type=click.FloatRange(0, 1), default=0.5),
        "match": _several("--match", "VALUE=OTHER", "With --teacher: match this inner value to the teacher's.",
                          _table, _TWO),
        "inputs": _several("--teacher-input", "INPUT=OWN", "With --teacher: the teacher's input, and the model's "
                                                           "input that feeds it.", _table, _TWO),
    }),
    Change("language_model", "made tokens the only input and scores the only output", {
        "(text)": _flag("--language-model", "Reduce a generating model to tokens in, scores out, without a key-value "
                                            "cache."),
    }),
    Change("in_float32", "converted float16 to float32", {
        "(wide)": _flag("--in-float32", "Convert the model from float16 to float32."),
    }),
    Change("forget_sizes", "removed the recorded shapes of inner values", {
        "(forget)": _flag("--forget-sizes", "Remove the recorded shapes of inner values."),
    }),
)  # fmt: skip

_USED = [option for change in CHANGES for option in change.options.values() if option is not _SEED]
OPTIONS = {option.name: option for option in [*_USED, _SEED]}


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all changes to a command."""
    for option in reversed(OPTIONS.values()):
        command = click.option(option.flag, option.name, **option.settings)(command)
    return command
