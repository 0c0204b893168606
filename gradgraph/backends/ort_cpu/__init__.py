"""onnxruntime's CPU provider: the forms measured to be fastest there, whole layers first."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, lowering_in


def _machine() -> str:
    """The width of blocks of channels depends on the processor."""
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
