"""A custom onnxruntime arena for the temporary tensors of a training session: one large region, reserved lazily.

onnxruntime's default arena requests regions from the system, each twice as large as the last one, and a tensor must fit
into one region. Large tensors therefore cannot use free space that is split between the end of one region and the
beginning of the next: 0.1 GB of 1.0 GB for a step with the gradient of an embedding. Our arena begins with one region
of twice the predicted peak of live tensors; the system allocates a page of it only when the page is written. The region
is not larger, since onnxruntime immediately writes a table of 8 bytes per 256 bytes of a region: 64 MiB for 2 GiB. Our
arena always splits a free piece that is larger than the tensor. The default arena only splits pieces of at least twice
the size; the unused remainders were 5 % of the peak of ResNet-50.

onnxruntime can only register a custom arena for the whole process. An arena is therefore registered while a session (or
several that run alternately) is created, and then replaced by a fresh one. These sessions are its only owners, and its
memory is freed with the last of them.
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
except ImportError:  # on Windows, where memory that was never written also counts
    resource = None  # type: ignore[assignment]

UNIT = 256  # bytes; sizes in an arena are multiples of UNIT
USUAL = 1 << 20  # bytes of the first region of onnxruntime's own arenas
LARGE = (1 << 31) - UNIT  # the largest int32 that is a multiple of UNIT
WORKSPACES = 64 << 20  # bytes of a region reserved for workspaces of kernels and for small steps
MOST_LEFT = 128 << 20  # maximum unused bytes (and less than half) at the end of a piece in onnxruntime's own arenas
DIVIDED = 1  # the same for our arena
LEAST_STATE = 1 << 28  # bytes: with less state, our arena does not save memory (44 MB more in small CNNs)
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = "2"  # content of that file if the system also counts memory that was never written
_registering = threading.Lock()  # the registered arena belongs to the whole process


def region_for(state: int, alive: int) -> int:
    """Return the size in bytes of the first region of a step's arena; ``USUAL`` for less than ``LEAST_STATE`` of state.

    ``alive`` are the peak bytes of temporary tensors.
    """
    return first_region(alive) if state >= LEAST_STATE else USUAL


def most_left(region: int) -> int:
    """Return the minimum number of unused bytes for which an arena splits a piece; it depends on the first region."""
    return MOST_LEFT if region == USUAL else DIVIDED


def first_region(alive: int) -> int:
    """Return the size in bytes of the first region of our arena: about twice the ``alive`` bytes, at most ``LARGE``.

    Fragmentation was at most 0.5 of the bytes alive, hence the factor 2. The size is ``USUAL``, as in onnxruntime's own
    arena, if the system also counts memory that is never written, or limits address space.
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
    """Run a block whose session has its own arena, with one large region for ``alive`` bytes of temporary tensors."""
    with region_of_several(alive) as memory, memory(settings):
        yield


@contextlib.contextmanager
def region_of_several(alive: int) -> Iterator[Memory]:
    """Yield a context in which to create a session; all sessions created in this block share one arena.

    It begins with one large region for ``alive`` bytes of temporary tensors.
    """
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
