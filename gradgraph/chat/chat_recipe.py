"""The fine-tuning options, declared once for Python, the command line, the model card and the docs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradgraph.arguments import FLAG, NAMES, PATH, TEXT, Kind, as_names
from gradgraph.chat.option_fields import changed_options, check_options, number, one_of, option, whole
from gradgraph.errors import ArgumentError, DataError, shown, suggestion

RANK = 16  # the default rank
LONG = ("error", "drop", "cut")
DESIRABLE = "desirable"  # the target of a preference loss that reads one answer per row
NEXT_TOKEN = "cross_entropy"
FLOAT, REQUANTISED, MERGE_NONE = MERGE = ("float", "requantised", "none")
BYTES = Kind("a size in bytes, such as '4GB'", lambda value: isinstance(value, str) and _is_size(value))
_TEXTS = Kind("a text, or a list of texts", NAMES.fits)


@dataclass(frozen=True)
class Recipe:
    """The options of a fine-tuning run; the ``words`` of each field describe it."""

    rank: int | None = option(None, "Rank of the adapters. Default: 16; with --memory, at most 16.",
                               whole(1).or_none(), typed=int)  # fmt: skip
    alpha: float | None = option(None, "LoRA scaling is alpha/rank. Default: twice the rank.",
                                  number(0, above=True).or_none(), typed=float)  # fmt: skip
    target: str | Sequence[str] = option((),
                                         "Layers that get adapters, by name or glob; repeatable. Default: all linear "
                                         "layers except the head and the routers of experts.",
                                         NAMES)  # fmt: skip
    kind: str = option("lora", "Adapter type.", TEXT, names="surgery.adapter_kinds.adapter_table:KINDS")
    dropout: float = option(0.0, "Dropout on the input of the adapters during training.", number(0, 1))
    epochs: int = option(3, "Number of epochs.", whole(1))
    batch_size: int = option(8, "Rows per batch.", whole(1))
    accumulate: int = option(1, "Number of batches over which gradients are accumulated.", whole(1))
    learning_rate: float = option(2e-4, "Peak learning rate of AdamW.", number(0, above=True), flag="lr")
    warmup: float = option(0.03, "Fraction of all steps used for linear warm-up; a cosine decay to 0 follows.",
                            number(0, 1))  # fmt: skip
    weight_decay: float = option(0.0, "Of AdamW.", number(0))
    clip_norm: float = option(1.0, "Maximum global gradient norm.", number(0, above=True))
    length: int | None = option(None, "Maximum number of tokens per row. Default: the model's context length, at "
                                      "most 2048.",
                                 whole(2).or_none(), typed=int)  # fmt: skip
    long: str = option("error", "What to do with longer texts: raise an error, drop them, or cut them.",
                        one_of(LONG), choices=LONG)  # fmt: skip
    pack: bool = option(False, "Pack several texts into a row, with attention restricted to each text; models that "
                               "do not support this train on one text per row, with a warning.", FLAG)  # fmt: skip
    loss: str = option(NEXT_TOKEN, "Loss: cross_entropy of the next token, or a preference loss.", TEXT,
                       suggested="frontend.losses_preferences:PREFERENCES")  # fmt: skip
    beta: float | None = option(None, "Beta of a preference loss. Default: that of the loss.",
                                number(0, above=True).or_none(), typed=float)  # fmt: skip
    label_smoothing: float = option(0.0, "Label smoothing.", number(0, 1))
    z_loss: float = option(
        0.0, "Coefficient of the z-loss, the square of log Σ exp of the scores, such as 1e-4.", number(0)
    )
    teacher: str | None = option(
        None, "Folder of a larger teacher model with the same tokenizer, for distillation.",
        PATH.or_none(), typed=str,
                                 metavar="FOLDER")  # fmt: skip
    temperature: float | None = option(None, "With a teacher: distillation temperature. Default: 2.",
                                       number(0, above=True).or_none(), typed=float)  # fmt: skip
    teacher_share: float | None = option(None, "With a teacher: weight of the distillation loss. Default: 0.5.",
                                         number(0, 1).or_none(), typed=float)  # fmt: skip
    recompute: bool = option(
        False, "Recompute activations in the backward pass instead of storing them: less memory, more time.", FLAG
    )
    memory: str | None = option(None, "Memory limit of the process, such as 4GB: chooses batch size, recomputation, "
                                      "the rank unless given, and with --long the row length.",
                                BYTES.or_none(), typed=str, metavar="SIZE")  # fmt: skip
    held_out: float = option(0.1, "Fraction of rows held out, unless validation data are given.", number(0, 0.9))
    eval_every: int | None = option(None, "Evaluate every N steps. Default: after each epoch.",
                                     whole(1).or_none(), typed=int)  # fmt: skip
    patience: int | None = option(None, "Early stopping: stop after this many evaluations without a lower loss, and "
                                        "keep the best state.",
                                   whole(1).or_none(), typed=int)  # fmt: skip
    max_steps: int | None = option(
        None, "Stop after this many steps; continue with --resume.", whole(1).or_none(), typed=int
    )
    checkpoint_every: int | None = option(None, "Save a checkpoint for --resume every N steps. Default: after each "
                                                "evaluation or epoch.", whole(1).or_none(), typed=int)  # fmt: skip
    sample: str | Sequence[str] = option((), "Prompt to answer periodically during training; repeatable.",
                                         _TEXTS, metavar="TEXT")  # fmt: skip
    sample_every: int | None = option(None, "Steps between samples. Default: 50.",
                                      whole(1).or_none(), typed=int)  # fmt: skip
    sample_tokens: int = option(64, "Maximum number of tokens of a sample.", whole(1))
    merge: str = option(FLOAT,
                         "Storage of changed weights in the merged model: float, or requantised; or no merged model.",
                         one_of(MERGE), choices=MERGE)  # fmt: skip
    seed: int = option(0, "Random seed of initial adapter weights, row order and held-out rows.", whole(0))

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("target", "sample"):
            object.__setattr__(
                self, name, tuple(as_names(getattr(self, name)))
            )  # a tuple, which is compared and stored
        if self.prefers:
            _check_preferences(self.loss)
        if self.prefers and (self.pack or self.label_smoothing or self.z_loss):
            raise ArgumentError(
                f"the loss {self.loss} compares two answers and does not support packing, label smoothing or z-loss",
                remedy="omit pack, label_smoothing and z_loss",
                shell="omit --pack, --label-smoothing and --z-loss",
            )
        if self.teacher is not None:
            object.__setattr__(self, "teacher", os.fspath(self.teacher))
        if self.teacher is not None and self.prefers:
            raise ArgumentError(
                f"a teacher requires the loss cross_entropy, but the loss is {self.loss}; omit one of them"
            )
        for name in ("temperature", "teacher_share"):
            if self.teacher is None and getattr(self, name) is not None:
                raise ArgumentError(
                    f"{name} requires a teacher, and none is given",
                    remedy=f"omit {name}, or add teacher=",
                    shell=f"omit --{name.replace('_', '-')}, or add --teacher",
                )
        if self.sample_every is not None and not self.sample:
            raise ArgumentError(
                "sample_every requires a prompt, and none is given",
                remedy="omit sample_every, or add sample=",
                shell="omit --sample-every, or add --sample",
            )
        if self.beta is not None and not self.prefers:
            raise ArgumentError(f"beta requires a preference loss, but the loss is {self.loss}; omit it")

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """Return a copy with ``changes`` (values by option) applied; raise ArgumentError for an unknown option."""
        return changed_options(self, changes, "fine-tuning")

    def of_rank(self, rank: int) -> Recipe:
        """Return a copy of the recipe with the given adapter rank, keeping alpha / rank constant."""
        now = self.rank or RANK
        return replace(self, rank=rank, alpha=None if self.alpha is None else self.alpha * rank / now)

    @property
    def settled(self) -> Recipe:
        """A copy of the recipe with the default rank if none is set."""
        return self.of_rank(self.rank or RANK)

    @property
    def prefers(self) -> bool:
        """Whether the loss is a preference loss."""
        return self.loss != NEXT_TOKEN

    @property
    def compares(self) -> bool:
        """Whether rows contain two answers; kto reads one answer and a label."""
        return self.prefers and not reads_labels(self.loss)

    @property
    def is_plain(self) -> bool:
        """Whether the loss is plain cross entropy, so that its exponential is the perplexity."""
        return self.label_smoothing == 0 and self.z_loss == 0


def _is_size(text: str) -> bool:
    from gradgraph.runtime.loop.sizing import limit_of  # slow to import, so help avoids it

    try:
        return bool(limit_of(f"auto:{text}"))
    except DataError:
        return False


def _check_preferences(loss: str) -> None:
    from gradgraph.frontend.losses_preferences import PREFERENCES  # slow to import, so help avoids it

    if loss not in PREFERENCES:
        raise ArgumentError(f"fine-tuning has no loss '{shown(loss)}'{suggestion(loss, [NEXT_TOKEN, *PREFERENCES])}")


def reads_labels(loss: str) -> bool:
    """Whether a preference loss reads one answer per row with a label for it, as kto does."""
    from gradgraph import losses

    return any(target.name == DESIRABLE for target in losses.by_name(loss).targets)


# options that may change when a run is resumed
STOPS_ONLY = ("max_steps", "checkpoint_every", "sample", "sample_every", "sample_tokens")
