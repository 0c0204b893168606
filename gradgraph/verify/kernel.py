"""Base class of the oracle's kernels: one class for each standard operator that differs in onnx's
ReferenceEvaluator.
"""

from __future__ import annotations

from typing import Any

from onnx.reference.op_run import OpRun

KERNELS: list[type[OpRun]] = []


class Kernel(OpRun):  # type: ignore[misc]
    """A kernel of the standard operator with the name of the class; names with ``_`` are base classes."""

    op_domain = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith("_"):
            KERNELS.append(cls)
