"""Tell, without a GPU, which nodes onnxruntime has CUDA kernels for and what a CUDA graph cannot record.

The table (``tables/ort-cuda.toml``) holds onnxruntime's CUDA kernels for opset 21, as far as steps use them, and what
it refuses in spite of a kernel; ``python -m benchmarks.placement --table`` compares it with the real ones. Nodes
without a kernel run on the CPU: their inputs and outputs travel between the memories in every step, and no CUDA graph
can be captured.

Arithmetic on shapes runs on the CPU by design: Shape gives its result there, and what reads only such results follows.
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
MOST_ELEMENTS_ON_HOST = 100  # elements of a constant up to which it does not keep arithmetic on the device


@dataclass(frozen=True)
class Stray:
    """A node that onnxruntime would run on the CPU, or refuse."""

    name: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operator} (node '{self.name}'): {self.reason}"


def without_kernel(model: ir.Model) -> list[Stray]:
    """The nodes of a step, lowered for CUDA, that have no CUDA kernel for their types and attributes.

    Args:
        model: without calls of functions; element types known, as lowering leaves them.

    Returns:
        None of those that onnxruntime runs on the CPU by design (``on_host``).
    """
    known, host = table(), set(on_host(model))
    found = []
    for node in nodes_of(model):
        reason = "" if node in host else known.verdict(node).reason
        if reason and not all(v is None or constant_of(v) is not None for v in node.inputs):
            found.append(Stray(node.name or "", node.op_type, reason))
    return found


def table() -> Table:
    """The table of CUDA's kernels."""
    found = table_of("ort-cuda")
    assert found is not None
    return found


def on_host(model: ir.Model) -> list[ir.Node]:
    """The nodes that onnxruntime runs on the CPU by design: Shape, and what reads only shapes."""
    values: set[ir.Value] = set()
    nodes = []
    for node in nodes_of(model):
        if not node.domain and (node.op_type in _ON_HOST or _follows(node, values)):
            values.update(node.outputs)
            nodes.append(node)
    return nodes


def obstacles_to_capture(model: ir.Model) -> list[Stray]:
    """Why a step cannot run as a CUDA graph: work for the CPU, control flow, sizes that only a run tells."""
    return [*without_kernel(model), *_read_back(model)]


def _read_back(model: ir.Model) -> Iterator[Stray]:
    """Name what only a run tells: open sizes, which body runs, how many there are of something."""
    for value in model.graph.inputs:
        if not is_static(value.shape):
            yield Stray(value.name or "", "input", "its size is open")
    for node in nodes_of(model):
        if node.op_type in _CONTROL:
            yield Stray(node.name or "", node.op_type, "the CPU decides what runs")
        elif node.op_type in _COUNTS:
            yield Stray(node.name or "", node.op_type, "the size of its result is read back by the CPU")


def _follows(node: ir.Node, host: set[ir.Value]) -> bool:
    """Is it arithmetic on what is in the memory of the host anyway?"""

    def is_there(value: ir.Value) -> bool:
        known = constant_of(value)
        return value in host or value.is_graph_input() or (known is not None and known.size <= MOST_ELEMENTS_ON_HOST)

    read = [v for v in node.inputs if v is not None]
    return any(v in host for v in read) and all(map(is_there, read))
