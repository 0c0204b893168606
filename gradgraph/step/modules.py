"""Parameter counts and multiply-accumulates (MACs) of a step, by module.

MACs are counted for MatMul, Gemm, Conv, ConvTranspose, Einsum of two operands, RNN, GRU and LSTM. Nodes inside
functions and subgraphs are not counted.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
import onnx.shape_inference

from gradgraph.graph.shapes import all_sizes, shape_of_type
from gradgraph.step.manifest import Manifest
from gradgraph.step.origins import casts_among, module_of, parent_of

MOST_ROWS = 24
Shape = tuple[int, ...]
RECURRENT = ("LSTM", "GRU", "RNN")


@dataclass(frozen=True)
class Module:
    """A part of a model, named by the common prefix of its weights and nodes.

    Attributes:
        name: the prefix, such as ``features.0``; empty for unnamed parts.
        trainable, frozen: the numbers of trained and of frozen scalar weights.
        macs: the multiply-accumulates of a forward pass.
    """

    name: str
    trainable: int
    frozen: int
    macs: int


def modules(m: Manifest, eval_: onnx.ModelProto, sizes: Mapping[str, int] | None = None) -> tuple[list[Module], int]:
    """Return the modules in the order of the model, and the number of matrix products whose size is unknown.

    ``sizes`` of symbolic dimensions are 1 by default.
    """
    weights = {s.name: math.prod(int(d or 0) for d in s.shape) for s in m.state if s.name in set(m.trainable)}
    still = {t.name: math.prod(t.dims) for t in eval_.graph.initializer if t.name in set(m.frozen)}
    known = _shapes(eval_, m, dict(sizes or {}))
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    unknown = 0
    own = [node for node in eval_.graph.node if not node.name.startswith("loss/")]
    cast = casts_among(own)
    for node in own:
        macs = _macs(node, known)
        unknown += macs is None
        if macs:
            counts[module_of(node, {*weights, *still}, cast)][2] += macs
        for name in node.input:
            if name in weights or name in still:
                counts[parent_of(name)]  # creates the entry, so that modules are in the order of the model
    for i, group in enumerate((weights, still)):
        for name, size in group.items():
            counts[parent_of(name)][i] += size
    return [Module(name, *numbers) for name, numbers in counts.items()], unknown


def tree(found: list[Module], most: int = MOST_ROWS) -> list[Module]:
    """Return modules merged by common prefixes until at most ``most`` remain, or all prefixes have one component."""
    deepest = max((m.name.count(".") + 1 for m in found), default=0)
    for depth in range(deepest, 0, -1):
        rows: dict[str, Module] = {}
        for m in found:
            name = ".".join(m.name.split(".")[:depth])
            so_far = rows.get(name, Module(name, 0, 0, 0))
            rows[name] = Module(name, so_far.trainable + m.trainable, so_far.frozen + m.frozen, so_far.macs + m.macs)
        if len(rows) <= most or depth == 1:
            return list(rows.values())
    return found


def _shapes(model: onnx.ModelProto, m: Manifest, sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Return inferred tensor shapes for the given sizes of symbolic dimensions."""
    fixed = copy.deepcopy(model)
    for value in fixed.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shape_of_type(value.type) or (), strict=True):
            dim.dim_value = size if isinstance(size, int) else sizes.get(size or "", 1)
    del fixed.graph.value_info[:]
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    known = {t.name: tuple(t.dims) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if (sizes_known := all_sizes(shape_of_type(value.type))) is not None:
            known[value.name] = tuple(sizes_known)
    return known


# --- products -------------------------------------------------------------------------------------------


def _macs(node: onnx.NodeProto, known: Mapping[str, Shape]) -> int | None:
    """Return the multiply-accumulates of a node; 0 for operators that are not counted, None if a shape is unknown."""
    count = COUNTS.get(node.op_type) if not node.domain else None
    if count is None:
        return 0
    try:
        read = [known[name] if name else () for name in node.input[:3]]
        return count(node, read, known[node.output[0] or node.input[0]])
    except (KeyError, IndexError, ValueError):
        return None


def _of_einsum(node: onnx.NodeProto, read: list[Shape], out: Shape) -> int:
    equation = next(a.s.decode() for a in node.attribute if a.name == "equation").replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if any("." in term for term in terms):
        raise ValueError("an ellipsis")
    sizes = {x: n for term, shape in zip(terms, read, strict=True) for x, n in zip(term, shape, strict=True)}
    return math.prod(sizes.values()) if len(node.input) == 2 else 0


COUNTS: dict[str, Callable[[onnx.NodeProto, list[Shape], Shape], int]] = {
    "MatMul": lambda node, read, out: math.prod(out) * read[0][-1],
    "Gemm": lambda node, read, out: math.prod(out) * read[0][0 if _is_set(node, "transA") else 1],
    "Conv": lambda node, read, out: math.prod(out) * math.prod(read[1][1:]),
    "ConvTranspose": lambda node, read, out: math.prod(read[0]) * math.prod(read[1][1:]),
    "Einsum": _of_einsum,
    **dict.fromkeys(
        RECURRENT, lambda node, read, out: math.prod(read[0][:2]) * (math.prod(read[1]) + math.prod(read[2]))
    ),
}


def _is_set(node: onnx.NodeProto, name: str) -> bool:
    return any(a.name == name and a.i for a in node.attribute)
