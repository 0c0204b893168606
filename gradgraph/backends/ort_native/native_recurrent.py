"""Training of LSTM with native kernels: all steps of a direction in one call, forward and backward.

The input's contribution to the gates of all steps is one product before the loop; the gradients of weights and inputs
are products after it. The tables have forms for these products. The kernels (``kernels/lstm.cc``) multiply a state by
the recurrent weight with tiles. They overwrite the input's contribution with the gates, and the gates with cotangents.

Sizes: T steps, N sequences, I features, H units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradgraph.backends.ort_cpu.recurrent.recurrent_tokens import Tokens
from gradgraph.backends.ort_cpu.recurrent.shared_states import StockRun, WritesRun
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_operators import kernel_of_several
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import Shape
from gradgraph.rules.recurrent_layer import Direction


def run_of(gradient: ir.Node) -> WritesRun:
    """Return the function that writes the layer of ``gradient``: native kernels for an LSTM with AMX, else loops."""
    return NativeRun.of if gradient.op_type == "LSTMGrad" and library.here().has_tiles else StockRun.of


@dataclass(frozen=True)
class NativeRun:
    """One direction of an LSTM whose forward pass has been written.

    Attributes:
        s: the direction, without cotangents.
        tokens: the embedding that computes X, if its table is small.
        gates: the gates of all steps, [T, N, 4H].
        after: h after each step, [T, N, H].
        before: h before each step.
        cells: c after each step.
        last: the last h and c, each [N, H].
    """

    s: Direction
    tokens: Tokens | None
    gates: Var
    after: Var
    before: Var
    cells: Var
    last: Sequence[Var]

    @classmethod
    def of(cls, s: Direction, gradient: ir.Node, tokens: Tokens | None) -> NativeRun:
        """Write the forward pass of the layer of ``gradient``, and return its results as a NativeRun."""
        op, bias = s.op, s.bias()
        assert bias is not None
        if tokens is not None:
            x = tokens.projected(s.W, bias)
        else:
            x = _of_each_step(op.Gemm(op.Flatten(s.X, axis=2), s.W, bias, transB=1), s.X)
        states: Shape = (*(s.X.shape or (None, None))[:2], (s.R.shape or (None, None))[1])
        shapes = [x.shape, states, states, states, states[1:], states[1:]]
        gates, after, before, cells, *last = _kernel(op, "LSTM", [x, s.R, *s.first], shapes, s.backwards)
        return cls(s, tokens, gates, after, before, cells, last)

    def outputs(self) -> list[Var]:
        """Return h after each step, [T, N, H], and the last states, each [1, N, H]."""
        return [self.after, *(self.s.op.Unsqueeze(v, [0]) for v in self.last)]

    def gradients(self, inputs: Sequence[Var | None]) -> list[Var]:
        """Return the gradients of X (or the table), W, R, Wb, Rb and the initial states."""
        s, op, tokens = self.s, self.s.op, self.tokens
        dh, dc, dY = inputs[-3:]
        shapes = [self.gates.shape, self.last[0].shape, self.last[1].shape, (self.gates.shape or (None,))[-1:]]
        given = [self.gates, self.cells, s.R, s.first[1], dh, dc, *([] if dY is None else [dY])]
        d, dh, dc, db = _kernel(op, "LSTMGrad", given, shapes, s.backwards)
        flat = op.Flatten(d, axis=2)
        dR = op.Gemm(flat, op.Flatten(self.before, axis=2), transA=1)
        dW = op.Gemm(flat, op.Flatten(s.X if tokens is None else tokens.one_hot, axis=2), transA=1)
        if tokens is None:
            dX = _of_each_step(op.MatMul(flat, s.W), s.X)
        else:
            dX, dW = tokens.gradients(dW, s.W)
        return [dX, dW, dR, db, db, dh, dc]


def _kernel(
    op: Builder, op_type: str, inputs: Sequence[Var | None], shapes: Sequence[Shape | None], backwards: bool
) -> list[Var]:
    return kernel_of_several(op, op_type, library.DOMAIN, inputs, shapes, backwards=int(backwards))


def _of_each_step(flat: Var, x: Var) -> Var:
    op = flat.op
    return op.Reshape(flat, op.Concat(op.dim(x, 0), op.dim(x, 1), op.dim(flat, 1), axis=0), allowzero=1)
