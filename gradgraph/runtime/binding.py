"""Running a session with the state bound to it: nothing is copied or allocated per run that need not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort

from gradgraph.runtime.session import explained, to_ortvalue
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
        self._fed: list[Any] = []

    def run(self, feeds: Mapping[str, Feed], options: ort.RunOptions | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Run once and return the scalars; a training run makes its results the current state.

        Raises:
            ModelError: onnxruntime failed; the current state is what it was.
            TerminatedError: ``options.terminate`` was set meanwhile; likewise.
        """
        binding = self._bindings[self._state.side]
        self._feed(binding, feeds)
        with explained("running the step failed"):
            self.session.run_with_iobinding(binding, options)
        if self._next_of:
            self._state.swap()
        return {name: array.reshape(()).copy() for name, array in self._scalars.items()}

    def compute(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Run once for ``outputs``, whatever their shapes turn out to be.

        Raises:
            ModelError: onnxruntime failed.
        """
        binding = self._bindings[self._state.side]
        binding.clear_binding_outputs()
        self._feed(binding, feeds)
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

    def _feed(self, binding: ort.IOBinding, feeds: Mapping[str, Feed]) -> None:
        values = {n: f if isinstance(f, ort.OrtValue) else to_ortvalue(f) for n, f in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        self._fed = [feeds, values]  # onnxruntime does not own this memory: keep it until the next run


_FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


def _result_buffer(output: Any) -> np.ndarray[Any, Any]:
    """Memory for a loss or metric: one element, of the shape that the model declares."""
    shape = [d if isinstance(d, int) else 1 for d in output.shape or ()]
    return np.zeros(shape, _FLOATS.get(output.type, np.float32))
