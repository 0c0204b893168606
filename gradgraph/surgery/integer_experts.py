"""Experts that QMoE of onnxruntime stores as integers: their numbers, read and written.

For adapters, a QMoE is rewritten as an MoE with DequantizeLinear of the same integers, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.quantisers import Quantiser
from gradgraph.passes.normal.edit import discard, replace_value
from gradgraph.surgery.matmul_nbits import Packing
from gradgraph.surgery.operation import Array, add_weight, free_name, numbers_of, set_numbers, tensor_of

DOMAIN = "com.microsoft"
IN_QMOE, IN_MOE = (2, 5, 8), (2, 4, 6)  # the weights among the inputs; QMoE has scales behind them, then biases
_POINTS, _LAST = (11, 12, 13), 14  # zero points of QMoE, and the first of further inputs
_BITS = (2, 4, 8)
_TYPES = {4: ir.DataType.UINT4, 8: ir.DataType.UINT8}
_OF_INTEGERS = ("expert_weight_bits", "block_size", "quant_type", "weights_prepacked", "accuracy_level",
                *(f"fc{i}_expert_weight_bits" for i in (1, 2, 3)))  # fmt: skip
_OPSET, _IR_VERSION = 21, 10  # the first with blocks of 4-bit integers


@dataclass(frozen=True)
class Integers:
    """The integers of one projection of a QMoE, (experts, outputs, inputs).

    Attributes:
        packed: the stored tensor, (experts, outputs, bytes).
        scales: (experts, outputs, blocks), or (experts, outputs) if each row has one scale.
        points: the packed zero points; None if all are the middle of the range.
        bits: the number of bits of each integer.
        block: the number of inputs that share a scale; 0 if all inputs do.
    """

    packed: ir.Value
    scales: ir.Value
    points: ir.Value | None
    bits: int
    block: int

    @classmethod
    def of(cls, node: ir.Node, i: int) -> Integers:
        """Return the integers of projection ``i`` (from 0) of a QMoE.

        Raises:
            BuildError: the integers, scales or zero points are computed, or have another number of bits.
        """
        inputs, name = [*node.inputs, *[None] * _LAST], shown(node.name or node.outputs[0].name)
        packed, scales = inputs[IN_QMOE[i] : IN_QMOE[i] + 2]
        points = inputs[_POINTS[i]]
        if packed is None or scales is None or None in (numbers_of(packed), numbers_of(scales)):
            raise BuildError(f"'{name}' is a QMoE whose experts are computed; use experts stored as floats")
        if points is not None and numbers_of(points) is None:
            raise BuildError(f"'{name}' is a QMoE with computed zero points; store them in the model")
        number = node.attributes.get_int
        bits = number(f"fc{i + 1}_expert_weight_bits", 0) or number("expert_weight_bits", 4)
        if bits not in _BITS:
            raise BuildError(f"'{name}' is a QMoE with experts of {bits} bits; use experts of 2, 4 or 8 bits")
        return cls(packed, scales, points, bits, number("block_size", 0))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of experts, outputs and inputs."""
        experts, outputs, width = _array(self.packed).shape
        return experts, outputs, width * 8 // self.bits

    @property
    def blocks(self) -> int:
        """The number of scales of a row."""
        return -(-self.shape[2] // self.block) if self.block else 1

    @property
    def quantiser(self) -> Quantiser:
        """The quantiser of all experts, with zero points in any case."""
        experts, outputs, inputs = self.shape
        shape, points = (experts, outputs, self.blocks), numbers_of(self.points)
        packing = _packing_of_points(self.shape, self.bits, self.block)
        return Quantiser(_array(self.scales).reshape(shape),
                         packing.points(None if points is None else points.numpy()).reshape(shape),
                         (0, 2**self.bits - 1), 2, self.block or inputs)  # fmt: skip

    def dequantised(self) -> Array:
        """Return the weights as float32."""
        return self.quantiser.dequantised(self._numbers())

    def rounding(self) -> Array:
        """Return the largest rounding error of each weight."""
        return self.quantiser.rounding(self._numbers())

    def _numbers(self) -> Array:
        return self._packing(self.shape[0]).weight(_array(self.packed)).reshape(self.shape)

    def _packing(self, experts: int) -> Packing:
        """Return the packing of some experts; rows are not padded to whole blocks."""
        _, outputs, inputs = self.shape
        return Packing(inputs, experts * outputs, self.bits, inputs)

    def write(self, work: ir.Model, weights: Array) -> float:
        """Quantise ``weights`` in the same format, one expert at a time; return the error ``‖stored - W‖/‖W‖``.

        Scales are fitted as by onnxruntime-genai's builder: the number farthest from 0 is the lower end of the range,
        with a negative scale if it is positive, or the upper end plus one if no old scale is negative. Zero points are
        fitted if the file has them. Blocks whose weights did not change stay as stored.
        """
        packed, whole, packing = np.array(_array(self.packed)), self.quantiser, self._packing(1)
        scales, points = np.array(whole.scales), np.array(whole.points)
        middle, is_positive = whole.middle if self.points is None else None, not (scales < 0).any()
        lost = total = 0.0
        for e, part in enumerate(weights):
            old = replace(whole, scales=scales[e], points=points[e], axis=1)
            if not np.array_equal(old.dequantised(packing.weight(packed[e])), part):
                fitted = old.fitted(part, middle, signed=True)
                fitted = replace(fitted, scales=np.abs(fitted.scales)) if is_positive else fitted
                fitted = old.unless_on_grid(fitted, part)
                integers = fitted.quantised(part)
                packed[e] = packing.packed_weight(integers, packed[e][:, None]).reshape(packed[e].shape)
                scales[e], points[e] = fitted.scales, fitted.points
                lost += float(np.sum(np.square(fitted.dequantised(integers) - part, dtype=np.float64)))
            total += float(np.sum(np.square(part, dtype=np.float64)))
        set_numbers(work, self.packed, packed)
        set_numbers(work, self.scales, scales.reshape(_array(self.scales).shape))
        if self.points is not None:
            set_numbers(work, self.points, _packed_points(points, self.shape, self.bits, self.block))
        return float(np.sqrt(lost / max(total, float(np.finfo(np.float64).tiny))))


def _array(value: ir.Value) -> Array:
    return tensor_of(value).numpy()


def _packing_of_points(shape: tuple[int, int, int], bits: int, block: int) -> Packing:
    """Return the packing of zero points: along the blocks of a row, or without blocks along the rows of an expert."""
    experts, outputs, inputs = shape
    return Packing(inputs, experts * outputs, bits, block) if block else Packing(outputs, experts, bits, 1)


def _packed_points(points: Array, shape: tuple[int, int, int], bits: int, block: int) -> Array:
    """Return zero points (experts, outputs, blocks) as QMoE reads them."""
    packing = _packing_of_points(shape, bits, block)
    width = -(-packing.blocks * bits // 8)
    sizes = (*shape[:2], width) if block else (shape[0], width)
    return packing.packed_points(points.reshape(packing.N, -1), np.zeros(sizes, np.uint8))


def why_not_read(node: ir.Node) -> str:
    """Return why the integers of a QMoE cannot be read, as the end of a sentence; empty if they can."""
    get = node.attributes
    is_prepacked = get.get_int("weights_prepacked", -1) > 0
    if get.get_string("quant_type", "int") != "int" or is_prepacked or not all(map(_is_plain, _projections(node))):
        return "whose experts are not stored as plain integers"
    return ""


def _projections(node: ir.Node) -> list[Integers]:
    present = [place < len(node.inputs) and node.inputs[place] is not None for place in IN_QMOE]
    return [Integers.of(node, i) for i, is_present in enumerate(present) if is_present]


def _is_plain(one: Integers) -> bool:
    """Whether scales and zero points have the sizes of the integers; what is packed for CUDA is transposed."""
    packed, points = _array(one.packed), numbers_of(one.points)
    if packed.ndim != 3 or packed.dtype != np.uint8 or one.block < 0:
        return False
    sizes = (*one.shape[:2], one.blocks) if one.block else one.shape[:2]
    like = _packed_points(np.zeros((*one.shape[:2], one.blocks)), one.shape, one.bits, one.block)
    fits = points is None or (points.numpy().shape, points.numpy().dtype) == (like.shape, like.dtype)
    return fits and _array(one.scales).shape == sizes


def why_not(node: ir.Node, opset: int) -> str:
    """Return why a QMoE cannot be rewritten, as the end of a sentence; empty if it can."""
    if because := why_not_read(node):
        return because
    if any(value is not None for value in node.inputs[_LAST:]):
        return "with separate routing weights or further scales"
    get = node.attributes.get_int
    if not (get("normalize_routing_weights", 0) or get("use_sparse_mixer", 0)):  # the CPU kernel does so nevertheless
        return "that does not normalize its routing weights"
    if any(one.bits not in _TYPES for one in _projections(node)):
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
        weight, _, bias = [*node.inputs, *[None] * 11][place : place + 3]
        if weight is not None:
            new.append(_dequantised(work, Integers.of(node, i)))
            weight = new[-1].outputs[0]
        inputs += [weight, bias]
    kept = [attribute for name, attribute in node.attributes.items() if name not in _OF_INTEGERS]
    return _instead(work, node, "MoE", inputs, kept, new)


def _dequantised(work: ir.Model, stored: Integers) -> ir.Node:
    """Return a DequantizeLinear of the integers, scales and zero points of a projection, whose tensors it changes."""
    quantiser, shape, dtype = stored.quantiser, stored.shape, _TYPES[stored.bits]
    packed, scales, name = stored.packed, stored.scales, stored.packed.name or ""
    assert quantiser.points is not None
    if stored.bits == 4:
        packed.const_value = ir.PackedTensor(_array(packed).reshape(-1), dtype, shape=ir.Shape(shape), name=name)
        packed.type, packed.shape = ir.TensorType(dtype), ir.Shape(shape)
    if quantiser.scales.shape != _array(scales).shape:
        _store(work, scales, quantiser.scales)
    points, numbers = stored.points, quantiser.points.astype(dtype.numpy())
    if points is None:
        points = add_weight(work, f"{name}.zero_points", numbers)
    else:
        _store(work, points, numbers)
    made = ir.Node("", "DequantizeLinear", [packed, scales, points], name=free_name(work, f"{name}/DequantizeLinear"),
                   attributes=[ir.AttrInt64("axis", 2), ir.AttrInt64("block_size", quantiser.block)])  # fmt: skip
    made.outputs[0].name = f"{made.name}/output_0"
    made.outputs[0].type = ir.TensorType(scales.dtype or ir.DataType.FLOAT)
    made.outputs[0].shape = ir.Shape(shape)
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
    """Whether a DequantizeLinear reads blocks of stored unsigned integers with zero points, along the last axis."""
    if node.op_type != "DequantizeLinear" or node.domain or len(node.inputs) < 3:
        return False
    numbers, *others = map(numbers_of, node.inputs[:3])
    is_along_inputs = node.attributes.get_int("axis", 1) in (2, -1) and node.attributes.get_int("block_size", 0) > 0
    is_known = numbers is not None and numbers.shape.rank() == 3 and numbers.dtype in _TYPES.values()
    return is_known and is_along_inputs and None not in others


def _write_integers(work: ir.Model, node: ir.Node, sources: dict[int, ir.Node]) -> None:
    """Replace an MoE whose projections are dequantised by ``sources`` with a QMoE."""
    is_in_blocks = any(_array(_input(source, 1)).shape[2] > 1 for source in sources.values())
    block = max(source.attributes.get_int("block_size", 0) for source in sources.values()) if is_in_blocks else 0
    inputs: list[ir.Value | None] = [*node.inputs[:2], *[None] * (_LAST - 2)]
    bits = dict[int, int]()
    for i, place in enumerate(IN_MOE):
        if i in sources:
            bits[i], inputs[IN_QMOE[i]], inputs[IN_QMOE[i] + 1], inputs[_POINTS[i]] = _packed(work, sources[i], block)
        inputs[IN_QMOE[i] + 2] = node.inputs[place + 1] if place + 1 < len(node.inputs) else None
    while inputs[-1] is None:
        inputs.pop()
    added = {"expert_weight_bits": max(bits.values()), "block_size": block}
    if len(set(bits.values())) > 1:
        added |= {f"fc{i + 1}_expert_weight_bits": count for i, count in bits.items()}
    new = [ir.AttrInt64(name, number) for name, number in added.items() if number]
    _instead(work, node, "QMoE", inputs, [*node.attributes.values(), *new], [])


def _packed(work: ir.Model, source: ir.Node, block: int) -> tuple[int, ir.Value, ir.Value, ir.Value | None]:
    """Store what a DequantizeLinear reads as QMoE reads it; return the bits, integers, scales and zero points.

    Without a ``block`` size, scales are a matrix. Zero points are None if all are the middle of the range.
    """
    packed, scales, points = (_input(source, at) for at in range(3))
    numbers, tensor = _array(points).astype(np.uint8), tensor_of(packed)
    experts, outputs, inputs = map(int, tensor.shape.numpy())
    bits = next(count for count, dtype in _TYPES.items() if dtype == tensor.dtype)
    if bits == 4:
        _store(work, packed, np.frombuffer(tensor.tobytes(), np.uint8).reshape(experts, outputs, -1))
    if not block:
        _store(work, scales, _array(scales)[..., 0])
    if (numbers == 2 ** (bits - 1)).all():
        return bits, packed, scales, None
    _store(work, points, _packed_points(numbers, (experts, outputs, inputs), bits, block))
    return bits, packed, scales, points


def _input(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None
    return value


def _store(work: ir.Model, value: ir.Value, numbers: Array) -> None:
    """Replace the data, the shape and the type of an initializer."""
    set_numbers(work, value, numbers)
    value.type = ir.TensorType(value.const_value.dtype if value.const_value is not None else ir.DataType.UINT8)


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
