"""The options of fine-tuning, each written once: Python, the shell, the model card and the page read them here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gradgraph.errors import ArgumentError, shown, suggestion

LONG = ("error", "drop", "cut")
MERGE = ("float", "requantised", "none")
TARGETS = ("*attn*", "*mlp*")


def _option(default: Any, words: str, fits: Callable[[Any], bool], expected: str, **more: Any) -> Any:
    return field(default=default, metadata={"words": words, "fits": fits, "expected": expected, **more})


def _whole(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least, (
        f"a whole number of at least {least}"
    )


def _number(least: float, most: float = math.inf, above: bool = False) -> tuple[Callable[[Any], bool], str]:
    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return is_number and (least < value if above else least <= value) and value <= most

    end = "" if most == math.inf else f" and at most {most:g}"
    return fits, f"a number {'above' if above else 'of at least'} {least:g}{end}"


def _one_of(names: tuple[str, ...]) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in names, f"one of {', '.join(names)}"


def _or_none(kind: tuple[Callable[[Any], bool], str]) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value is None or kind[0](value), kind[1]


_FLAG: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), "True or False")
_TEXT: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, str), "a text")
_TEXTS: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, tuple) and bool(value) and all(isinstance(name, str) for name in value),
    "names or globs",
)


@dataclass(frozen=True)
class Recipe:
    """Options of a fine-tuning; ``words`` of each field explain it."""

    rank: int = _option(16, "Rank of the adapters.", *_whole(1))
    alpha: float | None = _option(None, "Adapters count alpha/rank times; twice the rank by default.",
                                  *_or_none(_number(0, above=True)), kind=float)  # fmt: skip
    target: tuple[str, ...] = _option(TARGETS, "Layers that get adapters, by name or glob; repeatable.", *_TEXTS)
    kind: str = _option("lora", "Kind of the adapters.", *_TEXT, names="surgery.adapter_kinds.adapter_table:KINDS")
    dropout: float = _option(0.0, "Dropout before the adapters, in training.", *_number(0, 1))
    epochs: int = _option(3, "Passes over the data.", *_whole(1))
    batch_size: int = _option(8, "Rows of a batch.", *_whole(1))
    accumulate: int = _option(
        1, "Batches that move the weights once, as one batch of all their rows would.", *_whole(1)
    )
    learning_rate: float = _option(2e-4, "The highest learning rate of AdamW.", *_number(0, above=True), flag="lr")
    warmup: float = _option(0.03, "The share of all steps in which it rises; then it falls as a cosine to 0.",
                            *_number(0, 1))  # fmt: skip
    weight_decay: float = _option(0.0, "Of AdamW.", *_number(0))
    clip_norm: float = _option(1.0, "The largest norm of all gradients together.", *_number(0, above=True))
    length: int | None = _option(None, "Tokens that a row may have; by default what the model takes, 2048 at most.",
                                 *_or_none(_whole(2)), kind=int)  # fmt: skip
    long: str = _option("error", "What becomes of a text of more tokens: it is refused, left out, or cut.",
                        *_one_of(LONG), choices=LONG)  # fmt: skip
    pack: bool = _option(False, "Put several texts into a row, of which none sees another.", *_FLAG)
    label_smoothing: float = _option(0.0, "The share of each label that is spread over all tokens.", *_number(0, 1))
    z_loss: float = _option(0.0, "Factor of the square of log Σ exp of the scores, such as 1e-4.", *_number(0))
    held_out: float = _option(
        0.1, "The share of rows to measure on, where no data are given for that.", *_number(0, 0.9)
    )
    eval_every: int | None = _option(None, "Measure after so many steps; by default after each epoch.",
                                     *_or_none(_whole(1)), kind=int)  # fmt: skip
    patience: int | None = _option(None, "Stop after so many measurements without a lower loss; the best state counts.",
                                   *_or_none(_whole(1)), kind=int)  # fmt: skip
    max_steps: int | None = _option(None, "Stop after so many steps; --resume goes on.", *_or_none(_whole(1)), kind=int)
    merge: str = _option("float",
                         "How the merged model stores changed weights: as float, or as they were quantised; or "
                         "no such model.", *_one_of(MERGE), choices=MERGE)  # fmt: skip
    seed: int = _option(0, "Of the adapters' first numbers, the order of rows and what is held out.", *_whole(0))

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if not option.metadata["fits"](value):
                raise ArgumentError(
                    f"{option.name} is {shown(repr(value))}; it should be {option.metadata['expected']}"
                )

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """Give the same recipe with other values; raise ArgumentError where there is no such option."""
        known = [option.name for option in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ArgumentError(f"fine-tuning has no option '{shown(name)}'{suggestion(name, near or known)}")
        given: dict[str, Any] = {
            n: tuple([v] if isinstance(v, str) else v) if n == "target" else v for n, v in changes.items()
        }
        return replace(self, **given)

    @property
    def is_plain(self) -> bool:
        """Whether the loss is the mean of −log p alone, whose exponential is the perplexity."""
        return self.label_smoothing == 0 and self.z_loss == 0


STOPS_ONLY = ("max_steps",)  # options that may differ in a run that goes on
