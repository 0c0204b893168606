"""Rewrites for onnxruntime-web, whose WebAssembly memory is limited to 4 GB and never shrinks."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from gradgraph.autodiff.after import after, turn_after
from gradgraph.backends.backend import Lowering
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, calls_of, nodes_of
from gradgraph.passes.rewrites import Rewrite

_PRODUCTS = ("MatMul", "Gemm")
LARGE = 1 << 18  # elements of a weight, 1 MB of floats; for smaller weights the extra nodes do not pay


def dequantise_per_product(model: ir.Model) -> None:
    """Dequantize each large stored weight separately for every product that reads it, in place.

    Floats shared by the forward and backward pass would stay in memory between the two, for all weights at once. A
    language model of 336 million weights in 4 bits takes 1.51 GB in a browser tab with shared floats and 0.77 GB
    without, at equal speed (`python -m benchmarks.in_a_tab`).
    """
    editor = Editor(model)
    places = {node: i for i, node in enumerate(nodes_of(model))}
    for node in calls_of(model, "DequantizeLinear"):
        if _is_large(node):
            turned = [use.node for use in node.outputs[0].uses() if use.node.op_type == "Transpose"]
            for chain in ([node], *([node, transpose] for transpose in turned)):
                readers = sorted(chain[-1].outputs[0].uses(), key=lambda use: places[use.node])
                for reader, place in readers[1:]:
                    others = [
                        x for i, x in enumerate(reader.inputs[:2]) if i != place and x is not None and x.producer()
                    ]
                    if reader.op_type in _PRODUCTS and others:
                        _write_again(editor, chain, reader, place, others[0])


def _is_large(node: ir.Node) -> bool:
    x = node.inputs[0]
    sizes = [size for size in shape_of(x) or () if isinstance(size, int)]
    return x is not None and x.is_initializer() and math.prod(sizes) >= LARGE


def _write_again(editor: Editor, chain: list[ir.Node], reader: ir.Node, place: int, previous: ir.Value) -> None:
    """Write a copy of ``chain`` for input ``place`` of ``reader``, after ``previous`` to keep it from being merged."""
    op = editor.op
    op.scope = f"{reader.name}/again"
    x, scale, *rest = (op.wrap(v) for v in chain[0].inputs)
    assert scale is not None  # ONNX requires it
    late = after(op, scale, turn_after(op, [op.wrap(previous)]))
    settings: list[dict[str, Any]] = [dict(node.attributes) for node in chain]
    floats = op.DequantizeLinear(x, late, *rest, **settings[0])
    for more in settings[1:]:
        floats = op.Transpose(floats, **more)
    editor.place(reader)
    reader.replace_input_with(place, floats.value)


LOWERING = Lowering(before=(Rewrite(dequantise_per_product, "it matches products as the backward pass writes them"),))
