"""Mixed precision: the table of operators that run in float16 or bfloat16, and the settings of loss scaling.

The table is that of PyTorch's autocast, translated to ONNX operators. Products run in the low precision; reductions,
and operators whose results span many magnitudes, run in float32; everything else runs in the precision of its inputs.
``passes.mixed_precision`` applies it to a model before it is differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import onnx_ir as ir

from gradgraph.arguments import FINITE, NAMES, WHOLE, Kind, Table, as_names, instance
from gradgraph.errors import BuildError

METADATA_KEY = "gradgraph.precision"  # metadata key of a model of a mixed-precision step: the name of the precision
FLOAT32 = "float32"
PRECISIONS: Table[ir.DataType | None] = Table("precision", known_as={
    **dict.fromkeys(("16-mixed", "fp16", "half", "16"), "float16"),
    **dict.fromkeys(("bf16-mixed", "bf16"), "bfloat16"),
    **dict.fromkeys(("32-true", "fp32", "32"), FLOAT32),
})  # fmt: skip
PRECISIONS.add(FLOAT32, None)
PRECISIONS.add("float16", ir.DataType.FLOAT16)
PRECISIONS.add("bfloat16", ir.DataType.BFLOAT16)


def _operators(names: str) -> frozenset[str]:
    return frozenset(names.split())


PRODUCTS = _operators("Conv ConvTranspose Einsum GRU Gemm LSTM MatMul RNN")  # in the low precision
MOVES = _operators(  # in the precision of their inputs, without rounding
    "Abs Clip Concat DepthToSpace Expand Flatten Gather GatherElements GatherND GlobalMaxPool Identity Max MaxPool Min "
    "Neg Pad Relu Reshape ReverseSequence Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze Where"
)
FOLLOWS = _operators(  # in the precision of their inputs, with rounding
    "Add AveragePool Div Dropout Elu Erf Gelu HardSigmoid HardSwish LeakyRelu Mish Mul PRelu Selu Shrink Sigmoid "
    "Softsign Sub Sum Tanh ThresholdedRelu"
)

_ABOVE_ZERO = Kind("a number above 0", lambda value: FINITE.fits(value) and value > 0)


@dataclass(frozen=True)
class Precision:
    """The compute precision of a float32 model. Weights stay float32; operators read rounded copies of them.

    Args:
        name: ``"float16"``, ``"bfloat16"``, or ``"float32"`` for no change.
        float32: names and globs of nodes or operators that stay in float32.
        lower: names and globs of nodes or operators that run in the low precision, even if the table of operators says
            otherwise.
        scaled: scale the loss dynamically, so that small gradients do not vanish and large ones do not overflow; by
            default for float16.
        init_scale, growth_factor, backoff_factor, growth_interval: settings of the loss scale, as in
            ``torch.amp.GradScaler``. A step with non-finite gradients leaves the weights unchanged and multiplies the
            scale by ``backoff_factor``; after ``growth_interval`` consecutive finite steps, the scale is multiplied by
            ``growth_factor``.

    Raises:
        BuildError: the precision is unknown, or a number is out of range.
    """

    name: str
    float32: str | Sequence[str] = ()
    lower: str | Sequence[str] = ()
    scaled: bool | None = None
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        PRECISIONS.named(self.name)
        for name in ("float32", "lower"):
            NAMES.check(f"the {name} of a precision", getattr(self, name))
            object.__setattr__(self, name, tuple(as_names(getattr(self, name))))
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            _ABOVE_ZERO.check(name, getattr(self, name))
        WHOLE.check("growth_interval", self.growth_interval)
        if self.growth_interval < 1 or self.growth_factor < 1 or self.backoff_factor > 1:
            raise BuildError("growth_factor must be at least 1, backoff_factor at most 1, growth_interval at least 1")

    @property
    def dtype(self) -> ir.DataType | None:
        """The element type of the low precision; None for float32."""
        return PRECISIONS[self.name]

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled dynamically."""
        return self.name == "float16" if self.scaled is None else self.scaled and self.dtype is not None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The constructor's arguments that differ from their defaults, for the manifest."""
        given = {f.name: getattr(self, f.name) for f in fields(self)[1:] if getattr(self, f.name) != f.default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


GIVEN = instance(
    str | Precision, "'float32' (the default), another name such as 'float16', or gradgraph.Precision(...)"
)


def as_precision(given: str | Precision) -> Precision:
    """Convert a user's ``precision`` argument: the name of a precision, or a ``Precision``.

    Raises:
        BuildError: the name is unknown.
    """
    return Precision(given) if isinstance(given, str) else given
