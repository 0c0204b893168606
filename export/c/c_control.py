"""Convert Scan, Loop and If."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import shown
from gradgraph.export.c.c_reading import READERS, Reader, result
from gradgraph.export.c.program import Branch, Program, Repeat, Shape, Tensor, View
from gradgraph.graph.nodes import input_at


def _read_body(
    r: Reader, body: ir.Graph, inputs: Sequence[Tensor]
) -> tuple[Program, list[Tensor], list[Shape], list[Tensor]]:
    """Return the program of a body, whose inputs are ``inputs``, its results, their shapes, and the outer tensors read.

    The tensor of a result may have the same elements in another shape, as that of a product with a vector.
    """
    inside = r.inner()
    for value, tensor in zip(body.inputs, inputs, strict=True):
        inside.views[value] = tensor.whole()
    outside = {v.tensor for v in r.views.values()}
    inside.read(body)
    taken: set[Tensor] = set()
    results = [result(inside, inside.view(v), taken) for v in body.outputs]
    read = dict.fromkeys(v.tensor for o in inside.program.operations for v in o.views if v.tensor in outside)
    inside.program.outputs = {f"{i}": t for i, t in enumerate(results)}
    return inside.program, results, [inside.view(v).shape for v in body.outputs], list(read)


@READERS("Scan")
def _scan(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    body: ir.Graph = attrs["body"]
    count = int(attrs["num_scan_inputs"])
    states = len(node.inputs) - count
    axes = attrs.get("scan_input_axes") or [0] * count
    first = [r.whole(r.view(v)) for v in node.inputs[:states]]  # type: ignore[arg-type]
    whole = [_first(r.view(v), a) for v, a in zip(node.inputs[states:], axes, strict=True)]  # type: ignore[arg-type]
    steps, scanned = whole[0].shape[0], [r.whole(v) for v in whole]
    backwards = [bool(d) for d in attrs.get("scan_input_directions") or [0] * count]
    own = [r.tensor(v, "local") for v in body.inputs]
    program, results, shapes, captured = _read_body(r, body, own)
    _check_states(r, first, own[:states], results[:states])
    made = [r.tensor(v) for v in node.outputs[:states]]
    made += [
        Tensor((steps, *shape), t.dtype, v.name or "")
        for v, t, shape in zip(node.outputs[states:], results[states:], shapes[states:], strict=True)
    ]
    out_axes = attrs.get("scan_output_axes") or [0] * len(made[states:])
    for value, tensor, axis in zip(node.outputs, made, [0] * states + out_axes, strict=True):
        order = list(range(1, len(tensor.shape)))
        order.insert(axis % max(len(tensor.shape), 1), 0)
        r.views[value] = tensor.whole().permuted(order if tensor.shape else [])
    out_backwards = [bool(d) for d in attrs.get("scan_output_directions") or [0] * len(made[states:])]
    read = {v.tensor for o in program.operations for v in o.views}
    slices = [s for s in zip(scanned, own[states:], backwards, strict=True) if s[1] in read]
    r.add(
        Repeat(
            steps,
            program,
            list(zip(first, own[:states], results[:states], strict=True)),
            slices,
            list(zip(made[states:], results[states:], out_backwards, strict=True)),
            made[:states],
            captured=captured,
        )
    )


def _first(view: View, axis: int) -> View:
    """Return ``view`` with ``axis`` moved to the front."""
    rank = len(view.shape)
    return view.permuted([axis % rank, *(i for i in range(rank) if i != axis % rank)])


def _check_states(r: Reader, first: Sequence[Tensor], own: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    for start, inside, found in zip(first, own, results, strict=True):
        if not start.size == inside.size == found.size:
            raise r.unsupported(f"its state '{shown(inside.name)}' changes its size")


@READERS("Loop")
def _loop(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    """Read a Loop whose number of steps is known at run time only; all others were rewritten as Scan."""
    body: ir.Graph = attrs["body"]
    states = list(node.inputs[2:])
    if len(node.outputs) > len(states):
        raise r.unsupported("its number of steps must be constant, as it stacks the results of its steps")
    limit, condition = input_at(node, 0), input_at(node, 1)
    true = Tensor((), "bool", "", "constant", np.array(True)).whole()
    goes_on = r.map((), "bool", "{0}", [true if condition is None else r.of_shape(r.view(condition), ())])
    first = [goes_on, *(r.whole(r.view(v)) for v in states)]  # type: ignore[arg-type]
    counter, *own = (r.tensor(v, "local") for v in body.inputs)
    program, results, shapes, captured = _read_body(r, body, [counter, *own])
    _check_states(r, first, own, results)
    last = [Tensor(shape, t.dtype, t.name) for t, shape in zip(results, shapes, strict=True)]
    for value, tensor in zip(node.outputs, last[1:], strict=True):
        r.views[value] = tensor.whole()
    steps = None if limit is None else r.whole(r.view(limit))
    carried = list(zip(first, own, results, strict=True))
    r.add(Repeat(steps, program, carried, [], [], last, counter, own[0], captured=captured))


@READERS("If")
def _if(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    condition = r.view(node.inputs[0])  # type: ignore[arg-type]
    branches: list[ir.Graph] = [attrs["then_branch"], attrs["else_branch"]]
    known = r.constant(node.inputs[0])
    if known is not None:
        branch = branches[0 if bool(np.ravel(known)[0]) else 1]
        r.read(branch)
        r.node = node
        for value, inner in zip(node.outputs, branch.outputs, strict=False):
            if value.name:
                r.views[value] = r.view(inner)
        return
    made = [r.tensor(v) for v in node.outputs]
    programs, captured = [], dict[Tensor, None]()
    for branch in branches:
        program, results, shapes, read = _read_body(r, branch, [])
        for out, found, shape in zip(made, results, shapes, strict=True):
            if shape != out.shape or found.dtype != out.dtype:
                raise r.unsupported(f"'{out.name}' has different shapes in its branches")
        programs.append(program)
        captured.update(dict.fromkeys(read))
    for value, tensor in zip(node.outputs, made, strict=True):
        r.views[value] = tensor.whole()
    r.add(Branch(r.whole(r.of_shape(condition, ())), programs, made, captured=list(captured)))
