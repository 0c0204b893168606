"""Checks of models for a fault in a subprocess, because a model may crash the process or never finish."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from gradgraph.errors import DataError, shown
from gradgraph.machine.processes import Process, ends_well, start_python

VALUES = "values"  # not a fault: the subprocess returns the values that the model computes
_WAITING = 10  # wall-clock limit as a multiple of the CPU limit: the machine may be busy
_LATE = ("SIGPROF", "SIGKILL")
_MODEL = "model.onnx"
_CODE = "from gradgraph.reduction.observer import answer; answer({})"


class Observer:
    """A function that checks a model for a fault in a subprocess.

    Args:
        fault: a name of ``gradgraph.reduction.kinds.FAULTS``, or ``VALUES``.
        seconds: the CPU time limit for one model; exceeding it is a fault, too.
        folder: the folder of the file through which the subprocess receives models.
    """

    def __init__(self, fault: str, seconds: float, folder: Path) -> None:
        self.fault, self.seconds = fault, seconds
        self._path = folder / _MODEL
        self._process: Process | None = None

    def __call__(self, model: onnx.ModelProto) -> str | None:
        """Return the symptom in words, including a signal that ended the subprocess; None if there is no fault."""
        self._path.write_bytes(model.SerializeToString())
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_WAITING * self.seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{self.fault}\t{self._path}\n")
            process.stdin.flush()
            answered = process.stdout.readline()
        except BrokenPipeError:
            answered = ""
        finally:
            timer.cancel()
        if answered:
            seen: str | None = json.loads(answered)
            return seen
        code = process.wait()
        self.close()
        ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"it takes more than {self.seconds:g} s" if ending in _LATE else f"the process ends: {ending}"

    def _running(self) -> Process:
        if self._process is None:
            self._process = start_python(_CODE.format(self.seconds))
            assert self._process.stdout is not None
            self._process.stdout.readline()  # imports are done
        return self._process

    def close(self) -> None:
        """End the subprocess; the next check starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None


@contextmanager
def observer(fault: str, seconds: float) -> Iterator[Observer]:
    """Create an :class:`Observer` with a temporary folder for this context."""
    with tempfile.TemporaryDirectory(prefix="gradgraph-") as folder:
        found = Observer(fault, seconds, Path(folder))
        try:
            yield found
        finally:
            found.close()


def answer(seconds: float) -> None:
    """Serve the requests of an :class:`Observer`, as the main function of its subprocess.

    It prints an empty line when ready. Requests are lines on stdin: the fault, a tab, and the path of a model. Each
    response is a line of JSON: the symptom, or null.

    If a check exceeds ``seconds`` of CPU time, the process ends, on systems with such a limit.
    """
    import warnings

    from gradgraph.reduction.faults import LOOKS
    from gradgraph.reduction.submodels import values_of

    warnings.simplefilter("ignore")
    looks = {**LOOKS, VALUES: values_of}
    answers, sys.stdout = sys.stdout, sys.stderr  # output of libraries is not an answer
    print(file=answers, flush=True)
    for line in sys.stdin:
        fault, _, path = line.rstrip("\n").partition("\t")
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)
        seen = looks[fault](onnx.load(path))
        print(json.dumps(seen), file=answers, flush=True)


class Command:
    """A check for a fault by a user's command, which exits with 0 if a model has the fault.

    Args:
        words: the words of the command, in which ``{}`` is replaced by the path of the model.
        seconds: the time limit for one model.
        folder: the folder to which models are written.
    """

    def __init__(self, words: list[str], seconds: float, folder: Path) -> None:
        if "{}" not in " ".join(words):
            raise DataError(f"the test {shown(words)} has no {{}}, the placeholder for the path of the model")
        self._words, self._seconds, self._path = words, seconds, folder / _MODEL

    def __call__(self, model: onnx.ModelProto) -> str | None:
        self._path.write_bytes(model.SerializeToString())
        words = [w.replace("{}", str(self._path)) for w in self._words]
        try:
            return "the test exits with 0" if ends_well(words, self._seconds) else None
        except OSError as error:
            raise DataError(f"the test '{shown(words[0])}' does not start: {shown(error.strerror)}") from error
