"""Kernels of the oracle: one class for each standard operator that onnx's ReferenceEvaluator computes otherwise."""

from __future__ import annotations

from typing import Any

from onnx.reference.op_run import OpRun

KERNELS: list[type[OpRun]] = []


class Kernel(OpRun):  # type: ignore[misc]
    """A kernel of the standard operator that has the name of the class; a name with ``_`` is a base of others."""

    op_domain = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith("_"):
            KERNELS.append(cls)
