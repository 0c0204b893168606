"""Projected gradient descent: the attack of adversarial training, and of ``gg.explain``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.arguments import ABOVE_ZERO, FLAG, NAMES, Kind, Makers, instance, number, one_of
from gradgraph.autodiff.calls import Net, Points
from gradgraph.autodiff.projected_steps import BOUNDS, NORMS, Ball, Rule, iterated, projection
from gradgraph.errors import BuildError
from gradgraph.graph.builder import Builder, Var

KINDS: dict[str, Kind] = {
    "epsilon": number(0, above=True), "n": ABOVE_ZERO, "step": number(0, above=True).or_none(), "norm": one_of(NORMS),
    "bounds": BOUNDS, "random_start": FLAG, "clean": number(0, 1), "inputs": NAMES.or_none(),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class PGD:
    """Projected gradient descent (Madry et al. 2017, arXiv:1706.06083): an attack that moves inputs to raise the loss.

    With ``n=1`` and ``step=epsilon`` it is FGSM (Goodfellow et al. 2014, arXiv:1412.6572).

    Args:
        epsilon: the largest change, in the norm.
        n: the number of steps.
        step: the size of a step; 2.5 · epsilon / n by default.
        norm: ``"linf"`` limits the change of each element, ``"l2"`` the Euclidean length of the change of each sample.
        bounds: the lowest and the highest value of an input, each a number, an array or None for no bound.
        random_start: start from a random point, uniform in the ball.
        clean: the weight of the loss at the original inputs, from 0 to below 1; the loss at the moved inputs has the
            rest.
        inputs: names and globs of the inputs to move; by default all floating-point inputs with a row per sample.

    Raises:
        ArgumentError: if an argument has the wrong type or is out of range.
    """

    epsilon: float = 0.03
    n: int = 10
    step: float | None = None
    norm: str = "linf"
    bounds: tuple[Any, Any] | None = None
    random_start: bool = False
    clean: float = 0.0
    inputs: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            kind.check(name, getattr(self, name))
        if self.clean == 1:
            raise BuildError(
                "a weight of 1 for the clean loss leaves none for the loss at the moved inputs; remove adversarial",
                shell="remove --adversarial",
            )

    @property
    def ball(self) -> Ball:
        """The changes that the attack may make."""
        return Ball(self.norm, self.epsilon, per_sample=True)

    def moved(
        self,
        net: Net,
        gradients: Callable[[Points], Points],
        noise: Mapping[ir.Value, Var],
        unroll: bool,
        sign: float = 1.0,
    ) -> Points:
        """Return the points after all steps.

        Args:
            gradients: the gradients, at given points, of what increases, or with ``sign`` -1 decreases.
            noise: the change of each site at the start; empty for none.
        """
        ball, size = self.ball, sign * (2.5 * self.epsilon / self.n if self.step is None else self.step)

        def move(op: Builder, x: Var, g: Var) -> Var:
            if self.norm == "linf":
                return x + op.Sign(g) * size
            length = ball.length(op, g, x)
            return x + g * (size / op.Where(length > 0.0, length, 1.0))

        project, start = projection(net, self.bounds, ball), net.here()
        if noise:
            start = dict(project({x: v + noise[x] for x, v in start.items()}))
        return iterated(net, self.n, lambda at: (gradients(at), []), Rule(move), start, project, unroll)[0]


ATTACKS: Makers[PGD] = Makers("attack", PGD, "gradgraph", "pgd(epsilon=0.03)", {"fgsm": "pgd(n=1, step=…) is FGSM"})
ATTACKS.add("pgd", PGD)
GIVEN = instance(str | PGD | None, "gradgraph.PGD(...), or text such as 'pgd(epsilon=0.03)'")
