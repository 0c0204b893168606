"""Inference sessions that return their outputs batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array, Feed
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.runtime.execution.session import check_weights, explained
from gradgraph.runtime.execution.state import State, aligned_empty


class ComputingSession(BoundSession):
    """A session that returns outputs of any shape.

    If every output size is determined by the input sizes, a batch with the same shapes as the previous one writes its
    outputs to memory that stays bound.

    Args:
        session, state, stand_ins: as for ``BoundSession``.
        outputs: names of the outputs to compute.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        state: State,
        outputs: Iterable[str],
        stand_ins: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(session, state, Ports(), stand_ins=stand_ins)
        self.outputs = list(outputs)
        self._is_regular = state.on_cpu and _is_regular(session, self.outputs)
        self._kind: Any = None  # the side of the state, and the input shapes, of the last batch
        self._found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}  # shapes and types of its outputs
        self._memory: dict[str, Array] = {}  # memory bound for the outputs of such batches; empty if not bound

    def release(self) -> None:
        super().release()
        if self._kind is not None and self._kind[0] not in self._sides:
            self._kind = None  # that side's binding was released, and its bound outputs with it

    def compute(self, feeds: Mapping[str, Feed]) -> dict[str, Array]:
        """Run once and return copies of the outputs.

        Raises:
            ModelError: if onnxruntime fails, or a file with weights was overwritten before or during the run.
        """
        check_weights(self.session)
        found = self._computed(feeds)
        check_weights(self.session)
        return found

    def _computed(self, feeds: Mapping[str, Feed]) -> dict[str, Array]:
        self._state.check()
        binding = self.feed(feeds)
        kind = self._state.side, [feed.shape for feed in feeds.values()]
        if kind != self._kind or not self._is_regular:
            found = self._anywhere(binding)
            self._kind, self._memory = kind, {}
            self._found = {name: (array.shape, array.dtype) for name, array in found.items()}
            return found
        if not self._memory:
            self._memory = {name: aligned_empty(*like) for name, like in self._found.items()}
            for name, array in self._memory.items():
                binding.bind_ortvalue_output(name, to_ortvalue(array))
        try:
            self.session.run_with_iobinding(binding)
        except Exception:  # shapes differ from the model's declaration, or another recurring reason
            self._is_regular = False
            return self._anywhere(binding)
        return {name: array.copy() for name, array in self._memory.items()}

    def _anywhere(self, binding: ort.IOBinding) -> dict[str, Array]:
        """Run once, let onnxruntime allocate the outputs, and return copies of them."""
        binding.clear_binding_outputs()
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        with explained("running the model failed"):
            self.session.run_with_iobinding(binding)
            arrays = [value.numpy() for value in binding.get_outputs()]  # an error for types that NumPy lacks
        # copied, since onnxruntime's memory changes with the next run
        return {name: np.array(array) for name, array in zip(self.outputs, arrays, strict=True)}


def _is_regular(session: ort.InferenceSession, outputs: Sequence[str]) -> bool:
    """Whether outputs can be written to bound memory: they are numeric, with sizes determined by the input sizes.

    Outputs that are also inputs of the model cannot, since onnxruntime does not write them to bound memory.
    """
    if not {given.name for given in session.get_inputs()}.isdisjoint(outputs):
        return False
    sizes = {d for given in session.get_inputs() for d in given.shape if isinstance(d, str)}
    wanted = [o for o in session.get_outputs() if o.name in outputs]
    known = all(isinstance(d, int) or d in sizes for output in wanted for d in output.shape)
    return known and all(output.type in NUMBERS for output in wanted)


NUMBERS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(int64)", "tensor(int32)", "tensor(bool)")
