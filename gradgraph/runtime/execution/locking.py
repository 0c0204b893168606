"""Thread safety of a trainer: calls are serialized by a lock, and conflicting ones are rejected.

A step reads one set of state tensors and writes the other, so of two concurrent steps one would be lost. Every public
method of a trainer therefore holds one lock. ``fit`` holds it during each step; between steps, other threads may read
the state, save, evaluate and predict. Training or replacing the state during a ``fit`` of another thread raises.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gradgraph.errors import BusyError

Call = TypeVar("Call", bound=Callable[..., Any])

HANDOVER = 2e-4  # seconds until a thread that waits for the lock is awake


class Turns:
    """The lock of a trainer.

    Attributes:
        lock: reentrant; held while a trainer computes or its state is read.
        fitting: the thread in which ``fit`` runs, if any.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.fitting: threading.Thread | None = None
        self._waiting: list[None] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock; a running ``fit`` yields it between two steps."""
        self._waiting.append(None)
        try:
            self.lock.acquire()
        finally:
            self._waiting.pop()
        try:
            yield
        finally:
            self.lock.release()

    @contextlib.contextmanager
    def trained(self, what: str, in_callbacks: bool = True) -> Iterator[None]:
        """:meth:`taken` for a method that changes the state.

        Raises:
            BusyError: ``fit`` runs in another thread, or in this one and ``in_callbacks`` is False.
        """
        self.refuse_beside_fit(what)
        with self.taken():
            self.refuse_beside_fit(what)  # a fit may have started in the meantime
            if not in_callbacks and self.fitting is threading.current_thread():
                raise BusyError(  # it would change the current epoch of the fit
                    f"{what} cannot run in a callback of fit, which counts the epochs of this trainer; let the "
                    "callback return True, which ends fit, and call it then (step and load_state_dict can run in a "
                    "callback)"
                )
            yield

    @contextlib.contextmanager
    def of_fit(self) -> Iterator[None]:
        """Mark this thread as running ``fit``, without holding the lock. Raises: as ``trained``."""
        with self.trained("fit", in_callbacks=False):
            self.fitting = threading.current_thread()
        try:
            yield
        finally:
            self.fitting = None

    def refuse_beside_fit(self, what: str) -> None:
        """Raise BusyError if ``fit`` runs in another thread."""
        fitting = self.fitting
        if fitting is not None and fitting is not threading.current_thread():
            raise BusyError(
                f"{what} cannot run while fit trains the same trainer in the thread '{fitting.name}'; wait for its "
                "end, train in a callback of fit, or give each thread a Trainer of its own"
            )

    def give_way(self) -> None:
        """Yield the lock to a waiting thread between two steps; otherwise the fit would reacquire it before that thread
        is awake.
        """
        if self._waiting:
            time.sleep(HANDOVER)


def synchronized(method: Call) -> Call:
    """Decorate a method to hold the lock of ``self.turns`` while it runs."""

    @functools.wraps(method)
    def taken(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.turns.taken():
            return method(self, *arguments, **options)

    return taken  # type: ignore[return-value]
