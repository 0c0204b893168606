"""The table of ranks allowed for the inputs and outputs of operators.

Runtimes accept a few forms that ONNX does not allow, such as a scalar for a one-element vector. They are not in the
table: ``repair.py`` rewrites them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

MOST_AXES = 64  # the limit of NumPy arrays
_KINDS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
REDUCTIONS = tuple(f"Reduce{kind}" for kind in _KINDS)


@dataclass(frozen=True)
class Axes:
    """A range of allowed ranks, from ``least`` to ``most`` axes; ``shape in axes`` tests the rank of a shape."""

    least: int
    most: int

    def __contains__(self, shape: Sequence[object]) -> bool:
        return self.least <= len(shape) <= self.most

    def __str__(self) -> str:
        """Return the allowed ranks as a phrase for after "which must"."""
        if self.most == 0:
            return "be one number, without an axis"
        if self.least == self.most == 1:
            return "be a vector"
        upper = "" if self.least == self.most else " or more" if self.most == MOST_AXES else f" to {self.most}"
        return f"have {self.least}{upper} {'axis' if (self.least, self.most) == (1, 1) else 'axes'}"


_ANY = Axes(0, MOST_AXES)

# inputs -> outputs: "1" is one axis, "1+" one or more, "0-1" a scalar or a vector, "*" anything
_TABLE = {
    "AffineGrid": "3 1 -> 4-5",
    "AveragePool": "3+ -> 3+",
    "BatchNormalization": "1+ 1 1 1 1 -> 1+",
    "Clip": "* 0-1 0-1",
    "Col2Im": "3 1 1 -> 3+",
    "Compress": "1+",
    "Concat": "-> 1+",
    "ConstantOfShape": "1+",
    "Conv": "3+ 3+ 1 -> 3+",
    "ConvTranspose": "3+ 3+ 1 -> 3+",
    "CumSum": "1+ 0-1 -> 1+",
    "DFT": "2+ 0 0 -> 2+",
    "DeformConv": "3+ 3+ 3+ 1 3+ -> 3+",
    "DepthToSpace": "4 -> 4",
    "Det": "2+",
    "Dropout": "* 0 0",
    "EyeLike": "2 -> 2",
    "Flatten": "* -> 2",
    "GRU": "3 3 3 2 1 3 -> 4 3",
    "Gather": "1+",
    "GatherElements": "1+ 1+ -> 1+",
    "GatherND": "1+ 1+",
    "Gemm": "2 2 0-2 -> 2",
    "GlobalAveragePool": "3+ -> 3+",
    "GlobalLpPool": "3+ -> 3+",
    "GlobalMaxPool": "3+ -> 3+",
    "GridSample": "3+ 3+ -> 3+",
    "GroupNormalization": "2+ -> 2+",
    "Hardmax": "1+ -> 1+",
    "InstanceNormalization": "3+ 1 1 -> 3+",
    "LRN": "3+ -> 3+",
    "LSTM": "3 3 3 2 1 3 3 2 -> 4 3 3",
    "LayerNormalization": "1+ -> 1+",
    "LogSoftmax": "1+ -> 1+",
    "LpNormalization": "1+ -> 1+",
    "LpPool": "3+ -> 3+",
    "MatMul": "1+ 1+",
    "MaxPool": "3+ -> 3+ 3+",
    "MaxRoiPool": "4 2 -> 4",
    "MaxUnpool": "3+ 3+ 1 -> 3+",
    "Multinomial": "2 -> 2",
    "NegativeLogLikelihoodLoss": "2+ 1+ 1",
    "OneHot": "1+ 0-1 1 -> 2+",
    "Pad": "1+ 1 * 1 -> 1+",
    "RMSNormalization": "1+ -> 1+",
    "RNN": "3 3 3 2 1 3 -> 4 3",
    "Range": "0-1 0-1 0-1 -> 1",
    "Reshape": "* 1",
    "Resize": "1+ -> 1+",
    "ReverseSequence": "2+ 1 -> 2+",
    "RoiAlign": "4 2 1 -> 4",
    "STFT": "2-3 0-1 1 0-1 -> 4",
    "ScatterElements": "1+ 1+ 1+ -> 1+",
    "ScatterND": "1+ 1+ -> 1+",
    "SequenceAt": "* 0-1",
    "SequenceErase": "* 0-1",
    "SequenceInsert": "* * 0-1",
    "Slice": "1+ 1 1 1 1 -> 1+",
    "Softmax": "1+ -> 1+",
    "SoftmaxCrossEntropyLoss": "2+ 1+ 1 -> * 2+",
    "SpaceToDepth": "4 -> 4",
    "Split": "1+ 1",
    "SplitToSequence": "1+ 0-1",
    "Squeeze": "* 0-1",
    "Tile": "* 1",
    "TopK": "1+ 1 -> 1+ 1+",
    "Trilu": "2+ 0-1 -> 2+",
    "Unsqueeze": "* 0-1 -> *",
    **dict.fromkeys(REDUCTIONS, "* 0-1"),
}


def is_ranked(op_type: str) -> bool:
    return op_type in _TABLE


def misses(op_type: str, i: int, shape: Sequence[object] | None) -> Axes | None:
    """Return the ranks allowed for input ``i`` of an operator if ``shape`` has a different rank; otherwise None."""
    axes = axes_of(op_type)[0]
    return axes[i] if shape is not None and i < len(axes) and shape not in axes[i] else None


@functools.cache
def axes_of(op_type: str) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
    """Return the allowed ranks of the inputs and of the outputs of an operator; unlisted ones may have any rank."""
    inputs, _, outputs = _TABLE.get(op_type, "").partition("->")
    return tuple(map(_parsed, inputs.split())), tuple(map(_parsed, outputs.split()))


def _parsed(word: str) -> Axes:
    if word == "*":
        return _ANY
    if word.endswith("+"):
        return Axes(int(word[:-1]), MOST_AXES)
    least, _, most = word.partition("-")
    return Axes(int(least), int(most or least))
