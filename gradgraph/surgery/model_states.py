"""States of generative models: inputs that continue earlier tokens, and the outputs with their next values.

A state is recognised by what the graph does with it, not by its name:

1. An operator reads it in the place of its state, such as the past keys of GroupQueryAttention or the initial state of
   a recurrence.
2. Keys and values are joined with those of the new tokens by a Concat, whose result is an output.
3. Another state, of a convolution or recurrence in standard operators, becomes an output of its shape through
   operators that are linear in it: shifted, decayed, added to, or carried by a Loop or Scan. Tokens change it: an
   output that depends on no other input continues no state.

At the start of a text, keys and values are empty, and other states are zero: nothing is added to what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.surgery.operation import reached

_MICROSOFT, _BOTH = "com.microsoft", ("", "com.microsoft")
_KEYS, _FIXED = 2, None  # the axis of tokens of a state, or None for a state of fixed size
# operators with states: the output that continues the state of each input, and the axis of tokens
_STATES: dict[tuple[str, str], dict[int, tuple[int, int | None]]] = {
    (_MICROSOFT, "Attention"): {4: (1, 3)},  # [2, batch, heads, tokens, size]
    (_MICROSOFT, "DecoderMaskedMultiHeadAttention"): {5: (1, _KEYS), 6: (2, _KEYS)},
    (_MICROSOFT, "GroupQueryAttention"): {3: (1, _KEYS), 4: (2, _KEYS)},
    (_MICROSOFT, "MultiHeadAttention"): {6: (1, _KEYS), 7: (2, _KEYS)},
    (_MICROSOFT, "PagedAttention"): {3: (1, 1), 4: (2, 1)},  # [pages, page size, heads, size]
    (_MICROSOFT, "SparseAttention"): {3: (1, _KEYS), 4: (2, _KEYS)},
    ("", "Attention"): {4: (1, _KEYS), 5: (2, _KEYS)},
    **{(domain, "CausalConvWithState"): {3: (1, _FIXED)} for domain in _BOTH},
    **{(domain, "LinearAttention"): {3: (1, _FIXED)} for domain in _BOTH},
    (_MICROSOFT, "GatedDeltaNet"): {6: (1, _FIXED)},
    (_MICROSOFT, "VarlenCausalConvWithState"): {4: (1, _FIXED)},
    ("", "GRU"): {5: (1, _FIXED)},
    ("", "LSTM"): {5: (1, _FIXED), 6: (2, _FIXED)},
    ("", "RNN"): {5: (1, _FIXED)},
}
_REQUIRED = frozenset(
    {"PagedAttention", "SparseAttention", "VarlenCausalConvWithState"}
)  # operators whose state cannot be omitted
_FILLS = frozenset({"ScatterElements", "ScatterND", "TensorScatter"})  # write new tokens into a buffer
_CUTS = frozenset({"Gather", "Slice", "Split"})
# standard operators that are linear in their inputs at these places
_LINEAR: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Add", "Mul", "Sub"), (0, 1)),
    **dict.fromkeys(("Cast", "Div", "Expand", "Gather", "Identity", "Neg", "Pad", "Reshape", "Slice", "Split"), (0,)),
    **dict.fromkeys(("Squeeze", "Transpose", "Unsqueeze", *_FILLS), (0,)),
    "Where": (1, 2),
}


@dataclass(frozen=True)
class State:
    """A state of a generative model.

    Attributes:
        past: the input.
        present: the output that continues it; None if the model has no such output.
        axis: the axis of ``past`` along which it grows with each token; None if its size is fixed.
        is_buffer: whether tokens are written into a key-value buffer of fixed length.
    """

    past: ir.Value
    present: ir.Value | None
    axis: int | None
    is_buffer: bool = False


def is_optional_state(node: ir.Node, place: int) -> bool:
    """Whether the input of ``node`` at ``place`` is a state that can be omitted for an empty one."""
    return place in _STATES.get((node.domain, node.op_type), ()) and node.op_type not in _REQUIRED


def has_fixed_states(node: ir.Node) -> bool:
    """Whether ``node`` is a convolution or recurrence with a state of fixed size."""
    return any(axis is _FIXED for _, axis in _STATES.get((node.domain, node.op_type), {}).values())


def states_of(model: ir.Model, others: Collection[str] = ()) -> list[State]:
    """Return the states among the inputs of ``model``, in their order.

    Args:
        model: a model whose functions are inlined.
        others: names of inputs that are not states, such as tokens, masks and positions.
    """
    graph = model.graph
    length = _length_of_tokens(graph.inputs, others)
    given = [v for v in graph.inputs if not v.is_initializer() and v.name not in others]
    search = _Search(model)
    found = (search.state(v) for v in given if length is None or length not in (shape_of(v) or ()))
    return [state for state in found if state is not None]


def _length_of_tokens(inputs: Sequence[ir.Value], others: Collection[str]) -> str | None:
    """Return the symbolic number of tokens, which no state has as a size; None if it is unknown."""
    whole = [v for v in inputs if v.dtype in (ir.DataType.INT64, ir.DataType.INT32) and v.name not in others]
    shapes = [shape for v in whole if len(shape := shape_of(v) or ()) == 2]
    return next((shape[1] for shape in shapes if isinstance(shape[1], str)), None)


@dataclass(frozen=True)
class _Reached:
    """A value on the way from a state to its next value.

    Attributes:
        axes: the axis of the state for each axis of the value; None for an axis of unknown origin.
        joined: the axis of the state along which tokens have been appended; None if there is none.
        kept: whether an operator has read it in the place of a state.
        filled: whether tokens have been written into it.
        cut: whether a part of it has been selected.
    """

    value: ir.Value
    axes: tuple[int | None, ...]
    joined: int | None = None
    kept: bool = False
    filled: bool = False
    cut: bool = False


class _Search:
    """A search for the outputs that continue states, each the nearest."""

    def __init__(self, model: ir.Model) -> None:
        self._outputs = frozenset(model.graph.outputs)
        self._outer: dict[ir.Value, list[ir.Value]] = {}  # results of an If, by the result of a branch
        for node in nodes_of(model):
            for attribute in node.attributes.values() if node.op_type == "If" else ():
                for inner, outer in zip(attribute.as_graph().outputs, node.outputs, strict=False):
                    self._outer.setdefault(inner, []).append(outer)

    def state(self, past: ir.Value) -> State | None:
        """Return the state that ``past`` is; None if it is not known to be one."""
        first = _Reached(past, tuple(range(len(shape_of(past) or ()))))
        waiting, seen, kept = deque([first]), {past}, None
        while waiting:
            at = waiting.popleft()
            kept = kept or (at if at.kept else None)
            if at.value is not past and at.value in self._outputs and _continues(past, at) and _is_updated(past, at):
                return State(past, at.value, _growing(past, at), at.filled)
            for new in self._onward(at):
                if new.value not in seen:
                    seen.add(new.value)
                    waiting.append(new)
        return None if kept is None else State(past, None, _growing(past, replace(kept, value=past)))

    def _onward(self, at: _Reached) -> Iterator[_Reached]:
        for outer in self._outer.get(at.value, ()):
            yield replace(at, value=outer)
        for node, place in at.value.uses():
            states = _STATES.get((node.domain, node.op_type), {})
            if place in states:
                output, axis = states[place]
                joined = at.joined if axis is None or axis >= len(at.axes) else at.axes[axis]
                if output < len(node.outputs):
                    yield replace(at, value=node.outputs[output], joined=joined, kept=True)
            elif not node.domain:
                yield from _through(at, node, place)


def _through(at: _Reached, node: ir.Node, place: int) -> Iterator[_Reached]:
    """Yield what a standard operator makes of a state, if it is linear in it."""
    if node.op_type in ("Loop", "Scan"):
        yield from _carried(at, node, place)
    elif node.op_type == "Concat":
        axis = _at(at.axes, node.attributes.get_int("axis", 0))
        yield replace(at, value=node.outputs[0], joined=at.joined if axis is None else axis)
    elif place in _LINEAR.get(node.op_type, ()):
        filled, cut = at.filled or node.op_type in _FILLS, at.cut or node.op_type in _CUTS
        for value in node.outputs:
            yield replace(at, value=value, axes=_axes_behind(at, node, value), filled=filled, cut=cut)


def _carried(at: _Reached, node: ir.Node, place: int) -> Iterator[_Reached]:
    """Yield the final value of a state that a Loop or Scan carries."""
    if node.op_type == "Loop":
        carried = place - 2  # behind the number of iterations and the condition
    else:
        carried = place if place < len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0) else -1
    if 0 <= carried < len(node.outputs):
        yield replace(at, value=node.outputs[carried])


def _axes_behind(at: _Reached, node: ir.Node, value: ir.Value) -> tuple[int | None, ...]:
    """Return the axes of the state that the axes of ``value``, a result of ``node``, correspond to."""
    rank = len(at.axes)
    if node.op_type == "Transpose":
        return tuple(at.axes[i] for i in node.attributes.get_ints("perm", range(rank)[::-1]) if i < rank)
    if node.op_type in ("Expand", "Gather", "Reshape", "Squeeze", "Unsqueeze"):
        return (None,) * len(shape_of(value) or ())
    return at.axes


def _at(axes: Sequence[int | None], axis: int) -> int | None:
    return axes[axis] if -len(axes) <= axis < len(axes) else None


def _continues(past: ir.Value, at: _Reached) -> bool:
    """Whether the output that was reached has the type of ``past`` and, except for new tokens, its sizes."""
    before, after = shape_of(past), shape_of(at.value)
    if past.dtype is not None and at.value.dtype is not None and past.dtype != at.value.dtype:
        return False
    if before is None or after is None:
        return True
    sizes = enumerate(zip(before, after, strict=False))
    return len(before) == len(after) and all(
        i == at.joined or a == b or not (isinstance(a, int) and isinstance(b, int)) for i, (a, b) in sizes
    )


def _is_updated(past: ir.Value, at: _Reached) -> bool:
    """Whether the output that was reached depends on another input, too: new tokens change a state.

    An output that is computed from ``past`` alone, such as scaled features of an image, does not continue it.
    """
    values = reached([at.value], lambda value: () if (node := value.producer()) is None else node.inputs)
    return at.kept or any(map(_may_read_input, (value for value in values if value is not past)))


def _may_read_input(value: ir.Value) -> bool:
    """Whether a value is an input, or computed by a node with a body; what a body reads is not searched."""
    node, bodies = value.producer(), (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    if node is None:
        return value.is_graph_input() and not value.is_initializer()
    return any(attribute.type in bodies for attribute in node.attributes.values())


def _growing(past: ir.Value, at: _Reached) -> int | None:
    """Return the axis along which a state grows: tokens are appended, and its size is not fixed."""
    before, after = shape_of(past) or (), shape_of(at.value) or ()
    i = at.joined
    if i is None or i >= len(before) or i >= len(after):
        return i
    return None if isinstance(before[i], int) and (at.cut or before[i] == after[i]) else i
