"""A limit on memory binds what it is put around, and leaves room where other threads run."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("resource", reason="only Linux keeps a limit on memory")

ASKING = """
import sys, threading
from gradgraph.machine.limits import limited_memory
done = threading.Event()
if sys.argv[1] == "several":
    threading.Thread(target=done.wait, daemon=True).start()
try:
    with limited_memory(100_000_000):
        bytearray(int(sys.argv[2]))
    print("fits")
except MemoryError:
    print("refused")
bytearray(600_000_000)
print("lifted")
"""


DEEP = """
import contextlib, json, sys
from gradgraph.machine.limits import limited_memory
deep = "[" * 15_000 + "]" * 15_000
sys.setrecursionlimit(50_000)
held = []
with limited_memory(4_000_000):
    with contextlib.suppress(MemoryError):
        while True:
            held.append(bytearray(65_536))
    del held[-3:]
    with contextlib.suppress(MemoryError):
        json.loads(deep)
print("alive")
"""


@pytest.mark.sweep(0.1)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a limit on memory")
@pytest.mark.parametrize(
    ("threads", "size", "found"),
    [
        ("one", 50_000_000, "fits"),
        ("one", 500_000_000, "refused"),
        ("several", 500_000_000, "fits"),
        ("several", 4_000_000_000, "refused"),
    ],
)
def test_what_fits(threads: str, size: int, found: str) -> None:
    words = [sys.executable, "-c", ASKING, threads, str(size)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [found, "lifted"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a limit on memory")
def test_the_stack_may_grow_where_memory_is_short() -> None:
    """In a limit on address space the process would end by a signal."""
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "alive\n"
