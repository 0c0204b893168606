"""``gradgraph native``: build the native kernels for this machine, or say whether they are there."""

from __future__ import annotations

from typing import Literal

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command
from gradgraph.errors import shown


@click.command("native", cls=Command)
@click.argument("action", type=click.Choice(["build", "status"]))
@click.option(
    "--compiler", metavar="NAME", help="The C++ compiler; by default $CXX, or the first of c++, g++, clang++."
)
@output.json_option
@click.pass_context
def command(ctx: click.Context, action: Literal["build", "status"], compiler: str | None, as_json: bool) -> None:
    """Native kernels for training on the CPU: ACTION builds them for this machine, or says whether they are built.

    Examples:
      gradgraph native build
      gradgraph native build --compiler clang++
      gradgraph native status --json

    They are optional: training on the CPU uses them where they are, unless --no-native-kernels,
    gg.RuntimeOptions(native_kernels=False) or the environment variable GRADGRAPH_NATIVE_KERNELS=0 says otherwise. Many
    installs bring some. Those that are built here lie in the user's cache folder, come before those, and fit one
    processor, one onnxruntime and one gradgraph: after a change of any of these, build them again.
    """
    from gradgraph.backends.ort_native import in_use
    from gradgraph.backends.ort_native import library as kernels

    if action == "status" and compiler is not None:
        raise click.UsageError("--compiler belongs to 'build'", ctx)
    library = kernels.build(compiler) if action == "build" else kernels.here()
    if library.is_built:
        library.required()  # refuses what somebody else may have written
    told = in_use.status()
    if as_json:
        output.emit_json({"built": library.is_built, "library": str(library.path), "told": told})
        return
    output.emit(f"{'built' if library.is_built else 'not built'}: {shown(library.path)}")
    output.emit(told)
