"""Reading and writing of a linear layer's weight in any storage format: floats, integers, packed, transposed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.quantisers import INTEGER_RANGES, Array, Quantiser, limits_of
from gradgraph.passes.normal.edit import attributes, discard, replace_value
from gradgraph.surgery.gptq import Gptq
from gradgraph.surgery.linear_layers import Layer, rewritten
from gradgraph.surgery.matmul_nbits import Packing
from gradgraph.surgery.operation import add_weight, free_name, numbers_of, set_numbers, tensor_of

# elements of a packed weight that are quantised at once: 70 MB with all intermediate results. With 1 << 24, writing a
# matrix of 4096 by 4096 took 415 MB
_AT_ONCE = 1 << 21
Rounds = Callable[[Quantiser, Array], Array]  # from floats to the integers of a quantiser


def canonical(layer: Layer) -> Array:
    """Return the weight of a layer as float64: (outputs, inputs) or (outputs, inputs of a group, kernel)."""
    if layer.kind != "MatMulNBits":
        return as_laid_out(layer, np.asarray(as_read(layer.weight), np.float64))
    quantiser, integers = _packed(layer.node)
    return np.asarray(quantiser.dequantised(integers)[:, : layer.sizes[0]], np.float64)


def canonical_rounding(layer: Layer) -> Array:
    """Return the largest rounding error of each number that ``canonical`` returns, in the same shape."""
    if layer.kind != "MatMulNBits":
        return as_laid_out(layer, rounding_of(layer.weight))
    quantiser, integers = _packed(layer.node)
    return quantiser.rounding(integers)[:, : layer.sizes[0]]


def _packed(node: ir.Node) -> tuple[Quantiser, Array]:
    """Return the quantiser of a MatMulNBits, and its integers (outputs, blocks · block size)."""
    return quantiser_of(node), Packing.of(node).weight(tensor_of(node.inputs[1]).numpy())


def as_laid_out(layer: Layer, weight: Array) -> Array:
    """Convert a weight from (outputs, inputs) to the axis order of the layer's node, or from that to (outputs, inputs).

    Both conversions are the same: a transpose if the node stores inputs first, else none. MatMulNBits stores outputs
    first.
    """
    return weight if layer.axis == 0 or layer.kind == "MatMulNBits" else weight.T


def as_read(value: ir.Value) -> Array:
    """Return a stored weight as its reader gets it: transposed, cast, dequantised.

    Raises:
        BuildError: the value is not a stored weight.
    """
    numbers, chain = _stored_numbers(value)
    for node in chain:
        numbers = _rewritten_by(node, numbers)
    return numbers


def rounding_of(value: ir.Value) -> Array:
    """Return the largest rounding error of each number that ``as_read`` returns, in the same shape.

    A number of its type is the nearest to the float that it stands for: float32 and float64 are exact.

    Raises:
        BuildError: the value is not a stored weight.
    """
    numbers, chain = _stored_numbers(value)
    found = rounding_as(numbers.dtype, numbers)
    for node in chain:
        if node.op_type == "DequantizeLinear":
            found = quantiser_of(node).rounding(numbers)
        elif node.op_type == "Transpose":
            found = found.transpose(_order(node, found.ndim))
        numbers = _rewritten_by(node, numbers)
        found = np.maximum(found, rounding_as(numbers.dtype, numbers))
    return found


def _stored_numbers(value: ir.Value) -> tuple[Array, list[ir.Node]]:
    start, chain = rewritten(value)
    tensor = numbers_of(start)
    if tensor is None:
        raise BuildError(f"'{shown(value.name)}' is computed, so it has no stored numbers")
    return tensor.numpy(), chain


def _rewritten_by(node: ir.Node, numbers: Array) -> Array:
    if node.op_type == "Cast":
        return numbers.astype(ir.DataType(node.attributes["to"].as_int()).numpy())
    if node.op_type == "DequantizeLinear":
        quantiser = quantiser_of(node)
        return quantiser.dequantised(numbers).astype(quantiser.scales.dtype)
    return numbers.transpose(_order(node, numbers.ndim)) if node.op_type == "Transpose" else numbers


# relative rounding errors, and the smallest differences: converters to float16 raise smaller numbers to 1e-7
_ROUNDING = {"float16": (2.0**-11, 1e-7), "bfloat16": (2.0**-8, 0.0)}


def rounding_as(dtype: np.dtype, numbers: Array) -> Array:
    """Return the largest rounding error of each of ``numbers``, if these are stored as ``dtype``."""
    relative, least = _ROUNDING.get(dtype.name, (0.0, 0.0))
    return relative * np.abs(np.asarray(numbers, np.float64)) + least if relative else np.zeros(numbers.shape)


def _order(transpose: ir.Node, rank: int) -> list[int]:
    given = attributes(transpose).get("perm")
    return list(range(rank))[::-1] if given is None else list(given)


# --- stored as floats ----------------------------------------------------------------------------------------------


def write_floats(work: ir.Model, layer: Layer, weight: Array, readers: Collection[ir.Node] = ()) -> None:
    """Replace the weight of a layer with ``weight`` (outputs first), stored as floats.

    All ``readers`` get the new weight; without them, only this layer. Other nodes keep the old one.
    """
    if layer.kind == "MatMulNBits":
        _as_product(work, layer.node, weight.T)
        return
    new = as_laid_out(layer, weight).astype((layer.weight.dtype or ir.DataType.FLOAT).numpy(), order="C")
    if numbers_of(layer.weight) is not None and _is_its_own(layer.weight, readers):
        set_numbers(work, layer.weight, new)
    elif readers and (start := _start_of(layer, readers)) is not None:
        for node in reversed(rewritten(layer.weight)[1]):
            new = new.transpose(np.argsort(_order(node, new.ndim))) if node.op_type == "Transpose" else new
        kind = (start.dtype or ir.DataType.FLOAT).numpy()
        set_numbers(work, start, np.ascontiguousarray(new.astype(kind)))
    else:
        start, _ = rewritten(layer.weight)
        layer.node.replace_input_with(layer.place, add_weight(work, f"{(start or layer.weight).name}.merged", new))


def _start_of(layer: Layer, readers: Collection[ir.Node]) -> ir.Value | None:
    """Return the stored float tensor of a layer if only ``readers`` read it, as it is, transposed or cast."""
    start, chain = rewritten(layer.weight)
    values = [start, *(node.outputs[0] for node in chain)]
    is_theirs = all(value is not None and _is_its_own(value, readers) for value in values)
    return start if is_theirs and all(node.op_type != "DequantizeLinear" for node in chain) else None


def _as_product(work: ir.Model, node: ir.Node, weight: Array) -> None:
    """Replace MatMulNBits with a MatMul by a float weight (K, N), and an Add if it has a bias."""
    name = f"{(node.inputs[1].name if node.inputs[1] else None) or 'weight'}.merged"
    stored = add_weight(work, name, weight.astype(quantiser_of(node).scales.dtype))
    new = [ir.Node("", "MatMul", [node.inputs[0], stored], name=node.name)]
    bias = Layer(node).bias
    if bias is not None:
        new.append(ir.Node("", "Add", [new[0].outputs[0], bias], name=f"{node.name}/Add"))
        new[0].outputs[0].name = f"{node.outputs[0].name}.product"
    old, made = node.outputs[0], new[-1].outputs[0]
    work.graph.insert_before(node, new)
    made.type, made.shape, made.name = old.type, old.shape, old.name
    old.name = None
    replace_value(old, made)
    discard(node)


# --- quantised ----------------------------------------------------------------------------------------------------


def quantiser_of(node: ir.Node) -> Quantiser:
    """Return the quantiser of a DequantizeLinear or a MatMulNBits.

    Raises:
        BuildError: the scales or zero points are computed, or groups are reordered.
    """
    packed = node.op_type == "MatMulNBits"
    first, scale, zero, groups = [*node.inputs[packed : 4 + packed], None, None, None][:4]
    scales, points = numbers_of(scale), numbers_of(zero)
    if scales is None or (zero is not None and points is None) or (packed and groups is not None):
        raise BuildError(
            f"'{shown(node.name or node.outputs[0].name)}' has computed scales or reordered groups, so its weight "
            "cannot be read; keep an adapter of kind lora on it unmerged"
        )
    if packed:
        packing = Packing.of(node)
        zeros = packing.points(None if points is None else points.numpy())
        return Quantiser(scales.numpy().reshape(packing.N, -1), zeros, (0, 2**packing.bits - 1), 1, packing.block_size)
    given, limits = attributes(node), INTEGER_RANGES.get(first.dtype if first and first.dtype else ir.DataType.INT32)
    of_slices = None if points is None else points.numpy()
    return Quantiser(scales.numpy(), of_slices, limits or (0, 0), given.get("axis", 1), given.get("block_size", 0))


def is_quantised(layer: Layer) -> bool:
    _, chain = rewritten(layer.weight)
    return layer.kind == "MatMulNBits" or any(node.op_type == "DequantizeLinear" for node in chain)


def write_quantised(
    work: ir.Model, layer: Layer, weight: Array, readers: Collection[ir.Node] = (), gptq: Gptq | None = None
) -> float:
    """Replace a weight (outputs first) in the same quantised format: type, blocks, channels and kind of zero points.

    Scales are fitted to the new numbers, unless the old scales represent them equally well; an unchanged weight stays
    as stored. With ``gptq``, numbers are rounded by it, and scales are fitted only if numbers exceed the old range. All
    ``readers`` get the new weight; without them, only this layer. Returns the rounding error ``‖stored - W‖/‖W‖``.

    Raises:
        BuildError: the weight is quantised in a way that is not supported for writing.
    """
    if layer.kind == "MatMulNBits":
        return _write_packed(work, layer.node, weight, readers, gptq)
    if np.array_equal(weight, canonical(layer)):
        return 0.0
    biases = {node: as_read(v) for node in {layer.node, *readers} if (v := _integer_bias(node)) is not None}
    _write_stored(work, layer, weight, readers, gptq)
    for node, bias in biases.items():  # runtimes assume that their scales are products of the weights' scales
        write_integer_bias(work, node, bias)
    return _error(layer, weight)


def _integer_bias(node: ir.Node) -> ir.Value | None:
    """Return the bias of a Conv or Gemm of integer data, stored as integers, too; None for other biases and nodes."""
    bias = Layer(node).bias if node.op_type in ("Conv", "Gemm") else None
    data = node.inputs[0].producer() if bias is not None and node.inputs[0] is not None else None
    sources = [data, *rewritten(bias)[1]] if data is not None else []
    return bias if [n.op_type for n in sources if n is not None] == ["DequantizeLinear"] * 2 else None


def _error(layer: Layer, weight: Array) -> float:
    """Return the rounding error ``‖stored - W‖/‖W‖``."""
    return relative_norm(canonical(layer) - weight, weight)


def relative_norm(difference: Array, weight: Array) -> float:
    """Return ``‖difference‖/‖weight‖``."""
    return float(np.linalg.norm(difference) / max(np.linalg.norm(weight), np.finfo(np.float64).tiny))


def write_offsets(work: ir.Model, layer: Layer, offsets: Array, weight: Array) -> float:
    """Add a number to all weights of each block of a MatMulNBits, as float zero points ``z - offset/scale``.

    Bits and scales stay. If the scale of a block is 0, or so small that the zero point overflows the scales' type, the
    weights of the block become the offset alone.

    ``offsets`` is (outputs, blocks), and ``weight`` the resulting weight, outputs first. Returns the rounding error
    ``‖stored - W‖/‖W‖``.
    """
    node, packing, before = layer.node, Packing.of(layer.node), quantiser_of(layer.node)
    packed, scales = (tensor_of(value).numpy() for value in node.inputs[1:3])
    assert before.points is not None
    if offsets.any():
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            points = (before.points - offsets / before.scales.astype(np.float64)).astype(scales.dtype)
        alone = ~np.isfinite(points)
        if alone.any():
            numbers = packing.weight(packed).reshape(packing.N, packing.blocks, -1)
            kept = np.where(alone[..., None], 0, numbers).reshape(packing.N, -1)
            _store(work, node, 1, packing.packed_weight(kept, packed), ())
            _store(work, node, 2, np.where(alone, 1, before.scales).astype(scales.dtype).reshape(scales.shape), ())
        points = np.where(alone, -offsets, points).astype(scales.dtype)
        node.resize_inputs(max(4, len(node.inputs)))
        node.replace_input_with(3, add_weight(work, f"{layer.name}.zero_points", points.reshape(scales.shape)))
    return _error(layer, weight)


def _write_packed(
    work: ir.Model, node: ir.Node, weight: Array, readers: Collection[ir.Node], gptq: Gptq | None
) -> float:
    """Quantise the weight of a MatMulNBits in its own format, some rows at a time; return the rounding error."""
    packing, quantiser = Packing.of(node), quantiser_of(node)
    has_points = numbers_of([*node.inputs, None][3]) is not None
    given = [tensor_of(value).numpy() for value in node.inputs[1 : 3 + has_points]]
    middle = None if has_points else quantiser.middle
    stored = [np.array(array).reshape(packing.N, -1) for array in given]
    lost = total = 0.0
    step = max(1, _AT_ONCE // packing.K)
    for begin in range(0, packing.N, step):
        rows, part = slice(begin, begin + step), weight[begin : begin + step]
        some, own = replace(packing, N=len(part)), [array[rows] for array in stored]
        zeros = None if quantiser.points is None else quantiser.points[rows]
        old = replace(quantiser, scales=quantiser.scales[rows], points=zeros)
        total += _squared(part)
        if np.array_equal(old.dequantised(some.weight(own[0]))[:, : packing.K], part):
            continue  # unchanged weights stay as stored
        padded = np.pad(part, ((0, 0), (0, packing.blocks * packing.block_size - packing.K)))
        fitted = old.refitted(padded, middle, signed=True)
        fitted = fitted if gptq is None else old.unless_exceeded(fitted, padded)
        integers = fitted.quantised(padded)
        if gptq is not None:
            grid = (each[:, : packing.K] for each in fitted.grid(padded.shape))
            integers[:, : packing.K] = gptq.rounded(part, fitted.limits, *grid)
        own[0][:] = some.packed_weight(integers, own[0].reshape(len(part), packing.blocks, -1)).reshape(len(part), -1)
        own[1][:] = fitted.scales
        if has_points and fitted.points is not None:
            own[2][:] = some.packed_points(fitted.points, own[2])
        lost += _squared(fitted.dequantised(integers)[:, : packing.K] - part)
    for place, (before, array) in enumerate(zip(given, stored, strict=True), 1):
        _store(work, node, place, array.reshape(before.shape), readers)
    return float(np.sqrt(lost / max(total, float(np.finfo(np.float64).tiny))))


def _squared(array: Array) -> float:
    return float(np.sum(np.square(array, dtype=np.float64)))


def _write_stored(work: ir.Model, layer: Layer, weight: Array, readers: Collection[ir.Node], gptq: Gptq | None) -> None:
    """Quantise a weight (outputs first), and store integers, scales and zero points.

    Transposes are undone first. Raises BuildError if writing this kind of quantisation is not supported.
    """
    chain = _own_chain(work, layer, readers)
    at = [i for i, node in enumerate(chain) if node.op_type == "DequantizeLinear"]
    if len(at) != 1:
        raise BuildError(f"the weight of '{shown(layer.name)}' is quantised more than once; merge it as floats")
    if any(node.op_type == "Transpose" for node in chain[: at[0]]):
        raise BuildError(
            f"the weight of '{shown(layer.name)}' is transposed before it is dequantised; merge it as floats"
        )
    orders = [_order(node, weight.ndim) for node in chain if node.op_type == "Transpose"]
    weight = as_laid_out(layer, weight)
    for order in reversed(orders):
        weight = weight.transpose(np.argsort(order))

    def outputs_first(stored: Array) -> Array:
        for order in orders:
            stored = stored.transpose(order)
        return as_laid_out(layer, stored)

    rounds = None if gptq is None else functools.partial(_rounded, gptq, outputs_first)
    _write_dequantised(work, chain[at[0]], weight, readers, rounds)


def _rounded(gptq: Gptq, outputs_first: Callable[[Array], Array], quantiser: Quantiser, weight: Array) -> Array:
    """Return the integers of a weight as it is stored; ``outputs_first`` returns a view with the outputs first."""
    found = np.empty(weight.shape, np.int32)
    turned = outputs_first(found)
    weight, *grid = (outputs_first(each).reshape(len(turned), -1) for each in (weight, *quantiser.grid(weight.shape)))
    turned[:] = gptq.rounded(weight, quantiser.limits, *grid).reshape(turned.shape)
    return found


def _write_dequantised(
    work: ir.Model, node: ir.Node, weight: Array, readers: Collection[ir.Node], rounds: Rounds | None
) -> None:
    """Quantise ``weight``, and store the integers, scales and zero points that a DequantizeLinear reads."""
    stored, points = numbers_of(node.inputs[0]), numbers_of([*node.inputs, None][2])
    if stored is None or stored.dtype not in INTEGER_RANGES:
        raise BuildError(f"'{shown(node.name)}' dequantises computed or unsupported integers; merge it as floats")
    before = replace(quantiser_of(node), limits=limits_of(stored))
    fitted = before.refitted(weight, before.middle)
    fitted = fitted if rounds is None else before.unless_exceeded(fitted, weight)
    integers = fitted.quantised(weight) if rounds is None else rounds(fitted, weight)
    _store(work, node, 0, integers.astype(stored.dtype.numpy()), readers)
    _store(work, node, 1, fitted.scales.reshape(before.scales.shape), readers)
    if points is not None and fitted.points is not None:
        _store(work, node, 2, fitted.points.reshape(before.scales.shape).astype(points.dtype.numpy()), readers)


def write_in_blocks(work: ir.Model, node: ir.Node, weight: Array, rounds: Rounds | None = None) -> float:
    """Quantise the tensor that a DequantizeLinear computes, of any rank; return the error ``‖stored - W‖/‖W‖``.

    With ``rounds``, this function rounds the floats, as in :func:`write_quantised` with GPTQ.
    """
    _write_dequantised(work, node, weight, (), rounds)
    return relative_norm(quantiser_of(node).dequantised(tensor_of(node.inputs[0]).numpy()) - weight, weight)


def write_integer_bias(work: ir.Model, node: ir.Node, bias: Array) -> None:
    """Replace the bias of a Conv or Gemm that is stored as integers, as runtimes require: its scale is the product of
    the scales of data and weight.

    Raises:
        BuildError: the integers are not dequantised in this way.
    """
    chains = [rewritten(value)[1] for value in node.inputs[1:3]]
    data = node.inputs[0].producer() if node.inputs[0] is not None else None
    nodes = [data, *(next((n for n in chain if n.op_type == "DequantizeLinear"), None) for chain in chains)]
    known = [n for n in nodes if n is not None and n.op_type == "DequantizeLinear" and numbers_of(n.inputs[1])]
    if len(known) < 3:
        raise BuildError(
            f"the bias of '{shown(node.name)}' is stored as integers, but its data or weights are not, so its scale is "
            "unknown"
        )
    of_data, of_weight, old = (tensor_of(n.inputs[1]).numpy() for n in known)
    scales = np.broadcast_to(of_data * of_weight, (len(bias),)).astype(old.dtype)
    if old.size < len(bias) and (scales != scales[0]).any():
        raise BuildError(
            f"the bias of '{shown(node.name)}' has one scale, but the weights have one for each output; quantise the "
            "model again"
        )
    integers = np.clip(np.rint(bias / scales.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32)
    _store(work, known[2], 0, integers, ())
    _store(work, known[2], 1, scales[: old.size].reshape(old.shape), ())


def _own_chain(work: ir.Model, layer: Layer, readers: Collection[ir.Node]) -> list[ir.Node]:
    """Return the nodes from the stored tensor to the layer; nodes with other readers are replaced by copies."""
    _, chain = rewritten(layer.weight)
    shared = next((i for i, node in enumerate(chain) if not _is_its_own(node.outputs[0], readers)), len(chain))
    last = None if shared == 0 else chain[shared - 1].outputs[0]
    for i in range(shared, len(chain)):
        old = chain[i]
        new = ir.Node(old.domain, old.op_type, [last or old.inputs[0], *old.inputs[1:]], old.attributes.values())
        new.name = free_name(work, f"{old.name or old.outputs[0].name}.merged")
        last, made = new.outputs[0], old.outputs[0]
        last.name, last.type, last.shape = free_name(work, f"{made.name}.merged"), made.type, made.shape
        work.graph.insert_before(layer.node, new)
        chain[i] = new
    if shared < len(chain):
        layer.node.replace_input_with(layer.place, last)
    return chain


def _is_its_own(value: ir.Value, readers: Collection[ir.Node] = ()) -> bool:
    """Whether a value has exactly one reader, or only ``readers``, and is not an output."""
    alone = len(value.uses()) == 1 or all(use.node in readers for use in value.uses())
    return alone and not value.is_graph_output()


def _store(work: ir.Model, node: ir.Node, place: int, numbers: Array, readers: Collection[ir.Node]) -> None:
    """Replace the stored input ``place`` of ``node`` with ``numbers``; nodes except ``readers`` keep the old ones."""
    value = node.inputs[place]
    assert value is not None
    if _is_its_own(value, readers):
        set_numbers(work, value, numbers)
        return
    new = add_weight(work, f"{value.name}.merged", numbers)
    for reader, at in list(value.uses()):
        if reader in readers or (reader is node and at == place):
            reader.replace_input_with(at, new)
