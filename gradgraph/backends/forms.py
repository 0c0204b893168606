"""The table of forms of a backend: operator → ways to compute it there, best first.

A form is written like the portable form of a named operator::

    @form("ConvGradWeight", when=lambda call: call.static())
    def scan_gather(op, x, dy, w, *, group=1, **attrs):
        '''Why this is fast, and where it was measured.'''
        ...

It gets the builder, the inputs and attributes of the node, and returns its outputs, or ``None`` if it does not apply
(unknown kernel sizes, an unsuitable layout): then the next one is tried. ``when`` is true where it is *faster*;
``tune`` also tries it elsewhere. A form of a standard operator (``Conv``) must not write that operator again
unnecessarily, as its nodes are lowered in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import Shape, is_static
from gradgraph.rules.named_operators import DOMAIN, OPERATORS, arguments
from gradgraph.rules.registry import Case, attributes, key_of


@dataclass(frozen=True)
class Call:
    """A node to be lowered, as passed to forms."""

    node: ir.Node
    inputs: tuple[Var | None, ...]
    attrs: Mapping[str, Any]

    @classmethod
    def of(cls, op: Builder, node: ir.Node) -> Call:
        if node.domain == DOMAIN and node.op_type in OPERATORS:
            inputs, attrs = arguments(op, node)
            return cls(node, tuple(inputs), attrs)
        return cls(node, tuple(op.wrap(x) for x in node.inputs), attributes(node))

    @property
    def key(self) -> str:
        """Operator, types, shapes and attributes in one line: calls with equal keys are computed alike."""
        inputs = ", ".join("-" if x is None else f"{x.value.dtype}{list(x.shape or ())}" for x in self.inputs)
        attrs = ", ".join(f"{k}={v}" for k, v in sorted(self.attrs.items()) if not isinstance(v, ir.Graph))
        return f"{self.node.op_type}({inputs}; {attrs})"

    def shape(self, i: int) -> Shape | None:
        """The shape of input ``i``, as far as known."""
        x = self.inputs[i] if i < len(self.inputs) else None
        return None if x is None else x.shape

    def static(self, *indices: int) -> bool:
        """Whether the shapes of these inputs (by default all) are fully known."""
        chosen = indices or range(len(self.inputs))
        return all(self.inputs[i] is None or is_static(self.shape(i)) for i in chosen)


@dataclass(frozen=True)
class Form:
    """One way to compute an operator on one backend."""

    name: str
    domain: str
    op_type: str
    write: Callable[..., Any]
    when: Callable[[Call], bool]
    cases: tuple[Case, ...]


def _domain_of(op_type: str) -> str:
    """The domain of a standard or a named operator; their names are disjoint."""
    return "" if onnx.defs.has(op_type) else DOMAIN


class Forms:
    """The table of one backend, or of several that share one; a table may start with the rows of others."""

    def __init__(self, *others: Forms) -> None:
        self._rows: dict[tuple[str, str], list[Form]] = {}
        for row in (row for table in others for row in table):
            self._rows.setdefault((row.domain, row.op_type), []).append(row)

    def add(
        self, op_type: str, *cases: Case, domain: str | None = None, when: Callable[[Call], bool] = lambda call: True
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a row; rows are tried in the order in which they were added.

        Args:
            op_type, domain: a standard operator, a named one, or one of the given domain.
            cases: test cases for the comparison with the portable form, in addition to those of the operator.
            when: whether it is the best choice for a call.
        """
        own_domain = _domain_of(op_type) if domain is None else domain

        def register(write: Callable[..., Any]) -> Callable[..., Any]:
            row = Form(write.__name__, own_domain, op_type, write, when, cases)
            self._rows.setdefault((own_domain, op_type), []).append(row)
            return write

        return register

    def ask_in_order(self, op_type: str, *written: Callable[..., Any]) -> None:
        """Sort the rows of an operator that several files have added; ``written`` must name each of them."""
        key = _domain_of(op_type), op_type
        rows = {row.name: row for row in self._rows[key]}
        self._rows[key] = [rows.pop(write.__name__) for write in written]
        assert not rows, f"forms of {op_type} that have no place in the order: {', '.join(rows)}"

    def of(self, node: ir.Node) -> list[Form]:
        """The rows for ``node``, best first."""
        return self._rows.get(key_of(node), [])

    def __iter__(self) -> Iterator[Form]:
        for rows in self._rows.values():
            yield from rows
