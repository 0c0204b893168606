"""The fine-tuning options, declared once for Python, the command line, the model card and the docs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradgraph.arguments import NAMES, PATH, TEXT, Kind, as_names, number, whole
from gradgraph.building.option import changed_options, check_options, documented, options, spelled
from gradgraph.errors import ArgumentError, DataError, shown, suggestion

if TYPE_CHECKING:
    from gradgraph.optim import Optimizer

RANK = 16  # the default rank
LONG = ("error", "drop", "cut")
DESIRABLE = "desirable"  # the target of a preference loss that reads one answer per row
NEXT_TOKEN = "cross_entropy"
GENERATION = "text-generation"
SEQ2SEQ = "text2text-generation"
SPEECH = "automatic-speech-recognition"
LABELLED = ("text-classification", "token-classification")
QUESTIONS = "question-answering"
RATE, RATE_OF_ALL = 2e-4, 5e-5  # default learning rates: of adapters, and of all weights
FLOAT, REQUANTISED, MERGE_NONE = MERGE = ("float", "requantised", "none")
BYTES = Kind("a size in bytes, such as '4GB'", lambda value: isinstance(value, str) and _is_size(value))
_TEXTS = Kind("a string, or a list of strings", NAMES.fits)


def whole_option(help: str, least: int = 1, default: int | None = None) -> Any:
    """Return an option that is a whole number of at least ``least``, or without a default None."""
    kind = whole(least)
    return spelled(help, "training", "whole", kind=kind.or_none() if default is None else kind, default=default)


def number_option(help: str, kind: Kind, default: float | None = None, **shell: Any) -> Any:
    """Return an option that is a number of this kind, or without a default None; ``shell`` as for ``spelled``."""
    kind = kind.or_none() if default is None else kind
    return spelled(help, "training", "number", kind=kind, default=default, **shell)


def _flag(help: str) -> Any:
    return spelled(help, "training", "flag", default=False)


@documented
@options
class Recipe:
    """The options of a fine-tuning run; each a field."""

    task: str = spelled(
        f"What the model is trained for: {GENERATION} (chats), {SEQ2SEQ} (encoders with decoders, such as T5), "
        f"{SPEECH} (Whisper, Moonshine), {', '.join(LABELLED)}, or {QUESTIONS} (which marks the answer in a context); "
        "the last three train all weights.",
        "training", metavar="TASK", choices=(GENERATION, SEQ2SEQ, SPEECH, *LABELLED, QUESTIONS), default=GENERATION,
    )  # fmt: skip
    rank: int | None = whole_option("Rank of the adapters. Default: 16; with --memory, at most 16.")
    alpha: float | None = number_option("LoRA scaling is alpha/rank. Default: twice the rank.", number(0, above=True))
    target: str | Sequence[str] = spelled(
        "Layers that get adapters, by name or glob; repeatable. Default: all linear layers except the head and the"
        " routers of experts; for adapters of experts, attentions or biases, all of them.",
        "training", "list", metavar="NAME", kind=NAMES, default=(),
    )  # fmt: skip
    kind: str = spelled(
        "Adapter type.",
        "training", names=("surgery.adapter_kinds.adapter_table:KINDS",), strict=True, default="lora",
    )  # fmt: skip
    dropout: float = number_option("Dropout on the input of the adapters during training.", number(0, 1), 0.0)
    epochs: int = whole_option("Number of epochs.", default=3)
    batch_size: int = whole_option("Rows per batch.", default=8)
    accumulate: int = whole_option("Number of batches over which gradients are accumulated.", default=1)
    learning_rate: float | None = number_option(
        "Peak learning rate of AdamW. Default: 2e-4 for adapters; 5e-5 for all weights.", number(0, above=True),
        flags="--lr --learning-rate",
    )  # fmt: skip
    warmup: float = number_option(
        "Fraction of all steps used for linear warm-up; a cosine decay to 0 follows.", number(0, 1), 0.03
    )
    weight_decay: float = number_option("Of AdamW.", number(0), 0.0)
    clip_norm: float = number_option("Maximum global gradient norm.", number(0, above=True), 1.0)
    length: int | None = whole_option(
        "Maximum number of tokens per row. Default: the model's context length, at most 2048.", least=2
    )
    stride: int | None = whole_option(
        "For question answering: number of tokens that consecutive windows of a long context share. Default: a third "
        "of the length, which is at most 384 by default.",
        least=0,
    )
    language: str | None = spelled(
        "For speech recognition with a multilingual model: language of the transcripts, such as en or english. "
        "Default: that of generation_config.json.",
        "training", metavar="LANGUAGE", kind=TEXT.or_none(), default=None,
    )  # fmt: skip
    translate: bool = _flag("For speech recognition: the transcripts are English translations.")
    long: str = spelled(
        "What to do with longer texts: raise an error, drop them, or cut them.",
        "training", choices=LONG, default="error",
    )  # fmt: skip
    pack: bool = _flag(
        "Pack several texts into a row, with attention restricted to each text; models that do not support this "
        "train on one text per row, with a warning."
    )
    loss: str = spelled(
        "Loss: cross_entropy of the next token, or a preference loss.",
        "training", names=("frontend.losses_preferences:PREFERENCES",), default=NEXT_TOKEN,
    )  # fmt: skip
    beta: float | None = number_option("Beta of a preference loss. Default: that of the loss.", number(0, above=True))
    label_smoothing: float = number_option("Label smoothing.", number(0, 1), 0.0)
    z_loss: float = number_option(
        "Coefficient of the z-loss, the square of log Σ exp of the scores, such as 1e-4.", number(0), 0.0
    )
    teacher: str | None = spelled(
        "Folder of a larger teacher model with the same tokenizer, for distillation.",
        "training", metavar="FOLDER", kind=PATH.or_none(), default=None,
    )  # fmt: skip
    temperature: float | None = number_option(
        "With a teacher: distillation temperature. Default: 2.", number(0, above=True)
    )
    teacher_share: float | None = number_option(
        "With a teacher: weight of the distillation loss. Default: 0.5.", number(0, 1)
    )
    recompute: bool = _flag(
        "Recompute activations in the backward pass instead of storing them: less memory, more time."
    )
    keep_features: bool = _flag(
        "Compute the layers below the first adapter once for each row, and train only the rest in each epoch; useful "
        "if only the last layers have adapters."
    )
    memory: str | None = spelled(
        "Memory limit of the process, such as 4GB: chooses batch size, recomputation, the rank unless given, and "
        "with --long the row length.",
        "training", metavar="SIZE", kind=BYTES.or_none(), default=None,
    )  # fmt: skip
    held_out: float = number_option("Fraction of rows held out, unless validation data are given.", number(0, 0.9), 0.1)
    eval_every: int | None = whole_option("Evaluate every N steps. Default: after each epoch.")
    patience: int | None = whole_option(
        "Early stopping: stop after this many evaluations without a lower loss, and keep the best state."
    )
    max_steps: int | None = whole_option("Stop after this many steps; continue with --resume.")
    checkpoint_every: int | None = whole_option(
        "Save a checkpoint for --resume every N steps. Default: after each evaluation or epoch."
    )
    sample: str | Sequence[str] = spelled(
        "Prompt to answer periodically during training; repeatable.",
        "training", "list", metavar="TEXT", kind=_TEXTS, default=(),
    )  # fmt: skip
    sample_every: int | None = whole_option("Steps between samples. Default: 50.")
    sample_tokens: int | None = whole_option("Maximum number of tokens of a sample. Default: 64.")
    merge: str = spelled(
        "Storage of changed weights in the merged model: float, or requantised by GPTQ; or no merged model.",
        "training", choices=MERGE, default=FLOAT,
    )  # fmt: skip
    seed: int = whole_option("Random seed of initial adapter weights, row order and held-out rows.", 0, 0)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("target", "sample"):
            object.__setattr__(
                self, name, tuple(as_names(getattr(self, name)))
            )  # a tuple, which is compared and stored
        if self.prefers:
            _check_preferences(self.loss)
        if self.prefers and (self.pack or self.label_smoothing or self.z_loss):
            raise ArgumentError.of_options(
                f"the loss {self.loss} compares two answers and does not support packing, label smoothing or z-loss; "
                "omit --pack, --label-smoothing and --z-loss"
            )
        if self.prefers and self.keep_features:
            raise ArgumentError.of_options(
                f"the loss {self.loss} compares two answers, whose features cannot be kept; omit --keep-features"
            )
        if self.teacher is not None:
            object.__setattr__(self, "teacher", os.fspath(self.teacher))
        if self.teacher is not None and self.prefers:
            raise ArgumentError(
                f"a teacher requires the loss cross_entropy, but the loss is {self.loss}; omit one of them"
            )
        for name, option, what in (
            *((name, "teacher", "a teacher") for name in ("temperature", "teacher_share")),
            *((name, "sample", "a prompt") for name in ("sample_every", "sample_tokens")),
        ):
            if not getattr(self, option) and getattr(self, name) is not None:
                raise ArgumentError(
                    f"{name} requires {what}, and none is given",
                    remedy=f"omit {name}, or add {option}=",
                    shell=f"omit --{name.replace('_', '-')}, or add --{option}",
                )
        for name, task in (("stride", QUESTIONS), ("language", SPEECH), ("translate", SPEECH)):
            if getattr(self, name) not in (None, False) and self.task != task:
                raise ArgumentError(f"{name} applies to the task {task}, but the task is {self.task}; omit it")
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
        """A copy of the recipe with the default rank and learning rate if none are set."""
        return replace(self.of_rank(self.rank or RANK), learning_rate=self.rate)

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        return self.learning_rate or (RATE_OF_ALL if self.task in (*LABELLED, QUESTIONS) else RATE)

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


def optimizer_of(recipe: Recipe, total: int) -> Optimizer:
    """Return AdamW with clipped gradients, warm-up and cosine decay over ``total`` updates."""
    from gradgraph import optim  # help imports this module, and no optimizers

    rising = min(round(recipe.warmup * total), total - 1)
    rate = optim.cosine(recipe.rate, total - rising)
    adamw = optim.adamw(optim.warmup(rising, rate) if rising else rate, weight_decay=recipe.weight_decay)
    return optim.chain(optim.clip_by_global_norm(recipe.clip_norm), adamw)
