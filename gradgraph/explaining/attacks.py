"""Adversarial attacks as methods of ``gg.explain``: nearby inputs that the model classifies differently."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.autodiff.calls import Points, looped
from gradgraph.autodiff.projected_steps import projection
from gradgraph.building.pgd import PGD
from gradgraph.errors import BuildError
from gradgraph.explaining.methods import Results, method
from gradgraph.explaining.subject import Subject
from gradgraph.graph.builder import Var
from gradgraph.passes.randomness import RandomSource, initial_state


@method("fgsm", "Goodfellow et al. 2014, arXiv:1412.6572")
def fgsm(s: Subject, epsilon: float = 0.03, targeted: bool = False, bounds: Any = None) -> Results:
    """One step x + ε sign(∂L/∂x), which increases the loss of the target, or with ``targeted`` decreases it."""
    return pgd(s, epsilon=epsilon, n=1, step=epsilon, targeted=targeted, bounds=bounds)


@method("pgd", "Madry et al. 2017, arXiv:1706.06083")
def pgd(
    s: Subject,
    epsilon: float = 0.03,
    n: int = 10,
    step: float | None = None,
    norm: str = "linf",
    targeted: bool = False,
    random_start: bool = False,
    seed: int = 0,
    bounds: Any = None,
) -> Results:
    """``n`` steps of size ``step`` (2.5 ε / n by default), within ε in the norm ``linf`` or ``l2`` and ``bounds``."""
    attack = PGD(epsilon, n, step, norm, bounds, random_start)
    source = RandomSource(s.op.const(initial_state(seed)))
    noise = {x: attack.ball.draw(s.op, source, v) for x, v in s.x.items()} if random_start else {}

    def gradients(points: Points) -> Points:
        call = s.net.call(points)
        loss = s.loss(call)
        return call.gradients(loss, s.op.ones_like(loss), s.net.sites)

    return _attacked(s, attack.moved(s.net, gradients, noise, s.unroll, -1.0 if targeted else 1.0))


@method("deepfool", "Moosavi-Dezfooli et al. 2016, arXiv:1511.04599")
def deepfool(s: Subject, n: int = 50, overshoot: float = 0.02, bounds: Any = None) -> Results:
    """At most ``n`` steps to the nearest boundary of the class predicted, for each sample until its class changes."""
    op, y = s.op, s.first[s.output]
    classes = y.dim(1) if y.rank == 2 else None
    if not isinstance(classes, int) or classes < 2:
        raise BuildError(
            f"deepfool needs an output [batch, classes] with a known number of classes, not {list(y.shape or ())}"
        )
    if len(s.x) > 1:
        raise BuildError(f"deepfool needs one input, and the model has {len(s.x)}; choose one with inputs=")
    ((x, here),) = s.x.items()
    rows = op.Concat(op.const([-1]), op.const([1] * (here.rank - 1)), axis=0) if here.rank > 1 else op.const([-1])
    own = op.ArgMax(y, axis=1)
    project = projection(s.net, bounds, None)

    def moved(total: Var) -> Var:
        return project({x: here + total * (1.0 + overshoot)})[x]

    def body(_: list[Var], states: list[Var]) -> tuple[list[Var], list[Var]]:
        call = s.net.call({x: moved(states[0])})
        scores = call[s.output]
        margins = scores - op.GatherElements(scores, own, axis=1)  # [batch, classes]

        def one(row: list[Var], _: list[Var]) -> tuple[list[Var], list[Var]]:
            picked = op.cast(op.Equal(op.const(np.arange(classes)), row[0]), scores.dtype)
            less = op.cast(op.Equal(op.const(np.arange(classes)), own), scores.dtype)
            return [], [call.gradients(scores, picked - less, [x])[x]]

        _, (slopes,) = looped(op, [np.arange(classes)], [], one, s.unroll)  # [classes, batch, …]
        axes = np.arange(2, here.rank + 1)
        lengths = op.Sqrt(op.ReduceSumSquare(slopes, axes, keepdims=0)) if len(axes) else op.Abs(slopes)
        lengths = op.Transpose(lengths, perm=[1, 0])
        is_own = op.Equal(op.const(np.arange(classes)), own)
        most = 6e4 if here.dtype == ir.DataType.FLOAT16 else float(np.finfo(np.float32).max)
        flat = op.Equal(lengths, 0.0)
        divisors = op.Where(flat, 1.0, lengths)
        far = op.Where(is_own | flat, most, op.Abs(margins) / divisors)
        nearest = op.ArgMin(far, axis=1)  # [batch, 1]
        index = op.Reshape(nearest, op.Concat(op.const([1]), rows, axis=0))
        slope = op.Squeeze(
            op.GatherElements(slopes, op.Expand(index, op.Concat(op.const([1]), op.shape(here), axis=0))), [0]
        )
        reach = op.GatherElements(far, nearest, axis=1) + 1e-4
        unit = slope / op.Reshape(op.GatherElements(divisors, nearest, axis=1), rows)
        same = op.Equal(op.ArgMax(scores, axis=1), own)
        step = op.Where(op.Reshape(same, rows), unit * op.Reshape(reach, rows), 0.0)
        return [op.like(states[0] + step, here)], []

    (total,), _ = looped(op, [np.arange(n)], [op.zeros_like(here)], body, s.unroll)
    return _attacked(s, {x: moved(total)})


def _attacked(s: Subject, points: Points) -> Results:
    found = [(f"{s.names[x]}.adversarial", y) for x, y in points.items()]
    return [*found, (f"{s.output.name}.adversarial", s.net.call(points)[s.output])]
