"""The base class of kernels that replace kernels of onnx's ReferenceEvaluator in the float64 oracle."""

from __future__ import annotations

from typing import Any

from onnx.reference.op_run import OpRun

KERNELS: list[type[OpRun]] = []


class Kernel(OpRun):  # type: ignore[misc]
    """A kernel of the ONNX operator with the name of its class; classes with a leading ``_`` are base classes."""

    op_domain = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith("_"):
            KERNELS.append(cls)
