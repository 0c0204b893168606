"""A worker process of one library, driven over pipes by ``benchmarks.run``: one JSON object per line, each answered.

{"do": "load", ...fields of Job}   ->  {"build": seconds, "versions": "torch 2.13.0"}
{"do": "losses", "steps": 3}       ->  {"losses": [...], "first_step": seconds}
{"do": "time", "steps": 5}         ->  {"seconds": [...]}, one per step, after an untimed step
{"do": "memory"}                   ->  {"peak": bytes, "above_libraries": bytes}
{"do": "profile", "steps": 10}     ->  the result of ``Peer.profile``
any of them                        ->  {"cannot": "why, in one line"}
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.job import CannotError, Job, Peer, now

Reply = dict[str, Any]
REASON = 160  # maximum number of characters of an error message


class Worker:
    """A worker that answers requests about one library."""

    def __init__(self, make: Callable[[Job], Peer]) -> None:
        self.make = make
        self.libraries = status("VmRSS")
        self.forgotten = False
        self.peer: Any = None

    def load(self, **job: Any) -> Reply:
        seconds, self.peer = timed(lambda: self.make(Job(**job)))
        return {"build": seconds, "versions": self.peer.versions}

    def losses(self, steps: int) -> Reply:
        first, loss = timed(self.peer.step)
        self.forgotten = forget_peak()
        return {"losses": [loss, *(self.peer.step() for _ in range(steps - 1))], "first_step": first}

    def time(self, steps: int) -> Reply:
        self.peer.step()
        return {"seconds": [timed(self.peer.step)[0] for _ in range(steps)]}

    def memory(self) -> Reply:
        """Return the peak of training in bytes; empty if unknown, or if the peak of loading could not be reset."""
        peak = status("VmHWM")
        if not self.forgotten or peak is None or self.libraries is None:
            return {}
        return {"peak": peak, "above_libraries": peak - self.libraries}

    def profile(self, steps: int) -> Reply:
        found: Reply = self.peer.profile(steps)
        return found

    def answer(self, request: dict[str, Any]) -> Reply:
        try:
            reply: Reply = getattr(self, request.pop("do"))(**request)
            return reply
        except Exception as problem:  # libraries raise errors of any class
            return {"cannot": one_line(problem)}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = now()
    result = function()
    return now() - start, result


def one_line(problem: BaseException) -> str:
    """Return an error message in one line, without source locations of onnxruntime."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    text = re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : ", "", text)
    text = text if len(text) <= REASON else f"{text[:REASON]}…"
    return text if isinstance(problem, CannotError) else f"{type(problem).__name__}: {text}"


def end_with_parent() -> None:
    """End this process with its parent, which it would not notice while stopped (Linux only)."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def stay_on(cores: int) -> None:
    """Restrict this process to ``cores`` cores, since some libraries start a thread for each visible core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


# --- memory, as the kernel counts it ------------------------------------------------------------------------


def status(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes, or None."""
    path = Path("/proc/self/status")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def forget_peak() -> bool:
    """Release memory left from loading and reset the peak memory; return whether that succeeded."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):  # another C library; no /proc, or one that may not be written
        return False
    return True


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr, not between replies
    end_with_parent()
    stay_on(int(sys.argv[2]))
    make = importlib.import_module(f"benchmarks.peers.{sys.argv[1]}").Peer
    worker = Worker(make)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
