"""The changes of a model between two sweeps of peepholes, so that the second sweep skips nodes that none affects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from gradgraph.graph.checks import WITH_BODIES, subgraphs
from gradgraph.passes.normal.edit import nodes_of

# A peephole inspects its node, the readers of its node's inputs and outputs, and the nodes before it: up to this many,
# besides any number of nodes in CHAINS
MOST_BEFORE = 3
CHAINS = frozenset({"Expand", "Flatten", "Reshape", "Squeeze", "Unsqueeze"})

_State = tuple[tuple[ir.Value | None, ...], list[ir.Shape | None]]


class Changes:
    """The nodes that changes affect: all nodes in the first sweep, and later those near a change.

    The readers of initializers and graph inputs are not near each other: no peephole counts them.
    """

    def __init__(self) -> None:
        self._affected: set[ir.Node] | None = None  # None: all
        self._states: dict[ir.Node, _State] = {}  # inputs, and shapes of outputs, at the start of the last sweep
        self._outputs: set[ir.Value] = set()

    def since_last_sweep(self, model: ir.Model) -> list[ir.Node]:
        """Start a sweep: find the changes since the start of the last one, and return the nodes of ``model``."""
        nodes, before, outputs = list(nodes_of(model)), self._states, self._outputs
        self._states = {node: (tuple(node.inputs), [v.shape for v in node.outputs]) for node in nodes}
        bodies = (body for node in nodes if node.op_type in WITH_BODIES for body in subgraphs(node))
        self._outputs = {v for graph in (model.graph, *bodies) for v in graph.outputs}
        if not before:
            return nodes
        self._affected = set()
        gone = [inputs for node, (inputs, _) in before.items() if node not in self._states]
        changed = [node for node, state in self._states.items() if not _is_same(state, before.get(node))]
        read = [v for inputs in gone for v in inputs if v is not None]
        read += [v for node in changed if node in before for v in before[node][0] if v is not None]
        self.add([*read, *(outputs ^ self._outputs)], changed)
        return nodes

    def affect(self, node: ir.Node) -> bool:
        """Whether a change affects ``node``."""
        return self._affected is None or node in self._affected

    def add(self, values: Iterable[ir.Value], nodes: Iterable[ir.Node]) -> None:
        """Record that ``nodes`` were written or changed, and that the readers of ``values`` changed."""
        if self._affected is None:
            return
        near = dict.fromkeys(nodes, 0)
        for value in (*values, *(v for node in near for v in (*node.inputs, *node.outputs) if v is not None)):
            if (maker := value.producer()) is not None:
                self._affected.update([maker, *_readers(value)])
        waiting = list(near)
        while waiting:
            node = waiting.pop()
            for reader in (r for v in node.outputs for r in _readers(v)):
                distance = near[node] + (reader.op_type not in CHAINS)
                if distance < near.get(reader, MOST_BEFORE + 1):
                    near[reader] = distance
                    waiting.append(reader)
        self._affected.update(near)


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    return (node for node, _ in value.uses())


def _is_same(now: _State, before: _State | None) -> bool:
    """Whether the inputs and shapes are the same objects; onnx-ir replaces the tuple of inputs when one changes."""
    if before is None or now[0] is not before[0] or len(now[1]) != len(before[1]):
        return False
    return all(a is b for a, b in zip(now[1], before[1], strict=True))
