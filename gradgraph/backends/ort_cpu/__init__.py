"""onnxruntime's CPU provider: the forms that were measured to be fastest there, whole layers first."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.ort_cpu.lowering import LOWERING

    return LOWERING


def _machine() -> str:
    """Blocks of channels are as large as the processor has them."""
    from gradgraph.machine.hardware import nchwc_block

    return f"nchwc{nchwc_block()}"


ORT_CPU = Backend(
    name="ort-cpu",
    about="lowered now, for onnxruntime on a processor like this one",
    load=_lowering,
    provider="CPUExecutionProvider",
    only_there=True,
    machine=_machine,
)
