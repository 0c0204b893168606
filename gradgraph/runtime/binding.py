"""Running a session with the state bound to it: nothing is copied or allocated per run that need not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort

from gradgraph.runtime.session import explained, explanation, to_ortvalue
from gradgraph.runtime.state import State

Feed: TypeAlias = np.ndarray[Any, Any] | ort.OrtValue


class BoundSession:
    """A session whose state inputs, and for training its state outputs, are bound in advance: once for each of the
    two sets that the state alternates between.

    Args:
        session: the model; inputs that are state tensors are taken from ``state``.
        state: the tensors, shared with the other sessions of a trainer.
        scalars: floating outputs of one element, read back after every run.
        next_of: state tensor → output that holds its next value (training), empty otherwise.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        state: State,
        scalars: Sequence[str] = (),
        next_of: Mapping[str, str] | None = None,
    ) -> None:
        self.session = session
        self.inputs = {i.name for i in session.get_inputs()}
        self._state = state
        self._next_of = dict(next_of or {})
        types = {o.name: o for o in session.get_outputs()}
        self._scalars = {name: _result_buffer(types[name]) for name in scalars}
        self._bindings = [self._bound(side) for side in (0, 1)]
        # onnxruntime does not own the memory of a batch: it stays referenced here as long as it is bound
        self._wrapped: dict[str, tuple[Feed, ort.OrtValue]] = {}
        self._fed: tuple[dict[str, ort.OrtValue], ...] = ({}, {})

    def run(self, feeds: Mapping[str, Feed], options: ort.RunOptions | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Run once and return the scalars; a training run makes its results the current state.

        Raises:
            ModelError: onnxruntime failed; the current state is what it was.
            TerminatedError: ``options.terminate`` was set meanwhile; likewise.
        """
        binding = self._feed(feeds)
        try:
            self.session.run_with_iobinding(binding, options)
        except Exception as error:
            raise explanation(error, "running the step failed") from error
        if self._next_of:
            self._state.swap()
        return {name: array.reshape(()).copy() for name, array in self._scalars.items()}

    def compute(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Run once for ``outputs``, whatever their shapes turn out to be.

        Raises:
            ModelError: onnxruntime failed.
        """
        binding = self._feed(feeds)
        binding.clear_binding_outputs()
        for name in outputs:
            binding.bind_output(name, "cpu")
        with explained("running the model failed"):
            self.session.run_with_iobinding(binding, None)
        # copies: a view of onnxruntime's memory would change with the next run
        return {name: np.array(value.numpy()) for name, value in zip(outputs, binding.get_outputs(), strict=True)}

    def _bound(self, side: int) -> ort.IOBinding:
        binding = self.session.io_binding()
        for name, value in self._state.values(side).items():
            if name in self.inputs:
                binding.bind_ortvalue_input(name, value)
        for name, value in self._state.values(1 - side).items():
            if name in self._next_of:
                binding.bind_ortvalue_output(self._next_of[name], value)
        for name, array in self._scalars.items():
            binding.bind_ortvalue_output(name, to_ortvalue(array))
        return binding

    def _feed(self, feeds: Mapping[str, Feed]) -> ort.IOBinding:
        """Bind a batch. What is bound already, the same memory as last time, costs nothing; a device has copied it
        at binding, so there the contents may be old and it is bound again.
        """
        side = self._state.side
        binding, fed = self._bindings[side], self._fed[side]
        for name, feed in feeds.items():
            value = self._wrap(name, feed)
            if fed.get(name) is not value or not self._state.on_cpu:
                binding.bind_ortvalue_input(name, value)
                fed[name] = value
        return binding

    def _wrap(self, name: str, feed: Feed) -> ort.OrtValue:
        if isinstance(feed, ort.OrtValue):
            return feed
        known = self._wrapped.get(name)
        if known is not None and known[0] is feed and known[1].shape() == list(feed.shape):
            return known[1]
        value = to_ortvalue(feed)
        self._wrapped[name] = feed, value
        return value


_FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


def _result_buffer(output: Any) -> np.ndarray[Any, Any]:
    """Memory for a loss or metric: one element, of the shape that the model declares."""
    shape = [d if isinstance(d, int) else 1 for d in output.shape or ()]
    return np.zeros(shape, _FLOATS.get(output.type, np.float32))
