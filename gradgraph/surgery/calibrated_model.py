"""Quantisation of activations and weights by onnxruntime's quantiser, without holding all weights in memory.

The quantiser needs only the range of each weight, or of each of its channels, before it rounds the weight. So it is
called with small weights of the same ranges, and the large ones are rounded one at a time when they are written:
neither their floats nor their integers are all in memory. The result is the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import ModelError, RuntimeUnavailableError, shown
from gradgraph.files.external import is_external
from gradgraph.files.large_weights import LEAST_BYTES
from gradgraph.files.mapped import forget_pages
from gradgraph.files.protos import copied
from gradgraph.graph.quantisers import Quantiser
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import attributes, replace_value
from gradgraph.runtime.execution.frozen_weights import FrozenWeights, proto_and_weights
from gradgraph.runtime.execution.session import (
    Placement,
    RuntimeOptions,
    create_session,
    results,
    weights_pass_through,
)
from gradgraph.surgery.operation import Array, add_weight
from gradgraph.surgery.stored_weights import quantiser_of

Batch = Mapping[str, Array]
Ranges = Mapping[str, list[Array]]  # by tensor name: its smallest and its largest element, of shape [1]
Large = Mapping[str, ir.TensorProtocol]  # by weight name

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
_BIASED = ("Conv", "ConvTranspose", "Gemm")
_INTEGERS = "_quantized"  # suffixes that onnxruntime adds to the name of a weight


def calibrated(model: ir.Model, batches: Iterable[Batch], folder: Path) -> ir.Model:
    """Quantise the float ``model`` with onnxruntime's quantiser, with ranges observed on ``batches``.

    Large integers of the result are computed on access, from the weights of ``model``. ``folder`` is for temporary
    files.

    Raises:
        ModelError: onnxruntime's quantiser rejects the model.
        RuntimeUnavailableError: a package that the quantiser needs is not installed.
    """
    try:
        import onnxruntime.quantization  # noqa: F401
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime's quantiser needs the package {shown(error.name)}",
            remedy=f"pip install {shown(error.name)}",
        ) from None
    with _quiet():
        try:
            return _calibrated(model, batches, folder)
        except Exception as error:
            raise ModelError(f"onnxruntime's quantiser rejects the model: {shown(error)}") from None


def _calibrated(model: ir.Model, batches: Iterable[Batch], folder: Path) -> ir.Model:
    work = _optimised(model, folder / "optimised.onnx")
    _own_biases(work)
    proto, weights = proto_and_weights(work)
    proto = onnx.shape_inference.infer_shapes(proto)
    ranges = _ranges(proto, weights, batches)
    large = {name: tensor for name, value in work.graph.initializers.items() if (tensor := _large(value)) is not None}
    single = {name: np.zeros([1] * len(tensor.shape)) for name, tensor in large.items()}
    axes = _axes(_quantised(proto, single, ranges), large)
    condensed = {name: _condensed(large[name].numpy(), axis) for name, axis in axes.items()}
    whole = {name: tensor.numpy() for name, tensor in large.items() if name not in axes}
    return _with_weights(_quantised(proto, condensed | whole, ranges), large, condensed)


def turn_weights(model: ir.Model) -> None:
    """Remove each Transpose between a large weight and MatMuls, in place; the weight is transposed instead.

    Transposed weights are computed on access. onnxruntime would transpose them, too, but keep all of them in memory.
    """
    for node in [*model.graph]:
        weight, old = next(iter(node.inputs), None), node.outputs[0]
        tensor = _large(weight) if node.op_type == "Transpose" and weight is not None else None
        read_by = {use.op_type for use, _ in old.uses()}
        if weight is None or tensor is None or old.is_graph_output() or read_by != {"MatMul"}:
            continue
        order = given if (given := attributes(node).get("perm")) is not None else range(len(tensor.shape))[::-1]
        shape = ir.Shape([tensor.shape.numpy()[axis] for axis in order])
        turned = ir.LazyTensor(functools.partial(_turned, tensor, order, old.name), tensor.dtype, shape, name=old.name)
        value = ir.Value(name=old.name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=turned)
        replace_value(old, value)
        model.graph.remove(node, safe=True)
        model.graph.register_initializer(value)
        if not weight.uses() and not weight.is_graph_output():
            model.graph.initializers.pop(weight.name or "")


def _turned(weight: ir.TensorProtocol, order: Sequence[int], name: str | None) -> ir.TensorProtocol:
    numbers = weight.numpy()
    turned = np.ascontiguousarray(numbers.transpose(order))
    forget_pages(numbers)
    return ir.tensor(turned, name=name)


def _optimised(model: ir.Model, path: Path) -> ir.Model:
    """Return ``model`` with nodes fused by onnxruntime, for its integer kernels; ``path`` is a temporary file."""
    proto, weights = proto_and_weights(model)
    basic = RuntimeOptions(optimization="basic")
    create_session(proto, Placement.choose("cpu"), basic, weights, optimized=path, packs=False, runs=False)
    written = onnx.load(path, load_external_data=False)
    path.unlink()
    lying = {t.name for t in written.graph.initializer if is_external(t)}
    result: ir.Model = ir.from_proto(written)
    for name in lying:
        result.graph.initializers[name].const_value = model.graph.initializers[name].const_value
    return result


def _own_biases(model: ir.Model) -> None:
    """Give each layer its own bias with one number per output, multiplied by the ``beta`` of a Gemm, in place.

    The quantiser ignores ``beta`` and fails for biases of other shapes. It quantises a bias that layers share with the
    first layer's scale, while onnxruntime's integer kernels assume the scale of each layer.
    """
    for node in [*model.graph]:
        bias = node.inputs[2] if node.op_type in _BIASED and len(node.inputs) > 2 else None
        if bias is None or bias.const_value is None:
            continue
        beta, numbers = attributes(node).get("beta", 1.0), bias.const_value.numpy()
        weight = None if node.inputs[1] is None else shape_of(node.inputs[1])
        outputs = weight[0 if attributes(node).get("transB") else 1] if weight and node.op_type == "Gemm" else None
        if numbers.ndim != 1 and numbers.size in (1, numbers.shape[-1] if numbers.ndim else 1):
            numbers = numbers.reshape(-1)
        if isinstance(outputs, int) and numbers.size == 1:
            numbers = np.repeat(numbers, outputs)
        if beta == 1.0 and len(bias.uses()) == 1 and numbers.shape == tuple(bias.const_value.shape.numpy()):
            continue
        name = f"{bias.name}.of.{node.outputs[0].name}"
        node.replace_input_with(2, add_weight(model, name, (numbers * beta).astype(numbers.dtype)))
        if node.op_type == "Gemm":
            node.attributes["beta"] = ir.AttrFloat32("beta", 1.0)
        if not bias.uses() and not bias.is_graph_output():
            model.graph.initializers.pop(bias.name or "")


def _large(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the tensor of a large floating-point initializer with several axes; None for any other value."""
    tensor = value.const_value
    is_large = tensor is not None and tensor.dtype in _FLOATS and len(tensor.shape) > 1 and tensor.nbytes >= LEAST_BYTES
    return tensor if is_large else None


def _ranges(proto: onnx.ModelProto, weights: FrozenWeights | None, batches: Iterable[Batch]) -> Ranges:
    """Return the range of each floating-point activation of quantised operators, by name: smallest and largest value.

    Nodes that compute the ranges are appended in reverse order, so that onnxruntime runs each as early as possible.
    """
    stored, operators = {t.name for t in proto.graph.initializer}, _operators()
    values = (*proto.graph.value_info, *proto.graph.output, *proto.graph.input)
    kinds = {v.name: v.type.tensor_type.elem_type for v in values}
    ends = dict.fromkeys(x for n in proto.graph.node if n.op_type in operators for x in (*n.input, *n.output))
    names = [name for name in ends if kinds.get(name) in _FLOATS and name not in stored]
    if not names:
        return {}
    probed = copied(proto)
    del probed.graph.output[:]
    found = [f"{which}/{name}" for name in reversed(names) for which in ("ReduceMin", "ReduceMax")]
    for output in found:
        which, _, name = output.partition("/")
        probed.graph.node.append(onnx.helper.make_node(which, [name], [output], name=output, keepdims=1))
        probed.graph.output.append(onnx.helper.make_tensor_value_info(output, kinds[name], None))
    options = RuntimeOptions(optimization="none")
    session = create_session(probed, Placement.choose("cpu"), options, weights, packs=False)
    parts = []
    for batch in batches:
        with weights_pass_through(session):
            parts.append({name: array.reshape(-1) for name, array in results(session, found, batch).items()})
    return {
        name: [
            np.nanmin([part[f"ReduceMin/{name}"] for part in parts], axis=0),
            np.nanmax([part[f"ReduceMax/{name}"] for part in parts], axis=0),
        ]
        for name in names
    }


def _operators() -> set[str]:
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return {*QDQRegistry, *QLinearOpsRegistry}


def _quantised(proto: onnx.ModelProto, weights: Mapping[str, Array], ranges: Ranges) -> onnx.ModelProto:
    """Return ``proto`` quantised by onnxruntime, with its large weights replaced by the small ``weights``."""
    from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType
    from onnxruntime.quantization.calibrate import TensorData, TensorsData
    from onnxruntime.quantization.quant_utils import add_infer_metadata

    given = copied(proto)
    for tensor in given.graph.initializer:
        if tensor.name in weights:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name].astype(dtype, copy=False), tensor.name))
    add_infer_metadata(given)  # otherwise it infers shapes again, from these weights
    data: dict[str, Any] = {name: TensorData(lowest=low, highest=high) for name, (low, high) in ranges.items()}
    reduce_range = True  # SEVEN_BITS
    # on x86, onnxruntime leaves data of int8 that several nodes read in floats: 2 of 5 layers of residual blocks fused
    quantiser = QDQQuantizer(given, True, reduce_range, QuantType.QInt8, QuantType.QUInt8,
                             TensorsData(CalibrationMethod.MinMax, data), [], _in_floats(given),
                             list(_operators()), {})  # fmt: skip
    quantiser.quantize_model()
    quantiser.model.topological_sort()
    return quantiser.model.model


def _in_floats(proto: onnx.ModelProto) -> list[str]:
    """Return the names of nodes that the quantiser gets wrong.

    These are each ConvTranspose with groups and a bias, and each Gemm that adds a stored matrix.
    """
    found, axes = [], {t.name: len(t.dims) for t in proto.graph.initializer}
    for node in proto.graph.node:
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        bias = node.input[2] if len(node.input) > 2 else ""
        wrong = {"ConvTranspose": bias and groups > 1, "Gemm": axes.get(bias) == 2}
        if wrong.get(node.op_type):
            node.name = node.name or node.output[0]
            found.append(node.name)
    return found


def _axes(quantised: onnx.ModelProto, large: Large) -> dict[str, int | None]:
    """Return the axis of the scales of each large weight that was quantised to int8; None for a single scale."""
    stored = {t.name: t.data_type for t in quantised.graph.initializer}
    weights = {f"{name}{_INTEGERS}": name for name in large}
    return {
        weights[node.input[0]]: next((a.i for a in node.attribute if a.name == "axis"), None)
        for node in quantised.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in weights and stored[node.input[0]] == ir.DataType.INT8
    }


def _condensed(weight: Array, axis: int | None) -> Array:
    """Return a small weight: the minimum and maximum of each slice of ``weight`` along ``axis`` (None: of all)."""
    kept = None if axis is None else axis % weight.ndim
    others = tuple(a for a in range(weight.ndim) if a != kept)
    return np.concatenate([weight.min(others, keepdims=True), weight.max(others, keepdims=True)], others[0])


def _with_weights(quantised: onnx.ModelProto, large: Large, rounded: Collection[str]) -> ir.Model:
    """Return ``quantised`` with the large weights: as int8 for names in ``rounded``, else as floats."""
    result: ir.Model = ir.from_proto(quantised)
    stored = result.graph.initializers
    for name, tensor in large.items():
        if name in stored:
            _put(stored[name], tensor)
        if name in rounded:
            value = stored[f"{name}{_INTEGERS}"]
            reader = next(node for node, _ in value.uses() if node.op_type == "DequantizeLinear")
            computed = functools.partial(_rounded, quantiser_of(reader), tensor, value.name)
            _put(value, ir.LazyTensor(computed, ir.DataType.INT8, ir.Shape(tensor.shape.numpy()), name=value.name))
    return result


def _rounded(quantiser: Quantiser, weight: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    return ir.tensor(quantiser.quantised(weight.numpy().astype(np.float32, copy=False), np.int8), name=name)


def _put(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    value.const_value, value.shape = tensor, ir.Shape(tensor.shape.numpy())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the quantiser's warnings, which recommend preprocessing that was already done."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
