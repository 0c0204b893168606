"""In-place updates that wait for a finite loss, so that a diverging step leaves the state unchanged.

If next values overwrite the current ones, a step that fails half-way or has a NaN loss destroys the state. To prevent
this, updates wait for a gate computed from the loss: a Gather that reads a one-element vector at index 0. If the loss
is not finite, the index is 1, so that onnxruntime fails the run before the state is overwritten. Earlier failures (such
as labels out of range) leave the state unchanged, too.

The first node that all updates depend on, but the loss does not, is made to wait. Without such a node, several nodes
wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, numpy_helper

from gradgraph.data.arrays.batch import Array
from gradgraph.files.protos import reads
from gradgraph.runtime.execution.inplace import append, let_wait, sort_nodes

GATE = "in_place/loss_is_a_number"
"""The name of the Gather and of its output."""
_WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)
_FUSED = frozenset({"Reshape", "Squeeze", "Unsqueeze"})
"""Operators that onnxruntime fuses into one Reshape if they are consecutive, which would remove a Reshape for waiting.
"""


def with_updates_after_loss(
    model: onnx.ModelProto, loss: str, next_of: Mapping[str, str], names: Collection[str], fails: bool
) -> bool:
    """Make in-place updates of state tensors wait for the loss; return False, with ``model`` unchanged, if impossible.

    Args:
        model: a train graph in topological order, with the types of its tensors; changed in place.
        loss: the name of the loss, an output of one element.
        next_of: state tensor → the output with its next value.
        names: the state tensors whose next values should wait.
        fails: whether the run should fail if the loss is NaN or infinite.
    """
    graph = model.graph
    nodes = list(graph.node)
    writer = {y: i for i, node in enumerate(nodes) for y in node.output if y}
    kinds = {o.name: o.type.tensor_type.elem_type for o in graph.output}
    updates = [writer[next_of[name]] for name in names if next_of[name] in writer]
    if loss not in writer or GATE in writer or not updates:
        return False
    floats = _computed_floats(model)
    before = _ancestors(nodes, writer)
    reshaped = {y for node in nodes if node.op_type in _FUSED for y in node.output}
    numbers = floats.keys() - reshaped
    places = [_place(node, numbers) for node in nodes]
    free = sum(1 << i for i, place in enumerate(places) if place is not None) & ~before[writer[loss]]
    waiting: list[tuple[onnx.NodeProto, int]] = []
    while updates:
        common, rest = before[updates[0]] & free, list[int]()
        for i in updates[1:]:
            both = common & before[i]
            common, rest = (both, rest) if both else (common, [*rest, i])
        if common:
            first = (common & -common).bit_length() - 1
            waiting.append((nodes[first], places[first] or 0))
        updates = rest
    if not waiting:
        return False
    _write_gate(graph, loss, kinds[loss], fails)
    for node, place in waiting:
        x = node.input[place]
        let_wait(graph, node, place, GATE)
        late = graph.value_info.add()
        late.CopyFrom(floats[x])
        late.name = node.input[place]
    sort_nodes(graph)
    return True


def _computed_floats(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the float tensors of known rank that nodes compute, with their types."""
    made = {y for node in model.graph.node for y in node.output}
    known = {v.name: v for v in (*model.graph.value_info, *model.graph.output) if v.name in made}
    kinds = (*_WIDE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return {n: v for n, v in known.items()
            if v.type.tensor_type.elem_type in kinds and v.type.tensor_type.HasField("shape")}  # fmt: skip


def _ancestors(nodes: list[onnx.NodeProto], writer: Mapping[str, int]) -> list[int]:
    """Return, for each node, a bit mask of the node and its ancestors; bit i stands for the node at index i."""
    found: list[int] = []
    for i, node in enumerate(nodes):
        mask = 1 << i
        for x in reads(node):
            if x in writer:
                mask |= found[writer[x]]
        found.append(mask)
    return found


def _place(node: onnx.NodeProto, floats: Collection[str]) -> int | None:
    """Return the index of the first input of ``node`` in ``floats``, through which the node can be made to wait.

    None if there is no such input, or onnxruntime fuses the node with the preceding node.
    """
    if node.op_type in _FUSED:
        return None
    return next((k for k, x in enumerate(node.input) if x in floats), None)


def _write_gate(graph: onnx.GraphProto, loss: str, kind: int, fails: bool) -> None:
    graph.initializer.extend(
        numpy_helper.from_array(np.array(v), f"{GATE}/{k}") for k, v in {"one": [1], "zero": [0]}.items()
    )
    row = append(graph, "Reshape", [loss, f"{GATE}/one"], f"{GATE}/row")
    if kind not in _WIDE:
        row = append(graph, "Cast", [row], f"{GATE}/float", to=TensorProto.FLOAT)
    nothing = append(graph, "Sub", [row, row], f"{GATE}/nothing")  # 0, or NaN
    if fails:
        is_number = append(graph, "Equal", [nothing, nothing], f"{GATE}/is_number")
        other = append(graph, "Not", [is_number], f"{GATE}/other")
        at = append(graph, "Cast", [other], f"{GATE}/at", to=TensorProto.INT64)
    else:
        never = append(graph, "Less", [nothing, nothing], f"{GATE}/never")
        at = append(graph, "Cast", [never], f"{GATE}/at", to=TensorProto.INT64)
    append(graph, "Gather", [f"{GATE}/zero", at], GATE)
    graph.node[-1].name = GATE


class Keeping:
    """A check of whether a failed run left the state unchanged, based on the loss buffer.

    Args:
        loss: the buffer that a run writes the loss to.
        is_gated: whether the session overwrites the state only after the loss is computed.
        needs_number: whether a NaN or infinite loss leaves the state unchanged.
    """

    def __init__(self, loss: Array, is_gated: bool, needs_number: bool) -> None:
        self._loss, self._is_gated, self._needs_number = loss, is_gated, needs_number
        self._unknown = np.finfo(loss.dtype).min
        self._options = ort.RunOptions()
        self._options.log_severity_level = 4
        self._options.add_run_config_entry("gpu_graph_id", "0")  # as for ``Interrupts``

    def begin(self, options: ort.RunOptions | None) -> ort.RunOptions | None:
        """Reset the loss buffer before a run, and return the run options to use.

        A run that overwrites the state must not be terminated by the caller, so its ``options`` are replaced. For other
        runs, ``options`` (possibly None) is returned unchanged.
        """
        self._loss.fill(self._unknown)
        return self._options if self._is_gated else options

    def refuses(self) -> bool:
        """Return whether the last run left the state unchanged because its loss is not finite."""
        return self._needs_number and not math.isfinite(self._loss.item())

    def has_kept(self) -> bool:
        """Whether a failed run left the state unchanged."""
        return not self._is_gated or self._loss.item() == self._unknown or self.refuses()

    def is_refusal(self, error: Exception) -> bool:
        """Whether ``error`` was raised by the gate, because the loss is not finite."""
        return GATE in str(error) and self.refuses()
