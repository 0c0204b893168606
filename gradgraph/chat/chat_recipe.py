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
    rank: int | None = spelled(
        "Rank of the adapters. Default: 16; with --memory, at most 16.",
        "training", "whole", kind=whole(1).or_none(), default=None,
    )  # fmt: skip
    alpha: float | None = spelled(
        "LoRA scaling is alpha/rank. Default: twice the rank.",
        "training", "number", kind=number(0, above=True).or_none(), default=None,
    )  # fmt: skip
    target: str | Sequence[str] = spelled(
        "Layers that get adapters, by name or glob; repeatable. Default: all linear layers except the head and the"
        " routers of experts; for adapters of experts, attentions or biases, all of them.",
        "training", "list", metavar="NAME", kind=NAMES, default=(),
    )  # fmt: skip
    kind: str = spelled(
        "Adapter type.",
        "training", names=("surgery.adapter_kinds.adapter_table:KINDS",), strict=True, default="lora",
    )  # fmt: skip
    dropout: float = spelled(
        "Dropout on the input of the adapters during training.",
        "training", "number", kind=number(0, 1), default=0.0,
    )  # fmt: skip
    epochs: int = spelled("Number of epochs.", "training", "whole", kind=whole(1), default=3)
    batch_size: int = spelled("Rows per batch.", "training", "whole", kind=whole(1), default=8)
    accumulate: int = spelled(
        "Number of batches over which gradients are accumulated.",
        "training", "whole", kind=whole(1), default=1,
    )  # fmt: skip
    learning_rate: float | None = spelled(
        "Peak learning rate of AdamW. Default: 2e-4 for adapters; 5e-5 for all weights.",
        "training", "number", flags="--lr --learning-rate", kind=number(0, above=True).or_none(), default=None,
    )  # fmt: skip
    warmup: float = spelled(
        "Fraction of all steps used for linear warm-up; a cosine decay to 0 follows.",
        "training", "number", kind=number(0, 1), default=0.03,
    )  # fmt: skip
    weight_decay: float = spelled("Of AdamW.", "training", "number", kind=number(0), default=0.0)
    clip_norm: float = spelled(
        "Maximum global gradient norm.",
        "training", "number", kind=number(0, above=True), default=1.0,
    )  # fmt: skip
    length: int | None = spelled(
        "Maximum number of tokens per row. Default: the model's context length, at most 2048.",
        "training", "whole", kind=whole(2).or_none(), default=None,
    )  # fmt: skip
    stride: int | None = spelled(
        "For question answering: number of tokens that consecutive windows of a long context share. Default: a third "
        "of the length, which is at most 384 by default.",
        "training", "whole", kind=whole(0).or_none(), default=None,
    )  # fmt: skip
    language: str | None = spelled(
        "For speech recognition with a multilingual model: language of the transcripts, such as en or english. "
        "Default: that of generation_config.json.",
        "training", metavar="LANGUAGE", kind=TEXT.or_none(), default=None,
    )  # fmt: skip
    translate: bool = spelled(
        "For speech recognition: the transcripts are English translations.", "training", "flag", default=False
    )
    long: str = spelled(
        "What to do with longer texts: raise an error, drop them, or cut them.",
        "training", choices=LONG, default="error",
    )  # fmt: skip
    pack: bool = spelled(
        "Pack several texts into a row, with attention restricted to each text; models that do not support this "
        "train on one text per row, with a warning.",
        "training", "flag", default=False,
    )  # fmt: skip
    loss: str = spelled(
        "Loss: cross_entropy of the next token, or a preference loss.",
        "training", names=("frontend.losses_preferences:PREFERENCES",), default=NEXT_TOKEN,
    )  # fmt: skip
    beta: float | None = spelled(
        "Beta of a preference loss. Default: that of the loss.",
        "training", "number", kind=number(0, above=True).or_none(), default=None,
    )  # fmt: skip
    label_smoothing: float = spelled("Label smoothing.", "training", "number", kind=number(0, 1), default=0.0)
    z_loss: float = spelled(
        "Coefficient of the z-loss, the square of log Σ exp of the scores, such as 1e-4.",
        "training", "number", kind=number(0), default=0.0,
    )  # fmt: skip
    teacher: str | None = spelled(
        "Folder of a larger teacher model with the same tokenizer, for distillation.",
        "training", metavar="FOLDER", kind=PATH.or_none(), default=None,
    )  # fmt: skip
    temperature: float | None = spelled(
        "With a teacher: distillation temperature. Default: 2.",
        "training", "number", kind=number(0, above=True).or_none(), default=None,
    )  # fmt: skip
    teacher_share: float | None = spelled(
        "With a teacher: weight of the distillation loss. Default: 0.5.",
        "training", "number", kind=number(0, 1).or_none(), default=None,
    )  # fmt: skip
    recompute: bool = spelled(
        "Recompute activations in the backward pass instead of storing them: less memory, more time.",
        "training", "flag", default=False,
    )  # fmt: skip
    keep_features: bool = spelled(
        "Compute the layers below the first adapter once for each row, and train only the rest in each epoch; useful "
        "if only the last layers have adapters.",
        "training", "flag", default=False,
    )  # fmt: skip
    memory: str | None = spelled(
        "Memory limit of the process, such as 4GB: chooses batch size, recomputation, the rank unless given, and "
        "with --long the row length.",
        "training", metavar="SIZE", kind=BYTES.or_none(), default=None,
    )  # fmt: skip
    held_out: float = spelled(
        "Fraction of rows held out, unless validation data are given.",
        "training", "number", kind=number(0, 0.9), default=0.1,
    )  # fmt: skip
    eval_every: int | None = spelled(
        "Evaluate every N steps. Default: after each epoch.",
        "training", "whole", kind=whole(1).or_none(), default=None,
    )  # fmt: skip
    patience: int | None = spelled(
        "Early stopping: stop after this many evaluations without a lower loss, and keep the best state.",
        "training", "whole", kind=whole(1).or_none(), default=None,
    )  # fmt: skip
    max_steps: int | None = spelled(
        "Stop after this many steps; continue with --resume.",
        "training", "whole", kind=whole(1).or_none(), default=None,
    )  # fmt: skip
    checkpoint_every: int | None = spelled(
        "Save a checkpoint for --resume every N steps. Default: after each evaluation or epoch.",
        "training", "whole", kind=whole(1).or_none(), default=None,
    )  # fmt: skip
    sample: str | Sequence[str] = spelled(
        "Prompt to answer periodically during training; repeatable.",
        "training", "list", metavar="TEXT", kind=_TEXTS, default=(),
    )  # fmt: skip
    sample_every: int | None = spelled(
        "Steps between samples. Default: 50.",
        "training", "whole", kind=whole(1).or_none(), default=None,
    )  # fmt: skip
    sample_tokens: int | None = spelled(
        "Maximum number of tokens of a sample. Default: 64.",
        "training", "whole", kind=whole(1).or_none(), default=None,
    )  # fmt: skip
    merge: str = spelled(
        "Storage of changed weights in the merged model: float, or requantised by GPTQ; or no merged model.",
        "training", choices=MERGE, default=FLOAT,
    )  # fmt: skip
    seed: int = spelled(
        "Random seed of initial adapter weights, row order and held-out rows.",
        "training", "whole", kind=whole(0), default=0,
    )  # fmt: skip

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
        for name in ("temperature", "teacher_share"):
            if self.teacher is None and getattr(self, name) is not None:
                raise ArgumentError(
                    f"{name} requires a teacher, and none is given",
                    remedy=f"omit {name}, or add teacher=",
                    shell=f"omit --{name.replace('_', '-')}, or add --teacher",
                )
        for name in ("sample_every", "sample_tokens"):
            if not self.sample and getattr(self, name) is not None:
                raise ArgumentError(
                    f"{name} requires a prompt, and none is given",
                    remedy=f"omit {name}, or add sample=",
                    shell=f"omit --{name.replace('_', '-')}, or add --sample",
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
