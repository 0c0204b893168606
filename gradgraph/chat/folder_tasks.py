"""The task of a model, by its inputs and outputs as optimum exports them, and whether fine-tuning supports it."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.chat.chat_recipe import GENERATION, LABELLED, QUESTIONS, SEQ2SEQ, SPEECH
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.question_windows import ENDS, STARTS
from gradgraph.errors import DataError, shown
from gradgraph.files.models import load_model
from gradgraph.graph.shape_inference import shape_of
from gradgraph.surgery.encoder_decoders import STATES
from gradgraph.surgery.language_models import MASK

OF_TEXTS, OF_TOKENS = LABELLED
FEATURES, CHOICES, MASKED, IMAGES = "feature-extraction", "multiple-choice", "fill-mask", "image-to-text"
_FEATURES = frozenset({"last_hidden_state", "pooler_output", "token_embeddings", "sentence_embedding"})
_CACHED = ("past", "present")  # beginnings of names
_MASKED = "ForMaskedLM"  # the end of an architecture's name; such a model has the interface of a decoder


def task_of(base: ModelFolder, model: ir.Model) -> str | None:
    """Return the task that a folder's model was exported for, as optimum names it; None if it is unknown."""
    given = {v.name or "": v for v in model.graph.inputs}
    found = {v.name or "": v for v in model.graph.outputs}
    if "input_ids" not in given:
        return None
    if STATES in given:
        return _of_encoder(load_model(base.encoder()))
    if {STARTS, ENDS} <= found.keys():
        return QUESTIONS
    if "logits" not in found:
        return FEATURES if _FEATURES & found.keys() else None
    scores, tokens = shape_of(found["logits"]), shape_of(given.get("input_ids"))
    if tokens is not None and len(tokens) == 3:
        return CHOICES
    if any(name.startswith(_CACHED) for name in (*given, *found)):  # its texts may be packed: [tokens, vocabulary]
        return GENERATION
    if scores is not None and len(scores) == 2:
        return OF_TEXTS
    return None if scores is None or len(scores) != 3 else _of_each_token(base, scores[-1])


def _of_encoder(encoder: ir.Model) -> str | None:
    """Return the task of an encoder with a decoder: by what the encoder reads, tokens, sounds or images."""
    read = [v for v in encoder.graph.inputs if v.name != MASK and not v.is_initializer()]
    if len(read) != 1 or read[0].dtype is None:
        return None
    if not read[0].dtype.is_floating_point():
        return SEQ2SEQ
    return IMAGES if len(shape_of(read[0]) or ()) == 4 else SPEECH


def _of_each_token(base: ModelFolder, width: object) -> str | None:
    """Return the task of a model without a cache and with ``width`` scores for each token."""
    if base.vocabulary is None or not isinstance(width, int):
        return None
    if width != base.vocabulary:
        return OF_TOKENS if width < base.vocabulary // 2 else None  # some models pad or cut the vocabulary
    named = base.described.get("architectures")
    return MASKED if isinstance(named, list) and named and str(named[0]).endswith(_MASKED) else GENERATION


def check_task(base: ModelFolder, task: str) -> None:
    """Raise DataError if a folder's model was exported for another task than ``task``.

    Raises:
        ModelError: the model cannot be read.
    """
    model = load_model(base.model)
    found = task_of(base, model)
    if found is None and task in (SEQ2SEQ, SPEECH) and all(v.name != STATES for v in model.graph.inputs):
        alone = " (wav2vec 2.0 and other models without a decoder train by gg.build with the loss ctc)"
        raise DataError(
            f"'{shown(base.model)}' is not a decoder that reads the states of an encoder, which {task} requires; "
            f"export an encoder with a decoder by optimum{alone if task == SPEECH else ''}"
        )
    if found is None or found == task:
        return
    known = (GENERATION, SEQ2SEQ, SPEECH, *LABELLED, QUESTIONS)
    if found in known:
        remedy = f"pass the task {found}, or export the model for {task}"
    else:
        remedy = f"export it with optimum for a task that fine-tuning supports: {', '.join(known)}"
    raise DataError(f"the model in '{shown(base.path)}' was exported for {found}, not for {task}; {remedy}")
