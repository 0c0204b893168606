"""Layouts of a recurrent layer's states in which the recurrent weight is read in place.

In the product of each step, the weight is the larger factor. If states are rows, they are multiplied by the weight from
the right, and onnxruntime packs the weight again in every step. Measured with onnxruntime 1.31 on two AVX512 cores, 32
sequences, H 256: the four gates of an LSTM take 66 µs per step in rows, 46 in columns, 38 in blocks.

Sizes: T steps, N sequences, F units of a state or of several gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradgraph.backends.ort_operators import BLOCKED, CONTRIB, kernel
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.shapes import Dim, Shape, all_sizes, known_sizes, record_shape
from gradgraph.machine.hardware import nchwc_block


@dataclass(frozen=True)
class Columns:
    """The layout with sequences as columns: states are [F, N]. Products are matrix products; it supports all sizes.

    Attributes:
        op: the builder.
        sequences: the number of sequences.
        axis: the axis of units in a state.
    """

    op: Builder
    sequences: Dim

    axis = 0

    def enter(self, x: Var) -> Var:
        """Convert [T, N, F] to states, one per step."""
        return self.op.Transpose(x, perm=[0, 2, 1])

    def leave(self, x: Var) -> Var:
        """Convert the states of all steps to [T, N, F]."""
        return self.op.Transpose(x, perm=[0, 2, 1])

    def weight(self, w: Var) -> Var:
        """Convert a weight [out, in] to a factor for ``times``."""
        return w

    def transposed(self, w: Var) -> Var:
        """Convert the transpose of a weight [in, out] to a factor for ``times``."""
        return self.op.Transpose(w, perm=[1, 0])

    def bias(self, b: Var) -> Var:
        """Convert a bias [F] to the argument ``bias`` of ``times``."""
        return self.op.Unsqueeze(b, [1])

    def times(
        self, weight: Var, state: Var, added: Var | None = None, bias: Var | None = None, activation: str | None = None
    ) -> Var:
        """Return ``activation(weight state + added)``, or with ``bias`` instead of ``added``."""
        inputs = [x for x in (weight, state, bias if added is None else added) if x is not None]
        shape = (weight.shape or (None,))[0], self.sequences
        if activation is None:
            return _with_shape(self.op.Gemm(*inputs), shape)
        return kernel(self.op, "FusedGemm", CONTRIB, inputs, shape, activation=activation)

    def projected(self, x: Var, w: Var, b: Var) -> Var:
        """Return ``w x + b`` of all steps as states, for x [T, N, in]."""
        return self.op.MatMul(w, self.enter(x)) + self.bias(b)

    def back(self, d: Var, w: Var, x: Var) -> Var:
        """Return the gradient of x [T, N, in] from the gradient d of ``w x`` in all steps."""
        return self.op.Reshape(self.op.Gemm(self._flat(d), w, transA=1), self.op.shape(x), allowzero=1)

    def outer(self, d: Var, *xs: Var) -> list[Var]:
        """Return the sums over steps and sequences of d, and of d xᵀ for each x [T, N, F]."""
        flat = self._flat(d)
        total = self.op.ReduceSum(flat, [1], keepdims=0)
        return [total, *(self.op.MatMul(flat, self.op.Flatten(x, axis=2)) for x in xs)]

    def _flat(self, d: Var) -> Var:
        return self.op.Flatten(self.op.Transpose(d, perm=[1, 0, 2]), axis=1)


@dataclass(frozen=True)
class Blocks:
    """The layout with units in blocks, like channels in NCHWc, and adjacent sequences: states are [1, F, 1, N].

    A product is a convolution of one tap. Its weight is packed once, before the loop, by the kernel that packs images,
    in less than half the time of a Transpose. All sizes must be known. The axis of size 1 is not the last one, as
    onnxruntime would broadcast scalars 20 times slower.
    """

    op: Builder
    sequences: int
    block: int

    axis = 1

    def enter(self, x: Var) -> Var:
        steps, sequences, units = _static_shape(x)
        image = self._reshaped(x, steps, 1, sequences, units)
        blocks = kernel(self.op, "ReorderInput", BLOCKED, [image], (steps, units, 1, sequences), channels_last=1)
        return self._reshaped(blocks, steps, 1, units, 1, sequences)

    def leave(self, x: Var) -> Var:
        steps, _, units, _, sequences = _static_shape(x)
        blocks = self._reshaped(x, steps, units, 1, sequences)
        shape = (steps, 1, sequences, units)
        rows = kernel(self.op, "ReorderOutput", BLOCKED, [blocks], shape, channels=units, channels_last=1)
        return self._reshaped(rows, steps, sequences, units)

    def weight(self, w: Var) -> Var:
        outputs, inputs = _static_shape(w)  # packed like an image with these numbers of channels and pixels
        blocks = kernel(self.op, "ReorderInput", BLOCKED, [self._reshaped(w, 1, outputs, 1, inputs)], None)
        return self._reshaped(blocks, outputs, inputs, 1, 1)

    def transposed(self, w: Var) -> Var:
        inputs, outputs = _static_shape(w)
        rows = self._reshaped(w, 1, 1, inputs, outputs)
        blocks = kernel(self.op, "ReorderInput", BLOCKED, [rows], None, channels_last=1)
        return self._reshaped(blocks, outputs, inputs, 1, 1)

    def bias(self, b: Var) -> Var:
        return b

    def times(
        self, weight: Var, state: Var, added: Var | None = None, bias: Var | None = None, activation: str | None = None
    ) -> Var:
        inputs = [state, weight, bias, added]
        while inputs[-1] is None:
            inputs.pop()
        (images, *_), outputs = _static_shape(state), _static_shape(weight)[0]
        return self._convolved(inputs, (images, outputs, 1, self.sequences), activation)

    def projected(self, x: Var, w: Var, b: Var) -> Var:
        (outputs, inputs), (steps, sequences, _) = _static_shape(w), _static_shape(x)
        if inputs % self.block:
            rows = self.op.Gemm(self.op.Flatten(x, axis=2), w, b, transB=1)
            return self.enter(self._reshaped(rows, steps, sequences, outputs))
        image = self._reshaped(self.enter(x), steps, inputs, 1, sequences)
        return self._reshaped(self.times(self.weight(w), image, bias=b), steps, 1, outputs, 1, sequences)

    def back(self, d: Var, w: Var, x: Var) -> Var:
        steps, sequences, inputs = _static_shape(x)
        if inputs % self.block:
            rows = self.op.Gemm(self.op.Flatten(self.leave(d), axis=2), w)
            return self._reshaped(rows, steps, sequences, inputs)
        image = self._reshaped(d, steps, _static_shape(w)[0], 1, sequences)
        dx = self.times(self.transposed(w), image)
        return self.leave(self._reshaped(dx, steps, 1, inputs, 1, sequences))

    def outer(self, d: Var, *xs: Var) -> list[Var]:
        """Return the sums of :meth:`Columns.outer` by one convolution of ``xs`` and a column of ones, with weight d."""
        op = self.op
        steps, _, units, _, sequences = _static_shape(d)
        rows = steps * sequences
        if rows % self.block:
            flat = op.Flatten(self.leave(d), axis=2)
            total = op.ReduceSum(flat, [0], keepdims=0)
            return [total, *(op.Gemm(flat, op.Flatten(x, axis=2), transA=1) for x in xs)]
        tiles = op.Transpose(op.Reshape(d, [steps, units // self.block, sequences, self.block]), perm=[1, 0, 2, 3])
        widths = [1, *(_static_shape(x)[2] for x in xs)]
        beside = op.Concat(op.const(np.ones((rows, 1), np.float32)), *(op.Flatten(x, axis=2) for x in xs), axis=1)
        wide = self._reshaped(beside, 1, rows, 1, sum(widths))
        image = kernel(op, "ReorderInput", BLOCKED, [wide], wide.shape)
        sums = self._convolved([image, self._reshaped(tiles, units, rows, 1, 1)], (1, units, 1, sum(widths)), None)
        whole = kernel(op, "ReorderOutput", BLOCKED, [sums], sums.shape, channels=units)
        parts = op.Split(self._reshaped(whole, units, sum(widths)), widths, axis=1, outputs=len(widths))
        total, *products = all_of(parts)
        return [self._reshaped(total, units), *products]

    def _convolved(self, inputs: Sequence[Var | None], shape: Shape, activation: str | None) -> Var:
        return kernel(self.op, "Conv", BLOCKED, inputs, shape, kernel_shape=[1, 1], activation=activation)

    def _reshaped(self, x: Var, *shape: int) -> Var:
        return _with_shape(self.op.Reshape(x, shape), shape)


Layout = Columns | Blocks


def layout_of(op: Builder, x: Var, units: Dim) -> Layout:
    """Return the best layout for a layer with ``units`` units that reads ``x`` [T, N, I]."""
    block, sizes = nchwc_block(), (*(x.shape or (None, None, None)), units)
    known = [d for d in known_sizes(sizes) if d > 0]
    if block and len(known) == len(sizes) and known[-1] % block == 0:
        return Blocks(op, known[1], block)
    return Columns(op, sizes[1])


def _with_shape(x: Var, shape: Shape) -> Var:
    record_shape(x.value, shape)
    return x


def _static_shape(x: Var) -> tuple[int, ...]:
    sizes = all_sizes(x.shape)
    assert sizes
    return tuple(sizes)
