"""Adding up gradients where they lie, on GPUs: by NCCL, through NVIDIA's nccl4py, which reads OrtValues over DLPack.

Written against nccl4py 0.6 and run in the tests with a stand-in for it; it has not been run on GPUs yet.
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
    """The ranks of a job as owners of one GPU each.

    Args:
        comm: of mpi4py, by which the ranks find each other.
        memory, device_id: of this rank's GPU, as onnxruntime calls them.

    Raises:
        RuntimeUnavailableError: there is no nccl4py, or NCCL does not start.
    """

    def __init__(self, comm: Any, memory: str, device_id: int) -> None:
        self._nccl, device_type = _libraries()
        self._memory = memory
        self._scales: dict[
            int, tuple[ort.OrtValue, Any]
        ] = {}  # by type, a number on the GPU, and NCCL's sum scaled by it
        try:
            self._device = device_type(device_id)
            self._device.set_current()
            self._stream = self._device.create_stream()
            unique = comm.bcast(self._nccl.get_unique_id() if comm.rank == 0 else None)
            self._comm = self._nccl.Communicator.init(comm.size, comm.rank, unique)
        except Exception as error:  # of the driver, the library or the network: whatever they raise
            raise RuntimeUnavailableError(
                f"NCCL does not start on GPU {device_id} ({shown(str(error))}); each rank on a machine needs a GPU of "
                "its own, and NCCL_DEBUG=INFO tells more"
            ) from None

    def add_up(self, values: Collection[ort.OrtValue], factor: float) -> Begun:
        """Begin to let each of ``values`` be the sum over all ranks of ``factor``, which each has its own of, times it.

        Args:
            values: on this rank's GPU, float32 or float64; the same shapes on all ranks, in the same order.
        """
        self._device.set_current()  # another thread may have begun
        sums = {kind: self._scaled_sum(kind, factor) for kind in {value.element_type() for value in values}}
        with self._nccl.group():
            for value in values:
                self._comm.allreduce(value, value, sums[value.element_type()], stream=self._stream)
        return Begun(self._stream.record())

    def _scaled_sum(self, element_type: int, factor: float) -> Any:
        """NCCL's operator that scales what this rank has by ``factor`` before it is added up.

        There is one for each type: nccl4py keeps each that is ever made.
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
    """A sum on its way, as something to wait for in the manner of MPI's requests."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def Test(self) -> bool:  # noqa: N802 (MPI's name)
        """Whether it has arrived."""
        return bool(self._event.is_done)


def gpu_of(rank: int, ranks: int) -> int:
    """The number of the GPU for a process, one of ``ranks`` on this machine; some launchers let each see its own alone.

    Raises:
        RuntimeUnavailableError: they see fewer GPUs than they are.
    """
    told = os.environ.get(_VISIBLE)
    if told is None:
        return rank
    visible = len([name for name in told.split(",") if name.strip()])
    if visible == 1:
        return 0
    if visible < ranks:
        raise RuntimeUnavailableError(
            f"{ranks} ranks on this machine see {visible} GPUs ({_VISIBLE}={shown(told)}), and each needs one of its "
            "own; start as many ranks as there are GPUs"
        )
    return rank


def _libraries() -> tuple[Any, Any]:
    """``nccl.core``, and the class of GPUs of ``cuda.core``."""
    try:
        return importlib.import_module("nccl.core"), importlib.import_module("cuda.core").Device
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"nccl4py is not installed, by which GPUs add up their gradients ({shown(str(error))})",
            remedy="pip install 'nccl4py[cu12]' (or [cu13], as this onnxruntime-gpu has it), or train on the CPU",
        ) from None
