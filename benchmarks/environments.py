"""Virtual environments under ``.venv-bench`` for libraries with conflicting requirements."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from benchmarks.peer_processes import ROOT
from benchmarks.roster import LESS_EXACT, PEERS, REAL_PEERS

FOLDER = ROOT / ".venv-bench"


class InstallError(Exception):
    """Raised if a library cannot be installed; the message is pip's last line."""


def interpreter(name: str) -> str:
    """Return the Python interpreter for the library ``name``, and create its environment if it is missing.

    Raises:
        InstallError: pip fails, for instance because there is no wheel for this Python.
    """
    needs = {**PEERS, **REAL_PEERS, **LESS_EXACT}[name].needs
    return environment(name, needs) if needs else sys.executable


def environment(name: str, needs: Sequence[str]) -> str:
    """Return the Python interpreter of the environment ``name``, and create it if its packages are not ``needs``.

    Raises:
        InstallError: pip fails.
    """
    place = FOLDER / name
    python, stamp = place / "bin" / "python", place / "installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(needs):
        print(f"installing {name} in {place.relative_to(ROOT)}", file=sys.stderr)
        _run([sys.executable, "-m", "venv", "--clear", str(place)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *needs])
        stamp.write_text("\n".join(needs))
    return str(python)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InstallError(lines[-1] if lines else f"{command[0]} failed")
