"""The backend ``ort-cpu-native``: onnxruntime's CPU provider with optional C++ kernels (``kernels/``).

The kernels are additional forms, and never required. ``native_lowering`` lists forms and rewrites, ``library`` builds
and finds the kernels, and ``kernels/kernel.h`` explains how to write one.
"""

from gradgraph.backends.backend import Backend, lowering_in
from gradgraph.backends.ort_cpu import ORT_CPU

ORT_NATIVE = Backend(
    name="ort-cpu-native",
    about="as ort-cpu, with the kernels of `gradgraph native build`; a Trainer chooses them when it opens a step",
    load=lowering_in(f"{__name__}.native_lowering"),
    extends=ORT_CPU,
    provider="CPUExecutionProvider",
    only_there=True,
    for_steps=False,
    machine=ORT_CPU.machine,
    needs="session options of RuntimeOptions(native_kernels=True)",
)
