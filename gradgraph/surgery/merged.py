"""Adapters become part of the weights that they stand beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from gradgraph.arguments import PATH, checked
from gradgraph.errors import BuildError, shown
from gradgraph.files import Source
from gradgraph.normal.edit import discard, replace_value
from gradgraph.surgery.adapters import Adapter, adapters_of, write_adapters
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operated import (
    Path,
    Result,
    add_weight,
    array_named,
    closed,
    numbers_of,
    opened,
    set_numbers,
    value_named,
)
from gradgraph.surgery.weights import give_weights

Array = np.ndarray[Any, Any]


@checked(out=PATH.or_none())
def merge_adapters(
    model: Source, weights: Mapping[str, Array] | Path | None = None, *, out: Path | None = None
) -> Result:
    """The model without adapters, whose weights have become ``W + s·A·B`` (LoRA) or ``W·l`` (IA3).

    A weight that was quantised becomes float, as the sum of both has other ranges; all other layers stay quantised.

    Args:
        model: the model that :func:`lora` has given.
        weights: what a training run has made of its weights: ``trainer.state_dict()``, or an ``.onnx`` that a trainer
            has exported, a checkpoint, a ``.safetensors`` or ``.npz`` file. The model's own without it. What else was
            trained (a head, biases) is taken, too.
        out: write the result to this path.

    Raises:
        BuildError: the model has no adapters, or they are not where :func:`lora` has put them.
        DataError: the file cannot be read, or a shape in it does not fit.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    adapters = adapters_of(work)
    if not adapters:
        raise BuildError(
            "the model has no adapters to merge",
            remedy="gg.lora(model, target) puts some in",
            shell="gradgraph surgery MODEL --lora GLOB puts some in",
        )
    if weights is not None:
        give_weights(work, weights)
    for adapter in adapters:
        _merge(work, adapter)
    write_adapters(work, [])
    return closed(work, model, out)


def _merge(work: ir.Model, adapter: Adapter) -> None:
    result = value_named(work, adapter.output)
    last = result.producer()
    base = None if last is None or not last.inputs or last.inputs[0] is None else last.inputs[0].producer()
    if last is None or base is None or base.op_type != adapter.operator:
        raise BuildError(
            f"the adapter of '{shown(adapter.module)}' is not where it was put",
            remedy="merge the model that gg.lora gave, and pass the trained one as weights=",
            shell="merge the model that --lora gave, and say --trained of the trained one",
        )
    factors = [np.asarray(array_named(work, name), np.float64) for name in adapter.weights]
    if adapter.kind == "ia3":
        _scale_bias(work, base, factors[0].reshape(-1))
    _write(work, base, lambda w, turned: _sum(adapter, w, factors, turned))
    old = last.inputs[0]  # another value than before, where a MatMulNBits has become a product of floats
    assert old is not None
    if result.is_graph_output():
        old.name, result.name = result.name, None
    old.shape = result.shape
    replace_value(result, old)
    discard(last)


def _scale_bias(work: ir.Model, node: ir.Node, vector: Array) -> None:
    """IA3 multiplies a bias inside the layer, too."""
    position = {"MatMulNBits": 5, "Gemm": 2, "Conv": 2}.get(node.op_type, len(node.inputs))
    bias = node.inputs[position] if position < len(node.inputs) else None
    if bias is not None:
        scaled = (np.asarray(as_read(bias), np.float64) * vector).astype((bias.dtype or ir.DataType.FLOAT).numpy())
        node.replace_input_with(position, add_weight(work, f"{bias.name}.merged", scaled))


def _sum(adapter: Adapter, weight: Array, factors: list[Array], turned: bool) -> Array:
    """The new weight in float64, laid out as ``weight`` is; ``turned`` says that outputs come first."""
    if adapter.kind == "ia3":
        (vector,) = factors
        sizes = (-1, *[1] * (weight.ndim - 1)) if turned or weight.ndim > 2 else (-1,)
        return np.asarray(weight * vector.reshape(sizes))
    a, b = factors
    if adapter.operator == "Conv":
        return np.asarray(weight + adapter.scale * np.einsum("or,r...->o...", b.reshape(b.shape[:2]), a))
    product = a @ b
    return np.asarray(weight + adapter.scale * (product.T if turned else product))


def _write(work: ir.Model, node: ir.Node, change: Any) -> None:
    """Give a layer the weight that ``change`` makes of its own, float where it was quantised."""
    position = 0 if node.op_type == "Gather" else 1
    value = node.inputs[position]
    assert value is not None
    if node.op_type == "MatMulNBits":
        _unpack(work, node, change)
        return
    turned = Layer(node, value, "").turned
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    new = change(np.asarray(as_read(value), np.float64), turned).astype(dtype)
    if numbers_of(value) is not None and len(value.uses()) == 1:
        set_numbers(work, value, new)
    else:
        node.replace_input_with(position, add_weight(work, f"{_base_name(value)}.merged", new))


def _base_name(value: ir.Value) -> str:
    while numbers_of(value) is None:
        node = value.producer()
        assert node is not None and node.inputs[0] is not None
        value = node.inputs[0]
    return value.name or "weight"


def as_read(value: ir.Value) -> Array:
    """The numbers of a stored weight as its reader gets them: turned, cast, dequantised."""
    chain: list[ir.Node] = []
    start = value
    while numbers_of(start) is None:
        node = start.producer()
        assert node is not None and node.inputs[0] is not None
        chain.append(node)
        start = node.inputs[0]
    tensor = numbers_of(start)
    assert tensor is not None
    current: Array = tensor.numpy()
    for node in reversed(chain):
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


def _unpack(work: ir.Model, node: ir.Node, change: Any) -> None:
    """MatMulNBits → MatMul with a float weight, and Add where it has a bias."""
    tensors = [numbers_of(v) for v in node.inputs[1:4]]
    packed, scales = (None if t is None else t.numpy() for t in tensors[:2])
    points = tensors[2].numpy() if len(tensors) > 2 and tensors[2] is not None else None
    groups = node.inputs[4] if len(node.inputs) > 4 else None
    if packed is None or scales is None or groups is not None:
        raise BuildError(f"'{shown(node.name)}' has computed scales or reordered groups, which cannot be merged")
    given = {k: node.attributes[k].as_int() for k in ("K", "N", "bits", "block_size")}
    weight = dequantised(packed, scales, points, **given)
    name = f"{(node.inputs[1].name if node.inputs[1] else None) or 'weight'}.merged"
    stored = add_weight(work, name, change(weight.T.astype(np.float64), False).astype(scales.dtype))
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
    numbers = _bits(packed.reshape(N, blocks, -1), bits)[..., :block_size].astype(np.float32)
    if points is None:
        zero: Array = np.full((N, blocks), 2.0 ** (bits - 1), np.float32)
    elif points.dtype == np.uint8:
        zero = _bits(points.reshape(N, -1), bits)[:, :blocks].astype(np.float32)
    else:
        zero = points.reshape(N, blocks).astype(np.float32)
    scaled = (numbers - zero[..., None]) * scales.reshape(N, blocks, 1).astype(np.float32)
    return scaled.reshape(N, blocks * block_size)[:, :K]


def _bits(packed: Array, bits: int) -> Array:
    """Numbers of so many bits, of the last axis of bytes."""
    if bits == 8:
        return packed
    each = 8 // bits
    parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(each)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], packed.shape[-1] * each)
