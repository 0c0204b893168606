"""Post-training quantisation: integers in place of floats, for less memory and higher speed.

With calibration data, onnxruntime's own quantiser puts QuantizeLinear/DequantizeLinear pairs around all operators with
integer kernels. Without calibration data, only weights are stored as integers, rounded as in ``gg.qat``. In both cases,
the outputs are compared with the original model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import WHOLE, Kind, checked, described
from gradgraph.data.dataset import Loadable
from gradgraph.data.preprocess.column_nodes import cut_off
from gradgraph.data.preprocess.frames import is_table
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.sources.in_order import in_order
from gradgraph.data.sources.sources import common_length, read_data, row_count
from gradgraph.data.tables import columns_of
from gradgraph.errors import DataError, OutputError, listed, shown
from gradgraph.export.comparison import Compared, compared, drawn
from gradgraph.files import large_weights
from gradgraph.files.external import bytes_of, store_outside, stored_values
from gradgraph.files.large_weights import LEAST_BYTES, large_outside
from gradgraph.files.mapped import passing_through
from gradgraph.files.models import Source, to_proto
from gradgraph.files.spilled import Folder
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal import load_runnable
from gradgraph.passes.normal.opsets.opset import convert_to_opset
from gradgraph.passes.stored_integers import store_integers
from gradgraph.runtime.execution.joining import filled
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.runtime.execution.served import serve
from gradgraph.surgery.calibrated_model import calibrated, turn_weights
from gradgraph.surgery.integer_products import PER_CHANNEL
from gradgraph.surgery.operation import Result, as_model, learn_sizes
from gradgraph.surgery.quantised_training import qat

__all__ = ["Quantized", "quantize"]

Batch = Mapping[str, np.ndarray[Any, Any]]

_FOLDER = "gradgraph.integers"  # Model.meta key: keeps alive the temporary file of the result
_SEVEN_BITS = "weights int8 from -64 to 64, so that no processor saturates"
_COUNT = Kind("a positive whole number", lambda value: WHOLE.fits(value) and value > 0)


@dataclass(frozen=True, repr=False)
class Quantized:
    """The result of ``quantize``.

    Attributes:
        result: the quantised model: an ``onnx_ir.Model`` if the original model was one (its large weights may be in a
            temporary file, which is deleted with it), otherwise an ``onnx.ModelProto``.
        samples: the number of calibration samples; 0 if only weights are integers.
        bytes_before, bytes_after: sizes of the weights and constants of the original and the quantised model.
        outputs: the deviation of each output from the float model's: on the calibration data, or without any on a
            random batch; empty if no random batch fits the model; None if the models were not compared.
    """

    result: Result
    samples: int
    bytes_before: int
    bytes_after: int
    outputs: Mapping[str, Compared] | None

    def __str__(self) -> str:
        what = f"data are uint8, {_SEVEN_BITS}" if self.samples else "weights are int8"
        if self.outputs is None:
            return f"{what}: {self.bytes_before:,} bytes are {self.bytes_after:,}"
        where = f"on {self.samples:,} samples" if self.samples else "on random data"
        said = "; ".join(f"'{shown(name)}' {one}" for name, one in self.outputs.items())
        held = f"; {where}, against the float model: {said}" if said else "; no random data fit the model"
        return f"{what}: {self.bytes_before:,} bytes are {self.bytes_after:,}{held}"


@checked(batch_size=_COUNT)
def quantize(model: Source, calibration: Any = None, *, batch_size: int = 32) -> Quantized:
    """Quantise a trained float32 model to int8, without training.

    Args:
        model: an inference model: its path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        calibration: a few hundred samples from which ranges are computed: the path of arrays, a table or images, a
            dataset such as ``gradgraph.image_folder``, a table, or a dict of arrays by input. Without it, only weights
            become integers, and the computation stays float32.
        batch_size: samples per run; a model with a fixed batch size uses its own.

    Returns:
        The model with QuantizeLinear/DequantizeLinear pairs: data in uint8, weights in int8 with one scale for each
        output channel, and the deviation of its outputs from those of ``model``. Weights that multiply integers range
        from -64 to 64, as onnxruntime saturates larger ones on x86 processors without VNNI.

    Raises:
        DataError: the data do not fit the model.
        ModelError: the model is damaged, or onnxruntime's quantiser rejects it.
        BuildError: without calibration, no layer has a weight stored as floats.
        RuntimeUnavailableError: a package that the quantiser needs is not installed.
    """
    return quantized(model, calibration, batch_size)


def quantized(model: Source, calibration: Any, batch_size: int = 32, compares: bool = True) -> Quantized:
    """Quantise ``model`` as :func:`quantize` does; with ``compares=False``, without comparing it with the float model.

    ``compares`` has no effect with calibration data.
    """
    given, folder = load_runnable(model), Folder()
    inputs, outputs, before = _inputs(given), len(given.graph.outputs), bytes_of(stored_values(given))
    plan = DataNames.read_from(given.metadata_props).preprocess
    if plan is not None:  # table preprocessing is removed before quantising, and added again afterwards
        cut_off(given, plan)
    if calibration is not None:
        if given.opset_imports.get("", OPSET) < PER_CHANNEL:
            learn_sizes(given)
            convert_to_opset(given)
        turn_weights(given)
    _move_to_file(given, folder, "floats")
    with passing_through([tensor.numpy() for tensor in large_outside(given)]):
        if calibration is None:
            small, samples, found = _rounded(given), 0, None
            if compares:
                _move_to_file(small, folder, "integers")
                found = _compared_on_random_data(given, small)
        else:
            plain = Predictor(given, device="cpu", packs=False)
            samples, batches = _read(calibration, plain, plain.fixed_rows or batch_size)
            plain(batches[0])  # raises our own error for data that do not fit
            small = _calibrated(given, batches, folder)
            _move_to_file(small, folder, "integers")
            found = compared(plain, _predictor(small, plain), batches)
        small.meta[_FOLDER] = folder
    if inputs != _inputs(given):
        serve(small, DataNames.read_from(given.metadata_props), own_outputs=outputs > len(given.graph.outputs))
    after = bytes_of(stored_values(small))
    return Quantized(small if isinstance(model, ir.Model) else to_proto(small), samples, before, after, found)


def _inputs(model: ir.Model) -> list[str | None]:
    return [value.name for value in model.graph.inputs]


def _rounded(model: ir.Model) -> ir.Model:
    """Return ``model`` with only its weights stored as integers."""
    rounded = as_model(qat(model, weights="int8", activations=None))
    store_integers(rounded, lazily=True)
    return rounded


def _calibrated(model: ir.Model, batches: list[Batch], folder: Folder) -> ir.Model:
    """Return ``model`` with integer weights and activations; ranges are observed on ``batches``."""
    result = calibrated(model, batches, folder.path)
    for key, value in model.metadata_props.items():
        result.metadata_props.setdefault(key, value)
    return result


def _move_to_file(model: ir.Model, folder: Folder, name: str) -> None:
    """Write large weights to a file in ``folder``, and evaluate weights that are computed on access.

    Weights stored in another file are written, too, since a session maps files of one folder only. Weights stay in
    memory if they are small in total, or if the disk is full. ``folder`` deletes the file later.
    """
    large = [v for v in stored_values(model) if bytes_of([v]) >= LEAST_BYTES]
    if bytes_of(v for v in large if not isinstance(v.const_value, ir.ExternalTensor)) >= large_weights.LEAST_KEPT:
        with contextlib.suppress(OutputError):
            store_outside(large, folder.path, f"{name}.data")
    for value in stored_values(model):
        if isinstance(value.const_value, ir.LazyTensor):
            value.const_value = ir.tensor(value.const_value.numpy(), name=value.name)


def _compared_on_random_data(given: ir.Model, small: ir.Model) -> dict[str, Compared]:
    """Compare the quantised model with the float model on a random batch; return {} if none fits."""
    plain, last = Predictor(given, device="cpu", packs=False), dict[str, np.ndarray[Any, Any]]()
    plan = plain.names.preprocess
    if plan is None:
        feeds = drawn(given, lambda batch: last.update(plain(batch)))
    else:
        feeds = plan.arrays(plan.drawn(np.random.default_rng(0), plain.fixed_rows or 8))
        last |= plain(feeds)
    return {} if feeds is None else compared(lambda _: last, _predictor(small, plain), [feeds])


def _predictor(small: ir.Model, plain: Predictor) -> Predictor:
    return Predictor(small, plain.outputs, device="cpu", packs=False)


def _read(data: Any, predictor: Predictor, size: int) -> tuple[int, list[Batch]]:
    """Return the number of samples in ``data``, and batches of ``size`` samples for the model."""
    data = read_data(data, predictor.names)
    if isinstance(data, Loadable):
        with in_order(data, predictor.specs, (), predictor.names) as source:
            return source.rows, [
                filled(batch, size if predictor.fixed_rows else 0)[0] for batch in source.batches(size)
            ]
    if is_table(data):
        data, _ = columns_of(data, predictor.specs, predictor.names)
    if not isinstance(data, Mapping):
        raise DataError(
            f"{described(data)} is not calibration data; pass a path, a table, or a dict of arrays by input"
        )
    if missing := [name for name in predictor.specs if name not in data]:
        raise DataError(f"the calibration data lack {listed(missing)}, which the model expects")
    arrays = {name: np.asarray(data[name]) for name in predictor.specs}
    rows = common_length({name: row_count(name, array.shape) for name, array in arrays.items()})
    parts = ({n: a[i : i + size] for n, a in arrays.items()} for i in range(0, rows, size))
    return rows, [filled(batch, size if predictor.fixed_rows else 0)[0] for batch in parts]
