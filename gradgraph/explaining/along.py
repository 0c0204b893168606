"""``gg.along``: evaluate a model at many points and reduce the results, in one ONNX model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import ABOVE_ZERO, FLAG, NUMBERS, one_of, whole
from gradgraph.autodiff.calls import Net
from gradgraph.autodiff.path import carries, is_tensor
from gradgraph.autodiff.select import Names, content_of, float_outputs, select
from gradgraph.autodiff.site_values import Baseline, baselines_of
from gradgraph.backends import named
from gradgraph.backends.engine import unrolls
from gradgraph.errors import BuildError, DifferentiationError, shown
from gradgraph.explaining.points import RULES, Around, Line, Places, checked_weights, quadrature, reduced, zeros_of
from gradgraph.files.models import Source
from gradgraph.graph.builder import Var
from gradgraph.transforms import Append, transform

REDUCTIONS = ("mean", "sum", "stack")
UNROLL = FLAG.or_none()
SEED = whole(0)


@transform(n=ABOVE_ZERO, rule=one_of(RULES), seed=SEED, reduce=one_of(REDUCTIONS), weights=NUMBERS.or_none(),
           chunk=ABOVE_ZERO, unroll=UNROLL)  # fmt: skip
def along(
    model: Source,
    n: int,
    *,
    wrt: Names = None,
    outputs: Names = None,
    baseline: Baseline = None,
    rule: str = "gausslegendre",
    noise: float | np.ndarray | Mapping[str, Any] | None = None,
    seed: int = 0,
    reduce: str = "mean",
    weights: Sequence[float] | None = None,
    chunk: int = 1,
    unroll: bool | None = None,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that evaluates ``model`` at ``n`` points, and reduces each output over them.

    The points are on a line from a baseline to the values that are fed (``baseline=``), or these values plus normal
    noise (``noise=``). The mean of gradients on a line yields integrated gradients, the mean under noise SmoothGrad::

        gradient = gg.value_and_grad(model, output="score", wrt="x")
        averaged = gg.along(gradient, 32, wrt="x", baseline=0.0)      # output "x.grad.mean"

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        n: the number of points.
        wrt: names and globs of the inputs, initializers and inner values that vary; by default all floating-point
            inputs.
        outputs: names and globs of the floating-point outputs to reduce; all tensors among them by default.
        baseline: the start of the line: a number, an array of the shape of the tensor or of one sample, a dict of them
            by name, or ``"input"``, for new inputs ``"<name>.baseline"``.
        rule: where the points are on the line, and their weights in the mean: ``"gausslegendre"``, ``"riemann_left"``,
            ``"riemann_middle"``, ``"riemann_right"`` or ``"riemann_trapezoid"``.
        noise: the standard deviation of the noise, as ``baseline``.
        seed: the seed of the noise. The same seed draws the same noise in every run and every runtime.
        reduce: ``"mean"``, ``"sum"`` or ``"stack"``, which returns the values of all points, with a new first axis.
        weights: a weight for each point; the result is then the weighted sum of the values.
        chunk: the number of points that are evaluated at once, as additional rows of the batch. This requires a dynamic
            batch axis, independent samples, and outputs with one row per sample. Noise depends on ``chunk``.
        unroll: repeat the nodes of the model for each round instead of using a Scan; by default only for backends
            without Scan.

    Returns:
        The same kind of model as ``model`` (for a path, a ``ModelProto``), with an output ``"<output>.mean"`` (or
        ``.sum``, ``.stack``; with ``weights``, ``.sum``) for each of ``outputs``.

    Raises:
        UnknownNameError, DifferentiationError, BuildError: as for ``value_and_grad``.
        BuildError: if not exactly one of ``baseline`` and ``noise`` is given, or one does not have the shape of its
            tensor.
        DifferentiationError: with ``chunk`` > 1, if samples are not independent.
    """
    if (baseline is None) == (noise is None):
        raise BuildError("along evaluates points on a line or under noise; pass either baseline or noise")
    if noise is not None and rule != "gausslegendre":
        raise BuildError("rule selects points on a line, and has no effect on noise; remove it")
    if baseline is not None and seed:
        raise BuildError("seed selects the noise, and has no effect on a line; remove it")
    if weights is not None and reduce != "mean":
        raise BuildError(f"weights and reduce='{reduce}' exclude each other; remove one of them")
    scale = None if weights is None else checked_weights(weights, n)
    unrolled = unrolls(named(backend), unroll)
    suffix = reduce if weights is None else "sum"

    def append(work: ir.Model, named_operators: bool) -> ir.Model:
        targets = _reduced_outputs(work.graph, outputs)
        net = Net(work, _moving(work.graph, wrt, targets), targets, chunk, named_operators)
        names = {x: x.name or "" for x in net.sites}
        points: Places
        if noise is None:
            at, means = quadrature(rule, n)
            points = Line(net, baselines_of(net, baseline, names, "baseline"), at)
        else:
            means = np.full(n, 1 / n)
            points = Around(net, baselines_of(net, noise, names, "noise"), seed, n)
        factors = {"mean": means, "sum": np.ones(n) if scale is None else scale, "stack": None}[suffix]

        def evaluate(where: Mapping[ir.Value, Var], rows: int) -> list[Var]:
            call = net.call(where, rows)
            return [call[y] for y in net.results]

        zeros = [zeros_of(net.op, net.graph, y) for y in net.results]
        found = reduced(net, points, evaluate, factors, zeros, unrolled)
        return net.finish([net.named(y, f"{like.name}.{suffix}") for y, like in zip(found, net.results, strict=True)])

    return append


def _reduced_outputs(graph: ir.Graph, outputs: Names) -> list[ir.Value]:
    found = float_outputs(graph, outputs)
    tensors = [y for y in found if is_tensor(y)]
    if not tensors or (outputs is not None and len(tensors) < len(found)):
        other = next(y for y in found if not is_tensor(y))
        raise DifferentiationError(
            f"output '{shown(other.name)}' {content_of(other)}, but only tensors can be averaged; choose other outputs"
        )
    return tensors


def _moving(graph: ir.Graph, wrt: Names, targets: Sequence[ir.Value]) -> list[ir.Value]:
    if wrt is not None:
        return select(graph, wrt, targets)
    inputs = [x for x in graph.inputs if carries(x) and not x.is_initializer()]
    if not inputs:
        raise DifferentiationError("the model has no floating-point input that could vary; name values in `wrt`")
    return inputs
