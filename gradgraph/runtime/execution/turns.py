"""Several threads with one trainer: each call has its turn, and what cannot be shared is refused.

A step reads one set of state tensors and writes the other, so two at once would lose one of them. Every public call of
a trainer therefore holds one lock, ``fit`` for each of its steps: in between, other threads may read the state, save,
evaluate and predict. A call that would train beside a ``fit`` of another thread, or replace its state, is refused.
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

HANDOVER = 2e-4  # seconds: a thread that waits for a lock takes so long to wake up


class Turns:
    """The lock of a trainer.

    Attributes:
        lock: held while a trainer computes or its state is read; the thread that holds it may take it again.
        fitting: the thread in which ``fit`` runs, if any.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.fitting: threading.Thread | None = None
        self._waiting: list[None] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock; a ``fit`` gives way between two steps."""
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
        """:meth:`taken` for what changes the state, in callbacks of ``fit`` or not.

        Raises:
            BusyError: another thread fits, or this one and it may not.
        """
        self.refuse_beside_fit(what)
        with self.taken():
            self.refuse_beside_fit(what)  # one may have begun in the meantime
            if not in_callbacks and self.fitting is threading.current_thread():
                raise BusyError(  # it would move the epoch that the fit stands in
                    f"{what} cannot run in a callback of fit, which counts the epochs of this trainer; let the "
                    "callback return True, which ends fit, and call it then (step and load_state_dict can run in a "
                    "callback)"
                )
            yield

    @contextlib.contextmanager
    def of_fit(self) -> Iterator[None]:
        """While the block runs, this thread fits; it takes the lock only for what it does. Raises as ``trained``."""
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
        """Let a thread that waits have its turn, between two steps of a fit. (A lock goes to whoever asks first, and
        the fit would ask again before the other thread is awake.)
        """
        if self._waiting:
            time.sleep(HANDOVER)


def in_turn(method: Call) -> Call:
    """A method that holds the lock of its owner's ``turns`` while it runs."""

    @functools.wraps(method)
    def taken(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.turns.taken():
            return method(self, *arguments, **options)

    return taken  # type: ignore[return-value]
