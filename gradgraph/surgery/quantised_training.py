"""Quantisation-aware training: weights and inputs of layers are rounded as in an integer runtime.

A QuantizeLinear and a DequantizeLinear precede each chosen layer. In training the pair is arithmetic with a
straight-through gradient (Bengio et al. 2013, arXiv:1308.3432) within the range of the integers; evaluation and export
keep the pair, and an exported model stores its weights as integers.

- Weights are quantised symmetrically, with one scale for each output channel: ``max |W|`` divided by the largest
  integer, computed from the weight in each step. With 8-bit data, int8 weights have 7 bits
  (``gradgraph.graph.quantisers.SEVEN_BITS``).
- The input of a layer has one scale and one zero point, observed by running the model on a sample of data, and then
  fixed.
- With learned ranges both scales are trained from these initial values, by the gradient of LSQ (Esser et al. 2020,
  arXiv:1902.08153); zero points are not trained.
- For a model that is already quantised, see ``gradgraph.surgery.quantised_finetuning``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NAMES, PATH, Kind, as_names, checked
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.errors import BuildError, DataError, UnknownNameError, counted, listed, shown
from gradgraph.files.model_metadata import write_quantisation
from gradgraph.files.models import Source
from gradgraph.graph.quantisers import INTEGER_RANGES, SEVEN_BITS
from gradgraph.graph.shapes import OPSET, known_sizes, recorded_shape
from gradgraph.passes.normal.opsets.opset import convert_below
from gradgraph.surgery.integer_products import PER_CHANNEL, write_pairs
from gradgraph.surgery.linear_layers import Layer, linear_layers, stored
from gradgraph.surgery.operation import (
    Path,
    Result,
    check_patterns,
    closed,
    free_name,
    learn_sizes,
    log_matches,
    numbers_of,
    opened,
)
from gradgraph.surgery.quantised_finetuning import go_on, is_quantised, names_of_quantised, refuse_integer_products
from gradgraph.surgery.rounding_nodes import SMALLEST, Writer
from gradgraph.surgery.stored_weights import as_read
from gradgraph.surgery.verification import run_model
from gradgraph.verify.feeds import Feeds

WEIGHTS = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4}
ACTIVATIONS = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8, "uint16": ir.DataType.UINT16}
RANGES = ("observed", "learned")
_MOST = 1_000  # samples of a file used to observe ranges
_ROWS = 64  # batch size for observing ranges

_WEIGHTS = Kind("'int8' or 'int4'", lambda value: value in WEIGHTS)
_ACTIVATIONS = Kind("'uint8', 'int8', 'uint16' or None", lambda value: value is None or value in ACTIVATIONS)
_RANGES = Kind("'observed' or 'learned'", lambda value: value in RANGES)
_DATA = Kind("a dict of arrays by input, or a path", lambda v: v is None or isinstance(v, Mapping) or PATH.fits(v))


@checked(target=NAMES.or_none(), weights=_WEIGHTS, activations=_ACTIVATIONS, ranges=_RANGES, data=_DATA,
         out=PATH.or_none())  # fmt: skip
def qat(
    model: Source,
    data: Mapping[str, np.ndarray] | Path | None = None,
    *,
    target: str | Sequence[str] | None = None,
    weights: str = "int8",
    activations: str | None = "uint8",
    ranges: str = "observed",
    out: Path | None = None,
) -> Result:
    """Add fake quantisation of weights and activations, for quantisation-aware training.

    A model that is already quantised becomes trainable: integers read by DequantizeLinear become float weights that are
    rounded in each step, its pairs stay, and an exported model has them as before. Integer products (QLinearConv,
    MatMulInteger, …) are converted to such pairs first.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` of float32; it is not changed.
        data: samples by input to observe ranges on, such as a few hundred training samples, or an ``.npz`` or a folder
            of ``.npy``. A quantised model has its own ranges.
        target: names or globs of the layers (Conv, Gemm, MatMul with a float weight; in a quantised model also any with
            stored integers), by weight, module or node. By default all, or in a quantised model the quantised ones: a
            new head stays float unless named.
        weights: ``"int8"`` or ``"int4"``, symmetric, one scale for each output channel; int4 writes the model at opset
            21. Layers that are already quantised keep their type. With activations of 8 bits, int8 weights range from
            -64 to 64, as onnxruntime saturates larger ones on x86 processors without VNNI.
        activations: ``"uint8"``, ``"int8"`` or ``"uint16"`` for the inputs of the layers; None keeps them float.
        ranges: ``"observed"``: the scale of a weight is computed from its largest magnitude, and the scale of an
            activation is observed on the sample; a quantised model keeps the scales in the file. ``"learned"``: these
            scales are initial values, and are trained (LSQ).
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``. Training passes gradients through the rounding; ``trainer.export`` writes
        a model with QuantizeLinear and DequantizeLinear, whose weights are stored as integers.

    Raises:
        BuildError: no layer has a float weight, or the model already has fake quantisation; data are required; or a
            layer multiplies integers by an operator whose float form is unknown.
        DataError: the data do not fit the model.
        UnknownNameError: no layer with a stored weight matches a name or glob.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    if write_pairs(work):
        learn_sizes(work)
    refuse_integer_products(work)
    quantised, learned = is_quantised(work), ranges == "learned"
    convert_below(work, OPSET if weights == "int4" else PER_CHANNEL)
    write_quantisation(work, weights=weights, activations=activations or "")
    known = names_of_quantised(work)
    again = go_on(work, target, learned) if quantised else []
    layers = [] if quantised and target is None else _float_layers(work, target or "*")
    _check_found(work, target, known, again, layers)
    found = {} if activations is None else _observed(work, layers, data)
    seen: dict[ir.Value, ir.Value] = {}
    for layer in layers:
        _round_weight(work, layer, weights, _weight_limits(layer, weights, activations), learned)
        if activations is not None and (x := layer.data) in found:
            if x not in seen:
                seen[x] = _rounded(work, layer, found[x], activations, learned)
            layer.node.replace_input_with(0, seen[x])
    if again:
        log_matches("training the integers of", again, "tensor")
    if layers:
        log_matches("rounding at", [layer.name for layer in layers])
    return closed(work, model, out)


def _check_found(
    work: ir.Model, target: str | Sequence[str] | None, known: list[str], again: list[str], layers: list[Layer]
) -> None:
    """Raise an error unless there is something to quantise, and each name or glob in ``target`` matches.

    ``known`` are the names of tensors that are already quantised, and ``again`` the names of those to train further.
    """
    if target is None:
        if not layers and not is_quantised(work):
            raise BuildError(
                "no Conv, Gemm or MatMul of the model has a stored float32 weight, so nothing can be rounded"
            )
        if not layers and not again:
            raise BuildError(
                "the model already has fake quantisation: no layer has a weight stored as integers",
                remedy="build it unchanged, or name float layers with target=",
                shell="build it unchanged",
            )
        return
    if not layers and not again:
        raise UnknownNameError(f"no layer with a stored weight matches {listed(as_names(target))}")
    names = [*known, *(name for layer in layers for name in layer.names)]
    check_patterns(target, names, "layer with a stored weight", [one.name for one in _float_layers(work, "*")])


def _observed(
    work: ir.Model, layers: Sequence[Layer], data: Mapping[str, np.ndarray] | Path | None
) -> dict[ir.Value, _Range]:
    """Return the range of each input of ``layers`` that is not rounded yet, observed on ``data``."""
    new = {layer.data for layer in layers if not _comes_rounded(layer.data)}
    if data is None and new:
        raise BuildError(
            "the ranges of the layers' inputs must be observed on data, but none are passed",
            remedy="pass a sample of the training data, or activations=None",
            shell="pass a sample of the training data with --qat FILE",
        )
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        data = {name: np.asarray(array[:_MOST]) for name, array in load_arrays(data).items()}
    return _ranges(work, new, data) if new else {}


def _float_layers(work: ir.Model, target: str | Sequence[str]) -> list[Layer]:
    """Return the layers that match ``target`` and have a float32 weight."""
    layers = [one for one in linear_layers(work, target)[0] if one.kind in ("Conv", "Gemm", "MatMul")]
    held = [(one, numbers_of(stored(one.weight))) for one in layers]
    return [one for one, t in held if t is not None and {t.dtype, one.weight.dtype} == {ir.DataType.FLOAT}]


def _comes_rounded(x: ir.Value) -> bool:
    node = x.producer()
    return node is not None and node.op_type == "DequantizeLinear"


# --- weights --------------------------------------------------------------------------------------------------


def _weight_limits(layer: Layer, weights: str, activations: str | None) -> tuple[int, int]:
    """Return the smallest and the largest integer to which a layer's weight is rounded."""
    data = layer.data.producer() if _comes_rounded(layer.data) else None
    before = data.inputs[0] if data is not None else None
    kind = before.dtype if before is not None else ACTIVATIONS[activations] if activations is not None else None
    meets_bytes = kind in (ir.DataType.UINT8, ir.DataType.INT8)
    return SEVEN_BITS if weights == "int8" and meets_bytes else INTEGER_RANGES[WEIGHTS[weights]]


def _round_weight(work: ir.Model, layer: Layer, kind: str, limits: tuple[int, int], learned: bool) -> None:
    """Replace a weight W with round(W/s)·s, where s = max |W| / largest integer per output; s is trained if
    ``learned``.
    """
    weight, axis = layer.weight, layer.axis
    _, largest = limits
    others = [a for a in range(len(layer.shape)) if a != axis]
    write = Writer(work, layer.node, layer.name)
    if learned:
        first = np.maximum(np.abs(as_read(weight)).max(tuple(others)) / largest, SMALLEST)
        scale = write.learned(first, f"{layer.name}.weight_range")
    else:
        bounded = write.node("Max", write.largest(weight, others), write.constant(SMALLEST * largest))
        scale = write.node("Div", bounded, write.constant(largest))
    zero = write.constant(np.zeros(layer.sizes[1]), WEIGHTS[kind])
    integers, rounded = write.pair(weight, scale, zero, limits, axis=axis)
    scale.name = free_name(work, f"{layer.name}.weight_scale")  # an exported model stores these two
    integers.name = free_name(work, f"{layer.name}.weight_quantized")
    layer.node.replace_input_with(1, rounded)
    write.place()


# --- data -----------------------------------------------------------------------------------------------------


_Range: TypeAlias = tuple[float, float]  # the smallest and the largest element


def _ranges(work: ir.Model, values: set[ir.Value], data: Mapping[str, np.ndarray]) -> dict[ir.Value, _Range]:
    """Return the smallest and the largest element of each value when the model runs on ``data``; ranges include 0."""
    names = [v.name or "" for v in values]
    probe = work.clone()
    inner = {v.name: v for node in probe.graph for v in node.outputs}
    probe.graph.outputs[:] = [inner[n] for n in names if n in inner]
    found: dict[str, _Range] = dict.fromkeys(names, (0.0, 0.0))
    for feeds in _batches(work, data):
        results = {**feeds, **(run_model(probe, feeds, "on the data") if probe.graph.outputs else {})}
        for name in names:
            low, high = float(np.min(results[name])), float(np.max(results[name]))
            if not np.isfinite([low, high]).all():
                raise DataError(f"'{shown(name)}' is not finite on these data, so its range is unknown; check the data")
            found[name] = min(low, found[name][0]), max(high, found[name][1])
    return {v: found[v.name or ""] for v in values}


def _batches(work: ir.Model, data: Mapping[str, np.ndarray]) -> list[Feeds]:
    inputs = [v for v in work.graph.inputs if not v.is_initializer()]
    missing = [v.name for v in inputs if v.name not in data]
    if missing:
        raise DataError(f"the data have no {listed(missing)}, which the model reads; add an array for each input")
    arrays = {str(v.name): np.asarray(data[str(v.name)]).astype((v.dtype or ir.DataType.FLOAT).numpy()) for v in inputs}
    fixed = known_sizes(shape[0] for shape in map(recorded_shape, inputs) if shape)
    size = fixed[0] if fixed else _ROWS
    rows = min((len(a) for a in arrays.values() if a.ndim), default=1)
    if rows < (size if fixed else 1):
        raise DataError(
            f"the data have {counted(rows, 'sample')}, but the model has a batch size of {size}; pass at least {size}"
        )
    starts = range(0, rows - size + 1, size) if fixed else range(0, rows, size)
    return [{n: a[i : i + size] if a.ndim else a for n, a in arrays.items()} for i in starts]


def _rounded(work: ir.Model, layer: Layer, found: _Range, kind: str, learned: bool) -> ir.Value:
    """Write a Q/DQ pair on a layer's input, with scale and zero point for the range ``found``; return the result."""
    (lowest, highest), (low, high) = INTEGER_RANGES[ACTIVATIONS[kind]], found
    size = max((high - low) / (highest - lowest), SMALLEST)
    zero = int(np.clip(round(lowest - low / size), lowest, highest))
    write = Writer(work, layer.node, layer.name)
    number = np.array(size, np.float32)
    if learned:
        scale = write.learned(number, f"{layer.name}.input_range")
        scale.name = free_name(work, f"{layer.name}.input_scale")
    else:
        scale = write.constant(number)
    _, result = write.pair(layer.data, scale, write.constant(zero, ACTIVATIONS[kind]))
    write.place()
    return result
