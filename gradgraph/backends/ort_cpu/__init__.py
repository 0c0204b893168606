"""The backend ``ort-cpu``: onnxruntime's CPU provider, with the forms that are fastest there by measurement."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, lowering_in


def _machine() -> str:
    """Return the name of onnxruntime's NCHWc layout on this processor, by its block size, such as ``nchwc16``."""
    from gradgraph.machine.hardware import nchwc_block

    return f"nchwc{nchwc_block()}"


ORT_CPU = Backend(
    name="ort-cpu",
    about="lowered now, for onnxruntime on a processor like this one",
    load=lowering_in(f"{__name__}.cpu_lowering"),
    provider="CPUExecutionProvider",
    only_there=True,
    machine=_machine,
)
