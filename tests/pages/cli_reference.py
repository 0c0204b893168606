"""docs/reference/cli.md, made from the commands themselves: ``python -m tests.pages.cli_reference`` writes it anew."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from gradgraph.cli import recipe_command
from gradgraph.cli.app import COMMANDS, cli
from gradgraph.cli.sections import by_section, key_of

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
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

This page is made from the commands themselves by `python -m tests.pages.cli_reference`.

## Environment variables

| variable | meaning |
|---|---|
| `CXX` | The C++ compiler of `gradgraph native build`; `--compiler` wins. |
| `GRADGRAPH_NATIVE_KERNELS` | `0` trains without native kernels, `1` requires them, where no option says. |
| `GRADGRAPH_CPU` | `x86-64-v2`, `avx2` or `avx512`: hides what this processor has above it from gradgraph's own code. |
| `GRADGRAPH_OPENINGS` | `off`: what opening a step has decided is neither kept in the cache folder nor read there. |
| `XDG_CACHE_HOME` | The user's cache folder (Linux), where native kernels and choices of `tune` lie. |
| `LOCALAPPDATA` | Likewise on Windows. |
| `ORT_DISABLE_TELEMETRY` | `1` unless it is set: onnxruntime sends nothing. gradgraph never does. |
| `NO_COLOR`, `TERM` | No colours where `NO_COLOR` is set; neither colours nor bars where `TERM` is `dumb`. |
| `_GRADGRAPH_COMPLETE` | `bash_source`, `zsh_source` or `fish_source` prints shell completion. |

No variable sets another option: what a run is told stands on its command line or in its recipe.

## Recipes

`gradgraph train recipe.toml` and `gradgraph build recipe.toml` read all options from a file:

```toml
[model]
path = "model.onnx" # or a step folder
freeze = ["backbone.*"]

[data]
train = "train.npz"
validation = "held_out.npz"
batch_size = 64

[loss]
name = "cross_entropy"
options = { label_smoothing = 0.1 }
metrics = ["f1", "top_k(k=3)"]

[optimizer]
name = "adamw"
lr = 1e-4
no_decay = ["norm_and_bias"]
options = { betas = [0.9, 0.95] }

[optimizer.groups."head.*"]
lr = 1e-3

[schedule]
name = "warmup(100, cosine)"

[training]
epochs = 20
patience = 3

[output]
checkpoint = "run.ckpt"
export = "trained.onnx"
```

Every option of the two commands has its key; the tables of the options below name them. One recipe serves both
commands: each leaves out what only the other takes.

- Options on the command line win: `gradgraph train recipe.toml --epochs 5 --optimizer-option eps=1e-6`. Arguments and
  groups are merged by name; with `--optimizer` or `--loss`, those of the recipe's optimizer or loss do not count. A
  flag that a recipe sets is taken back by its opposite: `--no-force`, `--shuffle`.
- Relative paths count from the folder of the recipe, those on the command line from the working folder. `-` reads a
  recipe from stdin; its paths count from the working folder.
- A key or table that does not exist is refused, with the nearest that does.
- `--print-config` prints the whole recipe, defaults and the command line included, with absolute paths, and does
  nothing else: `gradgraph train model.onnx --data train.npz --print-config > recipe.toml` writes a first one.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(name) for name in COMMANDS)])


def _section(name: str) -> str:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    arguments = " ".join(str(p.name).upper() for p in command.params if isinstance(p, click.Argument))
    is_recipe = isinstance(command, recipe_command.RecipeCommand)
    table = _table_with_keys(command) if is_recipe else _table([p for p in command.params if _is_told(p)])
    title = f"## gradgraph {name} {arguments}".rstrip()
    return "\n".join([title, "", *_text(command.help or ""), *table, ""])


def _is_told(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.name not in ("quiet", "debug", "help")


def _table(options: list[click.Parameter]) -> list[str]:
    rows = [f"| {_spelling(p)} | {_meaning(p)} |" for p in options if isinstance(p, click.Option)]
    return ["| option | meaning |", "|---|---|", *rows] if rows else []


def _table_with_keys(command: click.Command) -> list[str]:
    """The options in their sections, with the keys that they are in a recipe."""
    rows = ["| option | in a recipe | meaning |", "|---|---|---|"]
    for section, parameters in by_section(command, click.Context(command)).items():
        for p in parameters:
            if isinstance(p, click.Option) and _is_told(p) and p.expose_value | (p.name == "print_config"):
                rows.append(f"| {_spelling(p)} | {f'`[{section}] {key_of(p)}`' if section else ''} | {_meaning(p)} |")
    return rows


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
    if option.multiple and "repeatable" not in notes[0].lower():
        notes.append("Repeatable.")
    return " ".join(notes)


if __name__ == "__main__":
    REFERENCE.write_text(reference(), "utf-8")
