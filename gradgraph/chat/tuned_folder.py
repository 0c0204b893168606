"""The results of fine-tuning: adapters, the merged model with what lies beside it, and a model card."""

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
from gradgraph.chat.chat_batches import ChatBatches
from gradgraph.chat.chat_recipe import FLOAT, MERGE_NONE, REQUANTISED, Recipe
from gradgraph.chat.model_folder import ModelFolder, is_merged
from gradgraph.chat.template import FILE as TEMPLATE
from gradgraph.chat.tokens import NO_TEMPLATE
from gradgraph.errors import BuildError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.models import Source, load_model, save_model
from gradgraph.files.spilled import Folder
from gradgraph.files.untrusted.regular import regular_bytes
from gradgraph.passes.normal.spelling.names import make_names_unique
from gradgraph.runtime.trainer import Trainer
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of
from gradgraph.surgery.merged import merge_to_folder
from gradgraph.surgery.weights import give_weights

log = logging.getLogger("gradgraph.chat")

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
ALONE = "decoder_model.onnx"  # optimum's name of a decoder without a past
_QUANTISED = frozenset({"MatMulNBits", "DequantizeLinear"})
ADAPTER, ORT_ADAPTER, CARD = "adapter", "adapter.onnx_adapter", "README.md"
_SLOW = "; the CPU is slow at its float zero points, and faster at the base with the adapter"
_WORDS = {
    "rows": "rows that it trained on",
    "held_out_rows": "rows held out",
    "tokens": "tokens of the rows that it trained on",
    "learnt_tokens": "of these, tokens that were learnt (the assistant's)",
    "steps": "steps",
    "loss": "loss at the end of training",
    "tokens_a_second": "tokens a second in training",
    "peak_memory_mib": "peak of the memory of the process until the end of training, in MiB",
    "perplexity_before": "perplexity of held-out answers before training",
    "perplexity": "perplexity of held-out answers after training",
    "perplexity_float": "perplexity of held-out answers of the merged model, with changed weights as float",
    "perplexity_requantised": "the same, with changed weights as they were quantised before",
    "perplexity_merged": "perplexity of held-out answers of the merged model, whose weights keep their bits",
    "held_out_loss_before": "loss of held-out rows before training",
    "held_out_loss": "loss of held-out rows after training",
    "reward_margin": "how much larger the reward of better answers of held-out rows is, in the mean",
    "reward_accuracy": "share of held-out rows whose better answer has the larger reward",
    "largest_rounding": "largest ‖stored − W‖/‖W‖ of a weight that was quantised again",
}


@dataclass(frozen=True)
class Told:
    """Data as a model card tells of them.

    Attributes:
        data, validation: what they are called.
        template: the file of another chat template; ``"none"`` where texts stood as they are.
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
    held_out: ChatBatches | None,
    figures: dict[str, Any],
    samples: Mapping[str, str],
    told: Told,
) -> None:
    """Write adapters, the merged model and its card to ``out``; add what is measured of the merged one to ``figures``.

    The chat template that the model has learnt becomes that of the folder.

    Raises:
        BuildError: adapters of this kind cannot be merged or saved.
        OutputError: something cannot be written.
    """
    file = base.model.name
    named, kept = _save_for_peft(out / ADAPTER, base, adapted, state), keeps_bits(adapted)
    surgery.save_adapter(adapted, out / ORT_ADAPTER, state)
    if recipe.merge != MERGE_NONE:
        for form in _forms(adapted, recipe.merge, held_out is not None and not kept):
            try:
                folder = Folder(inside=out)  # and not that of temporary files, which may be memory
                merged = _merged(adapted, state, form, figures, folder)
            except BuildError:
                if form == recipe.merge:
                    raise
                continue  # it would be measured alone
            if held_out is not None and (measured := perplexity_of(merged, held_out, recipe.batch_size)) is not None:
                figures["perplexity_merged" if kept else f"perplexity_{form}"] = measured
            if form == recipe.merge:
                file = _save(merged, base, out)
        base.copy_beside(out)
    if told.template not in (None, NO_TEMPLATE):
        write_atomically(out / TEMPLATE, regular_bytes(told.template))
    write_atomically(out / CARD, card(base, recipe, figures, named, samples, file, told).encode())


def keeps_bits(adapted: ir.Model) -> bool:
    """Whether all adapters merge into quantised weights without loss."""
    return all(KINDS[adapter.kind].offsets is not None for adapter in adapters_of(adapted))


def _forms(adapted: ir.Model, wanted: str, measures: bool) -> list[str]:
    """The forms of the merged model that are made: both where weights are quantised and they are measured."""
    both = measures and any(node.op_type in _QUANTISED for node in adapted.graph)
    return [FLOAT, REQUANTISED] if both else [wanted]


def _merged(
    adapted: ir.Model, state: Mapping[str, Any], form: str, figures: dict[str, Any], folder: Folder
) -> ir.Model:
    """The merged model, whose large new weights lie in ``folder``."""
    rounding: dict[str, float] = {}
    again = form == REQUANTISED and not keeps_bits(adapted)
    merged = merge_to_folder(adapted, state, folder.path, requantise=again, errors=rounding if again else None)
    if rounding:
        figures["largest_rounding"] = max(rounding.values())
    return merged


def _save(merged: ir.Model, base: ModelFolder, out: Path) -> str:
    """Save a model, and return the name of its file.

    One that keeps its past in 16 bits is saved without the sizes that its builder declares, some wrongly.
    """
    path, whole = out / base.model.name, load_model(base.model)
    if is_merged(whole) and not _give_both(whole, merged):
        path = out / ALONE
        log.warning("the weights that have changed are not those of both decoders of '%s'; %s has no past, and "
                    "generates without a cache", shown(base.model.name), ALONE)  # fmt: skip
    elif is_merged(whole):
        merged = whole
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if any(value.dtype in halves for value in merged.graph.inputs):
        surgery.forget_sizes(merged, out=path)
    else:
        save_model(merged, path)
    return path.name


def _give_both(whole: ir.Model, merged: ir.Model) -> bool:
    """Give two decoders in one file what has changed in the one that has learnt; whether both read all of it."""
    shared = set(whole.graph.initializers)
    make_names_unique(whole)  # as they were when one was taken
    before, after = _weights(whole), _weights(merged)
    changed = {name: new for name, new in after.items()
               if (not _alike(new, before[name]) if name in before else _is_learnt(name, new))}  # fmt: skip
    if not all(n in shared and n in before and new.shape == before[n].shape for n, new in changed.items()):
        return False
    give_weights(whole, {name: new.numpy() for name, new in changed.items()})
    return True


def _weights(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """The tensors that a model stores, integers of quantised weights among them."""
    return {name: v.const_value for name, v in model.graph.initializers.items() if v.const_value is not None}


def _is_learnt(name: str, tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor that both decoders do not share may have changed; integers of one alone are sizes and axes."""
    return tensor.dtype in _FLOATS or name.endswith(".merged")


def _alike(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    return one is other or np.array_equal(one.numpy(), other.numpy())


def _save_for_peft(folder: Path, base: ModelFolder, adapted: ir.Model, state: Mapping[str, Any]) -> str:
    """Save adapters by Hugging Face's names of layers, where they have some; say who reads them."""
    try:
        surgery.save_adapter(adapted, folder, state, family=base.family)
    except BuildError:  # layers that no family has: PEFT reads these for this file alone
        surgery.save_adapter(adapted, folder, state)
        own = next((a.kind for a in adapters_of(adapted) if a.kind != "prefix" and KINDS[a.kind].peft is None), None)
        if own is not None:
            return f"for `gg.surgery.load_adapter`: PEFT has no files of the kind {own}"
        return "as PEFT reads it, with the names of the layers of this file"
    return "as PEFT reads it, with the names of Hugging Face's layers"


def perplexity_of(model: Source, data: ChatBatches, batch_size: int = 8) -> float | None:
    """The perplexity of the learnt tokens of texts by a model that generates; None where it has no vector of weights.

    It is measured as in training, by a step that could train one vector: not every file runs without its past.
    """
    tokens_alone = surgery.language_model(load_model(model))
    assert isinstance(tokens_alone, ir.Model)  # as load_model gives one
    vector = _last_vector(tokens_alone)
    if vector is None:
        return None
    step = build(tokens_alone, losses.cross_entropy(axis=-1), optim.adamw(0.0), train=[vector])
    texts = ChatBatches(data.samples, data.length, pad=data.pad)
    return float(np.exp(Trainer(step).evaluate(texts, batch_size)["loss"]))


def _last_vector(model: ir.Model) -> str | None:
    """The name of the vector of weights that is nearest to the scores: little is to be differentiated."""
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
    """The model card, in Markdown with the head that model hubs read."""
    rows = [f"| {_WORDS[name]} | {_number(figures[name])} |" for name in _WORDS if name in figures]
    options = [f"| {o.name} | {_value(getattr(recipe, o.name))} |" for o in fields(recipe)]
    slow = _SLOW if KINDS[recipe.kind].offsets is not None else ""
    merged = [f"- `{file}`: the merged model, with its tokenizer and descriptions{slow}"]
    lines = [
        "---", "library_name: onnxruntime", "tags: [onnx, gradgraph, lora]", "---", "",
        f"# {shown(base.path.resolve().name)}, fine-tuned", "",
        f"Trained by gradgraph from `{shown(base.path.resolve().name)}/{shown(base.model.name)}`.", "",
        "## Files", "",
        *(merged if recipe.merge != MERGE_NONE else []),
        f"- `{ADAPTER}/`: the adapter, {named}",
        f"- `{ORT_ADAPTER}`: the same for `onnxruntime.LoraAdapter`, with the base of `gradgraph surgery --switchable`",
        "- `training/`: the checkpoint, the history and the options, from which `--resume` goes on", "",
        "## Data", "", *of_data(told), "",
        "## Figures", "", "| figure | value |", "|---|---|", *rows, "",
        *_answers(samples),
        "## Recipe", "", "| option | value |", "|---|---|", *options, "",
    ]  # fmt: skip
    return "\n".join(lines)


def of_data(told: Told) -> list[str]:
    """The lines on the data that it has learnt from, and on how to ask it."""
    measured = "a share of them, which it has not learnt" if told.validation is None else told.validation
    asked = "as they stand: `gradgraph generate --template none`" if told.template == NO_TEMPLATE else (
        f"by `{TEMPLATE}`, which was `{shown(Path(told.template).name)}`" if told.template is not None
        else "by the chat template of the folder, where it has one")  # fmt: skip
    return [f"- trained on {told.data}", f"- held out: {measured}", f"- SHA-256 of all tokens: `{told.digest}`",
            f"- prompts: {asked}"]  # fmt: skip


def _answers(samples: Mapping[str, str]) -> list[str]:
    """The prompts of ``sample`` with their answers, as quotations."""
    if not samples:
        return []
    told = [f"> {line}" for prompt, answer in samples.items()
            for line in (f"**{shown(prompt)}**", "", *(shown(line) for line in answer.split("\n")), "")]  # fmt: skip
    return ["## Answers", "", *told, ""]


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{shown(item)}`" for item in value) or "none"
    return "by default" if value is None else f"`{shown(value)}`"
