"""Processes that write a line for each thing they have done, and may hang at any of them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator


def lines_of(process: subprocess.Popen[str], longest_s: float) -> Iterator[str]:
    """What it writes, line by line; it and all that it started end when nobody reads on.

    Args:
        process: the leader of a session of its own, so that what it starts ends with it.
        longest_s: seconds to wait for one line.

    Raises:
        TimeoutError: it wrote nothing for so long.
    """
    written: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, written), daemon=True)
    reader.start()
    try:
        while line := written.get(timeout=longest_s):
            yield line
    except queue.Empty:
        raise TimeoutError(f"not done in {longest_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5)


def _read(process: subprocess.Popen[str], written: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            written.put(line)
    written.put("")
