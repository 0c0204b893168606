"""Ctrl-C during training: the first lets the step end, the second stops it at once.

Of several processes, what comes again within a moment is the first one still.

Python runs a signal handler only between two of its own instructions, so nothing happens while onnxruntime computes.
The wake-up descriptor, however, gets a byte from the C handler immediately: a thread waits for it, counts, and at the
second signal tells onnxruntime to stop.
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
    """A request to stop, if there was one: ``signal`` is None, SIGINT or SIGTERM.

    Args:
        moment: seconds after the first signal in which others are the same wish. A launcher hands on what its process
            group got, too, so ranks get one wish two or three times.
    """

    def __init__(self, moment: float = 0.0) -> None:
        self.signal: int | None = None
        self._moment, self._first = moment, math.inf
        self._second = threading.Event()  # wish
        self.run_options = ort.RunOptions()
        self.run_options.log_severity_level = 4
        # the default; onnxruntime's Python looks for this entry at every run, and its absence costs an exception
        self.run_options.add_run_config_entry("gpu_graph_id", "0")

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, _frame: object = None) -> None:
        """Note a signal: Python calls this in the main thread, between two instructions."""
        if not self.requested:
            self.signal = number
        elif self._second.wait(NOTED):  # the watching thread knows when it came
            raise KeyboardInterrupt

    def note(self, data: bytes) -> None:
        """Note when signals come, one byte each: the watching thread calls this also while the main thread is in
        onnxruntime.
        """
        now = time.monotonic()
        for _ in filter(HANDLED.__contains__, data):
            if self._first == math.inf:
                self._first = now
            elif now - self._first >= self._moment:
                self.run_options.terminate = True
                self._second.set()


HANDLED = (signal.SIGINT, signal.SIGTERM)
NOTED = 0.1  # seconds within which the watching thread has looked at a signal
SAME_WISH = 2.0  # seconds within which the processes of a job have got one signal by all ways


class Watcher:
    """The thread that waits at the wake-up descriptor. One for the process: beside onnxruntime's threads, which wait
    for work without sleeping, starting and ending one takes 2 to 5 ms.

    Attributes:
        told: who is told of signals, if anybody.
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
        """The watcher of this process; a new one where it was forked, as the thread is not there."""
        if cls._only is None or not cls._only._thread.is_alive():
            cls._only = cls()
        return cls._only

    def _watch(self) -> None:
        while data := self._reader.recv(16):
            if (told := self.told) is not None:
                told.note(data)

    @classmethod
    def forked(cls) -> None:
        """Take the wake-up descriptor back in a new process, whose signals are its own."""
        if cls._only is not None:
            descriptor = signal.set_wakeup_fd(-1)
            if descriptor not in (-1, cls._only.writer.fileno()):
                signal.set_wakeup_fd(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Watcher.forked)


@contextlib.contextmanager
def interrupts(moment: float = 0.0) -> Iterator[Interrupts]:
    """Handle SIGINT and SIGTERM while the block runs; outside the main thread signals stay as they are.

    Args:
        moment: as for :class:`Interrupts`.
    """
    received = Interrupts(moment)
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    watcher = Watcher.only()
    outer = watcher.told  # of a fit around this one
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
    """The exception to raise once everything is saved: KeyboardInterrupt, or SystemExit(143) for SIGTERM."""
    return SystemExit(128 + number) if number == signal.SIGTERM else KeyboardInterrupt(sentence)


def resume_sentence(checkpoint: str | os.PathLike[str] | None, steps: int) -> str:
    if checkpoint is None:
        return f"stopped after step {steps}; nothing was saved, as fit was given no checkpoint"
    return (
        f"stopped after step {steps} and saved to {os.fspath(checkpoint)}; go on with "
        f"gg.Trainer.resume(step, {os.fspath(checkpoint)!r}) and the same fit call"
    )
