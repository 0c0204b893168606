"""``gradgraph native``: build the native kernels for this machine, or show their status."""

from __future__ import annotations

from typing import Literal

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command
from gradgraph.errors import shown


@click.command("native", cls=Command)
@click.argument("action", type=click.Choice(["build", "status"]))
@click.option("--compiler", metavar="NAME", help="C++ compiler. Default: $CXX, or the first of c++, g++, clang++.")
@output.json_option
@click.pass_context
def command(ctx: click.Context, action: Literal["build", "status"], compiler: str | None, as_json: bool) -> None:
    """Build the native kernels for training on this CPU, or show their status.

    Examples:
      gradgraph native build
      gradgraph native build --compiler clang++
      gradgraph native status --json

    They are optional. Training on the CPU uses them if they are built, unless --no-native-kernels,
    gg.RuntimeOptions(native_kernels=False) or the environment variable GRADGRAPH_NATIVE_KERNELS=0 disables them. Many
    installations include some; kernels built with this command are stored in the user's cache folder and take
    precedence. They match one processor and one version of onnxruntime and gradgraph: rebuild after a change.
    """
    from gradgraph.backends.ort_native import in_use
    from gradgraph.backends.ort_native import library as kernels

    if action == "status" and compiler is not None:
        raise click.UsageError("--compiler applies to 'build' only; omit it", ctx)
    library = kernels.build(compiler) if action == "build" else kernels.here()
    if library.is_built:
        library.required()  # rejects files that another user may have written
    told = in_use.status()
    if as_json:
        output.emit_json({"built": library.is_built, "library": str(library.path), "told": told})
        return
    output.emit(f"{'built' if library.is_built else 'not built'}: {shown(library.path)}")
    output.emit(told)
