"""``gradgraph generate``: stream the answers of the language model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradgraph.chat.sampling import Sampling
from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.options import options_of

WITH = ("onnxruntime", "genai")


@click.command("generate", cls=Command)
@click.argument("folder", type=PATH)
@click.option("--prompt", "prompts", multiple=True, required=True, metavar="TEXT", help="User prompt; repeatable.")
@click.option("--system", metavar="TEXT", help="System prompt, for models with a chat template.")
@click.option(
    "--adapter", type=PATH, help="A PEFT adapter folder, or an .onnx_adapter for a model with switchable adapters."
)
@click.option(
    "--template", metavar="FILE", help='Chat template to use instead, in Jinja; "none" uses prompts verbatim.'
)
@click.option("--with", "runtime", type=click.Choice(WITH), default=WITH[0], show_default=True,
              help="Runtime; genai: onnxruntime-genai, if installed.")  # fmt: skip
@options_of(Sampling)
@output.json_option
def command(
    folder: Path,
    prompts: tuple[str, ...],
    system: str | None,
    adapter: Path | None,
    template: str | None,
    runtime: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate a language model's answers (a FOLDER written by onnxruntime-genai's builder, optimum or finetune).

    Examples:
      gradgraph generate tuned/ --prompt "Who are you?"
      gradgraph generate llm-int4/ --adapter tuned/adapter --prompt "Who are you?" --temperature 0.7 --seed 1
    """
    from gradgraph.chat.answers import Generator

    model = Generator(folder, adapter=adapter, template=template, runtime=runtime)
    sampling = Sampling().changed(options)
    asked: list[Any] = [
        prompt if system is None else [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        for prompt in prompts
    ]
    if as_json:
        answers = model(asked, sampling)
        output.emit_json([{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)])
        return
    for prompt in asked:
        for piece in model.stream(prompt, sampling):
            click.echo(output.lines_of(piece), nl=False)
        click.echo()
