"""Training of RNN, GRU and LSTM on a CPU: the forward loop saves values for the backward loop.

The operators do not output their gates, so a portable backward pass recomputes them. Here a Scan replaces the operator
in the forward pass. In addition to the states, it returns the factors by which a step's cotangents are multiplied, so
that all elementwise work is done while a step is in the cache. The backward loop is then little more than one product
per step; weight gradients are products over all steps at once.

Measured with onnxruntime 1.31 on two AVX512 cores, 64 steps of 32 sequences, forward and backward, as fractions of the
portable form's time: H 256: LSTM 0.66, GRU 0.7 to 0.8, RNN 0.5; H 96: LSTM 0.86. With 8 sequences and H 64, the many
small kernels of the loops make it 1.3 to 1.5, so small layers keep the operators.

Sizes: T steps, N sequences, G gates of H units. ``recurrent_layouts`` defines the layouts of states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import onnx_ir as ir

from gradgraph.backends.ort_cpu.recurrent.recurrent_layouts import Layout, layout_of
from gradgraph.backends.ort_cpu.recurrent.recurrent_tokens import Tokens, tokens_of
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.nodes import made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes, record_shape
from gradgraph.passes.normal.edit import Editor
from gradgraph.rules.named_operators import DOMAIN, OPERATORS, arguments
from gradgraph.rules.recurrent_layer import END, Direction


class Run(Protocol):
    """One direction of a layer, whose forward pass has been written."""

    def outputs(self) -> list[Var]: ...

    def gradients(self, inputs: Sequence[Var | None]) -> list[Var]: ...


WritesRun: TypeAlias = Callable[[Direction, ir.Node, Tokens | None], Run]

LEAST_WORK = 1 << 18  # minimum multiplications of a gate's recurrent product, H·H·N; 2¹⁵ is slower


def share_states(model: ir.Model, run_of: Callable[[ir.Node], WritesRun] | None = None) -> ir.Model:
    """Rewrite every large float32 layer together with its gradient operator, in place.

    ``run_of`` returns, for a gradient operator, the function that writes a direction's forward pass; by default
    ``StockRun.of``, which writes a loop.
    """
    editor = Editor(model)
    for layer, gradients in _pairs(model):
        editor.op.scope = layer.name or ""
        tokens = tokens_of(editor.op, layer, gradients)
        write: WritesRun = StockRun.of if run_of is None else run_of(gradients[0])
        runs = [write(*_direction(editor.op, layer, gradients, k), tokens) for k in range(len(gradients))]
        editor.replace(layer, *_outputs(editor.op, runs))
        for run, node in zip(runs, gradients, strict=True):
            editor.op.scope = node.name or ""
            editor.replace(node, *run.gradients(arguments(editor.op, node)[0]))
    return model


def _pairs(model: ir.Model) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    """Yield the large layers with the gradient operators of all their directions, forward first."""
    found: dict[ir.Node, dict[int, ir.Node]] = {}
    for node in model.graph:
        layer = _layer_of(node) if node.domain == DOMAIN and node.op_type in _KINDS else None
        if layer is not None:
            found.setdefault(layer, {})[node.attributes["backwards"].as_int()] = node
    for layer, gradients in found.items():
        direction = layer.attributes.get("direction")
        both = direction is not None and direction.as_string() == "bidirectional"
        if len(gradients) == 1 + both and _multiplications(layer) >= LEAST_WORK:
            yield layer, [gradients[k] for k in sorted(gradients)]


def _layer_of(gradient: ir.Node) -> ir.Node | None:
    """Return the recurrent layer that computes the states read by the node ``gradient``, else None.

    None also if the layer is not float32, or in another graph.
    """
    value = gradient.inputs[OPERATORS[gradient.op_type].parameters.index("Y")]
    while (node := made_by(value, "Split", "Squeeze")) is not None:
        value = node.inputs[0]
    layer = made_by(value, gradient.op_type.removesuffix("Grad"))
    own = value is not None and value.dtype == ir.DataType.FLOAT
    return layer if own and layer is not None and layer.graph is gradient.graph else None


def _multiplications(layer: ir.Node) -> int:
    """Return the number of multiplications H·H·N of one gate per step; 0 if sizes are unknown."""
    X, R = (shape_of(v) for v in (layer.inputs[0], layer.inputs[2]))
    sequences, units = (None, None) if X is None or R is None else (X[1], R[2])
    return sequences * units * units if isinstance(sequences, int) and isinstance(units, int) else 0


# --- one direction ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """One direction of a layer, before its forward pass is written.

    Attributes:
        s: the direction, without cotangents.
        at: the layout of states.
        attrs: the attributes of the gradient operator.
        tokens: the embedding that computes X, if its table is small.
    """

    s: Direction
    at: Layout
    attrs: Mapping[str, Any]
    tokens: Tokens | None

    @property
    def op(self) -> Builder:
        return self.s.op

    def cut(self, x: Var, *gates: int) -> list[Var]:
        """Split ``x`` along its first axis, gates of units, into parts of ``gates`` gates each."""
        if len(gates) == 1:
            return [x]
        units = self.op.dim(self.s.R, 1)
        sizes = self.op.Concat(*(self.op.Mul(units, n) for n in gates), axis=0)
        return all_of(self.op.Split(x, sizes, axis=0, outputs=len(gates)))

    def gates(self, x: Var, count: int, axis: int | None = None) -> list[Var]:
        """Split ``x`` into ``count`` gates along ``axis``, by default the axis of units in a state."""
        at = self.at.axis if axis is None else axis
        return all_of(self.op.Split(x, axis=at, num_outputs=count, outputs=count))

    def joined(self, *states: Var) -> Var:
        return self.op.Concat(*states, axis=self.at.axis)

    def projected(self, biases: Sequence[Var], *gates: int) -> list[Var]:
        """Return ``W x + b`` of all steps, in parts of ``gates`` gates each, with one bias per part."""
        rows, tokens = zip(self.cut(self.s.W, *gates), biases, strict=True), self.tokens
        if tokens is not None:
            return [self.at.enter(tokens.projected(w, b)) for w, b in rows]
        return [self.at.projected(self.s.X, w, b) for w, b in rows]

    def state(self, x: Var) -> Var:
        return self.op.Squeeze(self.at.enter(self.op.Unsqueeze(x, [0])), [0])

    def scan(self, write: Callable[..., Sequence[Var]], states: Sequence[Var], steps: Sequence[Var], back: bool) -> Any:
        """Write a loop by ``Direction.scan``; return its results, with their shapes recorded where known."""
        results = self.s.scan(write, states, steps, against=back)
        node = results[0].value.producer()
        body, length = node.attributes["body"].as_graph(), self.s.X.dim(0)
        for y, inner in list(zip(results, body.outputs, strict=True))[len(states) :]:
            known = shape_of(inner)
            record_shape(y.value, None if known is None else (length, *known))
        return results


@dataclass(frozen=True)
class StockRun:
    """One direction of a layer whose forward pass has been written with standard operators.

    Attributes:
        kind: its forward and backward loops.
        layer: the direction.
        last: the states after the last step.
        states: h after each step.
        kept: values per step that the backward loop reads.
    """

    kind: _Kind
    layer: _Layer
    last: Sequence[Var]
    states: Var
    kept: Sequence[Var]

    @classmethod
    def of(cls, s: Direction, gradient: ir.Node, tokens: Tokens | None) -> StockRun:
        """Write the forward loop of the layer of ``gradient``, and return its results as a StockRun."""
        layout = layout_of(s.op, s.X, (s.R.shape or (None, None))[1])
        layer = _Layer(s, layout, arguments(s.op, gradient)[1], tokens)
        kind = _KINDS[gradient.op_type]
        states = [layer.state(v) for v in s.first[: kind.states]]
        results = kind.forward(layer, states)
        return cls(kind, layer, results[: kind.states], results[kind.states], results[kind.states + 1 :])

    def outputs(self) -> list[Var]:
        """Return h after each step, [T, N, H], and the last states, each [1, N, H]."""
        op, at = self.layer.op, self.layer.at
        return [at.leave(self.states), *(at.leave(op.Unsqueeze(v, [0])) for v in self.last)]

    def gradients(self, inputs: Sequence[Var | None]) -> list[Var]:
        """Return the gradients of X (or the table), W, R, Wb, Rb and the initial states."""
        layer, op, at, s = self.layer, self.layer.op, self.layer.at, self.layer.s
        *dlast, dY = inputs[-1 - self.kind.states :]
        self._record(dY, *dlast)
        last, arriving = self._arriving_cotangents(dY, [x for x in dlast if x is not None])
        firsts, d, *products = self.kind.backward(self, [layer.state(x) for x in last], arriving)
        x = s.X if layer.tokens is None else layer.tokens.one_hot
        if products[0][0] is d:  # input and h contribute to the gates by a sum, so both have the cotangent d
            dWb, dW, dR = at.outer(d, x, products[0][1])
            dRb = dWb
        else:
            dWb, dW = at.outer(d, x)
            dRb, dR = (_concatenated(op, parts) for parts in zip(*(at.outer(*pair) for pair in products), strict=True))
        dX, dW = (at.back(d, s.W, s.X), dW) if layer.tokens is None else layer.tokens.gradients(dW, s.W)
        left = [op.Squeeze(at.leave(op.Unsqueeze(x, [0])), [0]) for x in firsts]
        return [dX, dW, dR, dWb, dRb, *left]

    def _record(self, dY: Var | None, *dlast: Var | None) -> None:
        """Record the shapes of the cotangents of Y and of the last states, which shape inference may not find."""
        s = self.layer.s
        sizes = all_sizes((*(s.X.shape or (None,))[:2], (s.R.shape or (None,))[-1]))
        for x, rank in [(dY, 3), *((x, 2) for x in dlast)]:
            if x is not None and sizes is not None:
                record_shape(x.value, tuple(sizes[-rank:]))

    def _arriving_cotangents(self, dY: Var | None, last: list[Var]) -> tuple[list[Var], list[Var]]:
        """Return the cotangents of the last states, and the cotangents that Y adds to h before each step."""
        if dY is None:
            return last, []
        op, backwards = self.layer.op, self.layer.s.backwards
        end = op.Squeeze(op.Slice(dY, *(([0], [1]) if backwards else ([-1], [END])), [0]), [0])
        shift = [-1, 0, 0, 1, 0, 0] if backwards else [1, 0, 0, -1, 0, 0]
        return [last[0] + end, *last[1:]], [self.layer.at.enter(op.like(op.Pad(dY, shift), dY))]

    @property
    def before(self) -> Var:
        """The h before each step, [T, N, H]."""
        s, states = self.layer.s, self.layer.at.leave(self.states)
        if s.X.shape is not None and s.R.shape is not None:
            record_shape(states.value, (*s.X.shape[:2], s.R.shape[1]))
        return s.before(states)


def _direction(op: Builder, node: ir.Node, gradients: Sequence[ir.Node], k: int) -> tuple[Direction, ir.Node]:
    """Return direction ``k`` of the layer ``node``, and the gradient operator of this direction."""
    count, backwards = len(gradients), bool(gradients[k].attributes["backwards"].as_int())
    X, *rest = (op.wrap(v) for v in (*node.inputs, *[None] * 7)[:7])
    own = (None if v is None else op.Gather(v, k, axis=0) if count > 1 else op.Squeeze(v, [0]) for v in rest)
    W, R, B, _, h, c = own
    assert X is not None and W is not None and R is not None and B is not None
    zeros = op.full(op.Concat(op.dim(X, 1), op.dim(R, 1), axis=0), 0.0, X.dtype)
    first = (zeros if h is None else h, zeros if c is None else c)
    biases = op.Split(B, num_outputs=2, outputs=2)
    return Direction(op, backwards, X, W, R, biases, first, None, X, None, first, (), None), gradients[k]


def _concatenated(op: Builder, parts: Sequence[Var]) -> Var:
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)


def _outputs(op: Builder, runs: Sequence[Run]) -> list[Var]:
    """Return the outputs of a node: Y, Y_h and, for an LSTM, Y_c."""
    states, *last = zip(*(run.outputs() for run in runs), strict=True)
    Y = [op.Unsqueeze(h, [1]) for h in states]
    return [op.Concat(*Y, axis=1) if len(Y) > 1 else Y[0], *(_concatenated(op, ends) for ends in last)]


# --- the operators ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """The forward and backward loop of an operator.

    Attributes:
        forward: writes the forward loop for a layer and its initial states; returns the last states, h of all steps,
            and saved values.
        backward: writes the backward loop for a run, the cotangents of its last states, and the cotangents that Y adds
            to h in each step. It returns the cotangents of the initial states and of the gates' inputs, and then, for
            each recurrent weight, a pair: the cotangent of its products, and the factor [T, N, H] that it is multiplied
            by.
        states: the number of states.
    """

    forward: Callable[[_Layer, Sequence[Var]], Sequence[Var]]
    backward: Callable[[StockRun, Sequence[Var], Sequence[Var]], Sequence[Any]]
    states: int = 1


def _rnn_forward(layer: _Layer, first: Sequence[Var]) -> Sequence[Var]:
    """Write the forward loop of an RNN: ``h' = f(W x + R h + b)``."""
    at, f = layer.at, layer.attrs["activation"]
    R, (b,) = at.weight(layer.s.R), [layer.s.bias()]
    assert b is not None

    def step(h: Var, x: Var) -> list[Var]:
        y = at.times(R, h, x, activation=f)
        return [y, y]

    results: Sequence[Var] = layer.scan(step, first, layer.projected([b], 1), back=False)
    return results


def _rnn_backward(run: StockRun, last: Sequence[Var], arriving: Sequence[Var]) -> Sequence[Any]:
    """Write the backward loop of an RNN: ``d = dh·f'``; the cotangent of the previous h is ``Rᵀd``."""
    layer, op, at, h = run.layer, run.layer.op, run.layer.at, run.states
    R = at.transposed(layer.s.R)
    slope = 1.0 - h * h if layer.attrs["activation"] == "Tanh" else op.cast(h > 0.0, h.dtype)

    def step(dh: Var, slope: Var, added: Var | None = None) -> list[Var]:
        d = dh * slope
        return [at.times(R, d, added), d]

    first, d = layer.scan(step, last, [op.like(slope, h), *arriving], back=True)
    return [first], d, (d, run.before)


def _lstm_forward(layer: _Layer, first: Sequence[Var]) -> Sequence[Var]:
    """Write the forward loop of an LSTM: ``c' = f c + i g`` and ``h' = o tanh c'``.

    It saves K (factors of dc, dh, dc, dc for the gates i, o, f, g), Kh (factor of dh for dc), and f.
    """
    op, at, bias = layer.op, layer.at, layer.s.bias()
    assert bias is not None
    Rs, Rg = map(at.weight, layer.cut(layer.s.R, 3, 1))

    def step(h: Var, c: Var, xs: Var, xg: Var) -> list[Var]:
        gates, g = at.times(Rs, h, xs, activation="Sigmoid"), at.times(Rg, h, xg, activation="Tanh")
        i, o, f = layer.gates(gates, 3)
        new, old = i * g, f * c
        after = new + old
        squashed = op.Tanh(after)
        y = o * squashed
        values = layer.joined(new, y, old)
        K = layer.joined(values - values * gates, i - new * g)
        return [y, after, y, K, o - y * squashed, f]

    steps = layer.projected(layer.cut(bias, 3, 1), 3, 1)
    results: Sequence[Var] = layer.scan(step, first, steps, back=False)
    return results


def _lstm_backward(run: StockRun, last: Sequence[Var], arriving: Sequence[Var]) -> Sequence[Any]:
    """Write the backward loop: ``dc += dh·Kh``, ``d = (dc, dh, dc, dc)·K``, then ``dc ← dc·f``, ``dh ← Rᵀd``."""
    layer, at = run.layer, run.layer.at
    R = at.transposed(layer.s.R)

    def step(dh: Var, dc: Var, K: Var, Kh: Var, f: Var, added: Var | None = None) -> list[Var]:
        dc = dc + dh * Kh
        d = layer.joined(dc, dh, dc, dc) * K
        return [at.times(R, d, added), dc * f, d]

    dh, dc, d = layer.scan(step, last, [*run.kept, *arriving], back=True)
    return [dh, dc], d, (d, run.before)


def _gru_forward(layer: _Layer, first: Sequence[Var]) -> Sequence[Var]:
    """Write the forward loop of a GRU: ``h' = n + z (h − n)``.

    With linear_before_reset, ``n = tanh(x + r q)`` with ``q = R h``; otherwise ``n = tanh(x + R (r h))``. The saved
    values are the factors by which dh is multiplied to get the gradients of the gates' recurrent parts, of n's input,
    and of h; without linear_before_reset, also r and r h.
    """
    op, at, after = layer.op, layer.at, bool(layer.attrs["linear_before_reset"])
    Rs, Rn = map(at.weight, layer.cut(layer.s.R, 2, 1))
    assert layer.s.biases is not None
    (Ws, Wn), (Bs, Bn) = (layer.cut(b, 2, 1) for b in layer.s.biases)
    bias = at.bias(Bn)

    def step(h: Var, xs: Var, xn: Var) -> list[Var]:
        gates = at.times(Rs, h, xs, activation="Sigmoid")
        z, r = layer.gates(gates, 2)
        reset = r * (at.times(Rn, h, bias=bias) if after else h)
        n = op.Tanh(xn + reset) if after else at.times(Rn, reset, xn, activation="Tanh")
        held = z * (h - n)
        y = n + held
        Kn = (1.0 - z) * (1.0 - n * n)
        values = layer.joined(held, reset)
        Kz, Kr = layer.gates(values - values * gates, 2)
        if after:
            return [y, y, layer.joined(Kz, Kr * Kn, Kn * r), Kn, z]
        return [y, y, Kz, Kr, Kn, z, r, reset]

    steps = layer.projected([Ws + Bs, Wn if after else Wn + Bn], 2, 1)
    results: Sequence[Var] = layer.scan(step, first, steps, back=False)
    return results


def _gru_backward(run: StockRun, last: Sequence[Var], arriving: Sequence[Var]) -> Sequence[Any]:
    """Write the backward loop of a GRU; with linear_before_reset ``d = (dh, dh, dh)·K``, ``dh ← Rᵀd + dh·z``."""
    if not run.layer.attrs["linear_before_reset"]:
        return _reset_before(run, last, arriving)
    layer, op, at = run.layer, run.layer.op, run.layer.at
    R = at.transposed(layer.s.R)

    def step(dh: Var, K: Var, Kn: Var, z: Var, *arriving: Var) -> list[Var]:
        d = layer.joined(dh, dh, dh) * K
        return [at.times(R, d, op.sum_of([dh * z, *arriving])), d, dh * Kn]

    first, d, dn = layer.scan(step, last, [*run.kept, *arriving], back=True)
    dz, dr, _ = layer.gates(d, 3, at.axis + 1)
    return [first], op.Concat(dz, dr, dn, axis=at.axis + 1), (d, run.before)


def _reset_before(run: StockRun, last: Sequence[Var], arriving: Sequence[Var]) -> Sequence[Any]:
    """Write the backward loop of a GRU without linear_before_reset: ``dn = dh·Kn``, and d, the cotangents of z and r.

    The cotangent of the previous h is ``Rᵀd + dh·z + (Rₙᵀdn)·r``.
    """
    layer, op, at = run.layer, run.layer.op, run.layer.at
    Rs, Rn = map(at.transposed, layer.cut(layer.s.R, 2, 1))
    *factors, reset = run.kept

    def step(dh: Var, Kz: Var, Kr: Var, Kn: Var, z: Var, r: Var, *arriving: Var) -> list[Var]:
        dn = dh * Kn
        dreset = at.times(Rn, dn)
        d = layer.joined(dh * Kz, dreset * Kr)
        return [at.times(Rs, d, op.sum_of([dh * z, dreset * r, *arriving])), d, dn]

    first, d, dn = layer.scan(step, last, [*factors, *arriving], back=True)
    return [first], op.Concat(d, dn, axis=at.axis + 1), (d, run.before), (dn, at.leave(reset))


_KINDS = {
    "RNNGrad": _Kind(_rnn_forward, _rnn_backward),
    "GRUGrad": _Kind(_gru_forward, _gru_backward),
    "LSTMGrad": _Kind(_lstm_forward, _lstm_backward, states=2),
}
