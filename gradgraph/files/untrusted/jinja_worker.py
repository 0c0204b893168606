"""Templates of Jinja that anybody may have written: rendered in a process that is ended when it takes too much.

A template is a program: ``{{ 'x' * 10**9 }}`` takes all memory, and a loop in a loop never ends. One process runs all
templates of this one, is started when it is first asked, and anew after it has been ended. Time is bounded everywhere;
memory is where the system bounds that of a process (Linux).
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
MOST = 16 << 20  # characters that a rendering may have beside four times those that it is given
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
    """A template gives no text.

    Attributes:
        kind: ``"source"`` where it is no template; ``"security"``, ``"recursion"``, ``"time"``, ``"memory"``,
            ``"long"``, ``"end"``; or ``"other"``, where it refuses what it is given.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(_WORDS.get(kind, reason))
        self.kind = kind


def is_installed() -> bool:
    """Whether the package jinja2 is."""
    return importlib.util.find_spec("jinja2") is not None


class Templates:
    """A process that renders templates, one at a time.

    Args:
        seconds: for one rendering.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process: Process | None = None
        self._known = set[str]()
        self._lock = threading.Lock()

    def check(self, source: str, now: datetime | None) -> None:
        """Raise TemplateError where a text is no template."""
        with self._lock:
            self._compiled(source, now)

    def render(self, source: str, now: datetime | None, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        """The texts of a template, one for each set of variables, which are plain JSON.

        Raises:
            TemplateError: the template refuses them, fails, or takes too much.
        """
        given = json.dumps(variables)
        with self._lock:
            key = self._compiled(source, now)
            request = f'{{"key": "{key}", "most": {MOST + 4 * len(given)}, "variables": {given}}}'
            return self._asked(request, len(variables))

    def _compiled(self, source: str, now: datetime | None) -> str:
        """The key by which the process knows a template."""
        request = {"source": source, "now": None if now is None else now.isoformat()}
        key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        if self._process is None or key not in self._known:
            self._asked(json.dumps({**request, "key": key}))
            self._known.add(key)
        return key

    def _asked(self, request: str, count: int = 1) -> list[str]:
        """The answers to a request; the process is ended if one of them does not come, or this process is stopped."""
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
        """End the process; the next rendering starts another one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what could not be written is nobody's
                    continue


def _line(process: Process, request: str, seconds: float) -> tuple[str, bool]:
    """The next line that a process writes, after a request, and whether it was ended for want of one."""
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
    """The process that renders the templates of this one."""
    return _ONE


def _forget() -> None:
    """Begin with a process of its own, in one that was forked."""
    global _ONE
    parents, _ONE = _ONE._process, Templates()
    if parents is not None:
        parents.returncode = 0  # it is no child of this one, to wait for


atexit.register(lambda: _ONE.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
