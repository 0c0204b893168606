"""The numbers of a linear layer's weight, read through whatever they are stored as, and written again."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from gradgraph.errors import BuildError, shown
from gradgraph.passes.normal.edit import discard, replace_value
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operated import add_weight, numbers_of, set_numbers

Array = np.ndarray[Any, Any]


def canonical(layer: Layer) -> Array:
    """The weight in float64, outputs first: (outputs, inputs), of a Conv (outputs, inputs of a group, kernel)."""
    if layer.kind == "MatMulNBits":
        return np.asarray(packed_weight(layer.node), np.float64)
    weight = np.asarray(as_read(layer.weight), np.float64)
    return weight if layer.turned or layer.kind == "Conv" else weight.T


def as_laid_out(layer: Layer, weight: Array) -> Array:
    """From outputs first to what the node reads."""
    return weight if layer.turned or layer.kind == "Conv" else weight.T


def write_floats(work: ir.Model, layer: Layer, weight: Array) -> None:
    """Give a layer another weight (outputs first), as floats."""
    if layer.kind == "MatMulNBits":
        _as_product(work, layer.node, weight.T)
        return
    new = as_laid_out(layer, weight).astype((layer.weight.dtype or ir.DataType.FLOAT).numpy())
    if numbers_of(layer.weight) is not None and len(layer.weight.uses()) == 1:
        set_numbers(work, layer.weight, new)
    else:
        position = 0 if layer.kind == "Gather" else 1
        layer.node.replace_input_with(position, add_weight(work, f"{start_of(layer.weight)[0].name}.merged", new))


def start_of(value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """The stored tensor behind a weight, and the nodes from there to it."""
    chain: list[ir.Node] = []
    while numbers_of(value) is None:
        node = value.producer()
        assert node is not None and node.inputs[0] is not None
        chain.append(node)
        value = node.inputs[0]
    return value, chain[::-1]


def as_read(value: ir.Value) -> Array:
    """The numbers of a stored weight as its reader gets them: turned, cast, dequantised."""
    start, chain = start_of(value)
    tensor = numbers_of(start)
    assert tensor is not None
    current: Array = tensor.numpy()
    for node in chain:
        current = _computed(node, current)
    return current


def _computed(node: ir.Node, data: Array) -> Array:
    """One node on ``data``, by ONNX's reference."""
    feeds: dict[str, Array] = {v.name: t.numpy() for v in node.inputs[1:] if v and v.name and (t := numbers_of(v))}
    feeds[node.inputs[0].name if node.inputs[0] and node.inputs[0].name else ""] = data
    proto = ir.to_proto(node)
    value_info = [onnx.helper.make_tensor_value_info(n, _type(a), a.shape) for n, a in feeds.items()]
    made = onnx.helper.make_tensor_value_info(proto.output[0], onnx.TensorProto.UNDEFINED, None)
    graph = onnx.helper.make_graph([proto], "one", value_info, [made])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    (result,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(result)


def _type(array: Array) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))


# --- MatMulNBits ------------------------------------------------------------------------------------------------


def packed_parts(node: ir.Node) -> tuple[Array, Array, Array | None]:
    """Packed numbers, scales and zero points of a MatMulNBits.

    Raises:
        BuildError: they are computed, or groups are reordered.
    """
    tensors = [numbers_of(v) for v in node.inputs[1:4]]
    packed, scales = (None if t is None else t.numpy() for t in tensors[:2])
    points = tensors[2].numpy() if len(tensors) > 2 and tensors[2] is not None else None
    groups = node.inputs[4] if len(node.inputs) > 4 else None
    if packed is None or scales is None or groups is not None:
        raise BuildError(f"'{shown(node.name)}' has computed scales or reordered groups, so its weight cannot be read")
    return packed, scales, points


def packed_sizes(node: ir.Node) -> dict[str, int]:
    return {k: node.attributes[k].as_int() for k in ("K", "N", "bits", "block_size")}


def packed_weight(node: ir.Node) -> Array:
    """The float weight (N, K) of a MatMulNBits."""
    packed, scales, points = packed_parts(node)
    return dequantised(packed, scales, points, **packed_sizes(node))


def _as_product(work: ir.Model, node: ir.Node, weight: Array) -> None:
    """MatMulNBits → MatMul with a float weight (K, N), and Add where it has a bias."""
    name = f"{(node.inputs[1].name if node.inputs[1] else None) or 'weight'}.merged"
    stored = add_weight(work, name, weight.astype(packed_parts(node)[1].dtype))
    new = [ir.Node("", "MatMul", [node.inputs[0], stored], name=node.name)]
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    if bias is not None:
        new.append(ir.Node("", "Add", [new[0].outputs[0], bias], name=f"{node.name}/Add"))
        new[0].outputs[0].name = f"{node.outputs[0].name}.product"
    old, made = node.outputs[0], new[-1].outputs[0]
    work.graph.insert_before(node, new)
    made.type, made.shape, made.name = old.type, old.shape, old.name
    old.name = None
    replace_value(old, made)
    discard(node)


def dequantised(
    packed: Array, scales: Array, points: Array | None, K: int, N: int, bits: int, block_size: int
) -> Array:
    """The float weight (N, K) of a MatMulNBits: ``(q − zero point) · scale`` in blocks along K.

    ``packed`` is (N, blocks, bytes of a block), low bits first; zero points are packed likewise, 2^(bits−1) by default
    (onnxruntime's contrib operators, com.microsoft.MatMulNBits).
    """
    blocks = -(-K // block_size)
    numbers = unpacked(packed.reshape(N, blocks, -1), bits)[..., :block_size].astype(np.float32)
    if points is None:
        zero: Array = np.full((N, blocks), 2.0 ** (bits - 1), np.float32)
    elif points.dtype == np.uint8:
        zero = unpacked(points.reshape(N, -1), bits)[:, :blocks].astype(np.float32)
    else:
        zero = points.reshape(N, blocks).astype(np.float32)
    scaled = (numbers - zero[..., None]) * scales.reshape(N, blocks, 1).astype(np.float32)
    return scaled.reshape(N, blocks * block_size)[:, :K]


def unpacked(packed: Array, bits: int) -> Array:
    """Numbers of so many bits, of the last axis of bytes."""
    if bits == 8:
        return packed
    each = 8 // bits
    parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(each)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], packed.shape[-1] * each)


def packed_again(numbers: Array, bits: int, size: int) -> Array:
    """``size`` bytes of the last axis, of numbers of so many bits."""
    each = 8 // bits
    full = np.zeros((*numbers.shape[:-1], size * each), np.uint8)
    full[..., : numbers.shape[-1]] = numbers
    parts = full.reshape(*numbers.shape[:-1], size, each) << (bits * np.arange(each, dtype=np.uint8))
    return np.asarray(np.bitwise_or.reduce(parts, -1), np.uint8)
