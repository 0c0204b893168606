"""Ctrl-C during training: the first lets the step end, the second stops it at once.

Python runs a signal handler only between two of its own instructions, so nothing happens while onnxruntime computes.
The wake-up descriptor, however, gets a byte from the C handler immediately: a thread waits for it, counts, and at the
second signal tells onnxruntime to stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import onnxruntime as ort


class Interrupts:
    """What has been asked for: ``signal`` is None, SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.run_options = ort.RunOptions()
        self.run_options.log_severity_level = 4
        # the default; onnxruntime's Python looks for this entry at every run, and its absence costs an exception
        self.run_options.add_run_config_entry("gpu_graph_id", "0")

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, _frame: object = None) -> None:
        """Python's handler, in the main thread between two instructions."""
        if self.requested:
            raise KeyboardInterrupt
        self.signal = number

    def watch(self, reader: socket.socket) -> None:
        """The watching thread: one byte per signal, also while the main thread is inside onnxruntime."""
        count = 0
        while data := reader.recv(16):
            count += sum(number in HANDLED for number in data)
            if count > 1:
                self.run_options.terminate = True


HANDLED = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle SIGINT and SIGTERM while the block runs; outside the main thread signals stay as they are."""
    received = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=received.watch, args=(reader,), daemon=True, name="gradgraph-interrupts")
    previous: list[tuple[signal.Signals, Any]] = [(number, signal.getsignal(number)) for number in HANDLED]
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        for number in HANDLED:
            signal.signal(number, received.handle)
        watcher.start()
        yield received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous:
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        writer.close()
        watcher.join()
        reader.close()


def exit_for(number: int, sentence: str) -> BaseException:
    """What to raise once everything is saved: KeyboardInterrupt, or SystemExit(143) for SIGTERM."""
    return SystemExit(128 + number) if number == signal.SIGTERM else KeyboardInterrupt(sentence)


def resume_sentence(checkpoint: str | os.PathLike[str] | None, steps: int) -> str:
    if checkpoint is None:
        return f"stopped after step {steps}; nothing was saved, as fit was given no checkpoint"
    return (
        f"stopped after step {steps} and saved to {os.fspath(checkpoint)}; go on with "
        f"gg.Trainer.resume(step, {os.fspath(checkpoint)!r}) and the same fit call"
    )
