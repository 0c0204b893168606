"""A fault is looked for in a process of its own: a model may end it, or take for ever."""

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

VALUES = "values"  # beside the faults: what the model computes
_WAITING = 10  # times the processor's time that is given, by the clock: the machine may be busy
_LATE = ("SIGPROF", "SIGKILL")
_MODEL = "model.onnx"
_CODE = "from gradgraph.reduction.watched import answer; answer({})"


class Observer:
    """Says what of a fault is seen in a model.

    Args:
        fault: a name of ``gradgraph.reduction.kinds.FAULTS``, or ``VALUES``.
        seconds: of the processor, after which a model counts as one that takes for ever.
    """

    def __init__(self, fault: str, seconds: float, folder: Path) -> None:
        self.fault, self.seconds = fault, seconds
        self._path = folder / _MODEL
        self._process: Process | None = None

    def __call__(self, model: onnx.ModelProto) -> str | None:
        """Say what is seen: words, the signal that ends the process, or ``None``."""
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
            self._process.stdout.readline()  # it has imported what it needs
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None


@contextmanager
def observer(fault: str, seconds: float) -> Iterator[Observer]:
    """An :class:`Observer` with a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="gradgraph-") as folder:
        found = Observer(fault, seconds, Path(folder))
        try:
            yield found
        finally:
            found.close()


def answer(seconds: float) -> None:
    """The process's own part: a line when it is ready; then it answers a fault and a path a line, by JSON.

    It ends where a look takes more than ``seconds`` of the processor, as far as the system has such a limit.
    """
    import warnings

    from gradgraph.reduction.faults import LOOKS
    from gradgraph.reduction.parts import values_of

    warnings.simplefilter("ignore")
    looks = {**LOOKS, VALUES: values_of}
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    print(file=answers, flush=True)
    for line in sys.stdin:
        fault, _, path = line.rstrip("\n").partition("\t")
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)
        seen = looks[fault](onnx.load(path))
        print(json.dumps(seen), file=answers, flush=True)


class Command:
    """A command of the user's that ends with 0 where the fault shows; ``{}`` stands for the model's path."""

    def __init__(self, words: list[str], seconds: float, folder: Path) -> None:
        if "{}" not in " ".join(words):
            raise DataError(f"the test {shown(words)} has no {{}}, which stands for the path of the model")
        self._words, self._seconds, self._path = words, seconds, folder / _MODEL

    def __call__(self, model: onnx.ModelProto) -> str | None:
        self._path.write_bytes(model.SerializeToString())
        words = [w.replace("{}", str(self._path)) for w in self._words]
        try:
            return "the test ends with 0" if ends_well(words, self._seconds) else None
        except OSError as error:
            raise DataError(f"the test '{shown(words[0])}' does not start: {shown(error.strerror)}") from error
