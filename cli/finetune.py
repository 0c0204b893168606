"""``gradgraph finetune``: a language model's folder and chat data in, the folder of one that has learnt them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gradgraph.chat.chat_recipe import Recipe
from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.field_options import options_of
from gradgraph.cli.run_ends import how_to_resume
from gradgraph.errors import shown


def columns_of(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """``prompt=question``: a column's name here, and the one that it has."""
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
    help="Chat data: a .jsonl, .json, .csv, .tsv or .parquet with messages, prompt and completion, text, or chosen and "
    "rejected.",
)  # fmt: skip
@click.option("-o", "--out", type=PATH, help="The folder to write.")
@click.option("--validation", type=PATH, help="Data to measure on; by default a share of the rows is held out.")
@click.option("--column", "columns", multiple=True, metavar="NAME=COLUMN", callback=columns_of,
              help="Name of a column of the data, such as prompt=question; repeatable.")  # fmt: skip
@click.option(
    "--template", metavar="FILE",
    help="Another chat template, in Jinja; none takes prompt, completion and text as they stand.",
)  # fmt: skip
@click.option(
    "--show", type=click.IntRange(1), metavar="N", help="Print the first N rows, what is learnt in colour, and stop."
)
@click.option("--sample-file", type=PATH, metavar="FILE", help="More prompts for samples, one a line.")
@click.option("--resume", is_flag=True, help="Go on with the run in the folder.")
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
    """Teach a language model (a FOLDER of onnxruntime-genai's builder or of optimum) by chat data, with adapters.

    Examples:
      gradgraph finetune llm-int4/ --data chat.jsonl --show 3
      gradgraph finetune llm-int4/ --data chat.jsonl --rank 16 -o tuned/
      gradgraph finetune llm-int4/ --data chat.jsonl --sample "Who are you?" --sample-every 20 -o tuned/
      gradgraph finetune llm-int4/ --data preferences.jsonl --loss dpo -o tuned/
      gradgraph finetune llm-int4/ --data faq.csv --column prompt=question --column completion=answer -o tuned/
    """
    from gradgraph.chat.finetuning import CHECKPOINT, TRAINING, finetune, shown_examples
    from gradgraph.chat.prompts import prompts_in

    if show is not None:
        with output.told_by("gradgraph.chat"):
            recipe = Recipe().changed(options)
            examples = shown_examples(folder, data, show, recipe=recipe, columns=columns, template=template)
        if as_json:
            output.emit_json([[{"text": text, "learnt": learnt} for text, learnt in pieces] for pieces in examples])
        else:
            _print(examples, ("chosen", "rejected") if recipe.compares else ())
        return
    if out is None:
        raise click.UsageError("nothing says where to write; give -o FOLDER, or --show 3 to look at the data")
    if sample_file is not None:
        options["sample"] = (*options["sample"], *prompts_in(sample_file))
    with output.told_by("gradgraph.chat"), how_to_resume(out / TRAINING / CHECKPOINT, None, force=False):
        found = finetune(
            folder, data, out, recipe=Recipe().changed(options), validation=validation, columns=columns,
            template=template, resume=resume, progress=False if output.talk.quiet or as_json else None,
        )  # fmt: skip
    if as_json:
        output.emit_json({"folder": str(out), **found.figures})
        return
    if "perplexity" in found.figures:
        before, after = (found.figures[name] for name in ("perplexity_before", "perplexity"))
        output.say(f"perplexity of held-out answers: {before:.4g} before, {after:.4g} after")
    if "held_out_loss" in found.figures:
        before, after = (found.figures[name] for name in ("held_out_loss_before", "held_out_loss"))
        output.say(f"loss of held-out pairs: {before:.4g} before, {after:.4g} after")
    pace = found.figures.get("tokens_a_second")
    told = "" if pace is None else f", {pace:,.0f} tokens a second"
    output.say(f"{found.figures['steps']} steps{told}; wrote {out}")


def _print(examples: Sequence[Sequence[tuple[str, bool]]], names: Sequence[str]) -> None:
    """Each example, with what is learnt in green; without colours between ⟦ and ⟧.

    Args:
        names: of the answers of a row, which are examples of their own; none where a row is one example.
    """
    from rich.text import Text

    console = output.console()
    for i, pieces in enumerate(examples):
        count, of_a_row = sum(learnt for _, learnt in pieces), max(len(names), 1)
        told = names[i % of_a_row] if names else f"{count} answer{'s' * (count != 1)}"
        text = Text(f"--- {i // of_a_row + 1}, {told}\n", style="bold")
        for piece, learnt in pieces:
            safe = output.lines_of(piece)
            marked = safe if not learnt or console.color_system else f"⟦{safe}⟧"
            text.append(marked, style="not bold green" if learnt else "not bold dim")
        console.print(text)
