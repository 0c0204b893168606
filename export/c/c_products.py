"""Compute cheap factors of products in the loop of the product, so that they are never stored.

A product whose factor is, for example, the Relu of a stored tensor becomes a reduction over the elements of both
factors, which applies Relu to each element as it reads it. Each element is computed once per row or column of the
result: slower than a stored factor, by a few operations per multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gradgraph.export.c.operators import SUM
from gradgraph.export.c.program import Map, Operation, Reduce, Rows, Shape, Tensor, View, row_major

MOST_OPERATIONS = 12  # per element of a factor


def with_factor(o: Operation, tensor: Tensor, chain: Sequence[Map | Reduce]) -> list[Operation] | None:
    """Return operations that compute the product ``o`` without reading its factor ``tensor``.

    Args:
        chain: the operations that compute ``tensor``; Maps only, or there is no such form.

    Returns:
        None if ``o`` is no product, or reads ``tensor`` in an order for which the chain has no strided form.
    """
    factors = _factors(o) if isinstance(o, Rows) else None
    makers = {m.out: m for m in chain if isinstance(m, Map)}
    if factors is None or len(makers) < len(chain):
        return None
    left, right, axes = factors
    made: list[Operation] = []

    def at(view: View) -> View | None:
        """Return ``view`` with its elements computed, over the domain of the product."""
        maker = makers.get(view.tensor)
        if maker is None:
            return view
        found = [None if v is None else at(v) for v in (_through(view, u) for u in maker.operands)]
        operands = [v for v in found if v is not None]
        if len(operands) < len(found) or len(made) >= MOST_OPERATIONS:
            return None
        made.append(Map(Tensor(view.shape, maker.out.dtype, maker.out.name), maker.template, operands, node=maker.node))
        return made[-1].outputs[0].whole()

    a, b = at(left), at(right)
    if a is None or b is None:
        return None
    terms = Map(Tensor(left.shape, "float32", ""), "{0} * {1}", [a, b])
    return [*made, terms, Reduce(o.outputs[0], SUM, terms.out.whole(), axes, node=o.node)]


def _factors(o: Rows) -> tuple[View, View, tuple[int, ...]] | None:
    """Return both factors of a product, as views over a common domain, and the axes over which it sums."""
    if o.function == "gemm_rows":
        left, right, terms, *steps = o.arguments
        assert isinstance(left, View) and isinstance(right, View) and isinstance(terms, int)
        a, b = (
            replace(v, shape=(*v.shape, terms), strides=(*v.strides, step))
            for v, step in zip((left, right), steps, strict=False)
            if isinstance(step, int)
        )
        return a, b, (len(a.shape) - 1,)
    if o.function == "conv_weight_rows":
        x, dy, _, p = o.arguments
        assert isinstance(x, Tensor) and isinstance(dy, Tensor) and isinstance(p, tuple)
        if p[1:3] != p[4:6] or p[6:10] != (1, 1, 1, 1) or p[12:15] != (0, 0, 1):
            return None  # not pointwise
        shape = p[3], p[0], p[15], p[1], p[2]  # channels of y, channels of x, batch, height, width
        plane = p[1] * p[2]
        a = View(x, shape, (0, plane, p[0] * plane, p[2], 1))
        return a, View(dy, shape, (plane, 0, p[3] * plane, p[2], 1)), (2, 3, 4)
    return None


def _through(view: View, operand: View) -> View | None:
    """Return ``operand``, which has one element per element of a tensor, at the elements that ``view`` reads of it."""
    cuts = None if view.offset else cuts_of(view)
    strides = []
    for cut in cuts or []:
        axes = [axis for _, axis in cut if axis is not None and operand.shape[axis] != 1]
        if any(operand.strides[i] != operand.strides[j] * operand.shape[j] for i, j in pairwise(axes)):
            return None
        strides.append(operand.strides[axes[-1]] if axes else 0)
    return None if cuts is None else replace(operand, shape=view.shape, strides=tuple(strides))


Cut = list[tuple[int, int | None]]  # the axes that an axis is split into: size, and axis of the tensor that it follows


def cuts_of(view: View) -> list[Cut] | None:
    """Split the axes of ``view`` so that each follows one axis of its tensor; None if there is no such split."""
    shape = view.tensor.shape
    strides = row_major(shape)
    start = [int(i) for i in np.unravel_index(view.offset, shape)] if shape else []
    found: list[Cut] = []
    for n, step in zip(view.shape, view.strides, strict=True):
        if n == 1 or step == 0:
            found.append([(n, None)])
            continue
        last = next((i for i, s in enumerate(strides) if s == step and shape[i] != 1), None)
        cut = None if last is None else _cut(n, last, shape, start)
        if cut is None:
            return None
        found.append(cut)
    used = [axis for cut in found for _, axis in cut if axis is not None]
    return found if len(used) == len(set(used)) else None


def _cut(n: int, last: int, shape: Shape, start: list[int]) -> Cut | None:
    """Return the axes of a tensor that an axis of size ``n`` follows; the innermost is ``last``."""
    cut: Cut = []
    while n > shape[last] - start[last]:
        if start[last] or n % shape[last] or last == 0:
            return None
        cut.insert(0, (shape[last], last))
        n //= shape[last]
        last -= 1
    return [(n, last), *cut]
