"""One process that reads mutants under limits: ``mutant_worker.py FOLDER SEED`` answers numbers, or paths, with JSON.

What it cannot say itself, a signal or a hang, its end says: the process that started it knows the number.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS.parent))

import gradgraph  # noqa: E402
from gradgraph.errors import LONGEST_MESSAGE, GradgraphError  # noqa: E402
from tests.mutation.mutants import Mutant, mutant, whole_model  # noqa: E402

SECONDS, SECONDS_PER_BYTE = 10.0, 20e-6  # of the processor: the machine may be busy
MEMORY, MEMORY_PER_BYTE = 500_000_000, 4
_RUNAWAY = 3 << 30  # bytes beyond which nothing is given, so that the machine lives on
_ESCAPES = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "ctypes.dlopen",
    "pickle.find_class",
)


def judge(subject: Mutant, folder: Path) -> dict[str, Any]:
    """What reading it ends in: ``outcome`` is fine, refused, internal, memory, message or escape."""
    path = folder / subject.name
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(subject.content)
    start, memory = time.process_time(), _memory_reset()
    outcome, words = "fine", ""
    with _limited(SECONDS + SECONDS_PER_BYTE * len(subject.content)), _watched(folder) as escapes:
        try:
            subject.use(folder)
        except GradgraphError as error:
            outcome, words = "refused", str(error)
            if len(words) > LONGEST_MESSAGE or "\n" in words or not words.isprintable():
                outcome = "message"
        except Exception as error:
            outcome, words = "internal", f"{type(error).__name__}: {error} {_frames(error)}"[:600]
    seconds, grown = time.process_time() - start, _peak_memory() - memory
    if grown > MEMORY + MEMORY_PER_BYTE * len(subject.content):
        outcome, words = "memory", f"{grown >> 20} MB; {words}"
    if escapes:
        outcome, words = "escape", "; ".join(escapes)
    path.unlink()
    if before is not None:
        path.write_bytes(before)
    return {"kind": subject.kind, "outcome": outcome, "words": words, "seconds": round(seconds, 3)}


def _frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """The process ends by SIGPROF where this takes longer, and says where it was."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


_seen: list[str] | None = None
_allowed: tuple[str, ...] = ()


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[list[str]]:
    """Collect what is opened outside of ``folder`` and of what Python itself lies in, and what is run or connected."""
    global _seen, _allowed
    _allowed = (
        str(folder),
        str(TESTS.parent),
        sys.prefix,
        sys.base_prefix,
        os.path.realpath(sys.prefix),
        "/proc/",
        "/sys/",
    )
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in _ESCAPES:
        _seen.append(f"{event} {arguments!r}"[:200])
    elif event == "open" and isinstance(arguments[0], str | bytes):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith(_allowed):
            _seen.append(f"open {path}")


def _memory_reset() -> int:
    """Bytes in use now; the peak starts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_memory()


def _peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def main() -> None:
    folder, seed = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _RUNAWAY, size + _RUNAWAY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)
    sys.addaudithook(_audit)
    assert gradgraph.__file__
    for line in map(str.strip, sys.stdin):
        result = judge(mutant(seed, int(line), folder) if line.isdigit() else whole_model(Path(line)), folder)
        answers.write(json.dumps({"number": int(line) if line.isdigit() else line, **result}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
