"""The table of forms: (target, operator) → ways to compute it there, the best one first.

A form is written like the portable form of a gradient operator::

    @form("ConvGradWeight", target=ORT_CPU, when=lambda call: call.batch is known ...)
    def scan_gather(op, x, dy, w, *, group=1, **attrs):
        '''Why this is fast, and where it was measured.'''
        ...

It takes the builder, the inputs and attributes of the node, returns its outputs, or ``None`` where it cannot serve
(kernel sizes unknown, a layout that does not fit): then the next one is asked. ``when`` says where it is *worth* it;
``tune`` also tries it elsewhere. A form of a standard operator (``Conv``) must not write that operator again without
need: what a form writes is lowered in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.operators import DOMAIN, OPERATORS, arguments
from gradgraph.registry import Case, attributes, key_of
from gradgraph.shapes import Shape, is_static

PORTABLE, ORT_CPU, ORT_CUDA, OPENVINO = "portable", "ort-cpu", "ort-cuda", "openvino"
TARGETS = (PORTABLE, ORT_CPU, ORT_CUDA, OPENVINO)
ORT_CPU_NATIVE = "ort-cpu-native"  # the CPU provider with our kernels: what a Trainer may run, nothing to build for
_EXTENDED = {ORT_CPU_NATIVE: ORT_CPU}


@dataclass(frozen=True)
class Call:
    """A node that is to be lowered, as forms see it."""

    node: ir.Node
    inputs: tuple[Var | None, ...]
    attrs: Mapping[str, Any]

    @classmethod
    def of(cls, op: Builder, node: ir.Node) -> Call:
        if node.domain == DOMAIN and node.op_type in OPERATORS:
            inputs, attrs = arguments(op, node)
            return cls(node, tuple(inputs), attrs)
        return cls(node, tuple(None if x is None else op.wrap(x) for x in node.inputs), attributes(node))

    @property
    def key(self) -> str:
        """Operator, types, shapes and attributes in one line: calls with one key are computed alike."""
        inputs = ", ".join("-" if x is None else f"{x.value.dtype}{list(x.shape or ())}" for x in self.inputs)
        attrs = ", ".join(f"{k}={v}" for k, v in sorted(self.attrs.items()) if not isinstance(v, ir.Graph))
        return f"{self.node.op_type}({inputs}; {attrs})"

    def shape(self, i: int) -> Shape | None:
        """What is known of the shape of input ``i``."""
        x = self.inputs[i] if i < len(self.inputs) else None
        return None if x is None else x.shape

    def static(self, *indices: int) -> bool:
        """Are the shapes of these inputs (all of them by default) known in full?"""
        chosen = indices or range(len(self.inputs))
        return all(self.inputs[i] is None or is_static(self.shape(i)) for i in chosen)


@dataclass(frozen=True)
class Form:
    """One way to compute an operator on one target."""

    name: str
    domain: str
    op_type: str
    target: str
    write: Callable[..., Any]
    when: Callable[[Call], bool]
    cases: tuple[Case, ...]


_FORMS: dict[tuple[str, str, str], list[Form]] = {}


def form(
    op_type: str, *cases: Case, target: str, domain: str = DOMAIN, when: Callable[[Call], bool] = lambda call: True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a row to the table; rows are asked in the order in which they were added.

    Args:
        op_type, domain: a gradient operator, or (``domain=""``) a standard one.
        cases: what tests compare with the portable form; further to those of the operator.
        target: where the form runs.
        when: where it is the best choice.
    """

    def register(write: Callable[..., Any]) -> Callable[..., Any]:
        row = Form(write.__name__, domain, op_type, target, write, when, cases)
        _FORMS.setdefault((target, domain, op_type), []).append(row)
        return write

    return register


def forms_of(target: str, node: ir.Node) -> list[Form]:
    """The rows for ``node``, the best one first."""
    own = _FORMS.get((target, *key_of(node)), [])
    return own if target not in _EXTENDED else [*own, *forms_of(_EXTENDED[target], node)]


def has_own_forms(target: str, node: ir.Node) -> bool:
    """Has ``target``, which adds to another one, something to add for ``node``?"""
    return target in _EXTENDED and (target, *key_of(node)) in _FORMS


def is_on_cpu(target: str) -> bool:
    """Is it onnxruntime's CPU provider, with native kernels or without?"""
    return _EXTENDED.get(target, target) == ORT_CPU


def every_form() -> Iterator[Form]:
    """The whole table."""
    for rows in _FORMS.values():
        yield from rows
