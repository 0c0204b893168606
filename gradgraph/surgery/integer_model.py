"""A trained model with integers in place of floats, without training any further: for less memory, and for speed.

With data to calibrate by, onnxruntime's own quantiser puts pairs of QuantizeLinear and DequantizeLinear round all that
has integer kernels; without, weights alone are stored as integers, as ``gg.qat`` rounds them. Either is then held
against the model that it was.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gradgraph.arguments import WHOLE, Kind, checked
from gradgraph.errors import DataError, ModelError, RuntimeUnavailableError, listed, shown
from gradgraph.export import Compared, compared, drawn
from gradgraph.files.models import Source, load_model, to_proto
from gradgraph.passes.stored_integers import store_integers
from gradgraph.runtime.data.in_order import in_order
from gradgraph.runtime.data.sources import common_length, row_count
from gradgraph.runtime.execution.joining import filled
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.surgery.quantised_training import qat

__all__ = ["Quantized", "quantize"]

Batch = Mapping[str, np.ndarray[Any, Any]]

_COUNT = Kind("a positive whole number", lambda value: WHOLE.fits(value) and value > 0)


@dataclass(frozen=True, repr=False)
class Quantized:
    """The result of ``quantize``.

    Attributes:
        result: the model with integers.
        samples: how many of the calibration data there were; 0 if weights alone are integers.
        bytes_before, bytes_after: of the whole files.
        outputs: how each output compares with that of the float model: on the calibration data, or else on a batch that
            was drawn; empty where no batch that was drawn fits the model.
    """

    result: onnx.ModelProto
    samples: int
    bytes_before: int
    bytes_after: int
    outputs: Mapping[str, Compared]

    def __str__(self) -> str:
        what = "weights and data are int8" if self.samples else "weights are int8"
        where = f"on {self.samples:,} samples" if self.samples else "on data that were drawn"
        said = "; ".join(f"'{shown(name)}' {one}" for name, one in self.outputs.items())
        held = f"; {where}, against the float model: {said}" if said else "; no data that were drawn fit the model"
        return f"{what}: {self.bytes_before:,} bytes are {self.bytes_after:,}{held}"


@checked(batch_size=_COUNT)
def quantize(model: Source, calibration: Any = None, *, batch_size: int = 32) -> Quantized:
    """Write a trained float32 model with int8 in place of floats, without training.

    Args:
        model: an inference model: its path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        calibration: some hundred samples, a path as ``gradgraph predict --data`` takes it or a dict of arrays by input:
            the ranges of all that is computed are theirs. Without, weights alone become integers, and everything is
            computed in float32.
        batch_size: samples per run; a model that is fixed to a number of samples has its own.

    Returns:
        The model with pairs of QuantizeLinear and DequantizeLinear, int8 with one scale for each output channel of a
        weight, and how far its outputs are from those of ``model``.

    Raises:
        DataError: the data do not fit the model.
        ModelError: the model is damaged, or onnxruntime's quantiser refuses it.
        BuildError: without calibration, no layer has a weight stored as floats.
        RuntimeUnavailableError: a package that the quantiser needs is not installed.
    """
    given = load_model(model)
    before = to_proto(given)
    plain = Predictor(given, device="cpu")
    size = plain.fixed_rows or batch_size
    if calibration is None:
        result = qat(before, weights="int8", activations=None)
        assert isinstance(result, onnx.ModelProto)
        store_integers(result)
        feeds, samples = drawn(given, plain), 0
        batches: list[Batch] = [] if feeds is None else [feeds]
    else:
        samples, batches = _read(calibration, plain, size)
        plain(batches[0])  # says in our words what does not fit
        result = _calibrated(before, batches)
    found = compared(plain, Predictor(load_model(result), plain.outputs, device="cpu"), batches)
    return Quantized(result, samples, before.ByteSize(), result.ByteSize(), found)


def _read(data: Any, predictor: Predictor, size: int) -> tuple[int, list[Batch]]:
    """How many samples there are, and batches of ``size`` of what the model takes."""
    if not isinstance(data, Mapping):
        with in_order(data, predictor.specs, (), predictor.names) as source:
            return source.rows, [
                filled(batch, size if predictor.fixed_rows else 0)[0] for batch in source.batches(size)
            ]
    if missing := [name for name in predictor.specs if name not in data]:
        raise DataError(f"the calibration data have no {listed(missing)}, which the model takes")
    arrays = {name: np.asarray(data[name]) for name in predictor.specs}
    rows = common_length({name: row_count(name, array.shape) for name, array in arrays.items()})
    if not rows:
        raise DataError("the calibration data are empty; give at least one sample")
    parts = ({n: a[i : i + size] for n, a in arrays.items()} for i in range(0, rows, size))
    return rows, [filled(batch, size if predictor.fixed_rows else 0)[0] for batch in parts]


def _calibrated(model: onnx.ModelProto, batches: list[Batch]) -> onnx.ModelProto:
    """The model as onnxruntime's quantiser writes it, with ranges found on ``batches``."""
    try:
        from onnxruntime.quantization import CalibrationDataReader, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime's quantiser needs the package {shown(error.name)}",
            remedy=f"pip install {shown(error.name)}",
        ) from None

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._batches = iter(batches)

        def get_next(self) -> Any:
            return dict(found) if (found := next(self._batches, None)) is not None else None

    with tempfile.TemporaryDirectory(prefix="gradgraph-") as folder, _quiet():
        prepared, written = Path(folder, "prepared.onnx"), Path(folder, "integers.onnx")
        try:
            own = onnx.ModelProto()  # for it moves the weights of what it is given into a file
            own.CopyFrom(model)
            quant_pre_process(own, prepared, skip_symbolic_shape=True)
            quantize_static(prepared, written, Reader(), per_channel=True)
        except Exception as error:  # it raises whatever it meets
            raise ModelError(f"onnxruntime's quantiser refuses the model: {shown(error)}") from None
        result = to_proto(load_model(written))
    known = {p.key for p in result.metadata_props}
    result.metadata_props.extend(p for p in model.metadata_props if p.key not in known)
    return result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the quantiser from advising what is done already."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
