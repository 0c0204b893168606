"""Fine-tuning of an encoder with a decoder (T5, BART, Whisper) with adapters, from a folder to a folder of optimum."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph import losses, surgery
from gradgraph.chat.adapted_layers import products
from gradgraph.chat.chat_recipe import SEQ2SEQ, SPEECH, Recipe
from gradgraph.chat.measures import check_measures
from gradgraph.chat.model_folder import ENCODER, ModelFolder, check_inside
from gradgraph.chat.recordings import NAMES, finish, read_recordings
from gradgraph.chat.run_place import Finetuned, create
from gradgraph.chat.task_request import Request
from gradgraph.chat.text_pairs import Pairs, digest_of, read_texts
from gradgraph.chat.tuned_folder import save_decoder
from gradgraph.errors import ArgumentError
from gradgraph.files.models import load_model, save_model
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS as ADAPTERS
from gradgraph.surgery.adapter_kinds.adapter_table import adapters_of
from gradgraph.surgery.encoder_decoders import PREFIX, encoder_decoder
from gradgraph.surgery.linear_layers import linear_layers
from gradgraph.surgery.operation import as_model, check_patterns, matched

# further files with the same decoder; the first reads keys and values of the encoder's states from its cache
OTHERS = ("decoder_with_past_model.onnx", "decoder_model_merged.onnx")
USED = ("task", "rank", "alpha", "target", "kind", "dropout", "epochs", "batch_size", "accumulate", "learning_rate",
        "warmup", "weight_decay", "clip_norm", "length", "long", "label_smoothing", "recompute", "held_out",
        "eval_every", "patience", "max_steps", "checkpoint_every", "seed")  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A task of encoders with decoders: its data, and how its rows are read and shown.

    Attributes:
        read: reads data.
        used: options that only this task uses.
        columns: the columns that may be mapped; None for any.
        write: writes changed files of the folder, besides the models.
    """

    read: Callable[[Request, Any], Pairs]
    used: Collection[str] = ()
    columns: Collection[str] | None = None
    write: Callable[[Request], None] = lambda request: None


log = logging.getLogger("gradgraph.chat")

KINDS = {
    SEQ2SEQ: Kind(read_texts),
    SPEECH: Kind(read_recordings, ("language", "translate"), (*NAMES,), finish),
}


def finetune_seq2seq(request: Request) -> Finetuned:
    """Train adapters of encoder and decoder on texts or recordings, and answers; see ``gradgraph.finetune``.

    Raises:
        ArgumentError: the task does not use one of the recipe's options.
        DataError: the data have other columns, or the folder has no tokenizer or no start token.
        ModelError: the folder has no encoder.
        BuildError: the models cannot be trained in this way.
    """
    kind = KINDS[request.recipe.task]
    request.check((*USED, *kind.used), kind.columns)
    base, recipe, out, encoder = request.base, request.recipe.settled, request.out, request.base.encoder()
    train, rest = request.split(functools.partial(kind.read, request), lambda rows, numbers: rows.selected(numbers))
    held = rest if len(rest) else None
    check_measures(held, recipe)
    models = _adapted(load_model(encoder), base.decoder(), recipe)
    digests = {"data": digest_of(train, held), "encoder": ModelFolder(base.path, encoder, base.described).digest}
    loss = losses.cross_entropy(label_smoothing=recipe.label_smoothing, axis=-1)
    found = replace(request, recipe=recipe).trained(encoder_decoder(*models), loss, train, held, digests)
    found.figures |= {"rows": len(train), "tokens": train.tokens}
    state = found.trainer.state_dict()
    found.trainer.close_sessions()  # merging can use their memory
    _write(base, models, state, recipe, out)
    base.copy_beside(out)
    kind.write(request)
    return found


def shown_pairs(request: Request, count: int) -> list[Sequence[tuple[str, bool]]]:
    """Return the first rows: what the models read, then the tokens that are trained on."""
    kind = KINDS[request.recipe.task]
    request.check_options((*USED, *kind.used), kind.columns)
    parts = load_model(request.base.encoder()), request.base.decoder()
    for part, model, names in zip(("encoder", "decoder"), parts, _layers(*parts, request.recipe), strict=True):
        log.info("%d of %d linear layers of the %s get adapters", len(names), len(products(model, False)), part)
    rows, decode = kind.read(request, request.data), request.tokenizer.decode
    return [[(rows.first(i, decode), False), (decode(rows.answers[i]), True)] for i in range(min(count, len(rows)))]


def _layers(encoder: ir.Model, decoder: ir.Model, recipe: Recipe) -> list[list[str]]:
    """Return the names of the layers of encoder and decoder that get adapters.

    Raises:
        UnknownNameError: a target matches no layer of either.
    """
    if not recipe.target:
        return [[layer.name for layer in products(model, model is decoder)] for model in (encoder, decoder)]
    every = [[(layer.names, layer.name) for layer in products(model, False)] for model in (encoder, decoder)]
    both = [*every[0], *every[1]]
    check_patterns(recipe.target, [name for names, _ in both for name in names], "linear layer of encoder or decoder",
                   [name for _, name in both])  # fmt: skip
    return [matched(recipe.target, layers) for layers in every]


def _adapted(encoder: ir.Model, decoder: ir.Model, recipe: Recipe) -> tuple[ir.Model, ir.Model]:
    """Return encoder and decoder with adapters on the layers of the recipe; by default all but the head.

    Raises:
        ArgumentError: the adapters are not those of linear layers.
        UnknownNameError: a target matches no layer.
    """
    if (kind := ADAPTERS[recipe.kind]).layers is not linear_layers:
        raise ArgumentError(
            f"the task {recipe.task} trains adapters of linear layers, but those of kind {recipe.kind} are of "
            f"{kind.what}; choose another kind, such as lora"
        )
    of_encoder, of_decoder = _layers(encoder, decoder, recipe)
    return _with_adapters(encoder, of_encoder, recipe), _with_adapters(decoder, of_decoder, recipe)


def _with_adapters(model: ir.Model, names: list[str], recipe: Recipe) -> ir.Model:
    """Return a model with adapters of the recipe on layers, if any are named."""
    if not names:
        return model
    return as_model(surgery.lora(model, names, rank=recipe.rank or 0, alpha=recipe.alpha, dropout=recipe.dropout,
                                 kind=recipe.kind, seed=recipe.seed))  # fmt: skip


def _write(
    base: ModelFolder, models: tuple[ir.Model, ir.Model], state: Mapping[str, Any], recipe: Recipe, out: Path
) -> None:
    """Write all models of the folder with merged adapters, and the adapters; ``models`` are encoder and decoder."""
    encoder, decoder = models
    of_decoder = {name.removeprefix(PREFIX): array for name, array in state.items() if name.startswith(PREFIX)}
    of_encoder = {name: array for name, array in state.items() if not name.startswith(PREFIX)}
    target = out / base.model.parent.relative_to(base.path)
    create(target)
    for part, model, own in (("encoder", encoder, of_encoder), ("decoder", decoder, of_decoder)):
        if adapters_of(model):
            surgery.save_adapter(model, out / "adapter" / part, own)
    save_model(_merged(encoder, of_encoder), target / ENCODER)
    save_decoder(_merged(decoder, of_decoder), base, target)
    for name in OTHERS:
        if (file := base.model.with_name(name)).is_file() and file != base.model:
            other = ModelFolder(base.path, check_inside(base.path, str(file.relative_to(base.path)), "the decoder"),
                                base.described)  # fmt: skip
            save_decoder(_merged(_alike(other.decoder(), decoder, recipe), of_decoder), other, target)


def _merged(model: ir.Model, state: Mapping[str, np.ndarray[Any, Any]]) -> ir.Model:
    if not adapters_of(model):
        return model
    own = {name: state[name] for adapter in adapters_of(model) for name in adapter.weights}
    return as_model(surgery.merge_adapters(model, own))


def _alike(other: ir.Model, decoder: ir.Model, recipe: Recipe) -> ir.Model:
    """Return another file of the decoder with the adapters of ``decoder``, on the layers that it has."""
    trained = {adapter.module for adapter in adapters_of(decoder)}
    names = [layer.name for layer in products(other, False) if layer.name in trained]
    return _with_adapters(other, names, recipe)
