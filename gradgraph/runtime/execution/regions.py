"""The memory that a training session takes for tensors that come and go: one region, of which what is written counts.

onnxruntime's arena takes regions from the system, each twice as large as the last one, and a tensor lies within one. So
what is free at the end of one region and at the beginning of the next serves no large tensor: with the gradient of an
embedding that was 0.1 GB of 1.0. The first region of an arena of ours is twice as large as what is predicted to
live at a time; the system gives memory for a page of it once that is written. It is no larger, since onnxruntime has a
table of 8 bytes for each 256 of a region, and writes it at once: 64 MiB for 2 GiB. A piece that is larger than a tensor
is always divided, which onnxruntime's own arena does from twice the size on: 5 % of the peak of ResNet-50 were such
ends of pieces.

onnxruntime lets sessions have another arena only by one that is registered for the process. So one is registered for
each session, or for several that run in turns, and afterwards the next one, of which nothing is taken yet: they alone
own their arena, and its memory goes with the last of them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime as ort

if TYPE_CHECKING:
    from gradgraph.runtime.execution.session import Memory

try:
    import resource
except ImportError:  # Windows, which counts memory that is not written, too
    resource = None  # type: ignore[assignment]

UNIT = 256  # bytes: sizes in an arena are multiples of it
USUAL = 1 << 20  # bytes of the first region of onnxruntime's own arenas
LARGE = (1 << 31) - UNIT  # the most that an int tells, in units of the arena
WORKSPACES = 64 << 20  # bytes of a region that kernels may take for themselves, and steps that are small
MOST_LEFT = 128 << 20  # bytes that may stay unused at the end of a piece in onnxruntime's own arenas, below its half
DIVIDED = 1  # the same in an arena of ours
LEAST_STATE = 1 << 28  # bytes of state from which one region pays: small steps of convolutions took 44 MB more in one
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = "2"  # what it says where memory counts that is not written
_registering = threading.Lock()  # the registered arena is the process's


def region_for(state: int, alive: int) -> int:
    """Bytes of the first region of an arena for a step with so much state, and tensors that live at a time."""
    return first_region(alive) if state >= LEAST_STATE else USUAL


def most_left(region: int) -> int:
    """Bytes that may stay unused at the end of a piece, in an arena with such a first region."""
    return MOST_LEFT if region == USUAL else DIVIDED


def first_region(alive: int) -> int:
    """Bytes of the first region of an arena of ours: ``USUAL`` where memory counts that is not written.

    Gaps were 0.5 of what lives at a time at most.
    """
    if resource is None or sys.maxsize < 1 << 32 or _counts_all():
        return USUAL
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return USUAL
    return min(LARGE, 2 * alive + WORKSPACES) // UNIT * UNIT


@functools.cache
def _counts_all() -> bool:
    try:
        return _OVERCOMMIT.read_text().strip() == _NEVER
    except OSError:
        return False


@contextlib.contextmanager
def in_one_region(alive: int, settings: ort.SessionOptions) -> Iterator[None]:
    """Let the session that is made in this block have an arena of its own, with one large region first.

    Args:
        alive: bytes of its tensors that live at a time.
    """
    with region_of_several(alive) as memory, memory(settings):
        yield


@contextlib.contextmanager
def region_of_several(alive: int) -> Iterator[Memory]:
    """Let all sessions that are made in this block, each in one of what it gives, have one arena, and no others."""
    with _registering:
        _register(first_region(alive))
        try:
            yield _in_registered
        finally:
            _register(USUAL)


@contextlib.contextmanager
def _in_registered(settings: ort.SessionOptions) -> Iterator[None]:
    settings.add_session_config_entry("session.use_env_allocators", "1")
    yield


def _register(first: int) -> None:
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    sizes = {"initial_chunk_size_bytes": first, "max_dead_bytes_per_chunk": DIVIDED}
    usual = {"max_mem": 0, "arena_extend_strategy": -1}
    ort.create_and_register_allocator(place, ort.OrtArenaCfg(usual | sizes))
