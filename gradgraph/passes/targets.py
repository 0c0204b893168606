"""The targets that a step or a transformed model can be written for, and whether a step runs here.

- ``auto``: gradient operators are model-local functions with standard bodies. Runs in onnxruntime, its JavaScript
  siblings and onnx's ReferenceEvaluator as it is; a Trainer replaces them by the best form of its machine.
- ``web``: the same file; the name says what it is for.
- ``portable``: standard nodes only, for runtimes without functions; ``openvino`` avoids operators that it lacks, too.
- ``ort-cpu``, ``ort-cuda``: lowered now, for onnxruntime on a processor like this one, or on CUDA. ``ort-cpu`` holds
  blocks of channels whose size is the processor's, so such a step names the size it needs.
- ``ort-cpu-native``: with our own kernels. Transformed models only; a Trainer chooses kernels where it opens a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.errors import BuildError, RuntimeUnavailableError, shown, suggestion
from gradgraph.hardware import nchwc_block
from gradgraph.normal.clean import clean_up
from gradgraph.passes.functions import write_functions, write_inline
from gradgraph.passes.lower import OPENVINO, ORT_CPU, ORT_CPU_NATIVE, ORT_CUDA, PORTABLE
from gradgraph.passes.lower.machine import written
from gradgraph.passes.lower.table import is_on_cpu

AUTO, WEB = "auto", "web"
TARGETS = (AUTO, PORTABLE, ORT_CPU, ORT_CUDA, WEB, OPENVINO)  # of steps
TRANSFORM_TARGETS = (*TARGETS, ORT_CPU_NATIVE)
TARGET_KEY = "gradgraph.target"  # in the metadata of a transformed model that does not run everywhere


def check_target(name: str, known: Sequence[str] = TARGETS) -> str:
    """``name``, or BuildError."""
    if name not in known:
        raise BuildError(f"there is no target '{shown(name)}'{suggestion(name, known)}; use {', '.join(known)}")
    return name


def write_for(model: ir.Model, target: str) -> ir.Model:
    """Write the gradient operators of ``model`` for one of ``TRANSFORM_TARGETS``, in place."""
    if target in (AUTO, WEB):
        return write_functions(model)
    if target == PORTABLE:
        return clean_up(write_inline(model))
    return written(model, target)


def machine_of(target: str) -> str:
    """What a file for ``target`` that is written here demands of the machine it runs on; empty for nothing."""
    return f"nchwc{nchwc_block()}" if is_on_cpu(target) else ""


def mark_target(model: ir.Model, target: str) -> None:
    """Say in ``model``, in place, where it runs, unless that is everywhere."""
    model.metadata_props.pop(TARGET_KEY, None)
    if target in (ORT_CPU, ORT_CPU_NATIVE, ORT_CUDA):
        needs = "session options of RuntimeOptions(native_kernels=True)" if target == ORT_CPU_NATIVE else ""
        model.metadata_props[TARGET_KEY] = ", ".join(filter(None, (target, machine_of(target), needs)))


def check_runs_here(target: str, machine: str, on_cuda: bool) -> None:
    """Refuse a step that was written for other machines.

    Args:
        target, machine: from the step's manifest.
        on_cuda: it is opened on the CUDA provider.

    Raises:
        RuntimeUnavailableError: with the remedy.
    """
    remedy = "build the step again here, or with the target 'auto', which runs everywhere"
    if target in (ORT_CPU, ORT_CUDA) and on_cuda != (target == ORT_CUDA):
        wanted = "the CUDA provider" if target == ORT_CUDA else "the CPU provider"
        raise RuntimeUnavailableError(f"this step was built for {target} and runs on {wanted} only; {remedy}")
    if machine and machine != machine_of(target):
        here = machine_of(target)
        raise RuntimeUnavailableError(
            f"this step was built for a processor with {shown(machine)}, and this one has {here}; {remedy}"
        )
