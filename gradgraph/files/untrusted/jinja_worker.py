"""Untrusted Jinja templates, rendered in a subprocess that is killed if it exceeds its limits.

A template is a program: ``{{ 'x' * 10**9 }}`` exhausts memory, and nested loops may never end. One subprocess renders
all templates; it is started on first use, and again after it was killed. Time is always limited, memory where the
system can limit it for a process (Linux).
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gradgraph.files.untrusted import jinja_program
from gradgraph.files.untrusted.jinja_program import BEGIN, END
from gradgraph.files.untrusted.regular import UnreadableError
from gradgraph.machine.processes import Process, start_python

__all__ = ["BEGIN", "END", "TemplateError", "Templates", "is_installed", "of_this_process"]

SECONDS = 10.0  # for one rendering
MOST = 16 << 20  # characters of output allowed in addition to four times the input
_STARTING = 120.0  # seconds, on a busy machine
_CODE = "import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
_WORDS = {
    "time": f"it takes more than {SECONDS:g} s",
    "memory": f"it takes more than {jinja_program.MEMORY >> 20} MiB of memory",
    "long": f"it writes more than {MOST >> 20} million characters",
    "end": "it ends the process that runs it",
    "recursion": "it calls itself without end",
}


class TemplateError(UnreadableError):
    """Raised if a template cannot be compiled or rendered.

    Attributes:
        kind: ``"source"`` for a syntax error; ``"security"`` for an operation that the sandbox forbids;
            ``"recursion"``, ``"time"``, ``"memory"`` or ``"long"`` for an exceeded limit; ``"end"`` if the template
            ended the subprocess; ``"other"`` if it rejected its input.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(_WORDS.get(kind, reason))
        self.kind = kind


def is_installed() -> bool:
    """Whether the package jinja2 is installed."""
    return importlib.util.find_spec("jinja2") is not None


class Templates:
    """A subprocess that renders templates, one at a time, each in at most ``seconds``."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process: Process | None = None
        self._known = set[str]()
        self._lock = threading.Lock()

    def check(self, source: str, now: datetime | None) -> None:
        """Raise TemplateError if ``source`` does not compile."""
        with self._lock:
            self._compiled(source, now)

    def render(self, source: str, now: datetime | None, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the texts that a template renders, one per set of variables (plain JSON).

        Raises:
            TemplateError: if the template rejects the variables, fails, or exceeds its limits.
        """
        given = json.dumps(variables)
        with self._lock:
            key = self._compiled(source, now)
            request = f'{{"key": "{key}", "most": {MOST + 4 * len(given)}, "variables": {given}}}'
            return self._asked(request, len(variables))

    def _compiled(self, source: str, now: datetime | None) -> str:
        """Compile a template in the subprocess, unless it was compiled before; return its key in the subprocess."""
        request = {"source": source, "now": None if now is None else now.isoformat()}
        key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        if self._process is None or key not in self._known:
            self._asked(json.dumps({**request, "key": key}))
            self._known.add(key)
        return key

    def _asked(self, request: str, count: int = 1) -> list[str]:
        """Send a request and return its answers; kill the subprocess if one is missing, or on interruption."""
        process, texts = self._running(), list[str]()
        is_whole = False
        try:
            for i in range(count):
                answered, is_late = _line(process, "" if i else f"{request}\n", self._seconds)
                if is_late or not answered:
                    raise TemplateError("time" if is_late else "end", "")
                found = json.loads(answered)
                if "fault" in found:
                    is_whole = True
                    raise TemplateError(found["fault"], found["reason"])
                texts.append(found["text"])
            is_whole = True
            return texts
        finally:
            if not is_whole:
                self.close()

    def _running(self) -> Process:
        if self._process is None:
            self._known.clear()
            program = Path(jinja_program.__file__).absolute()
            try:
                self._process = process = start_python(_CODE, str(program), str(self._seconds))
            except (OSError, ValueError, TypeError) as error:
                raise TemplateError("other", f"Python does not start: {error}") from None
            if not _line(process, "", _STARTING)[0]:
                self.close()
                raise TemplateError("other", "the process that runs it does not start")
        return self._process

    def close(self) -> None:
        """End the subprocess; the next rendering starts another one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # unwritten data are lost
                    continue


def _line(process: Process, request: str, seconds: float) -> tuple[str, bool]:
    """Send a request to a process; return the next line of its output, and whether it was killed after ``seconds``."""
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request)
        process.stdin.flush()
        return process.stdout.readline(), late.is_set()
    except BrokenPipeError:
        return "", late.is_set()
    finally:
        timer.cancel()


_ONE = Templates()


def of_this_process() -> Templates:
    """Return the ``Templates`` that this process shares."""
    return _ONE


def _forget() -> None:
    """Replace the ``Templates`` of a forked process, which does not own its parent's subprocess."""
    global _ONE
    parents, _ONE = _ONE._process, Templates()
    if parents is not None:
        parents.returncode = 0  # not a child of this process, so it cannot be waited for


atexit.register(lambda: _ONE.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
