"""Sessions with bound inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import onnxruntime as ort

from gradgraph.backends.engine import for_machine
from gradgraph.errors import CompatibilityError, shown
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session, explained


@dataclass(frozen=True)
class GivenOptions(RuntimeOptions):
    """Session options: the user's ``onnxruntime.SessionOptions``, or gradgraph's own."""

    given: ort.SessionOptions | None = None

    def session_options(self) -> ort.SessionOptions:
        return super().session_options() if self.given is None else self.given


def options_of(given: ort.SessionOptions | None) -> GivenOptions:
    return GivenOptions(flush_denormals=given is None, given=given)


def placement_of(device: str) -> Placement:
    """Return the placement of sessions for a device such as ``"cpu"`` or ``"cuda:1"``.

    Raises:
        CompatibilityError: if ``device`` is not a CPU or CUDA device.
        RuntimeUnavailableError: if the installed onnxruntime does not support the device.
    """
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdigit() or not number):
        raise CompatibilityError(f"there is no device '{shown(device)}'; use cpu, cuda or cuda:0")
    if kind == "cpu":
        return Placement.choose("cpu")
    return Placement.choose(
        providers=[("CUDAExecutionProvider", {"device_id": int(number or 0)}), "CPUExecutionProvider"]
    )


class BoundRun:
    """A session of ``model`` that is called with all inputs by name, and returns all outputs by name.

    Args:
        model: the model; in normal form if ``lower``.
        placement: the device of the session.
        options: the options of the session.
        sizes: the known sizes of symbolic dimensions.
        lower: replace operators with the forms that are fastest on this machine.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        placement: Placement,
        options: RuntimeOptions,
        sizes: Mapping[str, int] | None = None,
        lower: bool = True,
    ) -> None:
        written = for_machine(model, placement.backend, sizes) if lower else model
        self._session = create_session(written, placement, options)
        self._placement = placement
        self._inputs = [i.name for i in self._session.get_inputs()]
        self._spare: dict[str, ort.OrtValue] = {}
        self._outputs = [o.name for o in self._session.get_outputs()]

    def release(self) -> None:
        """Release buffers that are no longer referenced."""
        self._spare = {}

    def __call__(self, feeds: Mapping[str, ort.OrtValue], next_of: Mapping[str, str]) -> dict[str, ort.OrtValue]:
        """Run the model once on the inputs ``feeds``, and return its outputs by name.

        ``next_of`` maps each state input to the output with its next value, which the next run writes into its buffer.
        """
        binding = self._session.io_binding()
        for name in self._inputs:
            binding.bind_ortvalue_input(name, feeds[name])
        for name in self._outputs:
            if name in self._spare:
                binding.bind_ortvalue_output(name, self._spare[name])
            else:
                binding.bind_output(name, self._placement.memory, self._placement.device_id)
        with explained("running the model failed"):
            self._session.run_with_iobinding(binding)
        found = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        self._spare = {new: feeds[old] for old, new in next_of.items() if old in feeds and new in found}
        return found
