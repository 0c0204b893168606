"""onnxruntime's CPU provider with our own kernels in C++ (``kernels/``), which a user may build.

They are one more form each: never needed. ``native_lowering`` is the room's list, ``library`` builds the kernels and
finds them again, and ``kernels/kernel.h`` says how one is written.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, lowering_in
from gradgraph.backends.ort_cpu import ORT_CPU

ORT_NATIVE = Backend(
    name="ort-cpu-native",
    about="as ort-cpu, with the kernels of `gradgraph native build`; a Trainer chooses them where it opens a step",
    load=lowering_in(f"{__name__}.native_lowering"),
    extends=ORT_CPU,
    provider="CPUExecutionProvider",
    only_there=True,
    for_steps=False,
    machine=ORT_CPU.machine,
    needs="session options of RuntimeOptions(native_kernels=True)",
)
