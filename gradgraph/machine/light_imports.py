"""onnx-ir imported without sympy, which it needs only for arithmetic on symbolic sizes.

sympy takes a quarter of the processor time of a first ``gradgraph.build`` (0.25 of 1.1 s on an AMD EPYC), and steps are
written without it. An onnx-ir that uses it at once gets it at once. To import this module is to import onnx-ir so.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_LATER = ("sympy", "onnx_ir._symbolic_shapes")


class _Later(ModuleType):
    """Stands for a module that is imported when something of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for these
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _import_onnx_ir() -> None:
    """Import onnx-ir, with sympy to come when onnx-ir first uses it; others that import sympy get it whole."""
    if "onnx_ir" in sys.modules or "sympy" in sys.modules:
        return
    later = {name: _Later(name) for name in _LATER}
    sys.modules.update(later)
    try:
        importlib.import_module("onnx_ir")
    finally:
        for name, module in later.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


_import_onnx_ir()
