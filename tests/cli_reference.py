"""docs/cli.md, made from the commands themselves: ``python tests/cli_reference.py`` writes it anew."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from gradgraph.cli.app import COMMANDS, cli

REFERENCE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# The command line

`gradgraph` goes from a model and data to a trained model; every command is also a Python call. Data go to stdout, talk
goes to stderr, `--json` gives one JSON document on stdout, of a failure too. `--quiet` and `--debug` (the traceback of
an error) stand before or after the command.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure, said in one sentence on stderr; or a finding of `check` |
| 2 | a wrong command line |
| 130 | stopped by Ctrl-C: the step was finished and the checkpoint saved |
| 143 | stopped by SIGTERM, likewise |

With `--json` a failure is a document with four names, beside the sentence on stderr; the exit code stays what it is:

```json
{
  "error": "there is no optimizer 'adamW'; did you mean 'adamw'?",
  "kind": "BuildError",
  "remedy": "did you mean 'adamw'?",
  "findings": []
}
```

`error` is the sentence, `remedy` its part that says what to do (null if it says nothing), and `kind` is the class of
the error in `gradgraph.errors`, or one of `UsageError` (a wrong command line), `OSError`, `MemoryError`, `Interrupted`
(Ctrl-C or SIGTERM) and `InternalError` (a bug; please report it). `findings` holds what is wrong with single nodes and
tensors of a model, each with `subject`, `what`, `expected`, `remedy` and `severity`; `check` finds all of them in one
run. Gradients that are wrong are no failure of `check`: they are its document, with `"ok": false`.
Control and bidirectional characters are escaped in all that is printed.

Nothing is half-written: an output is the old file or the new one. `NO_COLOR` and `TERM=dumb` are respected, and
progress bars appear only on terminals. Shell completion is click's: `_GRADGRAPH_COMPLETE=bash_source gradgraph`.

This page is made from the commands themselves by `python tests/cli_reference.py`.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(name) for name in COMMANDS)])


def _section(name: str) -> str:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    arguments = " ".join(str(p.name).upper() for p in command.params if isinstance(p, click.Argument))
    options = [p for p in command.params if isinstance(p, click.Option)]
    rows = [f"| {_spelling(p)} | {_meaning(p)} |" for p in options if p.name not in ("quiet", "debug")]
    table = ["| option | meaning |", "|---|---|", *rows] if rows else []
    title = f"## gradgraph {name} {arguments}".rstrip()
    return "\n".join([title, "", *_text(command.help or ""), *table, ""])


def _text(text: str) -> list[str]:
    """Help as Markdown: paragraphs stay, indented ones become code."""
    lines = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("\b\n"):
            lines += [paragraph, ""]
            continue
        head, body = [], []
        for line in paragraph[2:].splitlines():
            (body if line.startswith("  ") else head).append(line)
        lines += [*head, *([""] if head else []), "```", *(b[2:] for b in body), "```", ""]
    return lines


def _spelling(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.metavar or _kind(option.type)}"
    return ", ".join(f"`{name}{value}`" for name in option.opts).replace("|", r"\|")


def _kind(kind: click.ParamType) -> str:
    return "|".join(kind.choices) if isinstance(kind, click.Choice) else kind.name.upper().removesuffix(" RANGE")


def _meaning(option: click.Option) -> str:
    notes = [option.help or ""]
    if option.show_default:
        default = option.default if isinstance(option.default, str | int | float) else ", ".join(option.default or ())
        notes.append(f"Default: `{default}`.")
    if option.required:
        notes.append("Required.")
    if option.multiple and "repeatable" not in notes[0]:
        notes.append("Repeatable.")
    return " ".join(notes)


if __name__ == "__main__":
    REFERENCE.write_text(reference(), "utf-8")
