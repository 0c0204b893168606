"""The output of fine-tuning: adapters, the merged model with its other files, and a model card."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph import losses, optim, surgery
from gradgraph.building.pipeline import build
from gradgraph.chat.adapted_layers import LEAST_PRODUCTS, QUANTISED
from gradgraph.chat.calibration import inputs_on
from gradgraph.chat.chat_batches import ChatBatches
from gradgraph.chat.chat_recipe import FLOAT, MERGE_NONE, REQUANTISED, Recipe
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.template import FILE as TEMPLATE
from gradgraph.chat.tokens import NO_TEMPLATE
from gradgraph.errors import BuildError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.models import Source, load_model, save_model
from gradgraph.files.spilled import Folder
from gradgraph.files.untrusted.regular import regular_bytes
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of
from gradgraph.surgery.layer_inputs import LayerInputs
from gradgraph.surgery.merged import kept_share, merge_to_folder, warn_of_rounding
from gradgraph.surgery.operation import as_model
from gradgraph.surgery.two_decoders import give_both, is_merged

log = logging.getLogger("gradgraph.chat")

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
PRODUCTS = 1 << 30  # LEAST_PRODUCTS without a memory limit, for fewer runs of the model; SmolLM2-135M has 400 MB
ALONE = "decoder_model.onnx"  # optimum's name of a decoder without a cache
ADAPTER, ORT_ADAPTER, CARD = "adapter", "adapter.onnx_adapter", "README.md"
_SLOW = "; its float zero points are slow on CPUs, where the base with the adapter is faster"
_WORDS = {
    "rows": "training rows",
    "held_out_rows": "held-out rows",
    "tokens": "tokens of the training rows",
    "learnt_tokens": "of these, trained tokens (the assistant's)",
    "steps": "steps",
    "loss": "loss at the end of training",
    "tokens_a_second": "tokens per second in training",
    "peak_memory_mib": "peak memory of the process until the end of training, in MiB",
    "perplexity_before": "perplexity of held-out answers before training",
    "perplexity": "perplexity of held-out answers after training",
    "perplexity_float": "perplexity of held-out answers of the merged model, changed weights stored as float",
    "perplexity_requantised": "the same, changed weights requantised",
    "perplexity_merged": "perplexity of held-out answers of the merged model, which keeps the quantised weights",
    "held_out_loss_before": "loss of held-out rows before training",
    "held_out_loss": "loss of held-out rows after training",
    "reward_margin": "mean reward margin of held-out rows",
    "reward_accuracy": "reward accuracy of held-out rows",
    "largest_rounding": "largest ‖stored − W‖/‖W‖ of a requantised weight",
    "drowned_updates": "requantised weights whose update rounding undoes",
    "update_kept": "median share of an update that requantising keeps",
}


@dataclass(frozen=True)
class Told:
    """The description of the training data in a model card.

    Attributes:
        data, validation: the names of training and validation data.
        template: a file with another chat template; ``"none"`` if texts are used verbatim.
        digest: SHA-256 of all tokens.
    """

    data: str
    validation: str | None
    template: str | Path | None
    digest: str


def write_results(
    out: Path,
    base: ModelFolder,
    adapted: ir.Model,
    state: Mapping[str, Any],
    recipe: Recipe,
    train: ChatBatches | None,
    held_out: ChatBatches | None,
    figures: dict[str, Any],
    samples: Mapping[str, str],
    told: Told,
) -> None:
    """Write adapters, the merged model and its card to ``out``; add the merged model's results to ``figures``.

    A ``template`` that was passed for training is written as the folder's chat template.

    Raises:
        BuildError: adapters of this type cannot be merged or saved.
        OutputError: a file cannot be written.
    """
    file = base.model.name
    named, kept = _save_for_peft(out / ADAPTER, base, adapted, state), keeps_bits(adapted)
    surgery.save_adapter(adapted, out / ORT_ADAPTER, state)
    if recipe.merge != MERGE_NONE:
        for form in _forms(adapted, recipe.merge, held_out is not None and not kept):
            folder = Folder(inside=out)  # the system's folder for temporary files may be in memory
            inputs = _inputs(adapted, state, form, train, recipe)
            merged = _merged(adapted, state, inputs, form, figures, folder)
            if held_out is not None and (measured := perplexity_of(merged, held_out, recipe.batch_size)) is not None:
                figures["perplexity_merged" if kept else f"perplexity_{form}"] = measured
            if form == recipe.merge:
                file = save_decoder(merged, base, out)
        base.copy_beside(out)
    if told.template not in (None, NO_TEMPLATE):
        write_atomically(out / TEMPLATE, regular_bytes(told.template))
    write_atomically(out / CARD, card(base, recipe, figures, named, samples, file, told).encode())


def keeps_bits(adapted: ir.Model) -> bool:
    """Whether all adapters can be merged into quantised weights without loss."""
    return all(KINDS[adapter.kind].offsets is not None for adapter in adapters_of(adapted))


def _forms(adapted: ir.Model, wanted: str, measures: bool) -> list[str]:
    """Return the forms of the merged model: a requantised one is compared with the float one if ``measures``."""
    both = measures and wanted == REQUANTISED and any(node.op_type in QUANTISED for node in adapted.graph)
    return [FLOAT, REQUANTISED] if both else [wanted]


def _inputs(
    adapted: ir.Model, state: Mapping[str, Any], form: str, train: ChatBatches | None, recipe: Recipe
) -> LayerInputs | None:
    """Return what the layers read in training data, if weights are requantised."""
    if form != REQUANTISED or keeps_bits(adapted) or train is None:
        return None
    return inputs_on(train, adapted, state, PRODUCTS if recipe.memory is None else LEAST_PRODUCTS)


def _merged(
    adapted: ir.Model,
    state: Mapping[str, Any],
    inputs: LayerInputs | None,
    form: str,
    figures: dict[str, Any],
    folder: Folder,
) -> ir.Model:
    """Return the merged model; its large merged weights are stored in ``folder``.

    A warning is logged if rounding undoes updates.

    Args:
        inputs: what the layers read in training data, for requantising.
    """
    again = form == REQUANTISED and not keeps_bits(adapted)
    merged, roundings = merge_to_folder(adapted, state, folder.path, requantise=again, inputs=inputs)
    if again and roundings:
        figures["largest_rounding"] = max(rounding.error for rounding in roundings.values())
        figures["drowned_updates"] = sum(rounding.drowns for rounding in roundings.values())
        kept = kept_share(roundings.values())
        if kept is not None:
            figures["update_kept"] = kept
    warn_of_rounding(roundings)
    return merged


def save_decoder(merged: ir.Model, base: ModelFolder, out: Path) -> str:
    """Save the merged model under the name of the decoder of ``base`` in ``out``, and return its file name.

    A model with a 16-bit cache is saved without its recorded shapes, since its builder declares some of them wrongly.
    """
    path, whole = out / base.model.name, load_model(base.model)
    if is_merged(whole) and not give_both(whole, merged):
        path = out / ALONE
        log.warning("the changed weights are not shared by both decoders of '%s'; %s has no cache, and generates "
                    "more slowly", shown(base.model.name), ALONE)  # fmt: skip
    elif is_merged(whole):
        merged = whole
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if any(value.dtype in halves for value in merged.graph.inputs):
        surgery.forget_sizes(merged, out=path)
    else:
        save_model(merged, path)
    return path.name


def _save_for_peft(folder: Path, base: ModelFolder, adapted: ir.Model, state: Mapping[str, Any]) -> str:
    """Save adapters under Hugging Face's layer names, if known; return a description of the format for the card."""
    try:
        surgery.save_adapter(adapted, folder, state, family=base.family)
    except BuildError:  # for layers of no known family, PEFT names match this file only
        surgery.save_adapter(adapted, folder, state)
        own = next((a.kind for a in adapters_of(adapted) if a.kind != "prefix" and KINDS[a.kind].peft is None), None)
        if own is not None:
            return f"for `gg.surgery.load_adapter`: PEFT has no format for adapters of type {own}"
        return "in PEFT's format, with the layer names of this file"
    return "in PEFT's format, with Hugging Face's layer names"


def perplexity_of(model: Source, data: ChatBatches, batch_size: int = 8) -> float | None:
    """Return a language model's perplexity over the trained tokens of texts; None if it has no 1-D weights.

    The model, which may require a key-value cache, is converted for training and evaluated by a step. A step needs at
    least one trained weight, so the last 1-D weight is marked as trained; no update is run. Weights are read from
    their file, not copied, since a copy of float weights may exceed the memory of training.
    """
    tokens_alone = as_model(surgery.language_model(load_model(model)))
    vector = _last_vector(tokens_alone)
    if vector is None:
        return None
    step = build(tokens_alone, losses.cross_entropy(axis=-1), optim.adamw(0.0), train=[vector])
    texts = ChatBatches(data.samples, data.length, pad=data.pad)
    trainer = Trainer(step, options=RuntimeOptions(pack_weights=False))
    try:
        return float(np.exp(trainer.evaluate(texts, batch_size)["loss"]))
    finally:
        trainer.close_sessions()


def _last_vector(model: ir.Model) -> str | None:
    """Return the name of the last weight vector before the scores, whose gradient is cheapest; None without vectors."""
    for node in reversed(list(model.graph)):
        for value in node.inputs:
            if value is not None and value.is_initializer() and value.dtype in _FLOATS and len(value.shape or ()) == 1:
                return value.name
    return None


def card(
    base: ModelFolder,
    recipe: Recipe,
    figures: Mapping[str, Any],
    named: str,
    samples: Mapping[str, str],
    file: str,
    told: Told,
) -> str:
    """Return the model card, in Markdown with the metadata that model hubs read."""
    numbers = {n: f"{v:,}" if isinstance(v, int) else f"{v:,.4g}" for n, v in figures.items() if n in _WORDS}
    rows = [f"| {words} | {numbers[name]} |" for name, words in _WORDS.items() if name in numbers]
    options = [f"| {o.name} | {_value(getattr(recipe, o.name))} |" for o in fields(recipe)]
    slow = _SLOW if KINDS[recipe.kind].offsets is not None else ""
    merged = [f"- `{file}`: the merged model, with its tokenizer and configuration{slow}"]
    lines = [
        "---", "library_name: onnxruntime", "tags: [onnx, gradgraph, lora]", "---", "",
        f"# {shown(base.path.resolve().name)}, fine-tuned", "",
        f"Trained by gradgraph from `{shown(base.path.resolve().name)}/{shown(base.model.name)}`.", "",
        "## Files", "",
        *(merged if recipe.merge != MERGE_NONE else []),
        f"- `{ADAPTER}/`: the adapter, {named}",
        f"- `{ORT_ADAPTER}`: the same for `onnxruntime.LoraAdapter`, with the base of `gradgraph surgery --switchable`",
        "- `training/`: checkpoint, history and options, for `--resume`", "",
        "## Data", "", *of_data(told), "",
        "## Figures", "", "| figure | value |", "|---|---|", *rows, "",
        *_answers(samples),
        "## Recipe", "", "| option | value |", "|---|---|", *options, "",
    ]  # fmt: skip
    return "\n".join(lines)


def of_data(told: Told) -> list[str]:
    """Return the model card's lines on the training data and the prompt format."""
    measured = "a fraction of them, not trained on" if told.validation is None else told.validation
    asked = "verbatim: `gradgraph generate --template none`" if told.template == NO_TEMPLATE else (
        f"by `{TEMPLATE}`, which was `{shown(Path(told.template).name)}`" if told.template is not None
        else "by the chat template of the folder, where it has one")  # fmt: skip
    return [f"- trained on {told.data}", f"- validation: {measured}", f"- SHA-256 of all tokens: `{told.digest}`",
            f"- prompts: {asked}"]  # fmt: skip


def _answers(samples: Mapping[str, str]) -> list[str]:
    """Return the prompts of ``sample`` with their answers, as quotations."""
    if not samples:
        return []
    told = [f"> {line}" for prompt, answer in samples.items()
            for line in (f"**{shown(prompt)}**", "", *(shown(line) for line in answer.split("\n")), "")]  # fmt: skip
    return ["## Answers", "", *told, ""]


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{shown(item)}`" for item in value) or "none"
    return "by default" if value is None else f"`{shown(value)}`"
