"""OrtValues over the memory of arrays, and copies between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort


def is_of_numpy(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of NumPy's built-in types (compared by kind, not by identity), not one from ml_dtypes."""
    return dtype.isbuiltin != 2


def to_ortvalue(array: np.ndarray[Any, Any]) -> ort.OrtValue:
    """Return an OrtValue that shares the memory of a C-contiguous array on the CPU."""
    if is_of_numpy(array.dtype):
        return ort.OrtValue.ortvalue_from_numpy(array)
    # onnxruntime does not accept arrays of ml_dtypes, so they are passed as unsigned integers
    bits = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.helper.np_dtype_to_tensor_dtype(array.dtype))


def on_device(shape: Sequence[int], dtype: np.dtype[Any], device: str, device_id: int) -> ort.OrtValue:
    """Return an OrtValue with new, uninitialised memory on a device."""
    element = dtype if is_of_numpy(dtype) else onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element, device, device_id)


def fill(value: ort.OrtValue, array: np.ndarray[Any, Any]) -> None:
    """Copy ``array`` into the memory of ``value``."""
    array = np.asarray(array, order="C")
    value.update_inplace(array if is_of_numpy(array.dtype) else to_ortvalue(array))


def fetched(value: ort.OrtValue, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a copy of ``value`` in host memory."""
    if is_of_numpy(dtype):
        return np.array(value.numpy())
    array = np.empty(value.shape(), dtype)
    to_ortvalue(array).update_inplace(value)
    return array
