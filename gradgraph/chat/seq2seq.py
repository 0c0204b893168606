"""Fine-tuning of an encoder with a decoder (T5, BART, Marian) with adapters, from a folder to a folder of optimum."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph import losses, surgery
from gradgraph.building.pipeline import build
from gradgraph.chat.adapted_layers import products
from gradgraph.chat.chat_recipe import SEQ2SEQ, Recipe, optimizer_of
from gradgraph.chat.chat_rows import read
from gradgraph.chat.fitted_runs import fitted, last_row
from gradgraph.chat.folder_tasks import check_task
from gradgraph.chat.labelled_tasks import check_unused, longest_of
from gradgraph.chat.measures import check_measures
from gradgraph.chat.model_folder import ModelFolder, check_inside
from gradgraph.chat.run_place import CHECKPOINT, LOG, TRAINING, Finetuned, begin, check_place, create
from gradgraph.chat.text_pairs import TextPairs, truncated
from gradgraph.chat.tuned_folder import save_decoder
from gradgraph.data.shuffling import permutation
from gradgraph.data.texts.tokenizer import NAME, Tokenizer
from gradgraph.errors import DataError, UnknownNameError, shown
from gradgraph.files.models import load_model, save_model
from gradgraph.runtime.loop.logs import JsonLines, peak_memory
from gradgraph.runtime.trainer import Trainer
from gradgraph.surgery.adapter_kinds.adapter_table import adapters_of
from gradgraph.surgery.encoder_decoders import PREFIX, encoder_decoder
from gradgraph.surgery.linear_layers import linear_layers

log = logging.getLogger("gradgraph.chat")

ENCODER = "encoder_model.onnx"
# further files with the same decoder; the first reads keys and values of the encoder's states from its cache
OTHERS = ("decoder_with_past_model.onnx", "decoder_model_merged.onnx")
LONGEST = 512  # default maximum number of tokens of a text, and of an answer
USED = ("task", "rank", "alpha", "target", "kind", "dropout", "epochs", "batch_size", "accumulate", "learning_rate",
        "warmup", "weight_decay", "clip_norm", "length", "long", "label_smoothing", "recompute", "held_out",
        "eval_every", "patience", "max_steps", "checkpoint_every", "seed")  # fmt: skip


@dataclass(frozen=True)
class _Parts:
    """Encoder and decoder, each with its adapters if it has any."""

    encoder: ir.Model
    decoder: ir.Model


def finetune_seq2seq(
    base: ModelFolder,
    data: Any,
    out: Path,
    recipe: Recipe,
    *,
    validation: Any = None,
    columns: Mapping[str, str] | None = None,
    template: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> Finetuned:
    """Train adapters of encoder and decoder on prompts and completions; see ``gradgraph.finetune``.

    Raises:
        ArgumentError: the task does not use one of the recipe's options.
        DataError: the data have other columns, or the folder has no tokenizer or no start token.
        ModelError: the folder has no encoder.
        BuildError: the models cannot be trained in this way.
    """
    check_unused(recipe, USED, template)
    check_task(base, SEQ2SEQ)
    check_place(out, resume)
    base.beside()
    encoder = check_inside(base.path, str(base.model.parent.relative_to(base.path) / ENCODER), "the encoder")
    recipe = recipe.settled
    train, held = _data(base, data, validation, columns, recipe)
    check_measures(held, recipe)
    parts = _adapted(load_model(encoder), base.decoder(), recipe)
    step = build(
        encoder_decoder(parts.encoder, parts.decoder),
        losses.cross_entropy(label_smoothing=recipe.label_smoothing, axis=-1),
        optimizer_of(recipe, recipe.epochs * math.ceil(math.ceil(len(train) / recipe.batch_size) / recipe.accumulate)),
        recompute="sqrt" if recipe.recompute else None,
        accumulate=recipe.accumulate > 1,
    )
    trainer, place = Trainer(step, seed=recipe.seed), out / TRAINING
    digests = {"data": _digest(train, held), "model": base.digest,
               "encoder": ModelFolder(base.path, encoder, base.described).digest}  # fmt: skip
    begin(out, recipe, digests, datetime.now().replace(microsecond=0), resume)
    if resume and (place / CHECKPOINT).is_file():
        trainer.load(place / CHECKPOINT)
    history = fitted(trainer, train, held, recipe, out, JsonLines(place / LOG), progress)
    figures = {"rows": len(train), "tokens": train.tokens, **last_row(history),
               "steps": trainer.progress.steps, **peak_memory()}  # fmt: skip
    state = trainer.state_dict()
    trainer.close_sessions()  # merging can use their memory
    _write(base, encoder, parts, state, recipe, out)
    base.copy_beside(out)
    return Finetuned(out, history, figures, {}, trainer)


def _data(
    base: ModelFolder, data: Any, validation: Any, columns: Mapping[str, str] | None, recipe: Recipe
) -> tuple[TextPairs, TextPairs | None]:
    """Return training and held-out rows as tokens."""
    if not (base.path / NAME).is_file():
        raise DataError(f"the folder '{shown(base.path)}' has no {NAME}; download it, or save it with transformers")
    tokenizer, start = Tokenizer(base.path / NAME, inside=True), base.described.get("decoder_start_token_id")
    if not isinstance(start, int):
        raise DataError(f"config.json in '{shown(base.path)}' has no decoder_start_token_id; add it from the model")
    pairs_of = functools.partial(_pairs, columns=columns, tokenizer=tokenizer, base=base, recipe=recipe, start=start)
    every = pairs_of(data)
    if validation is not None:
        return every, pairs_of(validation)
    order = permutation(recipe.seed, 0, len(every)).tolist()
    count = min(round(len(every) * recipe.held_out), len(every) - 1)
    parts = [sorted(part) for part in (order[count:], order[:count])]
    train, held = (
        TextPairs([every.texts[i] for i in part], [every.answers[i] for i in part], start, tokenizer.pad)
        for part in parts
    )
    return train, held if len(held) else None


def _digest(*parts: TextPairs | None) -> str:
    """Return the SHA-256 of all tokens."""
    rows = [None if part is None else [list(map(list, part[i])) for i in range(len(part))] for part in parts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _pairs(
    data: Any,
    columns: Mapping[str, str] | None,
    tokenizer: Tokenizer,
    start: int,
    base: ModelFolder,
    recipe: Recipe,
) -> TextPairs:
    rows = read(data, columns, ("prompt",))
    if rows.kind != "prompt" or not all(isinstance(row[n], str) for row in rows for n in ("prompt", "completion")):
        raise DataError(f"{rows.where} has no texts in prompt and completion, which {recipe.task} requires; name them")
    longest = longest_of(base, recipe, LONGEST)
    found = [[*tokenizer.spans([row[name] for row in rows], True)] for name in ("prompt", "completion")]
    for i, ((text, _), (answer, _)) in enumerate(zip(*found, strict=True)):
        _check_tokens((text, answer), rows.place(i), base.vocabulary)
    over = [i for i, both in enumerate(zip(*found, strict=True)) if any(len(ids) > longest for ids, _ in both)]
    if over and recipe.long == "error":
        raise DataError(
            f"{rows.place(over[0])} has more than {longest} tokens in a text or its answer",
            remedy="raise length=, or pass long='drop' or 'cut'",
            shell="raise --length, or pass --long drop or cut",
        )
    if over:
        log.warning("%d rows of %s have more than %d tokens; they are %s", len(over), rows.where, longest,
                    "dropped" if recipe.long == "drop" else "truncated")  # fmt: skip
    kept = [i for i in range(len(rows)) if recipe.long != "drop" or i not in set(over)]
    if not kept:
        raise DataError(
            f"no row of {rows.where} remains", remedy="add rows, or raise length=", shell="add rows, or raise --length"
        )
    texts, answers = ([truncated(*part[i], longest) for i in kept] for part in found)
    return TextPairs(texts, answers, start, tokenizer.pad)


def _check_tokens(both: tuple[Sequence[int], ...], place: str, known: int | None) -> None:
    """Raise DataError if a text has no tokens, or a token outside the model's vocabulary of ``known`` tokens."""
    if not all(both):
        raise DataError(f"{place} has a text without tokens; drop the row")
    most = max(map(max, both))
    if known is not None and most >= known:
        raise DataError(
            f"{place} has the token id {most:,}, but the model's vocabulary has {known:,}; remove such special tokens "
            "from the texts"
        )


def _adapted(encoder: ir.Model, decoder: ir.Model, recipe: Recipe) -> _Parts:
    """Return encoder and decoder with adapters on the layers of the recipe; by default all but the head."""
    made = []
    for model, with_head in ((encoder, False), (decoder, True)):
        layers = products(model, with_head)
        if recipe.target:
            wanted = {layer.node for layer in linear_layers(model, recipe.target)[0]}
            layers = [layer for layer in products(model, False) if layer.node in wanted]
        names = [layer.name for layer in layers]
        made.append(surgery.lora(model, names, rank=recipe.rank or 0, alpha=recipe.alpha, dropout=recipe.dropout,
                                 kind=recipe.kind, seed=recipe.seed) if names else model)  # fmt: skip
    if not any(adapters_of(model) for model in made):
        raise UnknownNameError(f"no linear layer of encoder or decoder matches {', '.join(recipe.target)}")
    return _Parts(*made)


def _write(
    base: ModelFolder, encoder: Path, parts: _Parts, state: Mapping[str, Any], recipe: Recipe, out: Path
) -> None:
    """Write all models of the folder with merged adapters, and the adapters."""
    of_decoder = {name.removeprefix(PREFIX): array for name, array in state.items() if name.startswith(PREFIX)}
    of_encoder = {name: array for name, array in state.items() if not name.startswith(PREFIX)}
    target = out / base.model.parent.relative_to(base.path)
    create(target)
    if adapters_of(parts.encoder):
        surgery.save_adapter(parts.encoder, out / "adapter" / "encoder", of_encoder)
    save_model(_merged(parts.encoder, of_encoder), target / ENCODER)
    if adapters_of(parts.decoder):
        surgery.save_adapter(parts.decoder, out / "adapter" / "decoder", of_decoder)
    save_decoder(_merged(parts.decoder, of_decoder), base, target)
    for name in OTHERS:
        if (file := base.model.with_name(name)).is_file() and file != base.model:
            other = ModelFolder(base.path, check_inside(base.path, str(file.relative_to(base.path)), "the decoder"),
                                base.described)  # fmt: skip
            save_decoder(_merged(_alike(other.decoder(), parts.decoder, recipe), of_decoder), other, target)


def _merged(model: ir.Model, state: Mapping[str, np.ndarray[Any, Any]]) -> ir.Model:
    if not adapters_of(model):
        return model
    own = {name: state[name] for adapter in adapters_of(model) for name in adapter.weights}
    found = surgery.merge_adapters(model, own)
    assert isinstance(found, ir.Model)  # like ``model``
    return found


def _alike(other: ir.Model, decoder: ir.Model, recipe: Recipe) -> ir.Model:
    """Return another file of the decoder with the adapters of ``decoder``, on the layers that it has."""
    trained = {adapter.module for adapter in adapters_of(decoder)}
    names = [layer.name for layer in products(other, False) if layer.name in trained]
    if not names:
        return other
    found = surgery.lora(other, names, rank=recipe.rank or 0, alpha=recipe.alpha, kind=recipe.kind)
    assert isinstance(found, ir.Model)  # like ``other``
    return found
