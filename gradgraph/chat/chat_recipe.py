"""The options of fine-tuning, each written once: Python, the shell, the model card and the page read them here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradgraph.arguments import FLAG, NAMES, PATH, TEXT, Kind, as_names
from gradgraph.chat.option_fields import changed_options, check_options, number, one_of, option, whole
from gradgraph.errors import ArgumentError, DataError, shown, suggestion

RANK = 16  # where none is given
LONG = ("error", "drop", "cut")
DESIRABLE = "desirable"  # the target of a loss that reads one answer a row
NEXT_TOKEN = "cross_entropy"
FLOAT, REQUANTISED, MERGE_NONE = MERGE = ("float", "requantised", "none")
BYTES = Kind("a number of bytes, such as '4GB'", lambda value: isinstance(value, str) and _is_size(value))
_TEXTS = Kind("a text, or a list of texts", NAMES.fits)


@dataclass(frozen=True)
class Recipe:
    """Options of a fine-tuning; ``words`` of each field explain it."""

    rank: int | None = option(None, "Rank of the adapters; 16 by default, with --memory at most that.",
                               whole(1).or_none(), typed=int)  # fmt: skip
    alpha: float | None = option(None, "Adapters count alpha/rank times; twice the rank by default.",
                                  number(0, above=True).or_none(), typed=float)  # fmt: skip
    target: str | Sequence[str] = option((),
                                         "Layers that get adapters, by name or glob; repeatable. By default all linear "
                                         "layers but the head and the routers of experts.",
                                         NAMES)  # fmt: skip
    kind: str = option("lora", "Kind of the adapters.", TEXT, names="surgery.adapter_kinds.adapter_table:KINDS")
    dropout: float = option(0.0, "Dropout before the adapters, in training.", number(0, 1))
    epochs: int = option(3, "Passes over the data.", whole(1))
    batch_size: int = option(8, "Rows of a batch.", whole(1))
    accumulate: int = option(1, "Batches that move the weights once, as one batch of all their rows would.", whole(1))
    learning_rate: float = option(2e-4, "The highest learning rate of AdamW.", number(0, above=True), flag="lr")
    warmup: float = option(0.03, "The share of all steps in which it rises; then it falls as a cosine to 0.",
                            number(0, 1))  # fmt: skip
    weight_decay: float = option(0.0, "Of AdamW.", number(0))
    clip_norm: float = option(1.0, "The largest norm of all gradients together.", number(0, above=True))
    length: int | None = option(None, "Tokens that a row may have; by default what the model takes, 2048 at most.",
                                 whole(2).or_none(), typed=int)  # fmt: skip
    long: str = option("error", "What becomes of a text of more tokens: it is refused, left out, or cut.",
                        one_of(LONG), choices=LONG)  # fmt: skip
    pack: bool = option(False, "Put several texts into a row, of which none sees another; where attention would mix "
                        "them, rows hold one text each, and a warning says so.", FLAG)  # fmt: skip
    loss: str = option(NEXT_TOKEN, "The loss: cross_entropy of the next token, or one of preferences.", TEXT,
                       suggested="frontend.losses_preferences:PREFERENCES")  # fmt: skip
    beta: float | None = option(None, "Of a loss of preferences, its beta; by default that of the loss.",
                                number(0, above=True).or_none(), typed=float)  # fmt: skip
    label_smoothing: float = option(0.0, "The share of each label that is spread over all tokens.", number(0, 1))
    z_loss: float = option(0.0, "Factor of the square of log Σ exp of the scores, such as 1e-4.", number(0))
    teacher: str | None = option(None, "Folder of a larger model with the same tokenizer, whose probabilities of the "
                                 "answers' tokens are learnt, too.", PATH.or_none(), typed=str,
                                 metavar="FOLDER")  # fmt: skip
    temperature: float | None = option(None, "With a teacher: what the scores of both are divided by; 2 by default.",
                                       number(0, above=True).or_none(), typed=float)  # fmt: skip
    teacher_share: float | None = option(None, "With a teacher: its share of the loss; 0.5 by default.",
                                         number(0, 1).or_none(), typed=float)  # fmt: skip
    recompute: bool = option(False, "Compute the forward pass again in parts: less memory, more time.", FLAG)
    memory: str | None = option(None, "What the command may take, such as 4GB: chooses batches, what is computed "
                                "again, the rank where none is given, and where --long allows it the length.",
                                BYTES.or_none(), typed=str, metavar="SIZE")  # fmt: skip
    held_out: float = option(0.1, "The share of rows to measure on, where no data are given for that.", number(0, 0.9))
    eval_every: int | None = option(None, "Measure after so many steps; by default after each epoch.",
                                     whole(1).or_none(), typed=int)  # fmt: skip
    patience: int | None = option(None, "Stop after so many measurements without a lower loss; the best state counts.",
                                   whole(1).or_none(), typed=int)  # fmt: skip
    max_steps: int | None = option(None, "Stop after so many steps; --resume goes on.", whole(1).or_none(), typed=int)
    checkpoint_every: int | None = option(None, "Save what --resume needs after so many steps; by default after each "
                                          "measurement or epoch.", whole(1).or_none(), typed=int)  # fmt: skip
    sample: str | Sequence[str] = option((), "A prompt that is answered now and then during training; repeatable.",
                                         _TEXTS, metavar="TEXT")  # fmt: skip
    sample_every: int | None = option(None, "Steps between two rounds of such samples; 50 by default.",
                                      whole(1).or_none(), typed=int)  # fmt: skip
    sample_tokens: int = option(64, "Tokens that a sample has at most.", whole(1))
    merge: str = option(FLOAT,
                         "How the merged model stores changed weights: as float, or as they were quantised; or "
                         "no such model.", one_of(MERGE), choices=MERGE)  # fmt: skip
    seed: int = option(0, "Of the adapters' first numbers, the order of rows and what is held out.", whole(0))

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("target", "sample"):
            object.__setattr__(self, name, tuple(as_names(getattr(self, name))))  # as it is compared and kept
        if self.prefers:
            _check_preferences(self.loss)
        if self.prefers and (self.pack or self.label_smoothing or self.z_loss):
            raise ArgumentError(
                f"the loss {self.loss} compares two answers, and goes with no packed rows, smoothed labels or squares "
                "of scores",
                remedy="leave pack, label_smoothing and z_loss out",
                shell="leave --pack, --label-smoothing and --z-loss out",
            )
        if self.teacher is not None:
            object.__setattr__(self, "teacher", os.fspath(self.teacher))
        if self.teacher is not None and self.prefers:
            raise ArgumentError(f"a teacher goes with the next token, and the loss is {self.loss}; leave it out")
        for name in ("temperature", "teacher_share"):
            if self.teacher is None and getattr(self, name) is not None:
                raise ArgumentError(
                    f"the {name.replace('teacher_', '')} belongs to a teacher, and there is none",
                    remedy=f"leave {name} out, or give teacher=",
                    shell=f"leave --{name.replace('_', '-')} out, or give --teacher",
                )
        if self.sample_every is not None and not self.sample:
            raise ArgumentError(
                "steps between samples are given, and no prompt",
                remedy="leave sample_every out, or give sample=",
                shell="leave --sample-every out, or give --sample",
            )
        if self.beta is not None and not self.prefers:
            raise ArgumentError(f"beta belongs to a loss of preferences, and the loss is {self.loss}; leave it out")

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """Give the same recipe with other values; raise ArgumentError where there is no such option."""
        return changed_options(self, changes, "fine-tuning")

    def of_rank(self, rank: int) -> Recipe:
        """Give the same recipe with adapters of another rank, which count as many times."""
        now = self.rank or RANK
        return replace(self, rank=rank, alpha=None if self.alpha is None else self.alpha * rank / now)

    @property
    def settled(self) -> Recipe:
        """The same recipe, with the usual rank where none is given."""
        return self.of_rank(self.rank or RANK)

    @property
    def prefers(self) -> bool:
        """Whether it learns which of two answers is better."""
        return self.loss != NEXT_TOKEN

    @property
    def compares(self) -> bool:
        """Whether rows hold two answers; kto reads one, and whether it is good."""
        return self.prefers and not reads_labels(self.loss)

    @property
    def is_plain(self) -> bool:
        """Whether the loss is the mean of −log p alone, whose exponential is the perplexity."""
        return self.label_smoothing == 0 and self.z_loss == 0


def _is_size(text: str) -> bool:
    from gradgraph.runtime.loop.sizing import limit_of  # it takes a while, which help has not

    try:
        return bool(limit_of(f"auto:{text}"))
    except DataError:
        return False


def _check_preferences(loss: str) -> None:
    """Raise ArgumentError unless it is a loss of preferences."""
    from gradgraph.frontend.losses_preferences import PREFERENCES  # it takes a second, which help has not

    if loss not in PREFERENCES:
        raise ArgumentError(f"fine-tuning has no loss '{shown(loss)}'{suggestion(loss, [NEXT_TOKEN, *PREFERENCES])}")


def reads_labels(loss: str) -> bool:
    """Whether a loss of preferences reads one answer a row, and whether that is good."""
    from gradgraph import losses

    return any(target.name == DESIRABLE for target in losses.by_name(loss).targets)


# options that may differ in a run that goes on
STOPS_ONLY = ("max_steps", "checkpoint_every", "sample", "sample_every", "sample_tokens")
