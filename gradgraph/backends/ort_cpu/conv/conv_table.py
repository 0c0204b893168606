"""Declare forms of convolutions, which are written for a ``Layer``; test cases of Conv also serve for its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gradgraph.backends.forms import Call, Forms
from gradgraph.backends.ort_cpu.conv.layer import Layer, layer
from gradgraph.backends.ort_cpu.cpu_table import FORMS
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import Case, case, real
from gradgraph.rules.windows import windows

Good = Callable[[Layer], bool]
Write = TypeVar("Write", bound=Callable[..., Any])

OPERANDS = {
    "Conv": "xw",
    "ConvGradInput": "ywx",
    "ConvGradWeight": "xyw",
}  # the inputs of each operator; y is dy in gradients

CONVOLUTIONS = (
    case(real(8, 6, 4, 4), real(5, 6, 3, 3), real(5), pads=[1, 1, 1, 1]),
    case(real(8, 16, 5, 4), real(32, 16, 3, 2), real(32), pads=[1, 0, 1, 1]),
    case(real(8, 3, 9, 8), real(16, 3, 3, 2), strides=[2, 1], pads=[0, 2, 1, 0], dilations=[2, 3]),
    case(real(8, 16, 8, 9), real(3, 16, 3, 3), pads=[0, 2, 1, 0], dilations=[1, 2]),
    case(real(8, 32, 9, 9), real(16, 32, 3, 3), real(16), strides=[2, 2], pads=[1, 1, 1, 1]),
    case(real(2, 32, 4, 5), real(32, 1, 3, 3), real(32), group=32, pads=[1, 1, 1, 1]),
    case(real(2, 16, 7, 6), real(16, 16, 5, 5), real(16), pads=[2, 1, 2, 3]),
    case(real(2, 32, 6, 5), real(32, 16, 3, 3), group=2, pads=[1, 1, 1, 1]),
    case(real(8, 4, 6, 6), real(6, 2, 3, 3), real(6), group=2, pads=[1, 1, 1, 1]),
    case(real(2, 32, 7, 6), real(32, 1, 3, 3), group=32, strides=[2, 2], pads=[1, 1, 1, 1]),
    case(real(1, 16, 9, 9), real(16, 1, 5, 2), group=16, strides=[3, 2], pads=[2, 0, 2, 1]),
    case(real(2, 20, 4, 5), real(20, 1, 3, 3), real(20), group=20, pads=[1, 1, 1, 1]),
    case(real(3, 23, 8, 6), real(23, 1, 5, 3), real(23), group=23, strides=[2, 2], pads=[2, 1, 2, 1]),
    case(real(2, 16, 6, 9), real(16, 1, 5, 5), real(16), group=16, pads=[2, 2, 2, 2]),
    case(real(3, 32, 5, 8), real(32, 1, 3, 7), group=32, pads=[1, 4, 1, 2], dilations=[2, 1]),
    case(real(2, 16, 7, 8), real(32, 16, 7, 3), strides=[2, 2], pads=[3, 1, 3, 1]),
    case(real(4, 16, 4, 16), real(16, 16, 3, 3), pads=[1, 1, 1, 1]),
    case(real(3, 5, 6, 16), real(16, 5, 3, 2), pads=[1, 0, 2, 1], dilations=[2, 1]),
    case(real(2, 16, 7, 18), real(3, 16, 3, 3), pads=[1, 0, 2, 2], dilations=[3, 2]),
    case(real(2, 32, 8, 5), real(16, 32, 3, 3), real(16), pads=[1, 1, 1, 1]),
    case(real(3, 16, 9, 6), real(32, 16, 5, 2), real(32), pads=[2, 0, 1, 1], dilations=[1, 2]),
    case(real(2, 16, 8, 6), real(32, 16, 4, 2), strides=[4, 2]),
    case(real(2, 32, 3, 9), real(5, 32, 1, 3), strides=[1, 3]),
    case(real(8, 32, 3, 3), real(16, 32, 1, 1), real(16)),
    case(real(2, 3, 5, 4), real(7, 3, 1, 1), real(7)),
    case(real(8, 6, 5, 5), real(4, 6, 1, 1), strides=[2, 2]),
    case(real(8, 2, 7), real(3, 2, 3), strides=[2], pads=[1, 1]),
    case(real(2, 2, 4, 3, 5), real(3, 2, 2, 3, 2), real(3), pads=[1, 1, 0, 0, 1, 1]),
)


def gradients(convolutions: Iterable[Case], roles: str) -> tuple[Case, ...]:
    """Return test cases of a Conv gradient whose inputs are ``roles`` (as in ``OPERANDS``), from test cases of Conv."""
    found = []
    for c in convolutions:
        x, w = c.inputs[:2]
        seen = windows(**{**c.attrs, "kernel_shape": w.shape[2:]})
        y = real(x.shape[0], w.shape[0], *seen.count(x.shape[2:]))
        given = {"x": x, "w": w, "y": y}
        found.append(replace(c, inputs=tuple(given[role] for role in roles)))
    return tuple(found)


def layer_of(call: Call) -> Layer | None:
    """Return the layer of a Conv or of one of its gradients; None if a size other than the batch size is unknown."""
    return _layer(call.node.op_type, call.inputs, call.attrs)


def _layer(op_type: str, inputs: Sequence[Var | None], attrs: Mapping[str, Any]) -> Layer | None:
    given = dict(zip(OPERANDS[op_type], inputs, strict=False))  # a Conv may have a bias
    x, w = given["x"], given["w"]
    return None if x is None or w is None else layer(x, w, given.get("y"), attrs)


def always(conv: Layer) -> bool:
    """Return True for every layer."""
    return True


def conv_form(
    op_type: str,
    convolutions: Iterable[Case] = CONVOLUTIONS,
    *,
    serves: Good = always,
    when: Good = always,
    any_batch: bool = False,
    forms: Forms = FORMS,
) -> Callable[[Write], Write]:
    """Return a decorator that adds a form ``write(op, layer, *inputs)`` of a Conv or one of its gradients.

    Args:
        op_type: ``Conv``, ``ConvGradInput`` or ``ConvGradWeight``.
        convolutions: test cases of Conv, from which the test cases of a gradient are derived.
        serves: whether the form supports a layer.
        when: whether it is the fastest for a layer.
        any_batch: whether ``when`` also decides about layers of unknown batch size, for which the form is otherwise not
            used.
        forms: the table to which it is added.
    """

    def worth(call: Call) -> bool:
        conv = layer_of(call)
        return conv is not None and (any_batch or conv.images > 0) and serves(conv) and when(conv)

    def register(write: Write) -> Write:
        @functools.wraps(write)
        def of_call(op: Builder, *inputs: Var | None, **attrs: Any) -> Any:
            conv = _layer(op_type, inputs, attrs)
            return write(op, conv, *inputs) if conv is not None and serves(conv) else None

        cases = convolutions if op_type == "Conv" else gradients(convolutions, OPERANDS[op_type])
        forms.add(op_type, *cases, when=worth)(of_call)
        return write

    return register
