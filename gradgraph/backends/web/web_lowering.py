"""Rewrites for onnxruntime-web, whose WebAssembly has 4 GB at most and never gives memory back."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from gradgraph.autodiff.after import after, turn_after
from gradgraph.backends.backend import Lowering
from gradgraph.graph.shapes import shape_of
from gradgraph.passes.normal.edit import Editor, nodes_of
from gradgraph.passes.rewrites import Rewrite

_PRODUCTS = ("MatMul", "Gemm")
LARGE = 1 << 18  # numbers: a megabyte of floats. What is smaller is not worth its nodes.


def dequantise_again(model: ir.Model) -> None:
    """Let every product have floats of its own of a large stored weight, in place; they are made right before it.

    Floats that the forward pass shares with the backward pass stand between them, all of a model's at once. A language
    model of 336 million weights in 4 bits takes 1.51 GB in a tab with them and 0.77 GB without, for as much time.
    """
    editor = Editor(model)
    nodes = list(nodes_of(model))
    places = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if node.op_type == "DequantizeLinear" and node.domain == "" and _is_large(node):
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


def _write_again(editor: Editor, chain: list[ir.Node], reader: ir.Node, place: int, beside: ir.Value) -> None:
    """Write ``chain`` once more for ``reader``, after ``beside`` is there, so that no runtime takes both for equal."""
    op = editor.op
    op.scope = f"{reader.name}/again"
    x, scale, *rest = (op.wrap(v) for v in chain[0].inputs)
    assert scale is not None  # ONNX demands it
    late = after(op, scale, turn_after(op, [op.wrap(beside)]))
    settings: list[dict[str, Any]] = [dict(node.attributes) for node in chain]
    floats = op.DequantizeLinear(x, late, *rest, **settings[0])
    for more in settings[1:]:
        floats = op.Transpose(floats, **more)
    editor.place(reader)
    reader.replace_input_with(place, floats.value)


LOWERING = Lowering(before=(Rewrite(dequantise_again, "it looks for products as the backward pass has written them"),))
