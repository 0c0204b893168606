"""Gradient rules of RNN, GRU and LSTM without unrolling: for any length, at linear cost.

The output Y of the forward pass contains the states, so that everything outside the recurrence is computed for all
steps at once, in large products: gates and their derivatives before the loop, weight gradients after it. Only the
cotangents of the states are computed in a Scan, from the last step to the first. For LSTM, another Scan before it
recomputes the cell state, which is not an output. Sizes: T steps, N sequences, I features, G gates of H units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.recurrent_layer import Cell, Direction, Kept, of_operands, outer, times, total
from gradgraph.rules.registry import Case, Draw, Gradients, Point, case, point, real, uniform, vjp

# --- cases ----------------------------------------------------------------------------------------------------

LENGTHS = np.array([5, 2, 0, 1], np.int32)  # with odd and even padding: two sign errors cancel if even
HIDDEN_SIZE = "onnxruntime requires hidden_size, which follows only from a known shape of R"
NO_BATCH = "onnxruntime's GRU and LSTM crash on an empty batch"
OPEN_SIZES = "a loop without steps returns outputs whose unknown sizes are 0"
NO_STEPS = "onnxruntime does not run a Scan without steps"


def _weights(gates: int, directions: int, features: int = 3, units: int = 2) -> list[Draw]:
    rows = gates * units
    return [uniform(-0.9, 0.9, directions, rows, features), uniform(-0.9, 0.9, directions, rows, units)]


def _case(*inputs: Any, hidden_size: int = 2, **options: Any) -> Case:
    return case(*inputs, hidden_size=hidden_size, **options)


def _inputs(
    gates: int, states: int, directions: int, lengths: np.ndarray | None = None
) -> list[Draw | np.ndarray | None]:
    """Return all inputs of a test case: 5 steps, 4 sequences, 3 features, 2 units."""
    bias = uniform(-0.9, 0.9, directions, gates * 4)
    return [real(5, 4, 3), *_weights(gates, directions), bias, lengths, *[real(directions, 4, 2)] * states]


def _cases(gates: int, states: int) -> list[Case]:
    """Return the cases shared by all three operators: directions, padding, absent inputs and outputs, sizes."""
    outputs, counts = 1 + states, {"forward": 1, "reverse": 1, "bidirectional": 2}
    full = {d: _inputs(gates, states, n) for d, n in counts.items()}
    padded = {d: _inputs(gates, states, n, LENGTHS) for d, n in counts.items()}
    first = [real(2, 1, 2)] * states
    return [
        _case(real(3, 2, 3), *_weights(gates, 1)),
        case(real(3, 2, 3), *_weights(gates, 1), known_shapes=HIDDEN_SIZE),
        *(_case(*inputs, outputs=outputs, direction=d) for d, inputs in full.items()),
        *(_case(*inputs, outputs=outputs, direction=d) for d, inputs in padded.items()),
        *(
            _case(*padded["bidirectional"], outputs=outputs, read=[i], direction="bidirectional")
            for i in range(outputs)
        ),
        _case(*padded["reverse"][:5], outputs=outputs, read=[1], direction="reverse"),
        _case(*padded["bidirectional"], outputs=outputs, clip=0.4, direction="bidirectional"),
        _case(real(2, 4, 3), *_weights(gates, 1), None, None, *first, outputs=outputs, layout=1),
        _case(real(1, 1, 1), *_weights(gates, 1, 1, 1), outputs=outputs, hidden_size=1),
        _case(real(3, 0, 3), *_weights(gates, 1), outputs=outputs, onnxruntime="" if gates == 1 else NO_BATCH),
        _case(
            real(0, 2, 3),
            *_weights(gates, 1),
            onnxruntime=NO_STEPS,
            known_shapes=OPEN_SIZES,
            first_order_only=OPEN_SIZES,
        ),
    ]


def _one(x: Sequence[float], slope: Sequence[float], **attrs: Any) -> Point:
    """Return a test point: an RNN of one unit and one step with weight 1, so that x is the input of its activation."""
    columns = [[[v] for v in row] for row in (x, slope)]
    return point([columns[0]], [[[1.0]]], [[[1.0]]], gives=[[columns[1]], None, None], hidden_size=1, **attrs)


# --- gradient operators: one direction of a layer with default options ------------------------------------------------


def _operands(gates: int, states: int) -> list[Draw]:
    """Return all inputs of a gradient operator except dY: 2 steps, 4 sequences, 3 features, 2 units."""
    rows, state = gates * 2, [real(4, 2)] * states
    weights = [uniform(-0.9, 0.9, rows, 3), uniform(-0.9, 0.9, rows, 2), real(rows), real(rows)]
    return [real(2, 4, 3), *weights, *state, uniform(-0.9, 0.9, 2, 4, 2), *state]


# --- RNN: h' = f(a), a = W x + R h + b ------------------------------------------------------------------------


FEW = [real(3, 2, 3), *_weights(1, 1)]
BOTH = [real(2, 3, 3), *_weights(1, 2)]
TWICE: dict[str, Any] = {"activations": ["Affine"], "activation_alpha": [2.0], "activation_beta": [0.0]}


@vjp(
    "RNN",
    *_cases(1, 1),
    *(_case(*FEW, activations=[f]) for f in ("Relu", "Sigmoid", "Softsign", "Softplus", "HardSigmoid", "Elu")),
    _case(*FEW, activations=["LeakyRelu"]),
    *(_case(*FEW, clip=0.7, activations=[f]) for f in ("Relu", "Softplus")),
    _case(*FEW, activations=["Affine"], activation_alpha=[0.8], activation_beta=[0.1]),
    _case(*FEW, activations=["ScaledTanh"], activation_alpha=[0.8], activation_beta=[0.7]),
    _case(*FEW, activations=["HardSigmoid"], activation_alpha=[0.3], activation_beta=[0.4], clip=0.9),
    _case(*FEW, activations=["ThresholdedRelu"], activation_alpha=[0.1]),
    _case(*FEW, activations=["LeakyRelu"], activation_alpha=[-0.3]),
    _case(*BOTH, activations=["LeakyRelu", "Elu"], activation_alpha=[0.4, 1.5], direction="bidirectional"),
    _case(*BOTH, activations=["Tanh", "Elu"], activation_alpha=[0.5], direction="bidirectional"),
    _one([0.0, 100.0, -200.0], [0.0, 1.0, 0.0], activations=["Relu"]),
    _one([0.0, 100.0, -200.0], [0.5, 1.0, 0.0], activations=["Softplus"]),
    _one([0.0, 100.0, -200.0], [0.25, 0.0, 0.0], activations=["Sigmoid"]),
    _one([0.0, 100.0, -200.0], [0.5, 1.0, 0.0], activations=["Elu"], activation_alpha=[0.5]),
    _one([0.0, 2.0], [0.25, 1.0], activations=["LeakyRelu"], activation_alpha=[0.25]),
    _one([-1.0, 2.0], [0.0, 1.0], activations=["LeakyRelu"], activation_alpha=[0.0]),
    _one([0.5], [0.0], activations=["ScaledTanh"], activation_alpha=[2.0], activation_beta=[0.0]),
    _one([0.5, 0.75], [0.0, 1.0], activations=["ThresholdedRelu"], activation_alpha=[0.5]),
    _one([-1.0, 0.0, 1.0], [0.0, 0.5, 0.0], activations=["HardSigmoid"], activation_alpha=[0.5]),
    _one([1.0, 1.5, -1.0, -1.5], [2.0, 0.0, 2.0, 0.0], clip=1.0, **TWICE),
)
def rnn(op: Builder, dys: tuple[Var | None, ...], ys: tuple[Var, ...], *inputs: Var | None, **attrs: Any) -> Gradients:
    cell = Cell(("tanh",), _rnn, rnn_gradient, {("tanh",): {"activation": "Tanh"}, ("relu",): {"activation": "Relu"}})
    return cell.gradients(op, dys, ys, inputs, attrs)


@named_operator(
    "RNNGrad",
    case(*_operands(1, 1), real(2, 4, 2), activation="Tanh", backwards=0),
    case(*_operands(1, 1), None, activation="Relu", backwards=1),
    inputs="X W R Wb Rb h Y dh dY",
    like=range(6),
)
def rnn_gradient(op: Builder, *inputs: Any, backwards: int, activation: str) -> tuple[Var, ...]:
    """Return the gradients of one direction of an RNN with tanh or relu."""
    return _rnn(op, of_operands(op, inputs, backwards, activation.lower()))


def _rnn(op: Builder, s: Direction) -> tuple[Var, ...]:
    (f,) = s.act
    h = s.before(s.Y)
    a = times(op, s.X, s.W, s.bias()) + times(op, h, s.R) if f.reads_input else s.Y
    slope = s.mask(f.slope(op, a, s.Y))

    def step(dh: Var, kept: Kept, slope: Var) -> list[Var]:
        d = dh * slope
        return [kept(d @ s.R), d]

    dh, d = s.back(step, [slope])
    db = total(op, d)
    return d @ s.W, outer(op, d, s.X), outer(op, d, h), db, db, dh


# --- GRU: h' = (1 - z) n + z h ------------------------------------------------------------------------------


@vjp(
    "GRU",
    *_cases(3, 1),
    *(_case(*_inputs(3, 1, 1), outputs=2, linear_before_reset=1, direction=d) for d in ("forward", "reverse")),
    _case(*_inputs(3, 1, 1)[:3], linear_before_reset=1),
    _case(*_inputs(3, 1, 2, LENGTHS), outputs=2, linear_before_reset=1, direction="bidirectional"),
    _case(*_inputs(3, 1, 2, LENGTHS), outputs=2, linear_before_reset=1, direction="bidirectional", clip=0.3),
    _case(*_inputs(3, 1, 1, LENGTHS), outputs=2, read=[1], linear_before_reset=1, direction="reverse"),
    _case(*_inputs(3, 1, 1), activations=["HardSigmoid", "LeakyRelu"], activation_alpha=[0.3, 0.2], clip=0.8),
    _case(
        *_inputs(3, 1, 2),
        direction="bidirectional",
        linear_before_reset=1,
        activations=["Sigmoid", "ScaledTanh", "Softsign", "Elu"],
        activation_alpha=[0.8, 0.6],
        activation_beta=[0.7],
    ),
)
def gru(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    *inputs: Var | None,
    linear_before_reset: int,
    **attrs: Any,
) -> Gradients:
    formula = partial(_gru, linear_before_reset=linear_before_reset)
    default = ("sigmoid", "tanh")
    cell = Cell(default, formula, gru_gradient, {default: {"linear_before_reset": linear_before_reset}})
    return cell.gradients(op, dys, ys, inputs, attrs)


@named_operator(
    "GRUGrad",
    case(*_operands(3, 1), real(2, 4, 2), linear_before_reset=0, backwards=0),
    case(*_operands(3, 1), None, linear_before_reset=1, backwards=1),
    inputs="X W R Wb Rb h Y dh dY",
    like=range(6),
)
def gru_gradient(op: Builder, *inputs: Any, backwards: int, linear_before_reset: int) -> tuple[Var, ...]:
    """Return the gradients of one direction of a GRU with sigmoid and tanh."""
    return _gru(op, of_operands(op, inputs, backwards, "sigmoid", "tanh"), linear_before_reset)


def _gru(op: Builder, s: Direction, linear_before_reset: int) -> tuple[Var, ...]:
    return (_gru_reset_after if linear_before_reset else _gru_reset_before)(op, s)


def _gru_reset_after(op: Builder, s: Direction) -> tuple[Var, ...]:
    """Return the gradients for n = g(W x + Wb + r q) with q = R h + Rb, which needs one product per step."""
    f, g = s.act
    Wb, Rb = s.biases or (None, None)
    h = s.before(s.Y)
    xz, xr, xn = _gates(op, times(op, s.X, s.W, Wb), 3)
    hz, hr, q = _gates(op, times(op, h, s.R, Rb), 3)
    az, ar = xz + hz, xr + hr
    z, r = f.value(op, az), f.value(op, ar)
    an = xn + r * q
    n = g.value(op, an)
    slope = s.mask((1.0 - z) * g.slope(op, an, n))  # the factor from dh to the cotangent of an
    others = [s.mask((h - n) * f.slope(op, az, z)), slope * q * f.slope(op, ar, r)]
    K = op.Concat(*others, slope * r, axis=-1)

    def step(dh: Var, _: Kept, K: Var, z: Var) -> list[Var]:
        d = op.Concat(dh, dh, dh, axis=-1) * K
        return [dh * z + d @ s.R, d, dh]

    first, d, dh = s.back(step, [K, s.mask(z, 1.0)], keeps=False)
    dz, dr, _ = _gates(op, d, 3)
    dx = op.Concat(dz, dr, dh * slope, axis=-1)
    return dx @ s.W, outer(op, dx, s.X), outer(op, d, h), total(op, dx), total(op, d), first


def _gru_reset_before(op: Builder, s: Direction) -> tuple[Var, ...]:
    """Return the gradients for n = g(W x + R (r h) + b), which needs a second product in each step."""
    f, g = s.act
    h = s.before(s.Y)
    units = op.dim(s.R, 1)
    Rzr, Rn = op.Split(s.R, op.Concat(op.Mul(units, 2), units, axis=0), axis=0, outputs=2)
    xz, xr, xn = _gates(op, times(op, s.X, s.W, s.bias()), 3)
    hz, hr = _gates(op, times(op, h, Rzr), 2)
    az, ar = xz + hz, xr + hr
    z, r = f.value(op, az), f.value(op, ar)
    reset = r * h
    an = xn + times(op, reset, Rn)
    n = g.value(op, an)
    Kn = s.mask((1.0 - z) * g.slope(op, an, n))
    Kz, Kr = s.mask((h - n) * f.slope(op, az, z)), s.mask(h * f.slope(op, ar, r))

    def step(dh: Var, _: Kept, Kz: Var, Kr: Var, Kn: Var, z: Var, r: Var) -> list[Var]:
        dn = dh * Kn
        dreset = dn @ Rn
        dzr = op.Concat(dh * Kz, dreset * Kr, axis=-1)
        return [dh * z + dreset * r + dzr @ Rzr, dzr, dn]

    first, dzr, dn = s.back(step, [Kz, Kr, Kn, s.mask(z, 1.0), r], keeps=False)
    d = op.Concat(dzr, dn, axis=-1)
    dR = op.Concat(outer(op, dzr, h), outer(op, dn, reset), axis=0)
    db = total(op, d)
    return d @ s.W, outer(op, d, s.X), dR, db, db, first


# --- LSTM: c' = f c + i g, h' = o k(c') -----------------------------------------------------------------------


PEEPHOLES = uniform(-0.9, 0.9, 1, 6)
PEEPHOLES_BOTH = uniform(-0.9, 0.9, 2, 6)


@vjp(
    "LSTM",
    *_cases(4, 2),
    _case(*_inputs(4, 2, 1), PEEPHOLES, outputs=3),
    _case(*_inputs(4, 2, 1)[:3], None, None, None, None, PEEPHOLES, outputs=3, read=[2], direction="reverse"),
    _case(*_inputs(4, 2, 2, LENGTHS), PEEPHOLES_BOTH, outputs=3, direction="bidirectional"),
    _case(*_inputs(4, 2, 2, LENGTHS), PEEPHOLES_BOTH, outputs=3, direction="bidirectional", clip=0.3),
    _case(*_inputs(4, 2, 1), outputs=3, input_forget=1),
    _case(*_inputs(4, 2, 2, LENGTHS), PEEPHOLES_BOTH, outputs=3, input_forget=1, direction="bidirectional", clip=0.5),
    _case(*_inputs(4, 2, 1), PEEPHOLES, activations=["hardsigmoid", "LEAKYRELU", "Softsign"], activation_alpha=[0.3]),
    _case(
        *_inputs(4, 2, 2),
        direction="bidirectional",
        clip=0.8,
        activations=["Sigmoid", "ScaledTanh", "Affine", "HardSigmoid", "Elu", "Softplus"],
        activation_alpha=[0.8, 0.6, 0.25, 0.5],
        activation_beta=[0.7, 0.1, 0.4],
    ),
)
def lstm(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    *inputs: Var | None,
    input_forget: int,
    **attrs: Any,
) -> Gradients:
    formula = partial(_lstm, coupled=bool(input_forget))
    default = ("sigmoid", "tanh", "tanh")
    cell = Cell(default, formula, lstm_gradient, {} if input_forget else {default: {}}, states=2)
    return cell.gradients(op, dys, ys, inputs, attrs)


@named_operator(
    "LSTMGrad",
    case(*_operands(4, 2), real(2, 4, 2), backwards=0),
    case(*_operands(4, 2), None, backwards=1),
    inputs="X W R Wb Rb h c Y dh dc dY",
    like=range(7),
)
def lstm_gradient(op: Builder, *inputs: Any, backwards: int) -> tuple[Var, ...]:
    """Return the gradients of one direction of an LSTM with sigmoid and tanh."""
    return _lstm(op, of_operands(op, inputs, backwards, "sigmoid", "tanh", "tanh"), coupled=False)


def _lstm(op: Builder, s: Direction, coupled: bool) -> tuple[Var, ...]:
    h = s.before(s.Y)
    pre = _gates(op, times(op, s.X, s.W, s.bias()) + times(op, h, s.R), 4)
    cell = _CellState(op, s, coupled, pre)
    Kh, K, Kc = cell.slopes()

    def step(dh: Var, kept: Kept, dc: Var, Kh: Var, K: Var, Kc: Var) -> list[Var]:
        dc = dc + dh * Kh
        d = op.Concat(dc, dh, dc, dc, axis=-1) * K
        return [kept(d @ s.R), dc * Kc, d]

    dh, dc, d = s.back(step, [s.mask(Kh), s.mask(K), s.mask(Kc, 1.0)])
    db = total(op, d)
    return d @ s.W, outer(op, d, s.X), outer(op, d, h), db, db, dh, dc, *cell.peephole_gradients(d)


class _CellState:
    """The cell state of an LSTM before each step (c) and after it (c'), and its gates, such as i = f(ai + pi c).

    Here f is the gate activation, and pi the peephole weights. ``pre`` are the gate arguments without peepholes (ai,
    ao, af, ag). If ``coupled``, the forget gate is 1 − i.
    """

    def __init__(self, op: Builder, s: Direction, coupled: bool, pre: Sequence[Var]) -> None:
        self.op, self.s, self.coupled = op, s, coupled
        self.f, self.g, k = s.act
        self.k = replace(k, clip=None)  # only gates are clipped
        self.ai, self.ao, self.af, self.ag = pre
        self.peepholes = _gates(op, s.P, 3) if s.P is not None else None
        self.n = self.g.value(op, self.ag)
        self.after = self._run()
        self.before = s.before(self.after, 1)

    def _run(self) -> Var:
        """Return c' of each step; without peepholes, the gates are computed before the loop."""
        ai, af, n, s = self.ai, self.af, self.n, self.s
        if self.peepholes is None:
            i, forget = self._gates(ai, af, n)
            return s.run(lambda c, kept, new: c * kept + new, s.first[1], [forget, i * n])

        def step(c: Var, ai: Var, af: Var, n: Var) -> Var:
            i, forget = self._gates(ai, af, c)
            return forget * c + i * n

        return s.run(step, s.first[1], [ai, af, n])

    def _gates(self, ai: Var, af: Var, c: Var) -> tuple[Var, Var]:
        i = self.f.value(self.op, self._peep(ai, 0, c))
        return i, 1.0 - i if self.coupled else self.f.value(self.op, self._peep(af, 2, c))

    def _peep(self, a: Var, gate: int, c: Var) -> Var:
        return a if self.peepholes is None else a + self.peepholes[gate] * c

    def slopes(self) -> tuple[Var, Var, Var]:
        """Return three factors that map cotangents: from h' to c'; to the gates i, o, f, g; from c' to c.

        The cotangents of i, f and g are computed from that of c', and the cotangent of o from that of h'.
        """
        op, f, before, after = self.op, self.f, self.before, self.after
        ai, ao, af = self._peep(self.ai, 0, before), self._peep(self.ao, 1, after), self._peep(self.af, 2, before)
        i, forget = self._gates(self.ai, self.af, before)
        o, out = f.value(op, ao), self.k.value(op, after)
        Ki = (self.n - before if self.coupled else self.n) * f.slope(op, ai, i)
        Ko = out * f.slope(op, ao, o)
        Kf = op.zeros_like(before) if self.coupled else before * f.slope(op, af, forget)
        Kg = i * self.g.slope(op, self.ag, self.n)
        Kh, Kc = o * self.k.slope(op, after, out), forget
        if self.peepholes is not None:
            pi, po, pf = self.peepholes
            Kh, Kc = Kh + po * Ko, Kc + pi * Ki + pf * Kf
        return Kh, op.Concat(Ki, Ko, Kf, Kg, axis=-1), Kc

    def peephole_gradients(self, d: Var) -> list[Var]:
        """Return the gradient of the peepholes P, from the cotangents ``d`` of the gates; empty without peepholes."""
        op = self.op
        if self.peepholes is None:
            return []
        di, do, df, _ = _gates(op, d, 4)
        sums = total(op, di * self.before), total(op, do * self.after), total(op, df * self.before)
        return [op.Concat(*sums, axis=0)]


def _gates(op: Builder, a: Var, count: int) -> list[Var]:
    """Return the gates, split along the last axis."""
    return all_of(op.Split(a, axis=-1, num_outputs=count, outputs=count))
