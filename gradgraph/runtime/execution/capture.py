"""Training steps captured as CUDA graphs, whose kernels are launched together instead of one by one from the CPU.

A graph repeats the recorded kernels at the same addresses, so batches and results are copied to and from memory that
stays bound. Each of the two sets of state tensors has a graph of its own, selected by onnxruntime's run option
``gpu_graph_id``. To record a graph, onnxruntime runs the step several times; this does not change the result, since a
step reads one set of state tensors and writes the other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.backends.ort_cuda.cuda_kernels import obstacles_to_capture
from gradgraph.data.arrays.batch import Array, Feed
from gradgraph.errors import RuntimeUnavailableError
from gradgraph.runtime.execution.binding import BoundSession, Ports, result_buffer
from gradgraph.runtime.execution.ort_values import fill, on_device
from gradgraph.runtime.execution.session import Placement
from gradgraph.runtime.execution.state import State

log = logging.getLogger("gradgraph")

FEW_BYTES = 64  # bytes: arrays up to this size, usually hyperparameters, are only copied if they changed


def can_capture(model: onnx.ModelProto, placement: Placement, wanted: bool | Literal["auto"]) -> bool:
    """Whether this step, lowered for its batch, should run as CUDA graphs.

    ``wanted`` is ``RuntimeOptions.cuda_graph``.

    Raises:
        RuntimeUnavailableError: if ``wanted`` is True, but the device or the step does not support CUDA graphs. For a
            model with symbolic sizes, the result is False instead.
    """
    if not wanted:
        return False
    if placement.memory != "cuda":
        return _refused("CUDA graphs need the CUDA provider", "choose device='cuda'", wanted)
    found = obstacles_to_capture(ir.from_proto(model))
    if any(stray.operator == "input" for stray in found):
        return False
    if found:
        return _refused(f"this step cannot run as a CUDA graph because of {found[0]}", "remove that node", wanted)
    return True


def _refused(reason: str, remedy: str, wanted: bool | Literal["auto"]) -> bool:
    if wanted != "auto":
        raise RuntimeUnavailableError(f"{reason}; {remedy}, or leave cuda_graph off")
    log.info("%s; it runs kernel by kernel", reason)
    return False


def capturing(placement: Placement) -> Placement:
    """Return a copy of ``placement`` whose first provider has the option ``enable_cuda_graph``."""
    first = placement.providers[0]
    name, settings = first if isinstance(first, tuple) else (first, {})
    return replace(placement, providers=((name, {**settings, "enable_cuda_graph": "1"}), *placement.providers[1:]))


class CapturedSession(BoundSession):
    """A training session with a CUDA graph for each set of state tensors.

    Args:
        session: a session on ``capturing(placement)``, for batches of one shape.
        state, ports: as for ``BoundSession``, except that constants are copied in each run, like a batch.
    """

    def __init__(self, session: ort.InferenceSession, state: State, ports: Ports, placement: Placement) -> None:
        super().__init__(session, state, Ports(next_of=ports.next_of))
        self._placement = placement
        self._fixed: dict[str, ort.OrtValue] = {}
        self._copied_last: dict[str, bytes] = {}
        self._bindings: dict[int, ort.IOBinding] = {}
        self._graphs: dict[int, ort.RunOptions] = {}
        types = {o.name: o for o in session.get_outputs()}
        self._on_device = {name: self._memory(result_buffer(types[output])) for name, output in ports.results.items()}
        self._outputs = {output: self._on_device[name] for name, output in ports.results.items()}

    def run(self, feeds: Mapping[str, Feed], options: ort.RunOptions | None = None) -> None:
        """Run once; ``options`` is ignored, since a graph cannot be interrupted."""
        for name, feed in feeds.items():
            self._copy(name, feed)
        side = self._state.side
        if side not in self._graphs:  # captured in the first run with this number, then replayed
            self._graphs[side] = ort.RunOptions()
            self._graphs[side].add_run_config_entry("gpu_graph_id", str(side + 1))
        super().run({}, self._graphs[side])
        self.numbers = {name: value.item() for name, value in self.results().items()}

    def results(self) -> dict[str, Array]:
        return {name: np.array(value.numpy()).reshape(()) for name, value in self._on_device.items()}

    def feed(self, feeds: Mapping[str, Feed]) -> ort.IOBinding:
        side = self._state.side
        if side not in self._bindings:
            self._bindings[side] = self.bound(side)
        return self._bindings[side]

    def _copy(self, name: str, feed: Feed) -> None:
        """Copy ``feed`` into the device memory from which the CUDA graphs read the input ``name``."""
        if isinstance(feed, ort.OrtValue):
            feed = feed.numpy() if feed.device_name() == "cpu" else feed
        if name not in self._fixed:
            self._fixed[name] = self._memory(feed.numpy() if isinstance(feed, ort.OrtValue) else feed)
        if isinstance(feed, ort.OrtValue):
            self._fixed[name].update_inplace(feed)
            self._copied_last.pop(name, None)
        elif feed.nbytes > FEW_BYTES or self._copied_last.get(name) != feed.tobytes():
            self._copied_last[name] = feed.tobytes() if feed.nbytes <= FEW_BYTES else b""
            fill(self._fixed[name], feed)

    def _memory(self, like: Array) -> ort.OrtValue:
        return on_device(like.shape, like.dtype, self._placement.memory, self._placement.device_id)

    def bound(self, side: int) -> ort.IOBinding:
        binding = super().bound(side)
        for name, value in self._fixed.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            binding.bind_ortvalue_output(name, value)
        return binding
