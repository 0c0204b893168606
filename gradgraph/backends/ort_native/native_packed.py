"""Products with frozen weights of 4 or 8 bits by one kernel, both ways: ``x · Wᵀ``, and ``dy · W`` for the gradient.

The kernel (``kernels/packed_matmul.cc``) dequantizes a few rows and columns at a time in the cache. No float weight is
written, and no session keeps a prepacked copy.
"""

from __future__ import annotations

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
            writer.replace(product, _by_kernel(writer, product))


def _fits(product: StoredProduct) -> bool:
    x = product.node.inputs[0]
    return product.weight.block % UNIT == 0 and x is not None and len(shape_of(x) or ()) <= library.MOST_AXES


def _by_kernel(writer: Writer, product: StoredProduct) -> Var:
    weight, op = product.weight, writer.op
    blocks = weight.rows * (weight.columns // weight.block)
    x = op.wrap(product.node.inputs[0])
    assert x is not None
    op.scope = product.node.name or ""
    inputs = [x, writer.view(weight.numbers, ir.DataType.UINT8, (weight.nbytes,)), op.wrap(weight.scales)]
    if weight.points is not None:
        inputs.append(writer.view(weight.points, ir.DataType.UINT8, ((blocks * weight.bits + 7) // 8,)))
    sizes = {"N": weight.rows, "K": weight.columns, "bits": weight.bits, "block_size": weight.block}
    shape = (*(x.shape or ())[:-1], weight.rows if product.turned else weight.columns)
    kinds = {"by_rows": int(product.turned), "signed": int(weight.has_sign)}
    return kernel(op, "PackedMatMul", library.DOMAIN, inputs, shape, **sizes, **kinds)
