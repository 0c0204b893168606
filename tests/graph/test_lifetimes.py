"""Sizes of values, the views that share memory, and the bytes alive at each node."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from gradgraph.graph.lifetimes import bytes_alive, known_bytes, owners


def test_bytes_alive_at_each_node() -> None:
    assert bytes_alive([(0, 2, 10), (1, 1, 5), (2, 3, 1)], 4) == [10, 15, 11, 1]
    assert bytes_alive([], 2) == [0, 0]


def test_views_share_the_memory_of_the_first_value() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[N, 3] x, int64[2] shape) => (float[2, 3] y) <float16[2, 3] a, float[M, 3] c> {
            a = Cast <to = 10> (x)
            b = Reshape (a, shape)
            c = Identity (b)
            y = Cast <to = 1> (c)
        }""")
    graph = ir.from_proto(model).graph
    values = {v.name: v for node in graph for v in node.outputs}
    assert {y.name: x.name for y, x in owners(graph).items()} == {"b": "a", "c": "a"}
    assert [known_bytes(values[name]) for name in "abcy"] == [12, None, None, 24]
