"""``gradgraph env``: the facts about a machine that a bug report needs."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command
from onnx_gradgraph import other_project

PACKAGES = ("onnx-gradgraph", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "safetensors", "click",
            "rich", "torch", "scikit-learn", "matplotlib")  # fmt: skip


@click.command("env", cls=Command)
@output.json_option
def command(as_json: bool) -> None:
    """Show versions and execution providers, for bug reports.

    Example:
      gradgraph env
    """
    import onnxruntime

    facts = {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        **{name: v for name in PACKAGES if (v := _version(name))},
        "providers": ", ".join(onnxruntime.get_available_providers()),
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
