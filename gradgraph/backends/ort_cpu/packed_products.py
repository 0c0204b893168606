"""Products with weights of 4 or 8 bits in blocks: ``x · Wᵀ`` and, for the gradient of ``x``, ``dy · W``.

A step computes them by DequantizeLinear, Transpose and MatMul, which every runtime supports. Two forms are faster here:

1. onnxruntime's MatMulNBits for ``x · Wᵀ``: with 128 rows half the time, and no float weight, provided that the session
   may keep a prepacked copy. Without the copy, MatMulNBits takes 1.7 times as long as form 2, and writes the whole
   float weight.
2. Strips, for ``dy · W`` and for weights that must not be copied: some rows of W are converted to float32 and
   multiplied, and their memory is reused for the next strip. DequantizeLinear reads each block as a row with one scale,
   which takes 0.4 of its time for blocks within rows.

Measured with onnxruntime 1.32 on one AVX512 core, 128 rows, blocks of 32, in nanoseconds per weight: a float product
3.0; MatMulNBits 3.0 with a copy, 7.1 without; DequantizeLinear 2.1, of rows 0.9.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_operators import CONTRIB, kernel
from gradgraph.graph.builder import Var, all_of
from gradgraph.graph.nodes import before_swap, made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.dialects.packed_weights import seen_as
from gradgraph.passes.normal.edit import Editor
from gradgraph.rules.registry import attributes, key_of

MOST_COPIED = 1 << 28  # maximum total bytes of weights that sessions copy; the backward pass also keeps the originals
STRIP = 1 << 22  # maximum elements of a strip, 16 MiB in float32
_BITS = {ir.DataType.UINT4: 4, ir.DataType.UINT8: 8, ir.DataType.INT4: 4, ir.DataType.INT8: 8}
_UNSIGNED = (ir.DataType.UINT4, ir.DataType.UINT8)
_BLOCKS = (16, 32, 64, 128, 256)  # block sizes that MatMulNBits supports


def multiply_packed(model: ir.Model, copied: bool | Literal["auto"] = "auto") -> None:
    """Rewrite products of the main graph with low-bit weights by MatMulNBits or by float32 strips, in place.

    ``copied`` is whether sessions may copy the weights; "auto" allows at most ``MOST_COPIED`` bytes in total.
    """
    products = list(stored_products(model))
    if copied == "auto":
        copied = sum(w.nbytes for w in {p.weight.numbers: p.weight for p in products}.values()) <= MOST_COPIED
    writer = Writer(Editor(model))
    with writer.editor.replacing_many():
        for product in products:
            writer.write(product, copied)


@dataclass(frozen=True)
class StoredWeight:
    """A low-bit matrix W of ``rows`` x ``columns``, with a scale (and zero point) per ``block`` of a row.

    Attributes:
        made: the DequantizeLinear that reads it.
        numbers, scales, points: the inputs of this node; None without zero points.
        rows, columns: the sizes of W.
        block: the number of consecutive weights in a row with the same scale.
    """

    made: ir.Node
    numbers: ir.Value
    scales: ir.Value
    points: ir.Value | None
    rows: int
    columns: int
    block: int

    @property
    def bits(self) -> int:
        assert self.numbers.dtype is not None
        return _BITS[self.numbers.dtype]

    @property
    def has_sign(self) -> bool:
        return self.numbers.dtype not in _UNSIGNED

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.bits // 8


@dataclass(frozen=True)
class StoredProduct:
    """A product with a stored W: ``x · Wᵀ`` if ``turned``, else ``x · W``; a Gemm ``node`` may add a summand."""

    node: ir.Node
    weight: StoredWeight
    turned: bool


def stored_products(model: ir.Model) -> Iterator[StoredProduct]:
    """Yield the products of the main graph whose second factor is a stored W or Wᵀ."""
    for node in model.graph:
        attrs = attributes(node)
        plain = not attrs.get("transA") and attrs.get("alpha", 1.0) == attrs.get("beta", 1.0) == 1.0
        if not plain or key_of(node) not in (("", "MatMul"), ("", "Gemm")):
            continue
        x, w = node.inputs[:2]
        source = before_swap(w)
        weight = _stored_weight(w if source is None else source)
        if weight is not None and x is not None and x.dtype == ir.DataType.FLOAT and len(shape_of(x) or ()) >= 2:
            yield StoredProduct(node, weight, (source is not None) != bool(attrs.get("transB")))


def _stored_weight(value: ir.Value | None) -> StoredWeight | None:
    """Return the low-bit matrix that ``value`` is dequantized from; None unless blocks of each row share a scale."""
    node = made_by(value, "DequantizeLinear")
    if node is None:
        return None
    numbers, scales, points = (*node.inputs, None, None)[:3]
    if numbers is None or scales is None or any(v is not None and not v.is_initializer() for v in node.inputs):
        return None
    sizes, attrs = shape_of(numbers), attributes(node)
    block = attrs.get("block_size", 0)
    fits = numbers.dtype in _BITS and scales.dtype == ir.DataType.FLOAT and numbers.const_value is not None
    if not fits or sizes is None or len(sizes) != 2 or attrs.get("axis", 1) not in (1, -1) or block < 2:
        return None
    rows, columns = sizes
    if not isinstance(rows, int) or not isinstance(columns, int) or not rows * columns or columns % block:
        return None
    return StoredWeight(node, numbers, scales, points, rows, columns, block)


class Writer:
    """A writer of MatMulNBits and strips, which shares initializers between products."""

    def __init__(self, editor: Editor) -> None:
        self.editor, self.op = editor, editor.op
        self._counts = Counter[tuple[ir.Value, bool]]()  # of products written by strips
        self._seen: dict[tuple[ir.Value, ir.DataType, tuple[int, ...], int], ir.Value] = {}

    def write(self, product: StoredProduct, copied: bool) -> None:
        written = self._by_matmul_nbits(product) if copied and product.turned else None
        self.replace(product, self._by_strips(product) if written is None else written)

    def replace(self, product: StoredProduct, written: Var) -> None:
        """Replace the product with ``written``, plus the summand of a Gemm."""
        summand = self.editor.op.wrap((*product.node.inputs, None)[2])
        self.editor.replace(product.node, written if summand is None else written + summand)

    def _by_matmul_nbits(self, product: StoredProduct) -> Var | None:
        """Return the product by MatMulNBits; None if it does not support the weight."""
        node, weight = product.node, product.weight
        points = self._zero_points(weight)
        if points is None or weight.block not in _BLOCKS or weight.has_sign:
            return None
        sizes = {"K": weight.columns, "N": weight.rows, "bits": weight.bits, "block_size": weight.block}
        packed = (weight.rows, weight.columns // weight.block, weight.block * weight.bits // 8)
        self.op.scope = node.name or ""
        x, numbers = self.editor.op.wrap(node.inputs[0]), self.view(weight.numbers, ir.DataType.UINT8, packed)
        assert x is not None
        inputs = [x, numbers, self.op.wrap(weight.scales), *points]
        return kernel(self.op, "MatMulNBits", CONTRIB, inputs, (*(x.shape or ())[:-1], weight.rows), **sizes)

    def _zero_points(self, weight: StoredWeight) -> list[Var] | None:
        """Return the zero points for MatMulNBits: an empty list for its defaults, None if they are not supported."""
        blocks = weight.columns // weight.block
        size = weight.rows * math.ceil(blocks * weight.bits / 8)
        if weight.points is None:
            return [self.op.const(np.zeros(size, np.uint8))]
        tensor, fits = weight.points.const_value, weight.bits == 8 or not blocks % 2
        if isinstance(tensor, ir.ExternalTensor):  # lowering does not read external data
            return [self.view(weight.points, ir.DataType.UINT8, (size,))] if fits else None
        if tensor is None:
            return None
        if (tensor.numpy().astype(np.uint8) == 2 ** (weight.bits - 1)).all():
            return []
        return [self.op.const(np.frombuffer(tensor.tobytes(), np.uint8))] if fits else None

    def _by_strips(self, product: StoredProduct) -> Var:
        """Return the product computed with strips W₁, W₂, … of W.

        ``x · Wᵀ`` is the concatenation of ``x · Wᵢᵀ``, and ``x · W`` the sum of ``xᵢ · Wᵢ`` with slices xᵢ of x.
        """
        op, strips = self.op, self._strips(product)
        op.scope = product.node.name or ""
        x = self.editor.op.wrap(product.node.inputs[0])
        assert x is not None
        if product.turned:
            parts = [x @ op.Transpose(w, perm=[1, 0]) for w in strips]
            return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=-1)
        if len(strips) == 1:
            return x @ strips[0]
        lengths = [w.dim(0) for w in strips]
        parts = all_of(op.Split(x, lengths, axis=-1, outputs=len(strips)))
        total, *others = (part @ w for part, w in zip(parts, strips, strict=True))
        for other in others:
            total = total + other
        return total

    def _strips(self, product: StoredProduct) -> list[Var]:
        """Return strips, runs of rows, of W in float32, computed in place of the whole W.

        Equal nodes would be merged, so that strips of the forward pass would stay in memory for the backward pass. To
        prevent this, the axis of DequantizeLinear is 0 for ``x · Wᵀ`` and −2 for ``x · W``. Further products of the
        same kind, such as those of recomputation, read the integers in a shape with more axes, of size 1.
        """
        weight, axis = product.weight, 0 if product.turned else -2
        more = self._counts[weight.numbers, product.turned]
        self._counts[weight.numbers, product.turned] += 1
        # even, so that with 4 bits the next strip starts at a whole byte
        height = max(2, STRIP // weight.columns // 2 * 2)
        self.op.scope = weight.made.name or ""
        made = [
            self._float_rows(weight, begin, min(height, weight.rows - begin), axis, more)
            for begin in range(0, weight.rows, height)
        ]
        self.editor.place(weight.made)
        return made

    def _float_rows(self, weight: StoredWeight, begin: int, count: int, axis: int, more: int) -> Var:
        blocks = weight.columns // weight.block
        kind, first, several = weight.numbers.dtype, begin * blocks, count * blocks
        assert kind is not None
        shape = (several, weight.block, *[1] * more)
        axis = axis if axis >= 0 else axis - more  # the first axis in both spellings
        numbers = self.view(weight.numbers, kind, shape, first * weight.block)
        scales = self.view(weight.scales, ir.DataType.FLOAT, (several,), first)
        points = None if weight.points is None else self.view(weight.points, kind, (several,), first)
        made = self.op.DequantizeLinear(numbers, scales, points, axis=axis)
        return self.op.Reshape(made, [count, weight.columns])

    def view(self, value: ir.Value, kind: ir.DataType, sizes: tuple[int, ...], first: int = 0) -> Var:
        """Return an initializer ``kind[sizes]`` that shares the bytes of ``value``, starting at element ``first``."""
        key = (value, kind, sizes, first)
        if key not in self._seen:
            tensor = value.const_value
            assert tensor is not None
            other = seen_as(tensor, kind, ir.Shape(sizes), first * kind.bitwidth // 8)
            other.name = self.op.fresh(f"{value.name}/part")
            made = ir.Value(name=other.name, type=ir.TensorType(kind), shape=ir.Shape(sizes), const_value=other)
            self.op.constants.append(made)
            self._seen[key] = made
        return self.op.wrap(self._seen[key])
