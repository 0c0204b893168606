"""RNN, LSTM and GRU layers with PyTorch's parameters, which are rearranged in the graph for ONNX's operators.

PyTorch stacks the gates of an LSTM as (i, f, g, o) and ONNX as (i, o, f, g); those of a GRU are (r, z, n) and
(z, r, n).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend import init
from gradgraph.frontend.attention import dropout
from gradgraph.frontend.module import Module, Parameter
from gradgraph.frontend.shaping import cat, stack
from gradgraph.frontend.trace import op, shaped, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["GRU", "LSTM", "RNN"]


class Cell(NamedTuple):
    """An ONNX recurrent operator; ``order`` is the index in PyTorch's order of each gate in ONNX's order."""

    op_type: str
    order: tuple[int, ...]


class Recurrent(Module):
    """Base class of RNN, LSTM and GRU.

    ``forward(x, state=None, lengths=None)`` takes ``[L, N, in]`` (``[N, L, in]`` with ``batch_first``, or ``[L, in]``)
    and returns ``(output, state)``: outputs ``[L, N, directions * hidden]`` and the last state of every layer and
    direction, ``[layers * directions, N, hidden]``.

    ``lengths``, integers ``[N]`` of at most L, are the lengths of the sequences in a padded batch, as in PyTorch's
    packed sequences. Outputs in the padding are zeros without gradients, the last state is the one at the end of each
    sequence, and the backward direction starts at that end.
    """

    cell: Cell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
    ) -> None:
        super().__init__()
        if proj_size:
            raise ModelError(
                f"{type(self).__name__} does not support proj_size={proj_size}, as ONNX has no projection; apply a "
                "Linear to the output"
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, dropout, bidirectional
        rows, bound = len(self.cell.order) * hidden_size, 1.0 / math.sqrt(hidden_size)
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * self.directions
            for suffix in self._suffixes(layer):
                shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, width), "weight_hh": (rows, hidden_size)}
                shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
                for name, shape in shapes.items():
                    parameter = Parameter(np.empty(shape, np.float32))
                    self.register_parameter(name + suffix, init.uniform_(parameter, -bound, bound))

    @property
    def directions(self) -> int:
        """The number of directions: 2 if bidirectional, else 1."""
        return 2 if self.bidirectional else 1

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: self.directions]

    def forward(self, x: Any, state: Any = None, lengths: Any = None) -> Any:
        x = tensor(x)
        if lengths is not None:
            lengths = tensor(lengths)
            if lengths.is_floating_point() or lengths.ndim != x.ndim - 2:
                raise ModelError(
                    f"{type(self).__name__} got lengths of type {lengths.dtype.name.lower()} and "
                    f"shape {lengths.shape}; pass integers, one per sequence of the batch"
                )
            lengths = (lengths.unsqueeze(0) if x.ndim == 2 else lengths).int()
        if x.ndim == 2:  # a single sequence without a batch axis
            output, last = self.forward(
                x.unsqueeze(0 if self.batch_first else 1), _each(state, lambda s: s.unsqueeze(1)), lengths
            )
            return output.squeeze(0 if self.batch_first else 1), _each(last, lambda s: s.squeeze(1))
        if x.ndim != 3 or (isinstance(x.shape[2], int) and x.shape[2] != self.input_size):
            raise ModelError(
                f"{type(self).__name__} over {self.input_size} features got an input of shape {x.shape}; expected "
                f"[{'batch, length' if self.batch_first else 'length, batch'}, {self.input_size}]"
            )
        x = x.transpose(0, 1) if self.batch_first else x
        initial = () if state is None else state if isinstance(state, tuple) else (state,)
        finals = []
        for layer in range(self.num_layers):
            d = self.directions
            x, final = self._layer(layer, x, [tensor(s)[layer * d : (layer + 1) * d] for s in initial], lengths)
            finals.append(final)
            if layer + 1 < self.num_layers:
                x = dropout(x, self.dropout)
        states = tuple(cat(per_layer, 0) for per_layer in zip(*finals, strict=True))
        output = x.transpose(0, 1) if self.batch_first else x
        return output, states[0] if len(states) == 1 else states

    def _layer(
        self, layer: int, x: Tensor, initial: list[Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs ``[L, N, directions * hidden]`` and last states of one layer for ``x`` ``[L, N, in]``."""
        length, batch, _ = x.shape
        suffixes = self._suffixes(layer)
        weights = [stack([self._gates(f"weight_{kind}{s}") for s in suffixes], 0) for kind in ("ih", "hh")]
        bias = None
        if self.bias:
            joined = [cat([self._gates(f"bias_ih{s}"), self._gates(f"bias_hh{s}")], 0) for s in suffixes]
            bias = stack(joined, 0)
        outputs = op.several(
            self.cell.op_type,
            x,
            *weights,
            bias,
            lengths,
            *initial,
            outputs=3 if self.cell.op_type == "LSTM" else 2,
            hidden_size=self.hidden_size,
            direction="bidirectional" if self.bidirectional else "forward",
            **self._attributes(),
        )
        d, h = self.directions, self.hidden_size
        y = shaped(outputs[0], [length, d, batch, h])
        finals = tuple(shaped(s, [d, batch, h]) for s in outputs[1:])
        y = y.squeeze(1) if d == 1 else y.transpose(1, 2).reshape(length, batch, d * h)
        return y, finals

    def _gates(self, name: str) -> Tensor:
        """Return the parameter called ``name`` with its gates in ONNX's order."""
        stored = tensor(getattr(self, name))
        if self.cell.order == tuple(range(len(self.cell.order))):
            return stored
        gates = stored.chunk(len(self.cell.order), 0)
        return cat([gates[i] for i in self.cell.order], 0)

    def _attributes(self) -> dict[str, Any]:
        return {}

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


def _each(state: Any, fn: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(fn(tensor(s)) for s in state)
    return None if state is None else fn(tensor(state))


class RNN(Recurrent):
    """The Elman network: ``h = tanh(W_ih x + b_ih + W_hh h + b_hh)`` (or relu)."""

    cell = Cell("RNN", (0,))

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ModelError(f"RNN has no nonlinearity {nonlinearity!r}; use 'tanh' or 'relu'")
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        self.nonlinearity = nonlinearity

    def _attributes(self) -> dict[str, Any]:
        return {"activations": [self.nonlinearity.capitalize()] * self.directions}


class LSTM(Recurrent):
    """Long short-term memory; its state is the pair ``(h, c)``."""

    cell = Cell("LSTM", (0, 3, 1, 2))


class GRU(Recurrent):
    """The gated recurrent unit."""

    cell = Cell("GRU", (1, 0, 2))

    def _attributes(self) -> dict[str, Any]:
        return {"linear_before_reset": 1}  # PyTorch applies the reset gate after the product with W_hn
