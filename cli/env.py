"""``gradgraph env``: facts about this machine for bug reports."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command
from gradgraph.errors import RuntimeUnavailableError, shown
from onnx_gradgraph import other_project

PACKAGES = ("onnx-gradgraph", "numpy", "onnx", "onnx-ir", "onnx-shape-inference", "onnxruntime", "onnxruntime-gpu",
            "safetensors", "click", "rich", "torch", "scikit-learn", "matplotlib")  # fmt: skip


@click.command("env", cls=Command)
@click.option("--forget-openings", is_flag=True, help="First clear the cache of opened steps.")
@output.json_option
def command(forget_openings: bool, as_json: bool) -> None:
    """Show versions, execution providers, native kernels and the cache of opened steps, for bug reports.

    Examples:
      gradgraph env
      gradgraph env --forget-openings
    """
    import onnxruntime

    from gradgraph.runtime.execution import openings

    if forget_openings:
        openings.forget()
    count, size = openings.kept()
    off = "" if openings.is_on() else ", off (GRADGRAPH_OPENINGS)"

    facts = {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        **{name: v for name in PACKAGES if (v := _version(name))},
        "providers": ", ".join(onnxruntime.get_available_providers()),
        "openings": f"{shown(openings.folder())} ({count} cached, {size / 1e6:.0f} MB{off})",
        "native kernels": _kernels(),
        "needed to run a saved step": "numpy, onnxruntime (docs/how-to/loops.md)",
    }
    if (warning := other_project()) is not None:
        facts["warning"] = warning
    if as_json:
        output.emit_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        output.emit(f"{name:{width}}  {value}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _kernels() -> str:
    """Return a text on whether native kernels are in use, with the reason if they are not."""
    from gradgraph.backends.ort_native import in_use

    try:
        return in_use.status()
    except RuntimeUnavailableError as error:
        return f"not in use: {error.in_shell()}"
