"""The distribution's own name, and the ``gradgraph`` command.

The distribution ``onnx-gradgraph`` has the package ``gradgraph``. The Python index has a distribution ``gradgraph``,
which is another project with the same import name: where both are installed, files of one replace files of the other.
This module lies outside the package, so that the command can say so before it imports anything of it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

_OTHER = "gradgraph"
_AGAIN = "install this one again: pip install --force-reinstall --no-deps PATH (of its clone or wheel)"


def other_project() -> str | None:
    """Return one sentence if the other project called ``gradgraph`` is installed, else None."""
    try:
        found = metadata.distribution(_OTHER)
    except metadata.PackageNotFoundError:
        return None
    if any(entry.name == "gradgraph" for entry in found.entry_points):  # an earlier installation of this one
        return None
    return (
        f"the distribution '{_OTHER}' {found.version} is another project with the same import name, and its files "
        f"replace some of ours; run: pip uninstall {_OTHER}, "
        f"then {_AGAIN}"
    )


def is_ours() -> bool:
    """Whether ``import gradgraph`` finds this package; nothing is imported."""
    spec = importlib.util.find_spec("gradgraph")
    return spec is not None and spec.origin is not None and "_HOMES" in Path(spec.origin).read_text(encoding="utf-8")


def main() -> NoReturn:
    """The entry point of the ``gradgraph`` command."""
    if not is_ours():
        broken = f"the package gradgraph is not whole; {_AGAIN}"
        sys.exit(f"error: {other_project() or broken}")
    from gradgraph.cli import main as command

    command()
