"""Derive the roles of stored tensors from the nodes that read them.

A tensor is followed through nodes that only move, cast or negate it, into and out of bodies, to the operators that
compute with it. Tables list the roles of operator inputs; an input that is not listed is an ordinary operand.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from gradgraph.graph.checks import describe, has_bodies, subgraphs
from gradgraph.graph.nodes import inputs_of, made_by
from gradgraph.graph.shapes import is_single
from gradgraph.passes.normal.edit import nodes_of


class Role(enum.Enum):
    """The role of a tensor in an operator that reads it."""

    FACTOR = "weight"  # a parameter of a product, a norm or a recurrence, which a layer learns
    BIAS = "bias"  # a number added to a product with one column
    SHAPED = "argument"  # the argument of Exp or a similar function, which keeps a learned number in a range
    OPERAND = "operand"  # an operand of arithmetic, or of an operator outside the tables
    STATE = "first state"  # the initial state of a recurrence
    SETTING = "setting"  # a setting, such as a bound, a scale or an exponent


@dataclass(frozen=True)
class Use:
    """A node that reads a tensor, and the tensor's role in words, such as ``the upper bound``."""

    node: ir.Node
    words: str

    def __str__(self) -> str:
        return f"{self.words} of {describe(self.node)}"


Uses: TypeAlias = Mapping[Role, Use]

# --- the table of operator inputs ---------------------------------------------------------------------------

_BOUND, SCALE, ZERO_POINT, _COUNT = "a bound", "a scale", "a zero point", "a size or an index"
_COSINES, _SINES = "the table of cosines", "the table of sines"
SETTINGS: dict[str, dict[int, str]] = {
    **dict.fromkeys(
        ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), dict.fromkeys((0, 1), "a threshold")
    ),
    "CastLike": {1: "the type"},
    "Clip": {1: "the lower bound", 2: "the upper bound"},
    "CumSum": {1: "the axis"},
    "DequantizeLinear": {1: SCALE, 2: ZERO_POINT},
    "Dropout": {1: "the ratio"},
    "GridSample": {1: "the coordinates"},
    "MelWeightMatrix": {3: _BOUND, 4: _BOUND},
    "NegativeLogLikelihoodLoss": {2: "the weights of classes"},
    "NonMaxSuppression": {2: _COUNT, 3: "a threshold", 4: "a threshold"},
    "OneHot": {1: "the depth", 2: "the pair of values"},
    "Pad": {2: "the padding"},
    "Pow": {1: "the exponent"},
    "QLinearConv": {1: SCALE, 2: ZERO_POINT, 4: SCALE, 5: ZERO_POINT, 6: SCALE, 7: ZERO_POINT},
    "QLinearMatMul": {1: SCALE, 2: ZERO_POINT, 4: SCALE, 5: ZERO_POINT, 6: SCALE, 7: ZERO_POINT},
    "QuantizeLinear": {1: SCALE, 2: ZERO_POINT},
    "Range": {0: _BOUND, 1: _BOUND, 2: "the step"},
    "Resize": {1: "the region", 2: "the scales"},
    "RoiAlign": {1: "the regions"},
    "MaxRoiPool": {1: "the regions"},
    "RotaryEmbedding": {1: _COSINES, 2: _SINES},
    "STFT": {2: "the window"},
    "SoftmaxCrossEntropyLoss": {2: "the weights of classes"},
    "Upsample": {1: "the scales"},
    "com.microsoft.CropAndResize": {1: "the regions"},
    "com.microsoft.DequantizeLinear": {1: SCALE, 2: ZERO_POINT},
    "com.microsoft.DynamicQuantizeMatMul": {2: SCALE, 3: ZERO_POINT},
    "com.microsoft.GatherBlockQuantized": {2: SCALE, 3: ZERO_POINT},
    "com.microsoft.GemmaRotaryEmbedding": {1: "the angles"},
    "com.microsoft.GridSample": {1: "the coordinates"},
    "com.microsoft.GroupQueryAttention": {7: _COSINES, 8: _SINES, 12: SCALE, 13: SCALE},
    "com.microsoft.MRotaryEmbedding": {2: _COSINES, 3: _SINES},
    "com.microsoft.MatMulBlockQuantizedFp4Weight": dict.fromkeys((2, 3, 4), SCALE),
    "com.microsoft.MatMulBlockQuantizedFp8Weight": {2: SCALE, 3: SCALE},
    "com.microsoft.MatMulBnb4": {2: SCALE},
    "com.microsoft.MatMulIntegerToFloat": {2: SCALE, 3: SCALE, 4: ZERO_POINT, 5: ZERO_POINT},
    "com.microsoft.MatMulNBits": {2: SCALE, 3: ZERO_POINT},
    "com.microsoft.MatMulNBitsMlp": {4: SCALE, 7: SCALE},
    "com.microsoft.MatMulNBitsQkv": {4: SCALE, 7: SCALE, 10: SCALE},
    "com.microsoft.Pad": {2: "the padding"},
    "com.microsoft.PagedAttention": {8: _COSINES, 9: _SINES, 14: SCALE, 15: SCALE},
    "com.microsoft.QAttention": {3: SCALE, 4: SCALE, 6: ZERO_POINT, 7: ZERO_POINT},
    "com.microsoft.QMoE": {**dict.fromkeys((3, 6, 9), SCALE), **dict.fromkeys((11, 12, 13), ZERO_POINT)},
    "com.microsoft.QGemm": {1: SCALE, 2: ZERO_POINT, 4: SCALE, 5: ZERO_POINT, 7: SCALE, 8: ZERO_POINT},
    "com.microsoft.QuantizeLinear": {1: SCALE, 2: ZERO_POINT},
    "com.microsoft.Range": {0: _BOUND, 1: _BOUND, 2: "the step"},
    "com.microsoft.RotaryEmbedding": {2: _COSINES, 3: _SINES},
    "com.microsoft.SparseAttention": {9: _COSINES, 10: _SINES},
}
FACTORS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),  # running statistics are not constants of formulas either
    "CausalConvWithState": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Einsum": (0, 1, 2, 3),
    "GRU": (1, 2, 3),
    "Gemm": (0, 1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
    "com.microsoft.BranchwiseRMSNorm": (1,),
    "com.microsoft.ConvTransposeWithDynamicPads": (1, 3),
    "com.microsoft.EngramGate": (3, 4, 5),
    "com.microsoft.FusedConv": (1, 2),
    "com.microsoft.FusedGemm": (0, 1, 2),
    "com.microsoft.FusedMatMul": (0, 1),
    "com.microsoft.FusedMatMulActivation": (0, 1),
    "com.microsoft.GemmFastGelu": (0, 1, 2),
    "com.microsoft.GroupQueryAttention": (14, 15),
    "com.microsoft.MatMulNBitsMlp": (2, 5, 8),
    "com.microsoft.MatMulNBitsQkv": (2, 5, 8, 11),
    "com.microsoft.MoE": (2, 4, 6),
    "com.microsoft.NhwcConv": (1, 2),
    "com.microsoft.NhwcFusedConv": (1, 2),
    "com.microsoft.PackedAttention": (1, 2),
    "com.microsoft.PagedAttention": (12, 13),
    "com.microsoft.VarlenCausalConvWithState": (1, 3),
}
STATES = {
    "Attention": (4, 5),
    "CausalConvWithState": (3,),
    "GRU": (5,),
    "LSTM": (5, 6),
    "LinearAttention": (3,),
    "RNN": (5,),
}
_COLUMNS = {  # axes of weights whose size is the number of columns or channels of the product
    "Conv": (0,),
    "ConvTranspose": (1,),
    "Einsum": (0, -1),
    "Gemm": (0, -1),
    "MatMul": (0, -1),
}
_LIMITS = frozenset({"Max", "Min"})  # operators for which an operand of one element is a bound
_SHAPING = frozenset({"Exp", "Sigmoid", "Softplus", "Tanh"})
ARITHMETIC = frozenset({"Add", "Div", "Mul", "Sub"})
_MOST_MOVES = 8  # maximum moving nodes between a product and its summand
_GROWS = frozenset({"Concat", "Expand", "Pad", "Tile"})
MOVES = frozenset(  # operators that move, cast, negate or invert the numbers of their first input
    {"Cast", "CastLike", "DequantizeLinear", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"}
    | {"Abs", "Identity", "Neg", "Pad", "QuantizeLinear", "Reciprocal", "Reshape", "Slice", "Split", "Sqrt"}
    | {"Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"}
)


def rotary_tables(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None] | None:
    """Return the cosines and sines of all positions that a node reads, None for one that it lacks.

    Return None for operators without rotary positions.
    """
    settings = SETTINGS.get(f"{node.domain}.{node.op_type}".lstrip("."), {})
    places = {words: place for place, words in settings.items()}
    if _COSINES not in places:
        return None
    cosines, sines = (
        node.inputs[places[words]] if places[words] < len(node.inputs) else None for words in (_COSINES, _SINES)
    )
    return cosines, sines


def roles(model: ir.Model) -> Mapping[ir.Value, Uses]:
    """Return, for each value that is read, its roles, with one use as an example of each.

    Roles propagate from readers back to their inputs, and each value gets each role once, so the time is linear in the
    size of the model.
    """
    found: dict[ir.Value, dict[Role, Use]] = defaultdict(dict)
    sources: dict[ir.Value, list[ir.Value]] = defaultdict(list)  # the values that flow into each value
    stored = _Stored(model)
    for node in nodes_of(model):
        for inside, outside in _flows(node):
            sources[outside].append(inside)
        for i, value in enumerate(node.inputs):
            if value is None:
                continue
            if stored.passes(node, i):
                for after in node.outputs:
                    sources[after].append(value)
            if (use := _role(node, i, stored)) is not None:
                found[value].setdefault(use[0], Use(node, use[1]))
    waiting = list(found)
    while waiting:
        after = waiting.pop()
        for value in sources.get(after, ()):
            new = [(role, use) for role, use in found[after].items() if role not in found[value]]
            if new:
                found[value].update(new)
                waiting.append(value)
    return found


def _role(node: ir.Node, i: int, stored: _Stored) -> tuple[Role, str] | None:
    """Return the role of input ``i`` of ``node``, with words for it; None if ``node`` only passes the input on."""
    kind, value = f"{node.domain}.{node.op_type}".lstrip("."), node.inputs[i]
    assert value is not None
    if (words := SETTINGS.get(kind, {}).get(i)) is not None:
        return Role.SETTING, words
    if kind.startswith("com.microsoft.QLinear"):
        return Role.SETTING, "a scale or a zero point"
    if kind in _LIMITS and stored.is_single(value):
        return Role.SETTING, _BOUND
    if i in FACTORS.get(kind, ()):
        return Role.FACTOR, "a weight"
    if i in STATES.get(kind, ()) or (has_bodies(node) and _changes(node, i)):
        return Role.STATE, "the first state"
    if kind in _SHAPING:
        return Role.SHAPED, "the argument"
    if has_bodies(node) or stored.passes(node, i):
        return None
    if kind == "Add" and stored.is_single(value) and _is_column(node.inputs[1 - i]):
        return Role.BIAS, "the bias"
    return Role.OPERAND, "an operand"


# --- known before the model runs ------------------------------------------------------------------------


class _Stored:
    """Stored values, and values computed only from these, with a record of those that have a single element."""

    def __init__(self, model: ir.Model) -> None:
        self._single = {v: is_single(v) for v in model.graph.initializers.values()}
        for node in nodes_of(model):
            read = [v for v in node.inputs if v is not None]
            if read and not has_bodies(node) and all(v in self._single for v in read):
                single = node.op_type not in _GROWS and all(
                    self._single[v] for v in read[: 1 if _moves(node) else None]
                )
                self._single.update(dict.fromkeys(node.outputs, single))

    def is_single(self, value: ir.Value) -> bool:
        return self._single.get(value, False)

    def passes(self, node: ir.Node, i: int) -> bool:
        """Whether input ``i`` has the roles of the output, as the node only moves it or combines stored values."""
        value = node.inputs[i]
        if node.domain or value is None or not node.outputs:
            return False
        if _moves(node):
            return i == 0
        if node.op_type == "Concat":
            return not self.is_single(value) or node.outputs[0] in self._single
        if node.op_type not in ARITHMETIC | _SHAPING or node.outputs[0] not in self._single:
            return False
        return self._single[value] == self._single[node.outputs[0]]


def _moves(node: ir.Node) -> bool:
    return node.op_type in MOVES and not node.domain


def _is_column(value: ir.Value | None) -> bool:
    """Whether the value is a product with a stored matrix or kernel of one column or channel."""
    node = None if value is None else made_by(_before_moves(value), *_COLUMNS)
    if node is None:
        return False
    stored = [t.shape.numpy() for v in inputs_of(node) if (t := _before_moves(v).const_value) is not None]
    return any(len(dims) > abs(a) and dims[a] == 1 for dims in stored for a in _COLUMNS[node.op_type])


def _before_moves(value: ir.Value) -> ir.Value:
    for _ in range(_MOST_MOVES):
        node = value.producer()
        if node is None or not _moves(node) or (source := node.inputs[0]) is None:
            break
        value = source
    return value


# --- bodies -----------------------------------------------------------------------------------------------


def _entering(node: ir.Node) -> tuple[int, int]:
    """Return the index of the first input of a Loop or Scan that enters the body, and of the body's first result."""
    return (2, 1) if node.op_type == "Loop" else (0, 0)


def _flows(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield pairs (before, after) of values passed into a body of ``node``, and of values passed out of it."""
    pairs: list[tuple[ir.Value | None, ir.Value]] = []
    for body in subgraphs(node) if has_bodies(node) else ():
        first, left = _entering(node)
        pairs += zip(node.inputs[first:], body.inputs[first:], strict=False)
        pairs += zip(body.outputs[left:], node.outputs, strict=False)
    yield from ((before, after) for before, after in pairs if before is not None)


def _changes(node: ir.Node, i: int) -> bool:
    """Whether input ``i`` is the initial value of a loop state that changes."""
    first, left = _entering(node)
    if node.op_type not in ("Loop", "Scan") or i < first:
        return False
    body = next(subgraphs(node))
    states = len(node.inputs) - (0 if node.op_type == "Loop" else node.attributes["num_scan_inputs"].as_int())
    if i >= states:
        return False
    return body.inputs[i] is not body.outputs[i - first + left]
