"""Sum gradients on GPUs with NCCL, through NVIDIA's nccl4py, which reads OrtValues over DLPack.

Written for nccl4py 0.6 and tested with a stand-in for it; not yet run on GPUs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.errors import RuntimeUnavailableError, shown
from gradgraph.runtime.execution.ort_values import fill, on_device

_FLOATS: dict[int, str] = {onnx.TensorProto.FLOAT: "FLOAT32", onnx.TensorProto.DOUBLE: "FLOAT64"}  # NCCL's names
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Nccl:
    """A communicator of ranks that each have a GPU of their own and find each other through mpi4py's ``comm``.

    Args:
        memory, device_id: onnxruntime's name of the memory, and the index, of this rank's GPU.

    Raises:
        RuntimeUnavailableError: if nccl4py is not installed, or NCCL does not start.
    """

    def __init__(self, comm: Any, memory: str, device_id: int) -> None:
        self._nccl, device_type = _libraries()
        self._memory = memory
        # by element type: a factor on the GPU, and NCCL's operator that multiplies by it and sums
        self._scales: dict[int, tuple[ort.OrtValue, Any]] = {}
        try:
            self._device = device_type(device_id)
            self._device.set_current()
            self._stream = self._device.create_stream()
            unique = comm.bcast(self._nccl.get_unique_id() if comm.rank == 0 else None)
            self._comm = self._nccl.Communicator.init(comm.size, comm.rank, unique)
        except Exception as error:  # any error of the driver, the library or the network
            raise RuntimeUnavailableError(
                f"NCCL does not start on GPU {device_id} ({shown(str(error))}); each rank on a machine needs a GPU of "
                "its own; set NCCL_DEBUG=INFO for details"
            ) from None

    def add_up(self, values: Collection[ort.OrtValue], factor: float) -> Begun:
        """Start replacing ``values`` with the sums over all ranks of values times ``factor``; return the running sum.

        Values are float32 or float64 tensors on this rank's GPU, with equal shapes in equal order on all ranks.
        """
        self._device.set_current()  # the current device is a setting of each thread
        sums = {kind: self._scaled_sum(kind, factor) for kind in {value.element_type() for value in values}}
        with self._nccl.group():
            for value in values:
                self._comm.allreduce(value, value, sums[value.element_type()], stream=self._stream)
        return Begun(self._stream.record())

    def _scaled_sum(self, element_type: int, factor: float) -> Any:
        """Return NCCL's operator that multiplies this rank's values by ``factor`` before it sums.

        nccl4py never frees operators, so one operator per element type is kept, and each call overwrites its factor.
        """
        if element_type not in self._scales:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(element_type)
            scale = on_device([1], dtype, self._memory, self._device.device_id)
            kind = self._nccl.NcclDataType[_FLOATS[element_type]]
            self._scales[element_type] = scale, self._comm.create_pre_mul_sum(scale, kind)
        scale, operator = self._scales[element_type]
        fill(scale, np.array([factor], onnx.helper.tensor_dtype_to_np_dtype(element_type)))
        return operator


class Begun:
    """A sum in progress, with the method ``Test`` of an MPI request."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def Test(self) -> bool:  # noqa: N802 (MPI's name)
        """Return whether the sum is complete."""
        return bool(self._event.is_done)


def gpu_of(rank: int, ranks: int) -> int:
    """Return the GPU index for process ``rank`` of ``ranks`` on this machine; 0 if it sees only one GPU.

    Raises:
        RuntimeUnavailableError: if there are fewer visible GPUs than ranks.
    """
    names = os.environ.get(_VISIBLE)
    if names is None:
        return rank
    visible = len([name for name in names.split(",") if name.strip()])
    if visible == 1:
        return 0
    if visible < ranks:
        raise RuntimeUnavailableError(
            f"{ranks} ranks on this machine see {visible} GPUs ({_VISIBLE}={shown(names)}), but each needs one of its "
            "own; start as many ranks as there are GPUs"
        )
    return rank


def _libraries() -> tuple[Any, Any]:
    """Return the module ``nccl.core`` and ``cuda.core.Device``; raise RuntimeUnavailableError without nccl4py."""
    try:
        return importlib.import_module("nccl.core"), importlib.import_module("cuda.core").Device
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"nccl4py, which sums gradients on GPUs, is not installed ({shown(str(error))})",
            remedy="pip install 'nccl4py[cu12]' (or [cu13], like this onnxruntime-gpu), or train on the CPU",
        ) from None
