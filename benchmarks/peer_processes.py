"""Benchmarked libraries as processes, driven over pipes, and stopped by a signal between their turns."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.roster import Entry

ROOT = Path(__file__).parent.parent


class Process:
    """A worker process, which runs only during a request, as spinning idle threads would slow the others.

    Args:
        entry: the library.
        python: the interpreter of its environment.
        threads: the number of OpenMP threads, and of cores that it may use.
    """

    def __init__(self, entry: Entry, python: str = sys.executable, threads: int = 2) -> None:
        variables = {**os.environ, **entry.variables, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", entry.module, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=ROOT,
            env=variables,
            start_new_session=True,  # signals also stop and end its child processes
        )

    def ask(self, do: str, limit: float, **request: Any) -> dict[str, Any]:
        """Return the reply, or ``{"cannot": reason}`` if the process dies or takes more than ``limit`` seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"cannot": self._last_words()}
        if not select.select([self.process.stdout], [], [], limit)[0]:
            self.end()
            return {"cannot": f"took more than {limit:g} s to {do}"}
        line = self.process.stdout.readline()
        if not line:
            return {"cannot": self._last_words()}
        self._signal(signal.SIGSTOP)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.errors.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # unread by a dead worker
                pipe.close()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _last_words(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process ended ({how}){': ' + lines[-1] if lines else ''}"
