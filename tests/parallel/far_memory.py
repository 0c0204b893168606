"""Stand-ins for GPUs and NVIDIA's libraries: memory that no part of a trainer takes for the processor's; sums over MPI.

What runs on it does all that it would do with GPUs but the sums themselves, which come as late as theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.runtime.execution.session import CPU, Placement


class Elsewhere(str):
    """The memory "cpu" to onnxruntime, and to everybody else who compares it another one."""

    def __eq__(self, other: object) -> bool:
        who: str = sys._getframe(1).f_globals["__name__"]
        return who.startswith("onnxruntime") and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class NcclDataType(enum.IntEnum):
    """NCCL's numbers of them."""

    FLOAT32, FLOAT64 = 7, 8


@dataclass
class ScaledSum:
    scale: ort.OrtValue
    datatype: NcclDataType


class Stream:
    """What was given to it, and how far that is."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def record(self) -> Event:
        return Event(self.requests)


class Event:
    """Sums on their way."""

    def __init__(self, requests: list[Any]) -> None:
        self._requests = requests

    @property
    def is_done(self) -> bool:
        return all(request.Test() for request in self._requests)


class Device:
    """A GPU."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id

    def set_current(self) -> None:
        pass

    def create_stream(self) -> Stream:
        return Stream()


class Communicator:
    """NCCL's, with the arguments that nccl4py takes."""

    grouped: list[tuple[Any, ...]] | None = None

    def __init__(self, nranks: int, rank: int) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD.Dup()
        assert (self._comm.size, self._comm.rank) == (nranks, rank)

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: Any, config: Any = None) -> Communicator:
        assert unique_id == "the first rank's"
        return cls(nranks, rank)

    def create_pre_mul_sum(self, scalar: Any, datatype: NcclDataType | None = None) -> ScaledSum:
        assert datatype is not None
        return ScaledSum(scalar, datatype)

    def allreduce(self, sendbuf: Any, recvbuf: Any, op: Any, *, stream: Any = None, config: Any = None) -> None:
        assert Communicator.grouped is not None and sendbuf is recvbuf
        Communicator.grouped.append((self, _memory(sendbuf, op.datatype), _memory(op.scale, op.datatype), stream))

    def begin(self, array: Any, scale: Any, stream: Stream) -> None:
        np.multiply(array, scale[0], out=array)
        stream.requests.append(self._comm.Iallreduce(self._mpi.IN_PLACE, array))


def _memory(value: ort.OrtValue, datatype: NcclDataType) -> Any:
    kind, dtype = (ctypes.c_float, np.float32) if datatype == NcclDataType.FLOAT32 else (ctypes.c_double, np.float64)
    assert np.from_dlpack(value).dtype == dtype
    count = math.prod(value.shape())
    return np.ctypeslib.as_array(ctypes.cast(value.data_ptr(), ctypes.POINTER(kind)), (count,))


_COPIED = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64)  # what steps are fed


@contextlib.contextmanager
def group() -> Iterator[None]:
    """What is asked for inside begins at the end."""
    Communicator.grouped = []
    yield
    asked, Communicator.grouped = Communicator.grouped, None
    for comm, array, scale, stream in asked or ():
        comm.begin(array, scale, stream)


def use() -> None:
    """From here on each trainer has its state elsewhere, and finds these libraries."""
    here = sys.modules[__name__]
    core = types.ModuleType("nccl.core")
    for name in ("NcclDataType", "Communicator", "group"):
        setattr(core, name, getattr(here, name))
    core.get_unique_id = lambda: "the first rank's"  # type: ignore[attr-defined]
    cuda = types.ModuleType("cuda.core")
    cuda.Device = Device  # type: ignore[attr-defined]
    sys.modules |= {
        "nccl": types.ModuleType("nccl"),
        "nccl.core": core,
        "cuda": types.ModuleType("cuda"),
        "cuda.core": cuda,
    }
    sys.modules["nccl"].core, sys.modules["cuda"].core = core, cuda  # type: ignore[attr-defined]

    own = set[int]()  # addresses of memory that is elsewhere
    make, bind = ort.OrtValue.ortvalue_from_shape_and_type, ort.IOBinding.bind_ortvalue_input

    def made(*arguments: Any, **more: Any) -> ort.OrtValue:
        value = make(*arguments, **more)
        own.add(value.data_ptr())
        return value

    def bound(binding: ort.IOBinding, name: str, value: ort.OrtValue) -> None:
        """As a device does, copy what the processor has when it is bound."""
        is_here = value.data_ptr() not in own and value.element_type() in _COPIED
        bind(binding, name, ort.OrtValue.ortvalue_from_numpy(value.numpy().copy()) if is_here else value)

    ort.OrtValue.ortvalue_from_shape_and_type = staticmethod(made)
    ort.IOBinding.bind_ortvalue_input = bound

    def elsewhere(*_: Any, **__: Any) -> Placement:
        return Placement((CPU,), Elsewhere("cpu"))  # type: ignore[arg-type]

    Placement.choose = elsewhere  # type: ignore[method-assign]
