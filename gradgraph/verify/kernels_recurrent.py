"""Kernels of RNN, GRU and LSTM for the float64 oracle, with every attribute; onnx's own kernels support few.

onnx's kernels ignore activations, clip, sequence_lens, input_forget and RNN's direction. The kernels here follow the
equations of the specification step by step. Where the specification is silent, they follow onnxruntime:

- a sequence of length 0 yields zeros, not its initial state, in Y_h and Y_c;
- steps beyond a sequence's end yield zeros in Y;
- clip bounds the inputs of the gates' activations, not the cell state in the formula of h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from gradgraph.verify.kernel import Kernel

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]
State = tuple[Array, ...]  # h, or (h, c): each [batch, hidden]

# name: f(x, α, β), and the defaults of α and β: None if f does not use it, nan if runtimes disagree on the default
_FUNCTIONS: dict[str, tuple[Callable[..., Array], float | None, float | None]] = {
    "tanh": (lambda x, a, b: np.tanh(x), None, None),
    "sigmoid": (lambda x, a, b: 0.5 * (1 + np.tanh(0.5 * x)), None, None),
    "relu": (lambda x, a, b: np.maximum(x, 0), None, None),
    "affine": (lambda x, a, b: a * x + b, nan, nan),
    "leakyrelu": (lambda x, a, b: np.where(x >= 0, x, a * x), 0.01, None),
    "thresholdedrelu": (lambda x, a, b: np.where(x > a, x, 0), nan, None),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), nan, nan),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))), 1.0, None),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), None, None),
    "softplus": (lambda x, a, b: np.logaddexp(0, x), None, None),
}


@dataclass(frozen=True)
class Weights:
    """The parameters of one direction, named as in ONNX; ``act`` are its activations, ``bound`` is the clip."""

    W: Array
    R: Array
    Wb: Array
    Rb: Array
    P: Array
    act: Sequence[Function]
    bound: float

    def gate(self, i: int, x: Array) -> Array:
        return self.act[i](np.clip(x, -self.bound, self.bound))


def _activations(names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]) -> list[Function]:
    """Return the activation functions; the α and β are assigned, in order, to the functions that use them."""
    alpha, beta = iter(alphas), iter(betas)
    found: list[Function] = []
    for name in names:
        f, a, b = _FUNCTIONS[name.lower()]
        a = a if a is None else next(alpha, a)
        b = b if b is None else next(beta, b)
        found.append(functools.partial(f, a=a, b=b))
    return found


class _Recurrent(Kernel):
    gates: int
    states = 1
    activations: tuple[str, ...]

    def step(self, x: Array, state: State, w: Weights) -> State:
        raise NotImplementedError

    def _run(
        self,
        X: Array,
        W: Array,
        R: Array,
        B: Any = None,
        lens: Any = None,
        h: Any = None,
        c: Any = None,
        P: Any = None,
        **attrs: Any,
    ) -> State:
        """Return Y [T, D, N, H] and the last states [D, N, H]; with layout 1 the batch comes first."""
        batch_first = bool(attrs.get("layout"))
        X = np.swapaxes(X, 0, 1) if batch_first else X
        initial = [s if s is None or not batch_first else np.swapaxes(s, 0, 1) for s in (h, c)[: self.states]]
        directions, hidden, batch = W.shape[0], R.shape[-1], X.shape[1]
        lens = np.full(batch, len(X)) if lens is None else lens
        zeros = np.zeros((directions, batch, hidden), X.dtype)
        first = [zeros if s is None else s for s in initial]
        B = np.zeros((directions, 2 * self.gates * hidden), X.dtype) if B is None else B
        P = np.zeros((directions, 3 * hidden), X.dtype) if P is None else P
        names = attrs.get("activations") or self.activations * directions
        alphas, betas = attrs.get("activation_alpha") or [], attrs.get("activation_beta") or []
        act = _activations(names[: len(self.activations) * directions], alphas, betas)
        bound = np.inf if attrs.get("clip") is None else float(attrs["clip"])
        done = []
        for d, own in enumerate(np.split(np.array(act, object), directions)):
            Wb, Rb = np.split(B[d], 2)
            w = Weights(W[d], R[d], Wb, Rb, P[d], list(own), bound)
            backwards = attrs.get("direction") == "reverse" or d == 1
            done.append(self._direction(X, lens, tuple(s[d] for s in first), w, backwards))
        Y, *last = ([each[k] for each in done] for k in range(len(done[0])))
        axis = 1 if batch_first else 0  # the axis of directions in the last states
        steps = np.stack(Y, 1 + axis)
        results = (steps.swapaxes(0, 1) if batch_first else steps, *(np.stack(s, axis) for s in last))
        return results[: len(self.onnx_node.output)]

    def _direction(self, X: Array, lens: Array, first: State, w: Weights, backwards: bool) -> State:
        state = first
        Y = np.zeros((len(X), *state[0].shape), X.dtype)
        for t in range(len(X))[:: -1 if backwards else 1]:
            inside = (t < lens)[:, None]
            new = self.step(X[t], state, w)
            state = tuple(np.where(inside, n, s) for n, s in zip(new, state, strict=True))
            Y[t] = np.where(inside, state[0], 0)
        return (Y, *(np.where((lens > 0)[:, None], s, 0) for s in state))


class RNN(_Recurrent):
    gates, activations = 1, ("Tanh",)

    def step(self, x: Array, state: State, w: Weights) -> State:
        (h,) = state
        return (w.gate(0, x @ w.W.T + h @ w.R.T + w.Wb + w.Rb),)


class GRU(_Recurrent):
    gates, activations = 3, ("Sigmoid", "Tanh")
    linear_before_reset: int | None

    def step(self, x: Array, state: State, w: Weights) -> State:
        (h,) = state
        xz, xr, xn = np.split(x @ w.W.T + w.Wb, 3, -1)
        Rz, Rr, Rn = np.split(w.R, 3)
        bz, br, bn = np.split(w.Rb, 3)
        z, r = w.gate(0, xz + h @ Rz.T + bz), w.gate(0, xr + h @ Rr.T + br)
        n = w.gate(1, xn + (r * (h @ Rn.T + bn) if self.linear_before_reset else (r * h) @ Rn.T + bn))
        return ((1 - z) * n + z * h,)


class LSTM(_Recurrent):
    gates, states, activations = 4, 2, ("Sigmoid", "Tanh", "Tanh")
    input_forget: int | None

    def step(self, x: Array, state: State, w: Weights) -> State:
        h, c = state
        ai, ao, af, ag = np.split(x @ w.W.T + h @ w.R.T + w.Wb + w.Rb, 4, -1)
        pi, po, pf = np.split(w.P, 3)
        i = w.gate(0, ai + pi * c)
        forget = 1 - i if self.input_forget else w.gate(0, af + pf * c)
        new = forget * c + i * w.gate(1, ag)
        return w.gate(0, ao + po * new) * w.act[2](new), new
