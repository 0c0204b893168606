"""Ctrl-C and SIGTERM during training: the first signal stops after the current step, the second terminates the step.

With several ranks, signals in quick succession count as one.

Python runs a signal handler only between two bytecode instructions, not while onnxruntime computes. The C handler,
however, writes a byte to the wake-up descriptor immediately. A thread reads these bytes, and terminates the onnxruntime
run at the second signal.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import onnxruntime as ort


class Interrupts:
    """The signals received during a fit.

    Args:
        moment: seconds after the first signal during which further signals are ignored. A launcher of ranks forwards
            signals that the ranks also receive directly, so each arrives two or three times.

    Attributes:
        signal: the first signal received: SIGINT or SIGTERM; None if there was none.
        run_options: the options of the current onnxruntime run, terminated by the second signal.
    """

    def __init__(self, moment: float = 0.0) -> None:
        self.signal: int | None = None
        self._moment, self._first = moment, math.inf
        self._second = threading.Event()  # set at the second signal
        self.run_options = ort.RunOptions()
        self.run_options.log_severity_level = 4
        # the default value; without this entry, onnxruntime's Python code raises and catches an exception in every run
        self.run_options.add_run_config_entry("gpu_graph_id", "0")

    @property
    def requested(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None

    def handle(self, number: int, _frame: object = None) -> None:
        """Record a signal; Python calls this in the main thread, between two instructions."""
        if not self.requested:
            self.signal = number
        elif self._second.wait(NOTED):  # the watching thread decides whether this is a second signal
            raise KeyboardInterrupt

    def note(self, data: bytes) -> None:
        """Process signals read from the wake-up descriptor: each byte of ``data`` is a signal number.

        The watcher thread calls this even while onnxruntime computes. The second signal terminates the run.
        """
        now = time.monotonic()
        for _ in filter(HANDLED.__contains__, data):
            if self._first == math.inf:
                self._first = now
            elif now - self._first >= self._moment:
                self.run_options.terminate = True
                self._second.set()


HANDLED = (signal.SIGINT, signal.SIGTERM)
NOTED = 0.1  # seconds to wait until the watching thread has processed a signal
SAME_WISH = 2.0  # seconds until all duplicates of a signal have reached the ranks of a job


class Watcher:
    """The thread that reads the wake-up descriptor.

    There is one per process, since starting and joining a thread takes 2 to 5 ms while onnxruntime's threads spin.

    Attributes:
        told: the current receiver of signals; None outside a fit.
    """

    _only: ClassVar[Watcher | None] = None

    def __init__(self) -> None:
        self.told: Interrupts | None = None
        self._reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="gradgraph-interrupts")
        self._thread.start()

    @classmethod
    def only(cls) -> Watcher:
        """Return this process's watcher, created on first use and after a fork, which does not copy threads."""
        if cls._only is None or not cls._only._thread.is_alive():
            cls._only = cls()
        return cls._only

    def _watch(self) -> None:
        while data := self._reader.recv(16):
            if (told := self.told) is not None:
                told.note(data)

    @classmethod
    def forked(cls) -> None:
        """Reset the wake-up descriptor in a forked process, so its signals do not reach the parent."""
        if cls._only is not None:
            descriptor = signal.set_wakeup_fd(-1)
            if descriptor not in (-1, cls._only.writer.fileno()):
                signal.set_wakeup_fd(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Watcher.forked)


@contextlib.contextmanager
def interrupts(moment: float = 0.0) -> Iterator[Interrupts]:
    """Handle SIGINT and SIGTERM within a block, in the main thread only; ``moment`` as for :class:`Interrupts`."""
    received = Interrupts(moment)
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    watcher = Watcher.only()
    outer = watcher.told  # the receiver of an enclosing fit
    previous: list[tuple[signal.Signals, Any]] = [(number, signal.getsignal(number)) for number in HANDLED]
    wakeup = signal.set_wakeup_fd(watcher.writer.fileno(), warn_on_full_buffer=False)
    try:
        watcher.told = received
        for number in HANDLED:
            signal.signal(number, received.handle)
        yield received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous:
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        watcher.told = outer


def exit_for(number: int, sentence: str) -> BaseException:
    """Return the exception to raise after saving: KeyboardInterrupt, or SystemExit(143) for SIGTERM."""
    return SystemExit(128 + number) if number == signal.SIGTERM else KeyboardInterrupt(sentence)


def resume_sentence(checkpoint: str | os.PathLike[str] | None, steps: int) -> str:
    """Return the message about a stopped fit, with the code to resume it."""
    if checkpoint is None:
        return f"stopped after step {steps}; nothing was saved, since fit was called without checkpoint"
    return (
        f"stopped after step {steps} and saved to {os.fspath(checkpoint)}; continue with "
        f"gg.Trainer.resume(step, {os.fspath(checkpoint)!r}) and the same fit call"
    )
