"""LSTM that is trained on a CPU: the loop forward keeps what the loop backwards needs.

The operator LSTM gives no gates, so a portable backward pass computes them a second time. Here the forward pass is a
Scan of our own, which gives them. Sequences are the columns of every matrix: then the recurrent weight, the larger
factor of each step's product, is read where it lies instead of being packed anew, and gates are contiguous rows.
Sizes: T steps, N sequences, I features, H units; states [H, N], gates [4H, N].

Measured with onnxruntime 1.31 on two AVX512 cores, T 64, N 32, I = H = 256.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.normal.edit import Editor
from gradgraph.operators import DOMAIN, arguments
from gradgraph.rules.recurrent import PLAIN
from gradgraph.rules.recurrent_layer import Direction

COLUMNS = [0, 2, 1]  # [T, N, H] to [T, H, N], and back


def share_states(model: ir.Model) -> ir.Model:
    """Write, in place, every float32 LSTM of one direction together with its gradient."""
    editor = Editor(model)
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type == "LSTMGrad"]:
        layer = _forward(node)
        if layer is None:
            continue
        editor.op.scope = layer.name or ""
        steps = _Steps.of(editor.op, layer)
        editor.replace(layer, *steps.outputs())
        editor.op.scope = node.name or ""
        dY, *_, dh, dc = arguments(editor.op, node)[0]
        assert dh is not None and dc is not None
        editor.replace(node, *steps.gradients(dY, dh, dc))
    return model


def _forward(gradient: ir.Node) -> ir.Node | None:
    """The LSTM whose gradient this is; ``None`` if it has two directions or another element type than float32."""
    Y = gradient.inputs[8]
    squeeze = None if Y is None else Y.producer()
    whole = squeeze.inputs[0] if squeeze is not None and squeeze.op_type == "Squeeze" else None
    layer = None if whole is None else whole.producer()
    if whole is None or layer is None or layer.op_type != "LSTM" or layer.domain or layer.graph is not gradient.graph:
        return None
    return layer if whole.dtype == ir.DataType.FLOAT else None


@dataclass(frozen=True)
class _Steps:
    """What the forward loop went through."""

    s: Direction  # without cotangents
    states: Var  # [T, H, N], h after each step
    cell: Var  # [T, H, N], c before each step
    squashed: Var  # [T, H, N], tanh c'
    gates: Var  # [T, 3H, N], i, o and f
    new: Var  # [T, H, N], g
    last: tuple[Var, Var]  # h and c, [H, N]

    @classmethod
    def of(cls, op: Builder, layer: ir.Node) -> _Steps:
        """Write the forward loop of an LSTM node."""
        X, *weights = (None if v is None else op.wrap(v) for v in (*layer.inputs, *[None] * 7)[:7])
        W, R, B, h, c = (None if v is None else op.Squeeze(v, [0]) for v in (*weights[:3], *weights[4:]))
        assert X is not None and W is not None and R is not None and B is not None
        zeros = op.full(op.Concat(op.dim(X, 1), op.dim(R, 1), axis=0), 0.0, X.dtype)
        first = (zeros if h is None else h, zeros if c is None else c)
        biases = op.Split(B, num_outputs=2, outputs=2)
        direction = layer.attributes.get("direction")
        backwards = direction is not None and direction.as_string() == "reverse"
        s = Direction(op, backwards, X, W, R, biases, first, None, X, None, first, PLAIN, None)
        return _run(op, s)

    def outputs(self) -> list[Var]:
        """Y, Y_h and Y_c of the node."""
        op = self.s.op
        Y = op.Unsqueeze(op.Transpose(self.states, perm=COLUMNS), [1])
        return [Y, *(op.Unsqueeze(op.Transpose(v, perm=[1, 0]), [0]) for v in self.last)]

    def gradients(self, dY: Var | None, dh: Var, dc: Var) -> list[Var]:
        """Those of X, W, R, each of the two biases, and the first h and c."""
        s, op = self.s, self.s.op
        i, o, f = op.Split(self.gates, axis=1, num_outputs=3, outputs=3)
        g, squashed = self.new, self.squashed
        Kh = o * (1.0 - squashed * squashed)
        others = op.Concat(g, squashed, self.cell, axis=1) * (self.gates * (1.0 - self.gates))
        K = op.Concat(others, i * (1.0 - g * g), axis=1)
        back = op.Transpose(s.R, perm=[1, 0])

        def step(dh: Var, dc: Var, Kh: Var, K: Var, f: Var, *arriving: Var) -> list[Var]:
            dh = dh + arriving[0] if arriving else dh
            dc = dc + dh * Kh
            d = op.Concat(dc, dh, dc, dc, axis=0) * K
            return [back @ d, dc * f, d]

        columns = [op.Transpose(v, perm=[1, 0]) for v in (dh, dc)]
        arriving = [] if dY is None else [op.Transpose(dY, perm=COLUMNS)]
        dh, dc, d = s.scan(step, columns, [Kh, K, f, *arriving], against=True)
        rows = op.Flatten(op.Transpose(d, perm=[1, 0, 2]), axis=1)  # [4H, T*N]
        before = s.before(op.like(op.Transpose(self.states, perm=COLUMNS), s.X))
        dX = op.Reshape(op.Gemm(rows, s.W, transA=1), op.shape(s.X))
        dW, dR = (op.MatMul(rows, op.Flatten(v, axis=2)) for v in (s.X, before))
        db = op.ReduceSum(rows, [1], keepdims=0)
        return [dX, dW, dR, db, *(op.Transpose(v, perm=[1, 0]) for v in (dh, dc))]


def _run(op: Builder, s: Direction) -> _Steps:
    """The loop forward: ``a = W x + R h + b``, ``c' = f c + i g``, ``h' = o tanh c'``."""
    bias = s.bias()
    assert bias is not None
    added = op.MatMul(s.W, op.Transpose(s.X, perm=COLUMNS)) + op.Unsqueeze(bias, [1])
    units = op.dim(s.R, 1)
    parts = op.Concat(op.Mul(units, 3), units, axis=0)

    def step(h: Var, c: Var, added: Var) -> list[Var]:
        a, n = op.Split(op.Gemm(s.R, h, added), parts, axis=0, outputs=2)
        gates, g = op.Sigmoid(a), op.Tanh(n)
        i, o, f = op.Split(gates, axis=0, num_outputs=3, outputs=3)
        new = f * c + i * g
        squashed = op.Tanh(new)
        after = o * squashed
        return [after, new, after, c, squashed, gates, g]

    first = [op.Transpose(v, perm=[1, 0]) for v in s.first]
    h, c, states, cell, squashed, gates, new = s.scan(step, first, [added], against=False)
    return _Steps(s, states, cell, squashed, gates, new, (h, c))
