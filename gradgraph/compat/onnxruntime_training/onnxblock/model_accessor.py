"""The model that blocks write into."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from gradgraph.errors import CompatibilityError, shown


class ModelAccessor:
    """Holds the model that blocks write into.

    Args:
        model: an own copy.
        model_path: where it comes from, if from a file.
    """

    def __init__(self, model: onnx.ModelProto, model_path: str | None = None) -> None:
        self._model, self._path = model, model_path

    @property
    def model(self) -> onnx.ModelProto:
        """The model as it is now."""
        return self._model

    @property
    def path(self) -> str:
        """Where the base model comes from."""
        if self._path is None:
            raise CompatibilityError("the base model comes from no file; pass its path to onnxblock.base")
        return self._path

    @property
    def has_path(self) -> bool:
        """Whether the base model comes from a file."""
        return self._path is not None


# set by base, empty_base and custom_op_library, and read by blocks, also those that users write
_GLOBAL_ACCESSOR: ModelAccessor | None = None
_GLOBAL_CUSTOM_OP_LIBRARY: str | os.PathLike[str] | None = None


def current_model() -> onnx.ModelProto:
    """The model that blocks write into.

    Raises:
        CompatibilityError: there is none.
    """
    if _GLOBAL_ACCESSOR is None:
        raise CompatibilityError("there is no model to write into; call blocks within `with onnxblock.base(model):`")
    return _GLOBAL_ACCESSOR.model


@contextmanager
def base(model: onnx.ModelProto, model_path: str | None = None) -> Iterator[ModelAccessor]:
    """Let blocks write into a copy of ``model`` meanwhile.

    Args:
        model: it is not changed.
        model_path: where it comes from, if from a file.

    Raises:
        CompatibilityError: there is such a model already, or none is given.
    """
    if not isinstance(model, onnx.ModelProto):
        raise CompatibilityError("onnxblock.base takes an onnx.ModelProto; use empty_base to begin without one")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with _accessing(ModelAccessor(copy, model_path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Let blocks write into an empty model meanwhile.

    Args:
        opset_version: the newest by default.

    Raises:
        CompatibilityError: there is a model to write into already.
    """
    opsets = [
        onnx.helper.make_opsetid("com.microsoft", 1),
        onnx.helper.make_opsetid("", opset_version or onnx.defs.onnx_opset_version()),
    ]
    model = onnx.ModelProto(ir_version=onnx.IR_VERSION, producer_name="gradgraph", opset_import=opsets)
    model.graph.name = "graph"
    with _accessing(ModelAccessor(model)) as accessor:
        yield accessor


@contextmanager
def _accessing(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    global _GLOBAL_ACCESSOR
    if _GLOBAL_ACCESSOR is not None:
        raise CompatibilityError("there is a model to write into already; leave its `with` first")
    _GLOBAL_ACCESSOR = accessor
    try:
        yield accessor
    finally:
        _GLOBAL_ACCESSOR = None


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str | os.PathLike[str]]:
    """Name the library of a model's own operators meanwhile.

    Graphs are written without it: an operator on the way to a trained parameter needs a rule
    (``gradgraph.extend.vjp``). Sessions need it: ``gradgraph.extend.library(path)``, or a ``Module`` with
    ``SessionOptions`` that have registered it.

    Raises:
        CompatibilityError: there is one already, or no such file.
    """
    global _GLOBAL_CUSTOM_OP_LIBRARY
    if _GLOBAL_CUSTOM_OP_LIBRARY is not None:
        raise CompatibilityError("a library of custom operators is named already; leave its `with` first")
    if not Path(custom_op_library_path).exists():
        raise CompatibilityError(f"there is no library '{shown(custom_op_library_path)}'; check its path")
    _GLOBAL_CUSTOM_OP_LIBRARY = custom_op_library_path
    try:
        yield custom_op_library_path
    finally:
        _GLOBAL_CUSTOM_OP_LIBRARY = None
