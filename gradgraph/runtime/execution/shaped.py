"""Sessions per batch shape: one specialized for the usual sizes, and a general one for all other batches.

With known sizes, lowering and onnxruntime's planning yield faster sessions, and most batches have the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np

from gradgraph.data.arrays.batch import Feed
from gradgraph.data.record.specs import TensorSpec

Sizes = dict[str, int]


class Releasing(Protocol):
    """The interface of sessions that may keep references to the arrays of the last batch, which ``release`` drops."""

    def release(self) -> None: ...


Session = TypeVar("Session", bound=Releasing)


class ShapedSessions(Generic[Session]):
    """The two sessions of a model, which share its state and are created on first use.

    One is specialized for the usual sizes of the symbolic dimensions; the other accepts batches of any size.

    Args:
        specs: the tensors of a batch; dimensions of the same name have the same size.
        make: creates a session for sizes by dimension; for any sizes if the dict is empty.

    Attributes:
        has_sizes: whether the model has symbolic dimensions, so that batches may differ in size.
        usual: the usual sizes; by default the sizes of the first batch.
    """

    def __init__(self, specs: Iterable[TensorSpec], make: Callable[[Sizes], Session]) -> None:
        self._dims = {dim: (s.name, axis) for s in specs for axis, dim in enumerate(s.shape) if isinstance(dim, str)}
        self.has_sizes = bool(self._dims)
        self._make = make
        self.close_sessions()

    def close_sessions(self) -> None:
        """Close all sessions; the next batch determines the usual sizes."""
        self.usual: Sizes | None = None
        self._made: dict[bool, Session] = {}
        self._last: Session | None = None
        self._last_sizes: list[tuple[str, int, int]] = []  # input, axis and size of that axis in the last batch

    def of(self, feeds: Mapping[str, Feed]) -> Session:
        """Return the session for a checked batch: specialized if it has the usual sizes, otherwise general."""
        if self._last is not None:
            for name, axis, size in self._last_sizes:
                if _size(feeds[name], axis) != size:
                    break
            else:
                return self._last
        sizes = self.sizes(feeds)
        if self.usual is None:
            self.usual = sizes
        self._last = self._session(sizes == self.usual)
        self._last_sizes = [(name, axis, sizes[dim]) for dim, (name, axis) in self._dims.items()]
        return self._last

    def sizes(self, feeds: Mapping[str, Feed]) -> Sizes:
        """Return the sizes of the symbolic dimensions in a checked batch."""
        return {dim: _size(feeds[name], axis) for dim, (name, axis) in self._dims.items()}

    def for_usual(self) -> Session:
        """Return the session for the usual sizes."""
        return self._made.get(True) or self._session(True)

    def release(self) -> None:
        """Drop the sessions' references to batches."""
        for session in self._made.values():
            session.release()

    def expect(self, usual: Sizes) -> None:
        """Set the usual sizes; a session for other usual sizes is closed."""
        if usual != self.usual:
            self._made.pop(True, None)
            self._last = None
        self.usual = usual

    def expect_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set the usual sizes from the shapes of a batch, by input name, unless a shape has too few dimensions."""
        if all(axis < len(shapes[name]) for name, axis in self._dims.values()):
            self.expect({dim: shapes[name][axis] for dim, (name, axis) in self._dims.items()})

    def _session(self, is_usual: bool) -> Session:
        if is_usual not in self._made:
            self._made[is_usual] = self._make(self.usual or {} if is_usual else {})
        return self._made[is_usual]


def _size(feed: Feed, axis: int) -> int:
    return int(feed.shape[axis] if isinstance(feed, np.ndarray) else feed.shape()[axis])
