"""The group of commands, and ``run``, which runs a command and handles all errors."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TextIO

import click

from gradgraph.cli import output, rank_output
from gradgraph.cli.command import keep_indented, talk_options
from gradgraph.cli.exit_codes import FAILED, INTERRUPTED, OK, USAGE
from gradgraph.errors import GradgraphError, shown, suggestion
from gradgraph.rivals.keywords import shell_advice

# each command is defined in the module of its name, which is imported on demand; the summaries are repeated here so
# that `gradgraph --help` imports none of them
COMMANDS = {
    "build": "Append a loss, backward pass and optimizer to a model; write a step folder.",
    "train": "Train a model or a step folder on data files.",
    "grad": "Append gradients to a model; write an ONNX model that returns them.",
    "check": "Check a model's gradients against finite differences.",
    "finetune": "Fine-tune a language model on chat data.",
    "surgery": "Edit a model: new head, inputs and outputs, adapters, weights.",
    "runs": "Compare the runs in a folder: results, and the options that differ.",
    "export": "Export the trained model as a plain inference model.",
    "evaluate": "Compute loss and metrics on held-out data, and list mistakes.",
    "predict": "Run a model or a trained step on data files and write its outputs.",
    "explain": "Show which parts of the data a model's predictions depend on, as a page.",
    "generate": "Generate a language model's answers to prompts.",
    "inspect": "Show the contents of a model or a step folder.",
    "tune": "Time operator implementations on this machine and cache the fastest.",
    "native": "Build the native C++ kernels for this CPU, or show their status.",
    "ops": "List the operators and which have gradients.",
    "reduce": "Shrink a model that shows a fault to a minimal one, for a bug report.",
    "demo": "Train a small CNN on handwritten digits, from scratch to the exported model.",
    "env": "Show versions and execution providers, for bug reports.",
}


class LazyGroup(click.Group):
    """A group of commands that are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        load_extensions()
        command: click.Command = importlib.import_module(f"gradgraph.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(f"there is no command '{shown(args[0])}'{suggestion(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Environment variables"):
            formatter.write_text("CXX, GRADGRAPH_CPU, NO_COLOR and others: see the table in docs/reference/cli.md.")


@functools.cache
def load_extensions() -> None:
    """Load the entry points in the group ``gradgraph`` of installed packages, which register extensions."""
    for point in metadata.entry_points(group="gradgraph"):
        try:
            point.load()
        except Exception as error:
            output.say(f"could not load the extension {shown(point.name)} ({shown(point.value)}): {shown(error)}")


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        with contextlib.suppress(metadata.PackageNotFoundError):
            click.echo(f"gradgraph {metadata.version('onnx-gradgraph')}")
            ctx.exit()
        click.echo("gradgraph (not installed: run from a checkout)")
        ctx.exit()


HELP = """Train any ONNX model, anywhere ONNX runs.

Examples:
  gradgraph train model.onnx --data train.npz --epochs 10 --export trained.onnx
  gradgraph check model.onnx
"""

cli = LazyGroup(
    "gradgraph",
    help=keep_indented(HELP),
    params=[
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version,
                     help="Show the version."),
        *talk_options(),
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip


# --- the error boundary --------------------------------------------------------------------------------


def start(arguments: Sequence[str]) -> int:
    """Run a command as the main program of a process, and return its exit code.

    Closed standard streams are opened before :func:`run`, and output is flushed after it.
    """
    # point a closed stream at /dev/null; otherwise the next opened file would get its file descriptor, and libraries
    # would print into that file
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # gets the lowest free descriptor
    code = run(arguments)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            try:
                stream.flush()
            except OSError:
                _forget(stream)
    return code


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors are printed as one sentence on stderr.

    The exit code is 0 for success, 1 for a failure or a finding, 2 for a wrong command line, and 130 after Ctrl-C.
    """
    output.talk.begin(arguments)
    try:
        rank_output.join(arguments)
        with output.notes():
            code = cli.main(args=list(arguments) or ["--help"], prog_name="gradgraph", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has closed it
        _forget(sys.stdout)
        return FAILED
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except SystemExit:  # SIGTERM
        output.emit_failure("stopped by SIGTERM", "Interrupted")
        raise
    except Exception as error:
        if output.talk.debug:
            traceback.print_exc(file=sys.stderr)
        if _came_of_interrupt(error):
            return _interrupted()
        kind, failure = _kind_and_failure(error)
        sentence = rank_output.begin_end(error) + failure.in_shell()
        output.error(sentence)
        output.emit_failure(sentence, kind, failure.shell_remedy, failure.findings)
        return rank_output.end(USAGE if isinstance(error, click.UsageError) else FAILED)
    return code if isinstance(code, int) else OK


def _interrupted() -> int:
    sentence = rank_output.begin_end(KeyboardInterrupt()) + "interrupted"
    output.say(sentence)
    output.emit_failure(sentence, "Interrupted")
    return rank_output.end(INTERRUPTED)


def _came_of_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused the error, such as the ImportError of an interrupted import of a compiled module."""
    seen: set[int] = set()  # guards against cyclic causes
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _kind_and_failure(error: Exception) -> tuple[str, GradgraphError]:
    """Return the kind of failure, for JSON output, and an error whose remedy is worded for the command line."""
    if isinstance(error, GradgraphError):
        return type(error).__name__, error
    if isinstance(error, click.NoSuchOption) and (advice := _where_it_lives(error)):
        return "UsageError", GradgraphError(f"no such option {shown(error.option_name)}; {advice}")
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "gradgraph"
        sentence = " ".join(error.format_message().split()).rstrip(".")
        return "UsageError", GradgraphError(f"{sentence} (see '{where} --help')")
    if isinstance(error, click.ClickException):
        return "UsageError", GradgraphError(error.format_message())
    if isinstance(error, MemoryError):
        remedy = "lower --batch-size, or close other programs"
        return "MemoryError", GradgraphError("this machine has run out of memory", remedy=remedy)
    if isinstance(error, OSError):
        name = f" ('{shown(error.filename)}')" if error.filename else ""
        remedy = "check the path, its permissions and the free space"
        return "OSError", GradgraphError(f"{error.strerror or shown(error)}{name}", remedy=remedy)
    place = "an unknown place"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("gradgraph."):  # keep the innermost one
            place = f"{Path(frame.f_code.co_filename).name}:{line}"
    return "InternalError", GradgraphError(
        f"this is a bug in gradgraph: {type(error).__name__} in {place}: {shown(error)}",
        remedy="please report it with the output of `gradgraph env` and of the same command with --debug",
    )


def _where_it_lives(error: click.NoSuchOption) -> str | None:
    """Return advice for an unknown option that another command or another tool supports; None if there is none."""
    asked, advice = error.option_name, shell_advice(error.option_name)
    if error.ctx is None:
        return advice
    group, here = error.ctx.find_root().command, error.ctx.command
    option = asked if advice is None else advice.removeprefix("that is ").partition(" ")[0]
    if not (option.startswith("--") and isinstance(group, LazyGroup)) or option in _options_of(here):
        return advice
    others = [name for name in ("train", "build", "surgery", *COMMANDS)
              if (found := group.get_command(error.ctx, name)) and option in _options_of(found)]  # fmt: skip
    that = "that is one" if option == asked else advice
    return f"{that} of `gradgraph {others[0]}`" if others else advice


def _options_of(command: click.Command) -> set[str]:
    return {opt for parameter in command.params for opt in parameter.opts}


def _forget(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null, so that Python does not report the error again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
