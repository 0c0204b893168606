"""Base class of the kernels that replace those of onnx's ReferenceEvaluator in the float64 oracle."""

from __future__ import annotations

from typing import Any

from onnx.reference.op_run import OpRun

KERNELS: list[type[OpRun]] = []


class Kernel(OpRun):  # type: ignore[misc]
    """A kernel of the ONNX operator with the name of the class; a name that begins with ``_`` marks a base class."""

    op_domain = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith("_"):
            KERNELS.append(cls)
