"""The session for a batch: onnxruntime plans and lowers best with sizes known, and most batches have one size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np

from gradgraph.runtime.data.batch import Feed
from gradgraph.step.manifest import TensorSpec

Sizes = dict[str, int]


class Releasing(Protocol):
    """A session that may keep a batch alive."""

    def release(self) -> None: ...


Session = TypeVar("Session", bound=Releasing)


class ShapedSessions(Generic[Session]):
    """The sessions of one model: one made for the usual sizes of its symbolic dimensions, and a general one for all
    other batches, made when the first of these arrives. Both work on the same state.

    Args:
        specs: what a batch holds; dimensions of the same name have the same size.
        make: a session for the given sizes; for any sizes, if none are given.

    Attributes:
        has_sizes: whether batches may have other sizes than the usual ones.
        usual: the usual sizes; those of the first batch, if no others are expected.
    """

    def __init__(self, specs: Iterable[TensorSpec], make: Callable[[Sizes], Session]) -> None:
        self.usual: Sizes | None = None
        self._dims = {dim: (s.name, axis) for s in specs for axis, dim in enumerate(s.shape) if isinstance(dim, str)}
        self.has_sizes = bool(self._dims)
        self._make = make
        self._made: dict[bool, Session] = {}
        self._last: Session | None = None
        self._last_sizes: list[tuple[str, int, int]] = []  # input, axis, and how long it was

    def of(self, feeds: Mapping[str, Feed]) -> Session:
        """The session for a batch that has been checked."""
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
        """The sizes of the symbolic dimensions in a batch that has been checked."""
        return {dim: _size(feeds[name], axis) for dim, (name, axis) in self._dims.items()}

    def for_usual(self) -> Session:
        """The session for the usual sizes."""
        return self._made.get(True) or self._session(True)

    def release(self) -> None:
        """Let go of all batches."""
        for session in self._made.values():
            session.release()

    def expect(self, usual: Sizes) -> None:
        """Expect batches of these sizes; a session that was made for others is given up."""
        if usual != self.usual:
            self._made.pop(True, None)
            self._last = None
        self.usual = usual

    def expect_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Expect batches of these shapes (of which one that cannot fit the step says nothing)."""
        if all(axis < len(shapes[name]) for name, axis in self._dims.values()):
            self.expect({dim: shapes[name][axis] for dim, (name, axis) in self._dims.items()})

    def _session(self, is_usual: bool) -> Session:
        if is_usual not in self._made:
            self._made[is_usual] = self._make(self.usual or {} if is_usual else {})
        return self._made[is_usual]


def _size(feed: Feed, axis: int) -> int:
    return int(feed.shape[axis] if isinstance(feed, np.ndarray) else feed.shape()[axis])
