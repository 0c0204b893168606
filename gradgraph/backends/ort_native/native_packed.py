"""Products with frozen weights of 4 or 8 bits by one kernel, both ways: ``x · Wᵀ``, and ``dy · W`` for the gradient.

The kernel (``kernels/packed_matmul.cc``) dequantizes a few rows and columns at a time in the cache. No float weight is
written, and no session keeps a prepacked copy.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_cpu.packed_products import StoredProduct, Writer, stored_products
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_operators import kernel
from gradgraph.graph.builder import Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor

UNIT = 16  # the kernel requires a multiple of this many numbers per scale (``kUnit``)


def multiply_stored(model: ir.Model) -> None:
    """Replace supported products of the main graph with the kernel's nodes, in place."""
    if not library.here().has_fast_vectors:  # with tiles, other forms multiply floats of a few rows at a time
        return
    products = [p for p in stored_products(model) if _fits(p)]
    writer = Writer(Editor(model))
    with writer.editor.replacing_many():
        for product in products:
            writer.replace(product, partial(_by_kernel, writer, product))


def _fits(product: StoredProduct) -> bool:
    x, block = product.node.inputs[0], product.weight.block or product.weight.columns
    dims = shape_of(x)
    return block % UNIT == 0 and dims is not None and len(dims) <= library.MOST_AXES


def _by_kernel(writer: Writer, product: StoredProduct, x: Var) -> Var:
    weight, op = product.weight, writer.op
    block = weight.block or weight.columns
    blocks = weight.rows * (weight.columns // block)
    scales = op.wrap(weight.scales) if weight.block else op.const(np.ones(blocks, np.float32))
    inputs = [x, writer.view(weight.numbers, ir.DataType.UINT8, (weight.nbytes,)), scales]
    size = (blocks * weight.bits + 7) // 8
    if weight.points is not None:
        inputs.append(writer.view(weight.points, ir.DataType.UINT8, (size,)))
    elif weight.point:
        point = weight.point % 2**weight.bits
        inputs.append(op.const(np.full(size, point if weight.bits == 8 else point << 4 | point, np.uint8)))
    sizes = {"N": weight.rows, "K": weight.columns, "bits": weight.bits, "block_size": block}
    shape = (*(x.shape or ())[:-1], weight.rows if product.turned else weight.columns)
    kinds = {"by_rows": int(product.turned), "signed": int(weight.has_sign)}
    return kernel(op, "PackedMatMul", library.DOMAIN, inputs, shape, **sizes, **kinds)
