"""Find, without a GPU, which nodes have CUDA kernels in onnxruntime, and what prevents CUDA graph capture.

The table (``tables/ort-cuda.toml``) lists the CUDA kernels of onnxruntime that steps use, for opset 21, and the cases
that they reject; ``python -m benchmarks.placement --table`` compares it with the real kernels. Nodes without a
kernel run on the CPU: their inputs and outputs are copied between device and host in every step, and no CUDA graph can
be captured.

Arithmetic on shapes runs on the CPU by design: Shape returns its result in host memory, and nodes that read only such
results run there, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from gradgraph.backends.capability import Table, table_of
from gradgraph.graph.shapes import constant_of, is_static
from gradgraph.passes.normal.edit import nodes_of

_ON_HOST = ("Shape", "Size", "SequenceLength")
_CONTROL = ("If", "Loop", "Scan")
_COUNTS = ("Compress", "NonZero", "Unique")  # the size of their result is read back from the device
MOST_ELEMENTS_ON_HOST = 100  # constants with more elements keep the arithmetic that reads them on the device


@dataclass(frozen=True)
class Stray:
    """A node that onnxruntime would run on the CPU, or reject, and the reason."""

    name: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operator} (node '{self.name}'): {self.reason}"


def without_kernel(model: ir.Model) -> list[Stray]:
    """Return the nodes that have no CUDA kernel for their types and attributes, except nodes in ``on_host``.

    ``model`` is a step lowered for CUDA, without function calls, and with known element types.
    """
    known, host = table(), set(on_host(model))
    found = []
    for node in nodes_of(model):
        reason = "" if node in host else known.verdict(node).reason
        if reason and not all(v is None or constant_of(v) is not None for v in node.inputs):
            found.append(Stray(node.name or "", node.op_type, reason))
    return found


def table() -> Table:
    found = table_of("ort-cuda")
    assert found is not None
    return found


def on_host(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that onnxruntime runs on the CPU by design: Shape, and nodes that read only shapes."""
    values: set[ir.Value] = set()
    nodes = []
    for node in nodes_of(model):
        if not node.domain and (node.op_type in _ON_HOST or _follows(node, values)):
            values.update(node.outputs)
            nodes.append(node)
    return nodes


def obstacles_to_capture(model: ir.Model) -> list[Stray]:
    """Return the obstacles to a CUDA graph of a step: nodes on the CPU, control flow, data-dependent sizes."""
    return [*without_kernel(model), *_read_back(model)]


def _read_back(model: ir.Model) -> Iterator[Stray]:
    """Yield inputs of unknown sizes, control flow, and nodes whose output size the CPU must read back."""
    for value in model.graph.inputs:
        if not is_static(value.shape):
            yield Stray(value.name or "", "input", "its size is not fixed")
    for node in nodes_of(model):
        if node.op_type in _CONTROL:
            yield Stray(node.name or "", node.op_type, "the CPU decides which body runs")
        elif node.op_type in _COUNTS:
            yield Stray(node.name or "", node.op_type, "the size of its result is read back by the CPU")


def _follows(node: ir.Node, host: set[ir.Value]) -> bool:
    """Return whether ``node`` is arithmetic on values in host memory."""

    def is_there(value: ir.Value) -> bool:
        known = constant_of(value)
        return value in host or value.is_graph_input() or (known is not None and known.size <= MOST_ELEMENTS_ON_HOST)

    read = [v for v in node.inputs if v is not None]
    return any(v in host for v in read) and all(map(is_there, read))
