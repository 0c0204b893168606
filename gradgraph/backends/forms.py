"""The table of forms of a backend: for each operator, ways to compute it on that backend, best first.

A form is written like the portable form of a named operator::

    @form("ConvGradWeight", when=lambda call: is_static(call.shape(0)))
    def scan_gather(op, x, dy, w, *, group=1, **attrs):
        '''Why this is fast, and where it was measured.'''
        ...

A form receives the builder and the inputs and attributes of the node. It returns the outputs, or ``None`` if it does
not apply (unknown kernel sizes, an unsupported layout); then the next form is tried. ``when`` is true where the form is
*faster*; ``tune`` also tries it elsewhere. A form of a standard operator (``Conv``) must not write that operator again
unnecessarily, as its nodes are lowered in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import Shape
from gradgraph.rules.named_operators import DOMAIN, OPERATORS, arguments
from gradgraph.rules.registry import Case, attributes, key_of


@dataclass(frozen=True)
class Call:
    """A node to be lowered, as passed to forms.

    Attributes:
        node: the node itself.
        inputs: its inputs; None for absent ones.
        attrs: its attributes, including defaults.
    """

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
        """Operator, types, shapes and attributes in one line; calls with equal keys use the same form."""
        inputs = ", ".join("-" if x is None else f"{x.value.dtype}{list(x.shape or ())}" for x in self.inputs)
        attrs = ", ".join(f"{k}={v}" for k, v in sorted(self.attrs.items()) if not isinstance(v, ir.Graph))
        return f"{self.node.op_type}({inputs}; {attrs})"

    def shape(self, i: int) -> Shape | None:
        """Return the shape of input ``i``, or None if the input is absent or its shape unknown."""
        x = self.inputs[i] if i < len(self.inputs) else None
        return None if x is None else x.shape


@dataclass(frozen=True)
class Form:
    """One way to compute an operator on one backend.

    Attributes:
        name: the name of the function that writes it.
        domain, op_type: the operator.
        write: writes the form's nodes and returns its outputs, or None if the form does not apply.
        when: whether the form is the fastest for a call.
        cases: test cases in addition to the operator's.
    """

    name: str
    domain: str
    op_type: str
    write: Callable[..., Any]
    when: Callable[[Call], bool]
    cases: tuple[Case, ...]


def _domain_of(op_type: str) -> str:
    """Return the domain of a standard or named operator; no name is in both domains."""
    return "" if onnx.defs.has(op_type) else DOMAIN


class Forms:
    """A table of forms, initially with the forms of the tables ``others``."""

    def __init__(self, *others: Forms) -> None:
        self._rows: dict[tuple[str, str], list[Form]] = {}
        for row in (row for table in others for row in table):
            self._rows.setdefault((row.domain, row.op_type), []).append(row)

    def add(
        self, op_type: str, *cases: Case, domain: str | None = None, when: Callable[[Call], bool] = lambda call: True
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a form to the table; an operator's forms are tried in the order of addition.

        Args:
            op_type: the operator, standard or named unless ``domain`` is given.
            cases: further test cases for the comparison with the portable form.
            domain: the domain of ``op_type``, for operators of other domains.
            when: whether the form is the fastest for a call.
        """
        own_domain = _domain_of(op_type) if domain is None else domain

        def register(write: Callable[..., Any]) -> Callable[..., Any]:
            row = Form(write.__name__, own_domain, op_type, write, when, cases)
            self._rows.setdefault((own_domain, op_type), []).append(row)
            return write

        return register

    def ask_in_order(self, op_type: str, *written: Callable[..., Any]) -> None:
        """Set the order of all forms of an operator, for forms that several files have added."""
        key = _domain_of(op_type), op_type
        rows = {row.name: row for row in self._rows[key]}
        self._rows[key] = [rows.pop(write.__name__) for write in written]
        assert not rows, f"forms of {op_type} that have no place in the order: {', '.join(rows)}"

    def of(self, node: ir.Node) -> list[Form]:
        """Return the forms for ``node``, best first."""
        return self._rows.get(key_of(node), [])

    def __iter__(self) -> Iterator[Form]:
        for rows in self._rows.values():
            yield from rows
