"""Products with weights of 4 or 8 bits: ``x · Wᵀ`` and, for the gradient of ``x``, ``dy · W``.

A step computes them by DequantizeLinear, Transpose and MatMul, which every runtime supports. Two forms are faster here:

1. onnxruntime's MatMulNBits for ``x · Wᵀ``: with 128 rows half the time, and no float weight, provided that the session
   may keep a prepacked copy. Without the copy, MatMulNBits takes 1.7 times as long as form 2, and writes the whole
   float weight.
2. Strips, for ``dy · W`` and for weights that must not be copied: some rows of W are converted to float32 and
   multiplied, and their memory is reused for the next strip. DequantizeLinear reads each block as a row with one scale,
   which takes 0.4 of its time for blocks within rows.

Scales of columns multiply the other factor or the product instead: ``x · (D diag(s))ᵀ = (x diag(s)) · Dᵀ``, and
``dy · (D diag(s)) = (dy · D) diag(s)``. Strips of D need a single scale of 1, and a single zero point m. If columns
have other zero points z, a product of rank 1 is subtracted: ``x · (D − 1 dᵀ)ᵀ = x · Dᵀ − (x · d) 1ᵀ`` with d = z − m,
and ``dy · (D − 1 dᵀ) = dy · D − (dy · 1) dᵀ``. It rounds like the whole product unless the integers of a column use
only a small part of their range, far from m.

Measured with onnxruntime 1.32 on one AVX512 core, 128 rows, blocks of 32, in nanoseconds per weight: a float product
3.0; MatMulNBits 3.0 with a copy, 7.1 without; DequantizeLinear 2.1, of rows 0.9. With 32 rows, 8 bits and scales of
columns: a float product 0.6, strips 0.9, whatever the zero points; DequantizeLinear and MatMul 2.2, and 2.4 as the
MatMulNBits to which onnxruntime fuses them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_operators import CONTRIB, kernel
from gradgraph.graph.builder import Var, all_of
from gradgraph.graph.constant_nodes import become_initializer, tensor_in
from gradgraph.graph.nodes import before_swap, inputs_of, is_standard, made_by
from gradgraph.graph.prune import prune
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.dialects.packed_weights import seen_as
from gradgraph.passes.normal.edit import Editor
from gradgraph.rules.registry import attributes, key_of

MOST_COPIED = 1 << 28  # maximum total bytes of weights that sessions copy; the backward pass also keeps the originals
STRIP = 1 << 22  # maximum elements of a strip, 16 MiB in float32
_BITS = {ir.DataType.UINT4: 4, ir.DataType.UINT8: 8, ir.DataType.INT4: 4, ir.DataType.INT8: 8}
_LEAST_OPSET = 13  # of DequantizeLinear with an axis, and of Split with its lengths as an input
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


def with_stored_weights(model: ir.Model, copied: bool) -> ir.Model:
    """Return a copy of an inference model, with products rewritten by ``multiply_packed``, for an unlowered session.

    Models of an opset before 13 are returned unchanged: the rewritten nodes do not exist there.
    """
    if model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1)) < _LEAST_OPSET:
        return model
    copy = model.clone()
    for node in [n for n in copy.graph if is_standard(n, "DequantizeLinear")]:
        for maker in filter(None, (value.producer() for value in inputs_of(node))):
            if (tensor := tensor_in(maker)) is not None:
                become_initializer(maker, tensor, copy.graph)
    multiply_packed(copy, copied)
    return prune(copy)


@dataclass(frozen=True)
class StoredWeight:
    """A low-bit matrix W of ``rows`` x ``columns``, with a scale and zero point per ``block`` of a row, or per column.

    Attributes:
        made: the DequantizeLinear that reads it.
        numbers, scales, points: the inputs of this node; None without zero points.
        rows, columns: the sizes of W.
        block: the number of consecutive weights in a row with the same scale; 0 if each column, or all of W, has one.
        point: the zero point of all columns, if block is 0; a number near them, if they differ.
        column_points: the zero points of columns, if block is 0 and they may differ.
    """

    made: ir.Node
    numbers: ir.Value
    scales: ir.Value
    points: ir.Value | None
    rows: int
    columns: int
    block: int
    point: int = 0
    column_points: ir.Value | None = None

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
        if weight is not None and x is not None and len(shape_of(x) or "??") >= 2:
            yield StoredProduct(node, weight, (source is not None) != bool(attrs.get("transB")))


def _stored_weight(value: ir.Value | None) -> StoredWeight | None:
    """Return the low-bit matrix that ``value`` is dequantized from; None if its scales belong to blocks of columns."""
    node = made_by(value, "DequantizeLinear")
    if node is None:
        return None
    numbers, scales, points = (*node.inputs, None, None)[:3]
    if numbers is None or scales is None or any(v is not None and not v.is_initializer() for v in node.inputs):
        return None
    sizes, axis, block = shape_of(numbers), node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    made = node.attributes.get_int("output_dtype", 0) or scales.dtype
    fits = numbers.dtype in _BITS and scales.dtype == made == ir.DataType.FLOAT and numbers.const_value is not None
    if not fits or sizes is None or len(sizes) != 2:
        return None
    rows, columns = sizes
    if not isinstance(rows, int) or not isinstance(columns, int) or not rows * columns:
        return None
    is_of_rows = axis in (0, -2)
    if block:
        fits = not is_of_rows and block > 1 and not columns % block
        return StoredWeight(node, numbers, scales, points, rows, columns, block) if fits else None
    if is_of_rows and shape_of(scales) == (rows,):
        return StoredWeight(node, numbers, scales, points, rows, columns, columns)
    near, differ = (0, False) if points is None else _middle(points)
    return StoredWeight(node, numbers, scales, None, rows, columns, 0, near, points if differ else None)


def _middle(points: ir.Value) -> tuple[int, bool]:
    """Return an integer in the middle of zero points, and whether they may differ from it."""
    tensor, kind = points.const_value, points.dtype
    if tensor is None or isinstance(tensor, ir.ExternalTensor):  # lowering does not read external data
        return 2 ** (_BITS[kind] - 1) if kind is not None and kind in _UNSIGNED else 0, True
    numbers = tensor.numpy().astype(np.int32)
    middle = int(np.median(numbers))
    return middle, bool((numbers != middle).any())


class Writer:
    """A writer of MatMulNBits and strips, which shares initializers between products."""

    def __init__(self, editor: Editor) -> None:
        self.editor, self.op = editor, editor.op
        self._counts = Counter[tuple[ir.Value, bool]]()  # of products written by strips
        self._seen: dict[tuple[ir.Value, ir.DataType, tuple[int, ...], int], ir.Value] = {}

    def write(self, product: StoredProduct, copied: bool) -> None:
        written = self._by_matmul_nbits(product) if copied and product.turned else None
        if written is None:
            self.replace(product, partial(self._by_strips, self._strips(product), product.turned))
        else:
            self._put(product, written)

    def replace(self, product: StoredProduct, multiply: Callable[[Var], Var]) -> None:
        """Replace the product with ``multiply(x)``, the product with the stored numbers times the scales of blocks."""
        op, weight = self.op, product.weight
        op.scope = product.node.name or ""
        x = op.wrap(product.node.inputs[0])
        assert x is not None
        if weight.block:
            self._put(product, multiply(x))
            return
        scales = op.wrap(weight.scales)
        x = x * scales if product.turned else x
        y = multiply(x)
        if weight.column_points is not None:
            points = op.wrap(weight.column_points)
            offsets = op.DequantizeLinear(points, 1.0, op.const(weight.point, points.dtype))
            y = y - (op.ReduceSum(x * offsets, [-1]) if product.turned else op.ReduceSum(x, [-1]) * offsets)
        self._put(product, y if product.turned else y * scales)

    def _put(self, product: StoredProduct, written: Var) -> None:
        """Replace the product with ``written``, plus the summand of a Gemm."""
        summand = self.editor.op.wrap((*product.node.inputs, None)[2])
        self.editor.replace(product.node, written if summand is None else written + summand)

    def _by_matmul_nbits(self, product: StoredProduct) -> Var | None:
        """Return the product by MatMulNBits; None if it does not support the weight."""
        node, weight = product.node, product.weight
        is_supported = weight.block in _BLOCKS and not weight.has_sign and shape_of(node.inputs[0]) is not None
        points = self._zero_points(weight) if is_supported else None
        if points is None:
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

    def _by_strips(self, strips: list[Var], turned: bool, x: Var) -> Var:
        """Return the product of ``x`` with W or (``turned``) Wᵀ, from strips W₁, W₂, … of W.

        ``x · Wᵀ`` is the concatenation of ``x · Wᵢᵀ``, and ``x · W`` the sum of ``xᵢ · Wᵢ`` with slices xᵢ of x.
        """
        op = self.op
        if turned:
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
        kind, block = weight.numbers.dtype, weight.block or 1
        assert kind is not None
        first, several = begin * weight.columns // block, count * weight.columns // block
        numbers = self.view(weight.numbers, kind, (several, block, *[1] * more), first * block)
        if weight.block:
            scales = self.view(weight.scales, ir.DataType.FLOAT, (several,), first)
            points = None if weight.points is None else self.view(weight.points, kind, (several,), first)
        else:
            scales, points = self.op.const(1.0), self.op.const(weight.point, kind) if weight.point else None
        axis = axis if axis >= 0 else axis - more  # the first axis in both spellings
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
