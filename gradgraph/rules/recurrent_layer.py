"""One direction of a recurrent layer: its operands, loops over time, and products over all steps at once.

The reverse direction does not reverse tensors; its loops run from the last step to the first. Padding steps beyond the
end of a sequence do not change the state, so that in both directions a sequence starts from the initial state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.rules.recurrent_activations import KINDS, Activation, activations

INT64 = ir.DataType.INT64
Formula = Callable[..., Sequence[Var | None]]
Kept = Callable[[Var], Var]  # see Direction.back
END = 2**63 - 1
MATRIX: shapes.Shape = (None, None)  # inputs and outputs of one step of a loop


@dataclass(frozen=True)
class Direction:
    """The operands of one direction, without a direction axis: T steps, N sequences, I features, G gates of H units."""

    op: Builder
    backwards: bool
    X: Var  # [T, N, I]
    W: Var  # [G*H, I]
    R: Var  # [G*H, H]
    biases: tuple[Var, Var] | None  # Wb and Rb, each [G*H]
    first: tuple[Var, ...]  # h, or h and c, before the first step: each [N, H]
    P: Var | None  # [3*H]
    Y: Var  # [T, N, H]
    dy: Var | None
    dlast: tuple[Var, ...]  # cotangents of the last h, or h and c
    act: tuple[Activation, ...]
    inside: Var | None  # boolean [T, N, 1]: whether the step is inside its sequence; None if all are

    def bias(self) -> Var | None:
        """Return Wb + Rb; None without biases."""
        return None if self.biases is None else self.biases[0] + self.biases[1]

    def before(self, states: Var, k: int = 0) -> Var:
        """Return the state before each step from ``states``, the states after each step; k is 0 for h, 1 for c."""
        first = self.op.Unsqueeze(self.first[k], [0])
        if self.inside is not None:  # Y is zero in the padding, where the reverse direction begins
            states = self.op.Where(self.inside, states, first) if self.backwards else states
        order = [states, first] if self.backwards else [first, states]
        joined = self.op.Concat(*order, axis=0)  # T + 1 states, also for T = 0
        start, end = (1, END) if self.backwards else (0, -1)
        return self.op.like(self.op.Slice(joined, [start], [end], [0]), states)

    def mask(self, x: Var, outside: float = 0.0) -> Var:
        """Return ``x`` with the steps after the end of each sequence set to ``outside``."""
        return x if self.inside is None else self.op.like(self.op.Where(self.inside, x, outside), x)

    def back(self, step: Callable[..., Sequence[Var]], slopes: Sequence[Var], keeps: bool = True) -> Any:
        """Run the backward loop over time; return the cotangents of the initial states, then the outputs of each step.

        Args:
            step: ``step(dh, kept, *cotangents of the other states, *slopes)`` returns the cotangents of the previous
                states, and then further outputs of the step. ``kept(d)`` returns ``d``, plus dh at steps beyond the end
                of a sequence, which keep the state.
            slopes: tensors of which each step reads a slice.
            keeps: False if ``kept`` is not needed, because the slopes account for steps that keep the state.
        """
        op, count = self.op, len(self.dlast) - 1 + len(slopes)

        def write(dh: Var, *given: Var) -> Sequence[Var]:
            dh = dh if self.dy is None else dh + given[count]
            return step(dh, lambda d: d + dh * given[-1] if kept else d, *given[:count])

        arriving = [] if self.dy is None else [self.mask(self.dy)]
        kept = [] if self.inside is None or not keeps else [op.cast(~self.inside, self.X.dtype)]
        return self.scan(write, self.dlast, [*slopes, *arriving, *kept], against=True)

    def run(self, write: Callable[..., Var], first: Var, steps: Sequence[Var]) -> Var:
        """Return the states [T, N, H] after each step, where ``write(state, *slices)`` returns the next state."""
        op, inside = self.op, self.inside

        def step(state: Var, *slices: Var) -> list[Var]:
            new = write(state, *slices[: len(steps)])
            new = new if inside is None else op.Where(slices[-1], new, state)
            return [new, new]

        return op.like(
            self.scan(step, [first], [*steps, *([] if inside is None else [inside])], against=False)[1], self.Y
        )

    def scan(
        self, write: Callable[..., Sequence[Var]], states: Sequence[Var], steps: Sequence[Var], against: bool
    ) -> Any:
        """Loop over time, along the direction or ``against`` it; see ``scan``."""
        return scan(self.op, write, states, steps, self.backwards != against)


def scan(
    op: Builder, write: Callable[..., Sequence[Var]], states: Sequence[Var], steps: Sequence[Var], backwards: bool
) -> tuple[Var, ...]:
    """Loop over time; return the final states, then the outputs of all steps.

    ``write(*states, *slices)`` returns the next states and the outputs of one step.
    """
    carried = [_value(s, s.shape) for s in states]
    slices = [_value(s, None if s.shape is None else s.shape[1:]) for s in steps]
    body = op.graph([*carried, *slices], write)
    for y in body.outputs:  # onnxruntime requires the ranks of these
        shapes.record_shape(y, shape_of(y) or MATRIX)
    results = op.Scan(
        *states,
        *steps,
        outputs=len(body.outputs),
        body=body,
        num_scan_inputs=len(steps),
        scan_input_directions=[int(backwards)] * len(steps),
        scan_output_directions=[int(backwards)] * (len(body.outputs) - len(states)),
    )
    results = results if isinstance(results, tuple) else (results,)
    for result, state in zip(results, states, strict=False):
        op.like(result, state)
    for result in results:
        result.value.type = ir.TensorType(steps[0].dtype)
    return results


def _value(x: Var, shape: shapes.Shape | None) -> ir.Value:
    value = ir.Value(name="step", type=ir.TensorType(x.dtype))
    shapes.record_shape(value, shape or MATRIX)
    return value


# --- splitting nodes into directions, and joining results --------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The differences between RNN, GRU and LSTM.

    Attributes:
        activations: the default activations of one direction.
        formula: ``formula(op, direction)`` returns the gradients of X, W, R, both biases and the first states (and P).
        named: the formula as a named operator, for a direction with biases, but without peepholes, clip and lengths.
        usual: for each combination of activations that ``named`` supports, its attributes.
        states: the number of states: 1 for h, 2 for h and c.
    """

    activations: tuple[str, ...]
    formula: Formula
    named: Formula
    usual: Mapping[tuple[str, ...], Mapping[str, Any]]
    states: int = 1

    def gradients(
        self,
        op: Builder,
        dys: Sequence[Var | None],
        ys: Sequence[Var],
        inputs: Sequence[Var | None],
        attrs: dict[str, Any],
    ) -> list[Var | None]:
        """Return the gradients of a node's inputs X, W, R, B, sequence_lens, initial_h (and initial_c, P).

        ``dys`` and ``ys`` are cotangents and values of Y, Y_h (and Y_c). Trailing ``inputs`` may be omitted.
        """
        layers = [self._of_direction(op, s) for s in self._directions(op, dys, ys, inputs, attrs)]
        dX, *others = ([layer[i] for layer in layers] for i in range(len(layers[0])))
        return [op.sum_of(dX), *(None if None in row else _stacked(op, row) for row in others)]

    def _of_direction(self, op: Builder, s: Direction) -> list[Any]:
        own = next((own for names, own in self.usual.items() if s.act == _plain(names)), None)
        if own is not None and s.biases is not None and s.P is None and s.inside is None:
            operands = (s.X, s.W, s.R, *s.biases, *s.first, s.Y, *s.dlast, s.dy)
            found = self.named(op, *operands, backwards=int(s.backwards), **own)
        else:
            found = self.formula(op, s)
        dX, dW, dR, dWb, dRb, *rest = found
        return [dX, dW, dR, op.Concat(dWb, dRb, axis=0), None, *rest]

    def _directions(
        self,
        op: Builder,
        dys: Sequence[Var | None],
        ys: Sequence[Var],
        inputs: Sequence[Var | None],
        attrs: dict[str, Any],
    ) -> list[Direction]:
        X, W, R, B, lens, h, c, P = (*inputs, *[None] * 5)[:8]
        assert X is not None and W is not None and R is not None
        count = 2 if attrs["direction"] == "bidirectional" else 1
        act = _activations(ys, self.activations, count, attrs)
        zeros = op.full(op.Concat(op.dim(X, 1), op.dim(R, 2), axis=0), 0.0, X.dtype)
        last: list[Var | None] = [*dys[1:], None, None][: self.states]
        inside = None
        if lens is not None:
            lens = op.cast(lens, INT64)
            steps = op.Range(0, op.Squeeze(op.dim(X, 0), [0]), 1)
            inside = op.Unsqueeze(op.Unsqueeze(steps, [1]) < lens, [2])
            X = op.Where(inside, X, 0.0)  # padding may contain anything
            started = op.Unsqueeze(lens > 0, [1])  # the last state of a sequence of length 0 is zero
            last = [None if d is None else op.Where(started, d, 0.0) for d in last]

        def split(v: Var | None, axis: int = 0, absent: Var | None = None) -> list[Any]:
            if v is None:
                return [absent] * count
            parts = [v] if count == 1 else all_of(op.Split(v, axis=axis, num_outputs=count, outputs=count))
            return [op.Squeeze(part, [axis]) for part in parts]

        columns = zip(
            [attrs["direction"] == "reverse", True][:count],
            [X] * count,
            split(W),
            split(R),
            [b if b is None else tuple(op.Split(b, num_outputs=2, outputs=2)) for b in split(B)],
            zip(*(split(first, 0, zeros) for first in (h, c)[: self.states]), strict=True),
            split(P),
            split(op.output(next(y for y in ys if y.value.name), 0), 1),  # the node may omit Y
            split(dys[0], 1),
            zip(*(split(d, 0, zeros) for d in last), strict=True),
            act,
            [inside] * count,
            strict=True,
        )
        return [Direction(op, *own) for own in columns]


def of_operands(op: Builder, operands: Sequence[Any], backwards: int, *activations: str) -> Direction:
    """Return the ``Direction`` for the inputs of a gradient operator."""
    X, W, R, Wb, Rb, *rest = operands
    n = (len(rest) - 1) // 2
    first, Y, dlast, dY = tuple(rest[:n]), rest[n], tuple(rest[n + 1 : 2 * n + 1]), rest[2 * n + 1]
    return Direction(op, bool(backwards), X, W, R, (Wb, Rb), first, None, Y, dY, dlast, _plain(activations), None)


def _plain(names: Sequence[str]) -> tuple[Activation, ...]:
    return tuple(Activation(KINDS[name], 0.0, 0.0, None) for name in names)


def _activations(
    ys: Sequence[Var], default: Sequence[str], count: int, attrs: dict[str, Any]
) -> list[tuple[Activation, ...]]:
    node = ys[0].value.producer()
    assert node is not None
    n = len(default)
    found = activations(node, (attrs.get("activations") or [*default] * count)[: n * count], attrs)
    return [tuple(found[d * n : (d + 1) * n]) for d in range(count)]


def _stacked(op: Builder, row: Sequence[Var]) -> Var:
    parts = [op.Unsqueeze(v, [0]) for v in row]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)


# --- over all steps at once ---------------------------------------------------------------------------------


def times(op: Builder, x: Var, weight: Var, bias: Var | None = None) -> Var:
    """Return ``x weightᵀ + bias`` for all time steps at once."""
    turned = op.Transpose(weight, perm=[1, 0])
    if x.dtype == ir.DataType.FLOAT16:  # as passes/half_products.py, which does not rewrite nodes in functions
        turned = op.Unsqueeze(turned, [0])
    product = op.MatMul(x, turned)
    return product if bias is None else product + bias


def outer(op: Builder, d: Var, x: Var) -> Var:
    """Return the gradient of a weight: the sum of d xᵀ over time steps and sequences."""
    return op.Gemm(op.Flatten(d, axis=2), op.Flatten(x, axis=2), transA=1)


def total(op: Builder, d: Var) -> Var:
    """Return the gradient of a bias: the sum of d over time steps and sequences."""
    return op.ReduceSum(d, [0, 1], keepdims=0)
