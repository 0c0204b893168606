"""QMoE of onnxruntime as MoE with DequantizeLinear of the same bytes, which adapters can be added to; and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.passes.normal.edit import discard, replace_value
from gradgraph.surgery.operation import add_weight, free_name, numbers_of

DOMAIN = "com.microsoft"
IN_QMOE, IN_MOE = (2, 5, 8), (2, 4, 6)  # the weights among the inputs; QMoE has scales behind them, then biases
_POINTS, _LAST = (11, 12, 13), 14  # zero points of QMoE, and the first of further inputs
_TYPES = {4: ir.DataType.UINT4, 8: ir.DataType.UINT8}
_OF_INTEGERS = ("expert_weight_bits", "block_size", "quant_type", "weights_prepacked", "accuracy_level",
                *(f"fc{i}_expert_weight_bits" for i in (1, 2, 3)))  # fmt: skip
_OPSET, _IR_VERSION = 21, 10  # the first with blocks of 4-bit integers


def bits_of(node: ir.Node, i: int) -> int:
    """Return the number of bits of the weights of projection ``i`` (from 0) of a QMoE."""
    return node.attributes.get_int(f"fc{i + 1}_expert_weight_bits", 0) or node.attributes.get_int(
        "expert_weight_bits", 4
    )


def why_not(node: ir.Node, opset: int) -> str:
    """Return why a QMoE cannot be rewritten, as the end of a sentence; empty if it can."""
    present = [i for i, value in enumerate(node.inputs) if value is not None]
    if node.attributes.get_string("quant_type", "int") != "int" or node.attributes.get_int("weights_prepacked", -1) > 0:
        return "whose experts are not stored as plain integers"
    if any(i >= _LAST or i in _POINTS for i in present):
        return "whose experts have zero points or further scales"
    if any(bits_of(node, i) not in _TYPES for i, place in enumerate(IN_QMOE) if place in present):
        return "whose experts have neither 4 nor 8 bits"
    return "" if opset >= _OPSET else f"in a model of opset {opset}, but 4-bit integers require {_OPSET}"


def write_floats(work: ir.Model, node: ir.Node) -> ir.Node:
    """Replace a QMoE with an MoE that reads dequantised weights; return it. The stored tensors keep their names.

    Raises:
        BuildError: the QMoE cannot be rewritten.
    """
    if because := why_not(node, work.opset_imports.get("", 0)):
        raise BuildError(f"'{shown(node.name)}' is a QMoE {because}; use experts stored as floats")
    inputs: list[ir.Value | None] = list(node.inputs[:2])
    new: list[ir.Node] = []
    for i, place in enumerate(IN_QMOE):
        weight, scales, bias = [*node.inputs, *[None] * 11][place : place + 3]
        if weight is not None and scales is not None:
            new.append(_dequantised(work, node, weight, scales, bits_of(node, i)))
            weight = new[-1].outputs[0]
        inputs += [weight, bias]
    kept = [attribute for name, attribute in node.attributes.items() if name not in _OF_INTEGERS]
    return _instead(work, node, "MoE", inputs, kept, new)


def _dequantised(work: ir.Model, node: ir.Node, packed: ir.Value, scales: ir.Value, bits: int) -> ir.Node:
    tensor, steps = numbers_of(packed), numbers_of(scales)
    if tensor is None or steps is None:
        raise BuildError(f"'{shown(node.name)}' is a QMoE whose experts are computed; use experts stored as floats")
    experts, outputs, width = map(int, tensor.shape.numpy())
    inputs, dtype = width * 8 // bits, _TYPES[bits]
    block = node.attributes.get_int("block_size", 0) or inputs
    shape = [experts, outputs, -(-inputs // block)]
    name = packed.name or ""
    if bits == 4:
        packed.const_value = ir.PackedTensor(
            tensor.numpy().reshape(-1), dtype, shape=ir.Shape([experts, outputs, inputs]), name=name
        )
        packed.type, packed.shape = ir.TensorType(dtype), ir.Shape([experts, outputs, inputs])
    if list(steps.shape.numpy()) != shape:
        scales.const_value = ir.tensor(steps.numpy().reshape(shape), name=scales.name)
        scales.shape = ir.Shape(shape)
    middle = np.full(shape, 2 ** (bits - 1), dtype.numpy())
    points = add_weight(work, f"{name}.zero_points", middle)
    made = ir.Node("", "DequantizeLinear", [packed, scales, points], name=free_name(work, f"{name}/DequantizeLinear"),
                   attributes=[ir.AttrInt64("axis", 2), ir.AttrInt64("block_size", block)])  # fmt: skip
    made.outputs[0].name = f"{made.name}/output_0"
    made.outputs[0].type = ir.TensorType(scales.dtype or ir.DataType.FLOAT)
    made.outputs[0].shape = ir.Shape([experts, outputs, inputs])
    return made


def write_integers(work: ir.Model) -> None:
    """Replace each MoE whose weights are all dequantised as by ``write_floats`` with a QMoE of the same bytes."""
    for node in list(work.graph):
        if node.op_type == "MoE" and node.domain == DOMAIN:
            weights = [(i, node.inputs[place]) for i, place in enumerate(IN_MOE) if place < len(node.inputs)]
            found = {i: value.producer() for i, value in weights if value is not None}
            sources = {i: source for i, source in found.items() if source is not None and _is_ours(source)}
            if sources and len(sources) == len(found):
                _write_integers(work, node, sources)


def _is_ours(node: ir.Node) -> bool:
    """Whether a DequantizeLinear reads blocks of stored unsigned integers whose zero points are the middle."""
    if node.op_type != "DequantizeLinear" or node.domain or len(node.inputs) < 3:
        return False
    numbers, points = numbers_of(node.inputs[0]), numbers_of(node.inputs[2])
    if numbers is None or points is None or numbers.shape.rank() != 3:
        return False
    bits = next((b for b, dtype in _TYPES.items() if dtype == numbers.dtype), None)
    return bits is not None and bool((points.numpy().astype(np.int64) == 2 ** (bits - 1)).all())


def _write_integers(work: ir.Model, node: ir.Node, sources: dict[int, ir.Node]) -> None:
    inputs, bits, blocks = list(node.inputs[:2]), dict[int, int](), set[int]()
    for i, place in enumerate(IN_MOE):
        source, bias = sources.get(i), node.inputs[place + 1] if place + 1 < len(node.inputs) else None
        packed, scales = (None, None) if source is None else source.inputs[:2]
        if source is not None and packed is not None and scales is not None:
            bits[i] = _packed(packed)
            blocks.add(_unblocked(scales, source.attributes.get_int("block_size", 0)))
        inputs += [packed, scales, bias]
    while inputs[-1] is None:
        inputs.pop()
    added = {"expert_weight_bits": max(bits.values()), "block_size": max(blocks)}
    if len(set(bits.values())) > 1:
        added |= {f"fc{i + 1}_expert_weight_bits": count for i, count in bits.items()}
    new = [ir.AttrInt64(name, number) for name, number in added.items() if number]
    _instead(work, node, "QMoE", inputs, [*node.attributes.values(), *new], [])


def _packed(value: ir.Value) -> int:
    """Store 4-bit integers as bytes of two, as QMoE reads them; return the number of bits."""
    tensor = numbers_of(value)
    assert tensor is not None
    if tensor.dtype == _TYPES[8]:
        return 8
    array = np.frombuffer(tensor.tobytes(), np.uint8).reshape(*map(int, tensor.shape.numpy()[:2]), -1)
    value.const_value = ir.tensor(array, name=value.name)
    value.type, value.shape = ir.TensorType(ir.DataType.UINT8), ir.Shape(array.shape)
    return 4


def _unblocked(scales: ir.Value, block: int) -> int:
    """Return the block size of QMoE: 0 if each row is one block, whose scales are then a matrix."""
    tensor = numbers_of(scales)
    assert tensor is not None
    steps = tensor.numpy()
    if steps.shape[2] > 1:
        return block
    scales.const_value, scales.shape = ir.tensor(steps[..., 0], name=scales.name), ir.Shape(steps.shape[:2])
    return 0


def _instead(
    work: ir.Model,
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Sequence[ir.Attr],
    before: Sequence[ir.Node],
) -> ir.Node:
    """Replace ``node`` with another operator and the nodes ``before`` it; return the operator."""
    made = ir.Node(DOMAIN, op_type, list(inputs), attributes, name=node.name)
    made.metadata_props.update(node.metadata_props)
    work.graph.insert_before(node, [*before, made])
    old, new = node.outputs[0], made.outputs[0]
    new.name, new.type, new.shape, old.name = old.name, old.type, old.shape, None
    replace_value(old, new)
    discard(node)
    if before:
        work.ir_version = max(work.ir_version or 0, _IR_VERSION)
    return made
