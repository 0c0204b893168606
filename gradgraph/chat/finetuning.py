"""Fine-tuning of a language model on chat data with adapters, from its folder to a folder of the same kind."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph import losses, metrics, surgery
from gradgraph.arguments import PATH, described
from gradgraph.chat.adapted_layers import adapted_layers, merging_memory, reached
from gradgraph.chat.chat_batches import ChatBatches
from gradgraph.chat.chat_recipe import GENERATION, QUESTIONS, SEQ2SEQ, SPEECH, Recipe
from gradgraph.chat.chat_rows import Rows, read
from gradgraph.chat.measures import PreferenceMeasures, check_measures, measured
from gradgraph.chat.memory_plan import Prepared, planned
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.preferences import TARGET, PairBatches, pairs_of
from gradgraph.chat.prompts import Prompts
from gradgraph.chat.row_lengths import Limit, fitted_pairs, fitted_texts, limit_of
from gradgraph.chat.run_place import LOG, Finetuned, began_at, begin, recorded, removed_unless_begun
from gradgraph.chat.task_request import Request, built
from gradgraph.chat.teaching import taught
from gradgraph.chat.tokens import Encoder, Tokens, check_number
from gradgraph.chat.training_samples import TrainingSamples, longest_sample
from gradgraph.data.arrays.batch import Array
from gradgraph.errors import ArgumentError, DataError, shown
from gradgraph.files.models import load_model
from gradgraph.files.suffixes import FOLDER, check_suffix
from gradgraph.graph.shape_inference import shape_of
from gradgraph.machine.free_memory import at_most_free, return_freed
from gradgraph.runtime.loop.logs import JsonLines, peak_memory
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.language_models import KEPT_APART, mixing
from gradgraph.surgery.operation import as_model

log = logging.getLogger("gradgraph.chat")

SAMPLE_EVERY, SAMPLE_TOKENS = 50, 64  # default numbers of steps between samples, and of their tokens
# minimum accepted ratio of the vocabulary sizes of model and tokenizer: models are padded to round numbers
# (Phi 2: 51,200 for 50,295 tokens), and tokenizers contain tokens of related models (Gemma 3 1B: one more)
ALIKE = 0.9


@dataclass
class Pace:
    """A timer of training that excludes samples and evaluations."""

    seconds: float = 0.0
    steps: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def on_step(self, trainer: Trainer, results: Any) -> None:
        now = time.perf_counter()
        self.seconds, self.steps, self._since = self.seconds + now - self._since, self.steps + 1, now

    def on_epoch(self, trainer: Trainer, row: Any) -> None:
        self.go_on()

    def go_on(self) -> None:
        """Restart the clock, so that the time since the last step is not counted."""
        self._since = time.perf_counter()


def finetune(
    folder: str | os.PathLike[str],
    data: Any,
    out: str | os.PathLike[str],
    *,
    recipe: Recipe | None = None,
    validation: Any = None,
    columns: Mapping[str, str] | None = None,
    template: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    **changes: Any,
) -> Finetuned:
    """Fine-tune a language model on chat data with adapters, and write the result to a folder.

    With another ``task``, an encoder and a decoder are trained on prompts and completions, or on recordings and
    transcripts, also with adapters; or all weights of a classifier of texts or tokens on a file of texts and labels, as
    by :func:`gradgraph.train`; or all weights of a model for extractive question answering on rows of question, context
    and answers, as in SQuAD.

    ``out`` gets ``adapter/`` (in PEFT's format), ``adapter.onnx_adapter``, the merged model with the other files of
    the given folder (``genai_config.json``, the tokenizer), a model card ``README.md``, and ``training/``, from
    which a run is resumed.

    Args:
        folder: written by onnxruntime-genai's builder or optimum: the model, ``tokenizer.json``, its chat template.
        data: as for :func:`read`: messages, prompt and completion, or text; for a preference loss two answers to
            each prompt (``chosen`` and ``rejected``), or for kto one answer with its ``label``.
        out: the output folder; created if missing, otherwise empty.
        recipe: options; by default those of :class:`Recipe`.
        validation: validation data; by default the fraction ``held_out`` of the rows.
        columns: the column names of ``data``, if they differ.
        template: a file with another chat template; ``"none"`` uses prompt and completion verbatim.
        resume: resume the run in ``out``; the result is bit-identical to an uninterrupted run.
        progress: as for ``Trainer.fit``.
        changes: recipe options by name: ``rank=8, epochs=1``.

    Raises:
        ArgumentError: an option is unknown or has an invalid value.
        DataError: data, tokenizer or template do not match; a text is too long; or a resumed run began with other
            data or options.
        ModelError: the model is missing or damaged.
        BuildError: the model cannot be trained in this way.
        OutputError: ``out`` is not empty, or cannot be written.
    """
    check_suffix(out, FOLDER)
    chosen = (recipe or Recipe()).changed(changes)
    if chosen.rank is not None and not KINDS.named(chosen.kind).has_rank:
        raise ArgumentError.of_options(f"adapters of kind {chosen.kind} have no rank; omit --rank")
    request = Request(ModelFolder.of(folder), data, Path(out), chosen, validation, columns or {}, template, resume,
                      progress)  # fmt: skip
    return _of_task(chosen.task)(request)


def finetune_chat(request: Request) -> Finetuned:
    """Train adapters of a decoder on chat data; see ``gradgraph.finetune``."""
    from gradgraph.chat.tuned_folder import Told, write_results

    request.check()
    base, place, chosen, template = request.base, request.out, request.recipe, request.template
    decoder = base.decoder()
    chosen = packed_where_apart(chosen, decoder)
    began = began_at(place, request.resume)
    prepare_for = functools.partial(prepare, request, now=began)
    prepared, pace, lines = prepare_for(chosen), Pace(), JsonLines(request.place / LOG)
    check_measures(prepared.held_out, chosen)
    models, prompts = _Models(decoder, base), Prompts(base, template, began)
    spare: int | None = None
    if chosen.memory is not None:
        plan, prepared = planned(
            chosen, prepared, prepare_for, lambda one, data: step_of(models.of(one)[1], data, one),
            longest_sample(prompts, chosen.sample, chosen.sample_tokens or SAMPLE_TOKENS),
            merging_memory(decoder, chosen), recorded(place, request.resume),
        )  # fmt: skip
        log.info("%s", plan)
        chosen, spare = plan.recipe, plan.spare
        gc.collect()
        return_freed()  # of the graphs that were planned
    chosen = chosen.settled
    request = replace(request, recipe=chosen)
    adapted, model = models.of(chosen)
    samples, measures = _watching(prompts, prepared, chosen, lines, pace)
    trainer = Trainer(step_of(model, prepared, chosen), seed=chosen.seed)
    refer(adapted, trainer, prepared, chosen)
    figures: dict[str, Any] = dict(prepared.figures)
    with removed_unless_begun(place, request.resume), at_most_free(spare):
        begin(place, chosen, _digests(prepared, base, chosen), began, request.resume)
        log.info("%s", reached(decoder, chosen))
        if prepared.held_out is not None:
            figures |= measured(trainer, prepared.held_out, chosen, "_before")
        if request.load(trainer):
            for each in samples:
                each.recall(request.place / LOG, trainer.progress.steps)
        elif request.resume:
            log.info("the run in '%s' stopped before its first checkpoint and starts again", shown(place))
        pace.go_on()
        history = request.fit(trainer, prepared.train, prepared.held_out, lines, [*measures, pace, *samples])
    figures |= {"steps": trainer.progress.steps, "loss": float(history["loss"][-1]), **peak_memory()}
    if pace.steps:  # none for a resumed run that had finished
        rows_a_second = pace.steps * chosen.batch_size / pace.seconds
        figures["tokens_a_second"] = round(rows_a_second * prepared.train.tokens / len(prepared.train), 1)
    if prepared.held_out is not None:
        figures |= measured(trainer, prepared.held_out, chosen)
    train, texts = (part.answers if isinstance(part, PairBatches) else part
                    for part in (prepared.train, prepared.held_out))  # fmt: skip
    answers = _last_answers(samples, trainer, chosen, lines)
    validation = None if request.validation is None else _name_of(request.validation)
    told = Told(_name_of(request.data), validation, template, prepared.digest)
    trainer.close_sessions()  # merging can use their memory
    weights = trainable_weights(trainer)
    write_results(place, base, adapted, weights, chosen, train, texts, figures, answers, told)
    return Finetuned(place, history, figures, answers, trainer)


def trainable_weights(trainer: Trainer) -> dict[str, Array]:
    """Return copies of the trained weights, without the optimizer's state."""
    state = trainer.state_dict()
    return {name: state[name] for name in trainer.manifest.trainable}


def _of_task(task: str) -> Callable[[Request], Finetuned]:
    """Return the function for a task; its module is imported only for it."""
    if task == GENERATION:
        return finetune_chat
    if task in (SEQ2SEQ, SPEECH):
        from gradgraph.chat.seq2seq import finetune_seq2seq

        return finetune_seq2seq
    if task == QUESTIONS:
        from gradgraph.chat.question_answering import finetune_questions

        return finetune_questions
    from gradgraph.chat.labelled_tasks import finetune_labels

    return finetune_labels


def _name_of(data: Any) -> str:
    """Return the name of the data in the model card: a file name, or the kind of the object."""
    return f"`{shown(Path(data).name)}`" if PATH.fits(data) else f"{described(data)} of Python"


def packed_where_apart(recipe: Recipe, decoder: ir.Model) -> Recipe:
    """Return the recipe, without packing (and with a warning) if tokens could attend to other texts of a packed row.

    Args:
        recipe: the recipe; its teacher, which reads the same rows, is checked, too.
        decoder: the model to train.

    Raises:
        ModelError: the teacher's folder or model does not exist.
    """
    if not recipe.pack:
        return recipe
    readers = {"the model": decoder}
    if recipe.teacher is not None:
        readers[f"the teacher '{shown(recipe.teacher)}'"] = ModelFolder.of(recipe.teacher).decoder()
    mixed = next((f"{who} {why}" for who, model in readers.items() if (why := mixing(model))), None)
    if mixed is None:
        return recipe
    log.warning("rows are not packed; texts of similar lengths share a batch: %s, and %s", KEPT_APART, mixed)
    return recipe.changed({"pack": False})


class _Models:
    """The models built from a decoder for a recipe; rebuilt only if a recipe with a different rank is passed."""

    def __init__(self, decoder: ir.Model, base: ModelFolder) -> None:
        self._decoder, self._base = decoder, base
        self._made: tuple[int | None, ir.Model, ir.Model] | None = None

    def of(self, recipe: Recipe) -> tuple[ir.Model, ir.Model]:
        """Return the decoder with adapters of the recipe's rank, and the model to build a step on.

        The latter is from tokens to next-token scores or the inputs of a preference loss.
        """
        if self._made is None or self._made[0] != recipe.rank:
            assert recipe.rank is not None  # the rank is settled
            adapted = surgery.lora(
                self._decoder, adapted_layers(self._decoder, recipe), rank=recipe.rank, alpha=recipe.alpha,
                dropout=recipe.dropout, kind=recipe.kind, seed=recipe.seed,
            )  # fmt: skip
            model = surgery.language_model(adapted, packed=recipe.pack)
            model = surgery.pair_model(model, next_token=bool(recipe.sample)) if recipe.prefers else model
            learner = as_model(model)
            learner = learner if recipe.teacher is None else taught(learner, self._base, recipe)
            self._made = recipe.rank, as_model(adapted), learner
        return self._made[1:]


def prepare(request: Request, recipe: Recipe, now: datetime | None = None) -> Prepared:
    """Read, tokenise and batch the data, and hold out a fraction of them; raises the errors of :func:`finetune`.

    Args:
        request: the request.
        recipe: the options, which ``memory`` may have changed.
        now: the time that the chat template sees.
    """
    base = request.base
    encoder = Encoder(base.path, request.template, now)
    known, limit = check_vocabulary(encoder, base), limit_of(base, recipe)

    def read_samples(data: Any) -> list[Any]:
        return samples_of(read(data, request.columns, _kinds(recipe)), encoder, recipe, limit, known)

    tokens = request.split(read_samples, lambda every, numbers: [every[i] for i in numbers])
    if not tokens[0]:
        raise DataError(
            "no row of the data remains for training",
            remedy="add rows, or raise length=",
            shell="add rows, or raise --length",
        )
    pad = encoder.tokenizer.pad
    train, held = (
        PairBatches(each, pad, limit.row) if recipe.prefers else ChatBatches(each, limit.row, recipe.pack, pad)
        for each in tokens
    )
    if not len(held) and not (recipe.patience or recipe.eval_every):  # both require held-out rows
        log.info("no rows are held out, so nothing is evaluated")
    texts = [[t for sample in each for t in ((sample.first, sample.second) if recipe.prefers else (sample,))]
             for each in tokens]  # fmt: skip
    figures = {"rows": len(tokens[0]), "held_out_rows": len(tokens[1]), "tokens": train.tokens,
               "learnt_tokens": sum(t.counted for t in texts[0])}  # fmt: skip
    goods = [sample.good for each in tokens for sample in each] if recipe.prefers else []
    longest = max(train.longest, held.longest)
    return_freed()  # of the texts
    return Prepared(train, held if len(held) else None, longest, figures, _digest(texts, goods))


def _kinds(recipe: Recipe) -> tuple[str, ...]:
    """Return the kinds of rows to prefer if the data have the columns of several kinds."""
    return () if recipe.prefers else ("messages",)


def samples_of(rows: Rows, encoder: Encoder, recipe: Recipe, limit: Limit, known: int | None) -> list[Any]:
    """Return rows as tokens, or as pairs for a preference loss; ``recipe.long`` applies to rows beyond ``limit``."""
    if recipe.prefers:
        pairs = pairs_of(rows, encoder, recipe.loss)
        for each in ([pair.first for pair in pairs], [pair.second for pair in pairs]):
            _check_ids(rows, each, known)
        return fitted_pairs(pairs, limit, recipe.long, rows)
    texts = encoder(rows)
    _check_ids(rows, texts, known)
    return fitted_texts(rows, texts, limit, recipe.long)


def refer(adapted: Any, trainer: Trainer, prepared: Prepared, recipe: Recipe) -> None:
    """Compute the reference log-probabilities of pairs with the base model, if the loss requires them."""
    if not any(spec.name == TARGET for spec in trainer.manifest.targets):
        return
    for part in (prepared.train, prepared.held_out):
        if isinstance(part, PairBatches):
            part.reference = surgery.reference(adapted, trainer, part, recipe.batch_size)


def check_vocabulary(encoder: Encoder, base: ModelFolder) -> int | None:
    """Return the vocabulary size of the model, or None if unknown.

    Raises:
        DataError: if the tokenizer belongs to another model.
    """
    known = base.vocabulary or _scores_of(base)
    size = encoder.tokenizer.size
    if known is not None and not ALIKE * known <= size <= known / ALIKE:
        raise DataError(
            f"the tokenizer of '{shown(base.path)}' has {size:,} tokens, but the model has {known:,}; use the "
            "tokenizer.json that belongs to the model"
        )
    return known


def _check_ids(rows: Rows, samples: list[Tokens], known: int | None) -> None:
    """Raise DataError for a token outside the model's vocabulary."""
    for i, tokens in enumerate(samples):
        check_number(int(tokens.ids.max()), rows.place(i), known)


def _scores_of(base: ModelFolder) -> int | None:
    """Return the vocabulary size from the shape of the model's output ``logits``, or None if it is unknown."""
    last = next((v for v in load_model(base.model).graph.outputs if v.name == "logits"), None)
    shape = None if last is None else shape_of(last)
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def step_of(model: Any, prepared: Prepared, recipe: Recipe) -> Step:
    """Build the training step: the loss, and AdamW with warm-up and cosine decay."""
    if recipe.prefers:
        loss = losses.by_name(recipe.loss, **({} if recipe.beta is None else {"beta": recipe.beta}))
        shown_beside = [metrics.reward_accuracy()] if len(loss.targets) == 1 else []
    else:
        loss = losses.cross_entropy(label_smoothing=recipe.label_smoothing, axis=-1, z_loss=recipe.z_loss)
        shown_beside = [] if recipe.is_plain else [metrics.perplexity(axis=-1)]
    return built(model, loss, prepared.train, recipe, shown_beside)


def _watching(
    prompts: Prompts, prepared: Prepared, recipe: Recipe, lines: JsonLines, pace: Pace
) -> tuple[list[TrainingSamples], list[PreferenceMeasures]]:
    """Return the callbacks that answer the prompts of ``sample`` and evaluate preferences, as requested."""

    def write(record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the log reports a failed write itself; or could not reopen
            lines.write(record)

    every, most = recipe.sample_every or SAMPLE_EVERY, recipe.sample_tokens or SAMPLE_TOKENS
    held = prepared.held_out
    samples = [TrainingSamples(prompts, recipe.sample, every, most, write, pace.go_on)]
    measures = [PreferenceMeasures(held, recipe, write)] if isinstance(held, PairBatches) else []
    return samples if recipe.sample else [], measures


def _last_answers(
    samples: Sequence[TrainingSamples], trainer: Trainer, recipe: Recipe, lines: JsonLines
) -> dict[str, str]:
    """Return the prompts of ``sample`` with the model's answers after the run."""
    if not samples:
        return {}
    with contextlib.suppress(OSError):
        lines.go_on()
    try:
        return {text: answer for each in samples
                for text, answer in zip(recipe.sample, each.at_end(trainer), strict=True)}  # fmt: skip
    finally:
        lines.close()


def _digests(prepared: Prepared, base: ModelFolder, recipe: Recipe) -> dict[str, str]:
    """Return the digests of training data, model and teacher, by name."""
    teacher = {} if recipe.teacher is None else {"teacher_model": ModelFolder.of(recipe.teacher).digest}
    return {"data": prepared.digest, "model": base.digest, **teacher}


def _digest(parts: Sequence[Sequence[Tokens]], goods: Sequence[bool]) -> str:
    """Return the SHA-256 of all tokens in ``parts`` (training and validation rows) and of the labels ``goods``."""
    found = hashlib.sha256(
        np.array(goods, bool).tobytes() + np.array([len(part) for part in parts], np.int64).tobytes()
    )
    for tokens in (one for part in parts for one in part):
        found.update(np.int64(len(tokens)).tobytes() + tokens.ids.astype(np.int64).tobytes() + tokens.learnt.tobytes())
    return found.hexdigest()


def shown_examples(
    folder: str | os.PathLike[str],
    data: Any,
    count: int,
    *,
    recipe: Recipe | None = None,
    columns: Mapping[str, str] | None = None,
    template: str | Path | None = None,
) -> list[Sequence[tuple[str, bool]]]:
    """Return the first rows as the model reads them: pieces of text, and whether each is trained on.

    With a preference loss, each chosen answer precedes the rejected one. The layers that would get adapters are logged.
    """
    base, chosen = ModelFolder.of(folder), recipe or Recipe()
    if chosen.task in (SEQ2SEQ, SPEECH):
        from gradgraph.chat.seq2seq import shown_pairs

        return shown_pairs(Request(base, data, Path(), chosen, None, columns or {}, template), count)
    encoder = Encoder(base.path, template)
    log.info("%s", reached(base.decoder(), chosen))
    rows = read(data, columns, _kinds(chosen))
    if not chosen.prefers:
        return [encoder.pieces(tokens) for tokens in encoder(rows.taken(range(min(count, len(rows)))))]
    pairs = pairs_of(rows, encoder, chosen.loss)[:count]
    return [
        encoder.pieces(t) for pair in pairs for t in ((pair.first, pair.second) if chosen.compares else (pair.first,))
    ]
