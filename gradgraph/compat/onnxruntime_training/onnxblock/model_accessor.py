"""The current model, to which blocks append nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from gradgraph.errors import CompatibilityError, shown
from gradgraph.files.protos import copied


class ModelAccessor:
    """An object with the current model, to which blocks append nodes.

    Args:
        model: the model, which is not shared with the user.
        model_path: the path of the file from which the model was loaded, if any.
    """

    def __init__(self, model: onnx.ModelProto, model_path: str | None = None) -> None:
        self._model, self._path = model, model_path

    @property
    def model(self) -> onnx.ModelProto:
        """The current model."""
        return self._model

    @property
    def path(self) -> str:
        """The path of the base model."""
        if self._path is None:
            raise CompatibilityError("the base model was not loaded from a file; pass its path to onnxblock.base")
        return self._path

    @property
    def has_path(self) -> bool:
        """Whether the base model has a path."""
        return self._path is not None


# set by base, empty_base and custom_op_library, and read by blocks, including users' own
_GLOBAL_ACCESSOR: ModelAccessor | None = None
_GLOBAL_CUSTOM_OP_LIBRARY: str | os.PathLike[str] | None = None


def current_model() -> onnx.ModelProto:
    """Return the current model, to which blocks append nodes.

    Raises:
        CompatibilityError: if there is no current model.
    """
    if _GLOBAL_ACCESSOR is None:
        raise CompatibilityError("there is no model to write into; call blocks within `with onnxblock.base(model):`")
    return _GLOBAL_ACCESSOR.model


@contextmanager
def base(model: onnx.ModelProto, model_path: str | None = None) -> Iterator[ModelAccessor]:
    """Set a copy of ``model`` as the current model of blocks within a ``with`` statement.

    Args:
        model: the model, which is not changed.
        model_path: the path of the file from which the model was loaded, if any.

    Raises:
        CompatibilityError: if there is already a current model, or ``model`` is not an ``onnx.ModelProto``.
    """
    if not isinstance(model, onnx.ModelProto):
        raise CompatibilityError("onnxblock.base requires an onnx.ModelProto; use empty_base to start without one")
    with _accessing(ModelAccessor(copied(model), model_path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Set an empty model as the current model of blocks within a ``with`` statement.

    Args:
        opset_version: the opset of the model; by default the newest.

    Raises:
        CompatibilityError: if there is already a current model.
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
        raise CompatibilityError("there is already a model to write into; leave its `with` statement first")
    _GLOBAL_ACCESSOR = accessor
    try:
        yield accessor
    finally:
        _GLOBAL_ACCESSOR = None


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str | os.PathLike[str]]:
    """Set the custom-op library of the model within a ``with`` statement.

    The library is not used to generate graphs: a custom operator on the path to a trained parameter requires a gradient
    rule (``gradgraph.extend.vjp``). To run the model, register the library with ``gradgraph.extend.library(path)``, or
    in the ``SessionOptions`` of a ``Module``.

    Raises:
        CompatibilityError: if a library is already set, or the file does not exist.
    """
    global _GLOBAL_CUSTOM_OP_LIBRARY
    if _GLOBAL_CUSTOM_OP_LIBRARY is not None:
        raise CompatibilityError("a custom-op library is already set; leave its `with` statement first")
    if not Path(custom_op_library_path).exists():
        raise CompatibilityError(f"there is no library '{shown(custom_op_library_path)}'; check its path")
    _GLOBAL_CUSTOM_OP_LIBRARY = custom_op_library_path
    try:
        yield custom_op_library_path
    finally:
        _GLOBAL_CUSTOM_OP_LIBRARY = None
