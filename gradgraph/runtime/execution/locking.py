"""Thread safety of a trainer: a lock serializes calls, and conflicting calls are rejected.

Of two concurrent steps, one would be lost, since a step reads one set of state tensors and writes the other. Every
public method of a trainer therefore holds one lock. ``fit`` holds it during each step; between steps, other threads may
read the state, save, evaluate and predict. Changing the state while ``fit`` runs in another thread raises BusyError.
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

HANDOVER = 2e-4  # seconds that a thread waiting for the lock needs to wake up


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
        """Run a block while holding the lock; a running ``fit`` releases the lock between two steps."""
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
        """Run a block that changes the state, while holding the lock.

        Args:
            what: name of the calling method, for the error message.
            in_callbacks: whether the block may run in a callback of ``fit``.

        Raises:
            BusyError: if ``fit`` runs in another thread, or in this one and ``in_callbacks`` is False.
        """
        self.refuse_beside_fit(what)
        with self.taken():
            self.refuse_beside_fit(what)  # a fit may have started in the meantime
            if not in_callbacks and self.fitting is threading.current_thread():
                raise BusyError(
                    f"{what} cannot run in a callback of fit, since it changes the epoch that fit is in; return True "
                    f"from the callback to end fit, and call {what} afterwards (step and load_state_dict can run in a "
                    "callback)"
                )
            yield

    @contextlib.contextmanager
    def of_fit(self) -> Iterator[None]:
        """Return a context, without the lock, in which this thread runs ``fit``; raise BusyError if one is running."""
        with self.trained("fit", in_callbacks=False):
            self.fitting = threading.current_thread()
        try:
            yield
        finally:
            self.fitting = None

    def refuse_beside_fit(self, what: str) -> None:
        """Raise BusyError if ``fit`` runs in another thread; ``what`` is the name of the calling method."""
        fitting = self.fitting
        if fitting is not None and fitting is not threading.current_thread():
            raise BusyError(
                f"{what} cannot run while fit trains the same trainer in the thread '{fitting.name}'; wait until fit "
                "has ended, train in a callback of fit, or use a separate Trainer in each thread"
            )

    def give_way(self) -> None:
        """Sleep briefly if a thread waits for the lock; otherwise ``fit`` would reacquire it first."""
        if self._waiting:
            time.sleep(HANDOVER)


def synchronized(method: Call) -> Call:
    """Decorate a method so that it holds the lock of ``self.turns`` while it runs."""

    @functools.wraps(method)
    def taken(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.turns.taken():
            return method(self, *arguments, **options)

    return taken  # type: ignore[return-value]
