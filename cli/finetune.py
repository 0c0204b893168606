"""``gradgraph finetune``: fine-tune the model in a folder, and write a folder of the same kind.

Language models are trained on chat data, classifiers on labels, extractive models on questions and answers, and speech
models on recordings and transcripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gradgraph.chat.chat_recipe import GENERATION, SEQ2SEQ, SPEECH, Recipe
from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.options import options_of
from gradgraph.errors import shown
from gradgraph.runs.interruption import how_to_resume


def columns_of(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Parse ``prompt=question`` into a dict from the expected column to its name in the data."""
    found = {}
    for text in given:
        name, equals, own = text.partition("=")
        if not (name and equals and own):
            raise click.BadParameter(f"'{shown(text)}' should be NAME=COLUMN, such as prompt=question", ctx, parameter)
        found[name] = own
    return found


@click.command("finetune", cls=Command)
@click.argument("folder", type=PATH)
@click.option(
    "--data", type=PATH, required=True,
    help="Chat data: a .jsonl, .json, .csv, .tsv or .parquet with messages, prompt and completion, text, or chosen "
         "and rejected. For classification, texts and labels. For question answering, question, context and answers. "
         "For speech recognition, audio (paths of WAV files) and text.",
)  # fmt: skip
@click.option("-o", "--out", type=PATH, help="Output folder.")
@click.option("--validation", type=PATH, help="Validation data. Default: a fraction of the rows is held out.")
@click.option("--column", "columns", multiple=True, metavar="NAME=COLUMN", callback=columns_of,
              help="Map an expected column name to one of the data, such as prompt=question; repeatable.")  # fmt: skip
@click.option(
    "--template", metavar="FILE",
    help="Chat template to use instead, in Jinja; \"none\" uses prompt, completion and text verbatim.",
)  # fmt: skip
@click.option(
    "--show",
    type=click.IntRange(1),
    metavar="N",
    help="Print the first N rows with the trained tokens in colour, and which layers get adapters, and exit.",
)
@click.option("--sample-file", type=PATH, metavar="FILE", help="File with more prompts for --sample, one per line.")
@click.option("--resume", is_flag=True, help="Resume the run in the output folder.")
@options_of(Recipe)
@output.json_option
def command(
    folder: Path,
    data: Path,
    out: Path | None,
    validation: Path | None,
    columns: Mapping[str, str],
    template: str | None,
    show: int | None,
    sample_file: Path | None,
    resume: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Fine-tune a language model (a FOLDER written by onnxruntime-genai's builder or optimum) on chat data with
    adapters; or with --task a classifier on texts and labels, or another model on its data.

    Examples:
      gradgraph finetune llm-int4/ --data chat.jsonl --show 3
      gradgraph finetune llm-int4/ --data chat.jsonl --rank 16 -o tuned/
      gradgraph finetune llm-int4/ --data chat.jsonl --sample "Who are you?" --sample-every 20 -o tuned/
      gradgraph finetune llm-int4/ --data preferences.jsonl --loss dpo -o tuned/
      gradgraph finetune llm-int4/ --data faq.csv --column prompt=question --column completion=answer -o tuned/
      gradgraph finetune bert/ --task text-classification --data reviews.csv --column label=stars -o tuned/
      gradgraph finetune bert/ --task question-answering --data squad.jsonl --validation dev.jsonl -o tuned/
      gradgraph finetune whisper/ --task automatic-speech-recognition --data calls.csv --language en -o tuned/
    """
    from gradgraph.chat.finetuning import finetune, shown_examples
    from gradgraph.chat.prompts import prompts_in
    from gradgraph.chat.run_place import CHECKPOINT, TRAINING

    if show is not None and options["task"] not in (GENERATION, SEQ2SEQ, SPEECH):
        raise click.UsageError(f"--show prints chat data, but --task is {options['task']}; omit it")
    if show is not None:
        with output.printed_log("gradgraph.chat"):
            recipe = Recipe().changed(options)
            examples = shown_examples(folder, data, show, recipe=recipe, columns=columns, template=template)
        if as_json:
            output.emit_json([[{"text": text, "learnt": learnt} for text, learnt in pieces] for pieces in examples])
        else:
            _print(examples, ("chosen", "rejected") if recipe.compares else ())
        return
    if out is None:
        raise click.UsageError("no output folder is given; add -o FOLDER, or --show 3 to look at the data")
    if sample_file is not None:
        options["sample"] = (*options["sample"], *prompts_in(sample_file))
    checkpoint, words = out / TRAINING / CHECKPOINT, output.talk.arguments
    with (
        output.printed_log("gradgraph.chat"),
        output.printed_log("gradgraph.runs"),
        how_to_resume(checkpoint, None, words, force=False),
    ):
        found = finetune(
            folder, data, out, recipe=Recipe().changed(options), validation=validation, columns=columns,
            template=template, resume=resume, progress=False if output.talk.quiet or as_json else None,
        )  # fmt: skip
    if as_json:
        output.emit_json({"folder": str(out), **found.figures})
        return
    if "perplexity" in found.figures:
        before, after = (found.figures[name] for name in ("perplexity_before", "perplexity"))
        merged = found.figures.get("perplexity_requantised")
        stored = f", {merged:.4g} requantised" if merged is not None else ""
        output.say(f"perplexity of held-out answers: {before:.4g} before, {after:.4g} after{stored}")
    if "held_out_loss" in found.figures:
        before, after = (found.figures[name] for name in ("held_out_loss_before", "held_out_loss"))
        output.say(f"loss of held-out pairs: {before:.4g} before, {after:.4g} after")
    for name in found.figures:
        if name.startswith("val_"):
            output.say(f"{name}: {found.figures[name]:.4g}")
    pace = found.figures.get("tokens_a_second")
    speed = "" if pace is None else f", {pace:,.0f} tokens a second"
    output.say(f"{found.figures['steps']} steps{speed}; wrote {out}")


def _print(examples: Sequence[Sequence[tuple[str, bool]]], names: Sequence[str]) -> None:
    """Print each example with the trained tokens in green; without colours, between ⟦ and ⟧.

    For preference data, ``names`` are the labels of a row's examples ("chosen", "rejected"); otherwise empty.
    """
    from rich.text import Text

    console = output.console()
    for i, pieces in enumerate(examples):
        count, of_a_row = sum(learnt for _, learnt in pieces), max(len(names), 1)
        label = names[i % of_a_row] if names else f"{count} answer{'s' * (count != 1)}"
        text = Text(f"--- {i // of_a_row + 1}, {label}\n", style="bold")
        for piece, learnt in pieces:
            safe = output.lines_of(piece)
            marked = safe if not learnt or console.color_system else f"⟦{safe}⟧"
            text.append(marked, style="not bold green" if learnt else "not bold dim")
        console.print(text)
