"""Convert operators and attributes of opsets 22 to 28 to opset 21.

``@since(24, "Swish")`` registers the converter for nodes of opset 24 and later; converters are described in
``upgrade``. A new operator without a converter here is replaced by its schema's function body (``function_bodies``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import NEWEST_OPSET, describe
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal.functions.function_bodies import instantiate_body, is_function, operators
from gradgraph.passes.normal.opsets.bit_cast import reinterpreted
from gradgraph.passes.normal.opsets.cumprod import running_product
from gradgraph.passes.normal.opsets.upgrade import F, Form

_FORMS: dict[str, tuple[int, Form]] = {}


def since(opset: int, *op_types: str) -> Callable[[F], F]:
    def register(form: F) -> F:
        _FORMS.update(dict.fromkeys(op_types, (opset, form)))
        return form

    return register


def form_for(op_type: str, opset: int) -> Form | None:
    """Return the converter of an operator of ``opset``; None if its nodes are valid at opset 21."""
    if opset <= OPSET:
        return None
    first, form = _FORMS.get(op_type, (NEWEST_OPSET + 1, None))
    if opset >= first:
        return form
    return _by_body if op_type in _new_operators() else None


def _new_operators() -> frozenset[str]:
    return operators(NEWEST_OPSET) - operators(OPSET)


def is_new(op_type: str) -> bool:
    """Whether the operator was added after opset 21."""
    return op_type in _new_operators()


def has_form(op_type: str) -> bool:
    """Whether an operator that opset 21 lacks has a converter or a function body."""
    return op_type in _FORMS or is_function(op_type, NEWEST_OPSET)


def _by_body(op: Builder, node: ir.Node, *inputs: Var | None, **attrs: Any) -> tuple[Var | None, ...]:
    outputs = instantiate_body(op, node, NEWEST_OPSET)
    if outputs is None:
        first = onnx.defs.get_schema(node.op_type, NEWEST_OPSET).since_version
        raise ModelError(
            f"{describe(node)} cannot be converted to opset {OPSET} without known shapes; export the model "
            f"with fixed shapes, or with an opset before {first}"
        )
    return outputs


# --- activations and normalization ------------------------------------------------------------------------


@since(24, "Swish")
def swish(op: Builder, node: ir.Node, x: Var, *, alpha: float = 1.0) -> Any:
    return x * op.Sigmoid(x if alpha == 1.0 else alpha * x)


@since(28, "SwiGLU")
def swiglu(op: Builder, node: ir.Node, a: Var, b: Var, *, alpha: float = 1.0) -> Any:
    return swish(op, node, a, alpha=alpha) * b


@since(23, "RMSNormalization")
def rms_normalization(
    op: Builder, node: ir.Node, x: Var, scale: Var, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    """Compute x / sqrt(mean(x²) + ε) · scale; the root is computed in the stash type or a wider one."""
    stash = ir.DataType(stash_type)
    wide = op.cast(x, stash) if x.dtype.bitwidth < stash.bitwidth else x
    axes = list(range(axis if axis < 0 else axis - x.rank, 0))
    rms = op.Sqrt(op.ReduceMean(wide * wide, axes, keepdims=1) + epsilon)
    return op.cast(op.cast(wide / rms, x.dtype), scale.dtype) * scale


# --- attributes -------------------------------------------------------------------------------------------


@since(24, "Cast", "CastLike")
def cast(op: Builder, node: ir.Node, *inputs: Var, round_mode: str = "up", **attrs: Any) -> Any:
    """Remove ``round_mode``, which matters only for float8e8m0, a type that opset 21 does not have."""
    return op.emit(node.op_type, *inputs, **attrs)


@since(27, "Range")
def range_(op: Builder, node: ir.Node, start: Var, limit: Var, delta: Var, *, stash_type: int = 1) -> Any:
    return op.Range(start, limit, delta)


@since(23, "DequantizeLinear")
def dequantize_linear(
    op: Builder, node: ir.Node, x: Var, scale: Var, *rest: Var, output_dtype: int = 0, **attrs: Any
) -> Any:
    y = op.DequantizeLinear(x, scale, *rest, **attrs)
    return op.cast(y, ir.DataType(output_dtype)) if output_dtype else y


@since(23, "QuantizeLinear")
def quantize_linear(
    op: Builder, node: ir.Node, x: Var, scale: Var, *rest: Var, precision: int = 0, **attrs: Any
) -> Any:
    if precision not in (0, int(scale.dtype)):
        raise ModelError(
            f"{describe(node)} requires precision {ir.DataType(precision).name}, which opset {OPSET} cannot express"
        )
    return op.QuantizeLinear(x, scale, *rest, **attrs)


@since(28, "Mod")
def mod(op: Builder, node: ir.Node, a: Var, b: Var, *, fmod: int = 0) -> Any:
    """Emulate fmod=0 for floats, whose result has the sign of b; opset 21 supports only fmod=1, with the sign of a."""
    if fmod or not a.is_float:
        return op.Mod(a, b, fmod=fmod)
    rest = op.Mod(a, b, fmod=1)
    other_sign = op.Less(rest * op.Sign(b), 0.0)
    return op.Where(other_sign, rest + b, rest)


@since(28, "SpaceToDepth")
def space_to_depth(op: Builder, node: ir.Node, x: Var, *, blocksize: int, mode: str = "DCR") -> Any:
    """Convert SpaceToDepth; mode CRD keeps the channel outermost: [N, C, H, W] -> [N, C, b, b, H/b, W/b]."""
    if mode == "DCR":
        return op.SpaceToDepth(x, blocksize=blocksize)
    n, c, h, w = (op.dim(x, i) for i in range(4))
    b = op.const([blocksize])
    split = op.Reshape(x, op.Concat(n, c, op.Div(h, b), b, op.Div(w, b), b, axis=0))
    moved = op.Transpose(split, perm=[0, 1, 3, 5, 2, 4])
    return op.Reshape(moved, op.Concat(n, op.Mul(c, [blocksize**2]), op.Div(h, b), op.Div(w, b), axis=0))


# --- operators without a function body ----------------------------------------------------------------------


@since(24, "TensorScatter")
def tensor_scatter(
    op: Builder,
    node: ir.Node,
    past: Var,
    update: Var,
    start: Var | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Any:
    """Write the update of sample b at positions start[b], start[b] + 1, … of ``axis``, modulo its size if circular."""
    axis = axis % past.rank
    steps = op.Range(0, op.Squeeze(op.dim(update, axis)), 1)
    trailing = list(range(1, past.rank - axis))
    positions = op.Unsqueeze(steps, trailing) if trailing else steps
    if start is not None:
        positions = op.Unsqueeze(start, list(range(1, past.rank))) + positions
    if mode == "circular":
        positions = op.Mod(positions, op.dim(past, axis))
    return op.ScatterElements(past, op.Expand(positions, op.shape(update)), update, axis=axis)


@since(26, "CumProd")
def cum_prod(op: Builder, node: ir.Node, x: Var, axis: Var, *, exclusive: int = 0, reverse: int = 0) -> Any:
    return running_product(op, x, op.Reshape(op.cast(axis, ir.DataType.INT64), [1]), bool(exclusive), bool(reverse))


@since(26, "BitCast")
def bit_cast(op: Builder, node: ir.Node, x: Var, *, to: int) -> Any:
    y = reinterpreted(op, x, ir.DataType(to))
    if y is None:
        raise ModelError(
            f"{describe(node)} reinterprets {shown(x.dtype.name)} as {shown(ir.DataType(to).name)}, which opset "
            f"{OPSET} cannot express; reinterpret float16, float32 or float64 as integers, or these as floats"
        )
    return y
