"""QA-LoRA (Xu et al. 2023, arXiv:2309.14717): a low-rank update that is constant within each block of a weight.

``y = x·W + s·(P(x)·A)·B``, where P(x) sums the inputs of each block, A is (blocks, rank) and B (rank, outputs). So the
update of W is one number for each block of each output, and a merged weight keeps its integers: the number is merged
into the block's zero point, ``z − s·A·B/scale``, which MatMulNBits accepts as a float.

``P(x)·A`` is written here as ``x`` times A with each row repeated for the inputs of its block.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.files.model_metadata import Adapter
from gradgraph.surgery.adapter_kinds import low_rank
from gradgraph.surgery.adapter_kinds.kind import KINDS, Kind, zeros
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.linear_layers import Layer, drawn
from gradgraph.surgery.matmul_nbits import Packing
from gradgraph.surgery.operation import Array
from gradgraph.surgery.stored_weights import quantiser_of

FLOAT_POINTS = (2, 4)  # bit widths for which onnxruntime supports float zero points


def put(work: ir.Model, layer: Layer, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Add two trained factors A and B to a layer; return the adapter with the names of its tensors.

    Raises:
        BuildError: the layer is not a MatMulNBits; or it has a bit width without float zero points, bfloat16 scales, or
            reordered groups.
    """
    packing = _packing_of(layer)
    writer = Writer(work, layer.node, wanted, layer.dtype)
    a = writer.weight("lora_A", drawn(rng, (packing.blocks, wanted.rank), packing.K, layer.dtype))
    b = writer.weight("lora_B", np.zeros((wanted.rank, packing.N)))
    return low_rank.put_beside(writer, layer, wanted, (a, b), _repeated(writer, a, packing))


def _packing_of(layer: Layer) -> Packing:
    if layer.kind != "MatMulNBits":
        integer = layer.node.inputs[layer.place]
        producer = None if integer is None else integer.producer()
        turned = producer is not None and producer.op_type == "DequantizeLinear"
        why = (
            "is dequantised by DequantizeLinear, whose zero points are whole numbers" if turned else "is not quantised"
        )
        raise BuildError(
            f"the weight of '{shown(layer.name)}' ({layer.kind}) {why}, but adapters of kind qalora merge into float "
            "zero points of a MatMulNBits; use kind lora, exclude this layer, or quantise the model with "
            "onnxruntime's MatMulNBitsQuantizer"
        )
    packing = Packing.of(layer.node)
    if packing.bits not in FLOAT_POINTS:
        raise BuildError(
            f"the weight of '{shown(layer.name)}' has {packing.bits} bits, but onnxruntime supports float zero points "
            "for 2 and 4 bits only; use kind lora, or exclude this layer"
        )
    if layer.dtype == ir.DataType.BFLOAT16:
        raise BuildError(
            f"the weight of '{shown(layer.name)}' has scales of bfloat16, whose 8 bits are too few for trained zero "
            "points; use kind lora, or exclude this layer"
        )
    quantiser_of(layer.node)  # raises for reordered groups
    return packing


def _repeated(writer: Writer, a: ir.Value, packing: Packing) -> ir.Value:
    """Return A with each row repeated for the inputs of its block: (inputs, rank)."""
    blocks, size = packing.blocks, packing.block_size
    rows = writer.node("Reshape", a, writer.whole(blocks, 1, -1))
    rows = writer.node("Expand", rows, writer.whole(1, size, 1))
    rows = writer.node("Reshape", rows, writer.whole(blocks * size, -1))
    if blocks * size == packing.K:
        return rows
    return writer.node("Slice", rows, writer.whole(0), writer.whole(packing.K), writer.whole(0))


def merge(adapter: Adapter, weight: Array, factors: list[Array]) -> Array:
    """Return the merged weight, output axis first: W plus ``s·A·B``, which has one number per block of inputs."""
    found, inputs = low_rank.delta(adapter, factors), weight.shape[1]
    size = 1 << (-(-inputs // found.shape[1]) - 1).bit_length()  # block size, a power of two
    return np.asarray(weight + np.repeat(found, size, 1)[:, :inputs])


KINDS.add(
    "qalora",
    Kind("low rank over blocks of a MatMulNBits of 2 or 4 bits, merged without loss", put, low_rank.FACTORS,
         zeros, ((1, 0), (0, 1)), low_rank.factor, merge, drops=True, adds=True, offsets=low_rank.delta),
)  # fmt: skip
