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

from gradgraph.arguments import WHOLE, Kind, checked, described
from gradgraph.errors import DataError, ModelError, RuntimeUnavailableError, listed, shown
from gradgraph.export import Compared, compared, drawn
from gradgraph.files.models import Source, load_model, save_model, to_proto
from gradgraph.passes.stored_integers import store_integers
from gradgraph.preprocess.column_nodes import cut_off
from gradgraph.preprocess.frames import is_table
from gradgraph.runtime.data.in_order import in_order
from gradgraph.runtime.data.loadable import Loadable
from gradgraph.runtime.data.sources import common_length, read_data, row_count
from gradgraph.runtime.data.tables import columns_of
from gradgraph.runtime.execution.joining import filled
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.runtime.execution.served import serve
from gradgraph.step.data_names import DataNames
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
        calibration: some hundred samples, whose ranges are taken for all that is computed: the path of arrays, a table
            or images, a dataset such as ``gradgraph.image_folder``, a table, or a dict of arrays by input. Without,
            weights alone become integers, and everything is computed in float32.
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
    outputs = len(given.graph.outputs)
    before = to_proto(given)
    bytes_before = before.ByteSize()
    plan = DataNames.read_from(given.metadata_props).preprocess
    if plan is not None:  # integers come behind the columns, and these in front again
        cut_off(given, plan)
        before = to_proto(given)
    plain = Predictor(given, device="cpu")
    size = plain.fixed_rows or batch_size
    if calibration is None:
        result = _weights_alone(before)
        rng, samples = np.random.default_rng(0), 0
        feeds = drawn(given, plain) if plan is None else plan.arrays(plan.drawn(rng, plain.fixed_rows or 8))
        batches: list[Batch] = [] if feeds is None else [feeds]
    else:
        samples, batches = _read(calibration, plain, size)
        plain(batches[0])  # says in our words what does not fit
        result = _calibrated(before, batches)
    del before  # the float weights lie in memory no longer while both models run
    small = load_model(result)
    found = compared(plain, Predictor(small, plain.outputs, device="cpu"), batches)
    if plan is not None:
        serve(small, plain.names, own_outputs=outputs > len(given.graph.outputs))
        result = to_proto(small)
    return Quantized(result, samples, bytes_before, result.ByteSize(), found)


def _weights_alone(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with weights as integers, in a new message: protobuf keeps what is taken out of one."""
    result = qat(model, weights="int8", activations=None)
    assert isinstance(result, onnx.ModelProto)
    store_integers(result)
    return onnx.ModelProto.FromString(result.SerializeToString())


def _read(data: Any, predictor: Predictor, size: int) -> tuple[int, list[Batch]]:
    """How many samples there are, and batches of ``size`` of what the model takes."""
    data, plan = read_data(data, predictor.names), predictor.names.preprocess
    if isinstance(data, Loadable):
        with in_order(data, predictor.specs, (), predictor.names) as source:
            return source.rows, [
                filled(batch, size if predictor.fixed_rows else 0)[0] for batch in source.batches(size)
            ]
    if is_table(data) or (isinstance(data, Mapping) and plan is not None and plan.read.keys() <= data.keys()):
        data, _ = columns_of(data, predictor.specs, predictor.names)
    if not isinstance(data, Mapping):
        raise DataError(f"{described(data)} is no calibration data; give a path, a table, or a dict of arrays by input")
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
        plain, prepared, written = (Path(folder, f"{name}.onnx") for name in ("plain", "prepared", "integers"))
        try:
            save_model(model, plain)  # of a model in memory it moves all constants into a file, and does not find them
            quant_pre_process(plain, prepared, skip_symbolic_shape=True)
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
