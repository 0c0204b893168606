"""Sizes that a Reshape, a Transpose or a MatMul gives by ONNX's rules, for the usual case.

ONNX's own inference takes a node that is written out, with the types of its inputs: 0.1 ms each. Graphs are written
with thousands of these three. Whatever is not usual (sizes that are no numbers, shapes that do not fit, axes without
elements) is left to ONNX: the rules here say nothing then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Dims = tuple[Any, ...]  # sizes, names, or None for what is open
Known = Dims | None


def sizes_by_rule(node: ir.Node, given: Sequence[Known], target: np.ndarray | None) -> Known:
    """The shape of the output; None where that is left to ONNX.

    Args:
        node: of ONNX's own domain.
        given: the shapes of the inputs.
        target: the numbers of the second input, if they are known.
    """
    rule = _RULES.get(node.op_type)
    return None if rule is None else rule(node, given, target)


def _reshape(node: ir.Node, given: Sequence[Known], target: np.ndarray | None) -> Known:
    dims = given[0]
    if dims is None or target is None or target.ndim != 1 or node.attributes.get_int("allowzero", 0) != 0:
        return None
    if not _are_counts(dims) or (target == 0)[len(dims) :].any():
        return None
    sizes = [int(d) or dims[i] for i, d in enumerate(target)]
    total, others = math.prod(dims), math.prod(d for d in sizes if d != -1)
    if sizes.count(-1) == 1 and not total % others:
        sizes[sizes.index(-1)] = total // others
    return tuple(sizes) if _are_counts(sizes) and math.prod(sizes) == total else None


def _transpose(node: ir.Node, given: Sequence[Known], target: np.ndarray | None) -> Known:
    dims = given[0]
    if dims is None:
        return None
    order = node.attributes.get_ints("perm") or range(len(dims))[::-1]
    return tuple(dims[i] for i in order) if sorted(order) == list(range(len(dims))) else None


def _matmul(node: ir.Node, given: Sequence[Known], target: np.ndarray | None) -> Known:
    a, b = given[:2]
    if a is None or b is None or min(len(a), len(b)) < 2 or not _are_counts((*a, *b)) or a[-1] != b[-2]:
        return None
    rank = max(len(a), len(b))
    pairs = list(zip(*[(1,) * (rank - len(s)) + s[:-2] for s in (a, b)], strict=False))
    return (*map(max, pairs), a[-2], b[-1]) if all(1 in p or p[0] == p[1] for p in pairs) else None


def _are_counts(dims: Sequence[Any]) -> bool:
    return all(isinstance(d, int) and d > 0 for d in dims)


_RULES: dict[str, Callable[[ir.Node, Sequence[Known], np.ndarray | None], Known]] = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "MatMul": _matmul,
}
