"""Quantisation-aware training: weights and data of layers are rounded as an integer runtime will round them.

Before each chosen layer stand a QuantizeLinear and a DequantizeLinear. In training the pair is arithmetic through
which gradients pass straight (Bengio et al. 2013, arXiv:1308.3432), within the range of the integers; evaluation and
export keep the pair, and an exported model stores its weights as integers.

- A weight has one scale for each output channel, ``max |W| / 127``, which follows the weight as it moves; symmetric.
- Data have one scale and one zero point, found by running the model on a sample of data, and fixed from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NAMES, PATH, Kind, checked
from gradgraph.errors import BuildError, DataError, UnknownNameError, listed, shown
from gradgraph.files import Source
from gradgraph.marks import QUANTISED
from gradgraph.runtime.data.arrays import load_arrays
from gradgraph.surgery.linear_layers import Layer, linear_layers, stored
from gradgraph.surgery.operated import Path, Result, add_weight, closed, free_name, numbers_of, opened
from gradgraph.surgery.tried import run_model
from gradgraph.verify.feeds import Feeds

WEIGHTS = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4}
ACTIVATIONS = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8, "uint16": ir.DataType.UINT16, None: None}
_LARGEST = {"int8": 127.0, "int4": 7.0}
_RANGE = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535)}
_SMALLEST = 1e-8  # a scale: of a channel of zeros, too
_MOST = 1_000  # samples of a file that ranges are found on
_ROWS = 64  # of the data that ranges are found on, at a time
_ONLY = ("Conv", "Gemm", "MatMul")

_WEIGHTS = Kind("'int8' or 'int4'", lambda value: value in WEIGHTS)
_ACTIVATIONS = Kind("'uint8', 'int8', 'uint16' or None", lambda value: value is None or value in ACTIVATIONS)
_DATA = Kind("a dict of arrays by input, or a path", lambda v: v is None or isinstance(v, Mapping) or PATH.fits(v))


@checked(target=NAMES, weights=_WEIGHTS, activations=_ACTIVATIONS, data=_DATA, out=PATH.or_none())
def qat(
    model: Source,
    data: Mapping[str, np.ndarray] | Path | None = None,
    *,
    target: str | Sequence[str] = "*",
    weights: str = "int8",
    activations: str | None = "uint8",
    out: Path | None = None,
) -> Result:
    """The model with rounded weights and data, to be trained until it is as good as it was.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` of float32; it is not changed.
        data: samples by input, such as a few hundred of those to train on, or an ``.npz`` or a folder of ``.npy`` of
            them: the ranges of the data are theirs.
        target: names or globs of the layers (Conv, Gemm, MatMul with a float weight), by weight, module or node.
        weights: ``"int8"`` or ``"int4"``, symmetric, one scale for each output channel.
        activations: ``"uint8"``, ``"int8"`` or ``"uint16"`` for what goes into the layers; None leaves that float.
        out: write the result to this path.

    Returns:
        The same kind of model. A step of it trains through the rounding; ``trainer.export`` gives a model with
        QuantizeLinear and DequantizeLinear, whose weights are stored as integers.

    Raises:
        BuildError: the model is quantised already, or data are needed and not given.
        DataError: the data are not what the model takes.
        UnknownNameError: no layer with a float weight matches.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    if any(node.op_type == "QuantizeLinear" for node in work.graph):
        raise BuildError(
            "the model is quantised already",
            remedy="to train it as it is, call gradgraph.extend.straight_through() before gg.build",
            shell="quantise the float model that it was made of",
        )
    if activations is not None and data is None:
        raise BuildError(
            "the ranges of what goes into the layers are found on data",
            remedy="pass a sample of them, or activations=None",
            shell="give a sample with --qat FILE",
        )
    layers = [one for one in linear_layers(work, target)[0] if one.kind in _ONLY and _is_plain(one)]
    if not layers:
        raise UnknownNameError(
            f"no layer with a float weight matches {listed([target] if isinstance(target, str) else target)}"
        )
    if data is not None and not isinstance(data, Mapping):
        data = {name: np.asarray(array[:_MOST]) for name, array in load_arrays(data).items()}
    ranges = (
        _ranges(work, {layer.data for layer in layers}, data) if activations is not None and data is not None else {}
    )
    seen: dict[ir.Value, ir.Value] = {}
    for layer in layers:
        _round_weight(work, layer, weights)
        if activations is not None:
            x = layer.data
            if x not in seen:
                seen[x] = _rounded(work, x, layer, ranges[x], activations)
            layer.node.replace_input_with(0, seen[x])
    work.metadata_props[QUANTISED] = json.dumps({"weights": weights, "activations": activations})
    return closed(work, model, out)


def _is_plain(layer: Layer) -> bool:
    """Is its weight stored as floats?"""
    source = stored(layer.weight)
    tensor = numbers_of(source)
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT and layer.weight.dtype == ir.DataType.FLOAT


# --- weights --------------------------------------------------------------------------------------------------


def _round_weight(work: ir.Model, layer: Layer, kind: str) -> None:
    """W → round(W/s)·s with s = max|W| / largest for each output channel."""
    weight = layer.weight
    rank = len(weight.shape or ())
    axis = 0 if layer.kind == "Conv" or layer.turned else 1
    write = _Writer(work, layer)
    others = write.weight("axes", np.array([a for a in range(rank) if a != axis], np.int64))
    largest = write.node("ReduceMax", write.node("Abs", weight), others, keepdims=0)
    bounded = write.node("Max", largest, write.number(_SMALLEST * _LARGEST[kind]))
    scale = write.node("Div", bounded, write.number(_LARGEST[kind]))
    zero = write.zero(WEIGHTS[kind])
    integers = write.node("QuantizeLinear", weight, scale, zero, axis=axis)
    scale.name = free_name(work, f"{layer.name}.weight_scale")  # these two are what an exported model stores
    integers.name = free_name(work, f"{layer.name}.weight_quantized")
    layer.node.replace_input_with(1, write.node("DequantizeLinear", integers, scale, zero, axis=axis))
    write.place()


# --- data -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Range:
    low: float
    high: float


def _ranges(work: ir.Model, values: set[ir.Value], data: Mapping[str, np.ndarray]) -> dict[ir.Value, _Range]:
    """The smallest and the largest number of each value, on ``data``; 0 is always among them."""
    names = [v.name or "" for v in values]
    probe = work.clone()
    inner = {v.name: v for node in probe.graph for v in node.outputs}
    probe.graph.outputs[:] = [inner[n] for n in names if n in inner]
    found = {n: _Range(0.0, 0.0) for n in names}
    for feeds in _batches(work, data):
        results = {**feeds, **(run_model(probe, feeds, "on the data") if probe.graph.outputs else {})}
        for name in names:
            low, high = float(np.min(results[name])), float(np.max(results[name]))
            if not np.isfinite([low, high]).all():
                raise DataError(f"on these data '{shown(name)}' is not finite, so it has no range")
            found[name] = _Range(min(low, found[name].low), max(high, found[name].high))
    return {v: found[v.name or ""] for v in values}


def _batches(work: ir.Model, data: Mapping[str, np.ndarray]) -> list[Feeds]:
    inputs = [v for v in work.graph.inputs if not v.is_initializer()]
    missing = [v.name for v in inputs if v.name not in data]
    if missing:
        raise DataError(f"the data have no {listed(missing)}, which the model reads")
    arrays = {str(v.name): np.asarray(data[str(v.name)]).astype((v.dtype or ir.DataType.FLOAT).numpy()) for v in inputs}
    fixed = [v.shape[0] for v in inputs if v.shape is not None and len(v.shape) and isinstance(v.shape[0], int)]
    size = int(fixed[0]) if fixed else _ROWS
    rows = min((len(a) for a in arrays.values() if a.ndim), default=1)
    if rows < (size if fixed else 1):
        raise DataError(f"the data have {rows} samples, and the model takes {size} at a time")
    starts = range(0, rows - size + 1, size) if fixed else range(0, rows, size)
    return [{n: a[i : i + size] if a.ndim else a for n, a in arrays.items()} for i in starts]


def _rounded(work: ir.Model, x: ir.Value, layer: Layer, found: _Range, kind: str) -> ir.Value:
    lowest, highest = _RANGE[kind]
    scale = max((found.high - found.low) / (highest - lowest), _SMALLEST)
    zero = int(np.clip(round(lowest - found.low / scale), lowest, highest))
    write = _Writer(work, layer)
    step = write.constant(np.array(scale, np.float32))
    point = write.constant(np.array(zero, kind))
    integers = write.node("QuantizeLinear", x, step, point)
    result = write.node("DequantizeLinear", integers, step, point)
    write.place()
    return result


class _Writer:
    """Writes nodes before a layer."""

    def __init__(self, work: ir.Model, layer: Layer) -> None:
        self.work, self.layer, self._nodes = work, layer, list[ir.Node]()

    def node(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        attrs = [ir.AttrInt64(k, v) for k, v in attributes.items()]
        return self._write(op_type, inputs, attrs)

    def _write(self, op_type: str, inputs: Sequence[ir.Value], attrs: Sequence[ir.Attr]) -> ir.Value:
        name = free_name(self.work, f"{self.layer.name}/quantise/{op_type}_{len(self._nodes)}")
        made = ir.Node("", op_type, inputs, attrs, name=name)
        made.outputs[0].name = name
        self._nodes.append(made)
        return made.outputs[0]

    def constant(self, data: np.ndarray) -> ir.Value:
        value = self._write("Constant", [], [ir.AttrTensor("value", ir.tensor(data))])
        value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(data.dtype)), ir.Shape(data.shape)
        return value

    def number(self, value: float) -> ir.Value:
        return self.constant(np.array(value, np.float32))

    def weight(self, name: str, data: np.ndarray) -> ir.Value:
        return add_weight(self.work, f"{self.layer.name}/quantise/{name}", data)

    def zero(self, kind: ir.DataType) -> ir.Value:
        """Zero points of zero, one for each channel."""
        channels = self.layer.sizes[1]
        tensor = ir.tensor(np.zeros(channels, np.int8), dtype=kind)
        return self._write("Constant", [], [ir.AttrTensor("value", tensor)])

    def place(self) -> None:
        self.work.graph.insert_before(self.layer.node, self._nodes)
