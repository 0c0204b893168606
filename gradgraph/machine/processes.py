"""Run subprocesses that never load code from the working folder.

A folder that a user received with a model may also contain a ``numpy.py`` or a ``c++``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO, TypeAlias

_CLOSED = 0o077  # umask: this user, and nobody else, can access files that programs write

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h

Process: TypeAlias = subprocess.Popen[str]

# sets the search path for modules to the one that the command passes
_ROOT = Path(__file__).absolute().parents[2]
_PATHS = "import os, sys\nsys.path[:] = sys.argv.pop(1).split(os.pathsep)\n"


def program(name: str) -> str | None:
    """Return the path of an executable program, or None if it is not found.

    A bare name is searched for in the PATH's absolute folders only.
    """
    if os.path.dirname(name):  # noqa: PTH120 - as it was given, "./c++" too
        found = shutil.which(name)
        return found and os.path.abspath(found)  # noqa: PTH100 - links are not resolved: compilers look at their own name
    for folder in os.get_exec_path():
        found = shutil.which(os.path.join(folder, name)) if os.path.isabs(folder) else None  # noqa: PTH117, PTH118
        if found:
            return found
    return None


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Call ``subprocess.run`` with captured output, in a new empty folder.

    Args:
        command: the path of a program, as returned by ``program``, and its arguments; files by absolute paths.

    Raises:
        OSError: if the folder cannot be created, or the program does not start.
        subprocess.SubprocessError: as for ``subprocess.run``.
    """
    with tempfile.TemporaryDirectory(prefix="gradgraph-") as folder:
        Path(folder).chmod(0o700)  # regardless of the umask
        if os.name != "nt":
            options["umask"] = _CLOSED
        return subprocess.run(command, cwd=folder, capture_output=True, **options)


def run_python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run Python ``code`` by :func:`run`; it finds the modules of this process, but none in the working folder."""
    return run(python_command(code, *arguments), **options)


def python_command(code: str, *arguments: str) -> list[str]:
    """Return a command that runs Python ``code`` with the modules of this process, but none from the working folder.

    The folder that contains this package stays, since an editable installation may be used from its own clone.
    """
    known = [p for p in sys.path if os.path.isabs(p)]  # noqa: PTH117
    paths = [p for p in known if Path(p) == _ROOT or not _is_here(p)]
    return [sys.executable, "-I", "-c", _PATHS + code, os.pathsep.join(paths), *arguments]


def start_python(code: str, *arguments: str, **options: Any) -> Process:
    """Start a long-running process by :func:`python_command`, with text pipes for stdin and stdout; drop stderr."""
    pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        python_command(code, *arguments), stdin=pipe, stdout=pipe, stderr=quiet, text=True, **options
    )


def in_foreground(command: list[str], shows: Callable[[str], bool], **environment: str) -> int:
    """Run a command in the working folder, with these variables set; print its output and return its exit code.

    Ctrl-C and SIGTERM are left to the command.

    Args:
        shows: returns whether to print a line of output.

    Raises:
        OSError: if the program does not start.
    """
    pipe, known = subprocess.PIPE, {**os.environ, **environment}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", env=known,
                          preexec_fn=_ends_with_this_one()) as process:  # fmt: skip
        streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        readers = [threading.Thread(target=_pass_on, args=(*stream, shows), daemon=True) for stream in streams]
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            for reader in readers:
                reader.start()
            while True:
                try:
                    code = process.wait()
                    for reader in readers:
                        reader.join()
                    return code
                except KeyboardInterrupt:  # the command receives it, too
                    continue
        finally:
            signal.signal(signal.SIGTERM, before)


def _ends_with_this_one() -> Callable[[], object] | None:
    """Return a function that makes the kernel kill a child process when this process ends; None except on Linux."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _pass_on(lines: Iterable[str], stream: TextIO, shows: Callable[[str], bool]) -> None:
    for line in lines:
        if shows(line):
            with contextlib.suppress(OSError):
                stream.write(line)
                stream.flush()


def ends_well(command: list[str], seconds: float) -> bool:
    """Return whether a command, run in the working folder, exits with 0 within ``seconds``.

    Raises:
        OSError: if the program does not start.
    """
    try:
        return subprocess.run(command, capture_output=True, timeout=seconds, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _is_here(folder: str) -> bool:
    try:
        return Path(folder).samefile(".")
    except OSError:  # there is no such folder, or no working folder
        return False
