"""Send 16-bit gradients as float32: MPI sums float32 25 times faster, and does not support bfloat16."""

from __future__ import annotations

from dataclasses import replace

import onnx

from gradgraph.files.protos import copied
from gradgraph.step.step import Step

_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def widened(step: Step) -> Step:
    """Return ``step`` with 16-bit gradients cast to float32 between gradient.onnx and apply.onnx.

    A step without 16-bit gradients is returned unchanged.
    """
    spec = step.manifest.separate
    assert spec is not None
    types = {o.name: o.type.tensor_type.elem_type for o in step.separate["gradient"].graph.output}
    narrow = {name: types[name] for name in spec.gradients.values() if types[name] in _NARROW}
    if not narrow:
        return step
    halves = {name: copied(half) for name, half in step.separate.items()}
    for name, dtype in narrow.items():
        inner = f"{name}.narrow"
        gradient, apply = halves["gradient"].graph, halves["apply"].graph
        for node in gradient.node:
            node.input[:] = [inner if x == name else x for x in node.input]
            node.output[:] = [inner if y == name else y for y in node.output]
        for node in apply.node:
            node.input[:] = [inner if x == name else x for x in node.input]
        gradient.node.append(onnx.helper.make_node("Cast", [inner], [name], to=onnx.TensorProto.FLOAT))
        apply.node.insert(0, onnx.helper.make_node("Cast", [name], [inner], to=dtype))
        for value in [v for v in (*gradient.output, *apply.input) if v.name == name]:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return replace(step, train=step.trains[""], separate=halves)
