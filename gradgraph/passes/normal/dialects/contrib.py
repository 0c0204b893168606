"""Pass: rewrite onnxruntime's fused operators with standard operators; its optimizer writes them into saved models.

``@fused("BiasGelu")`` registers the form of an operator of domain com.microsoft: a function of the builder, the node,
its inputs, and its attributes by keyword. It returns the outputs, or ``None`` to keep the node. An operator without a
form is not changed. Forms of other domains (``ml_models``) are in the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.checks import describe
from gradgraph.graph.shape_inference import infer_nodes, shape_of
from gradgraph.graph.shapes import OPSET, as_dims
from gradgraph.graph.size_context import is_generated
from gradgraph.passes.normal.dialects.kept_operators import infer_kept
from gradgraph.passes.normal.dialects.packed_weights import as_stored
from gradgraph.passes.normal.edit import Editor, is_wanted, nodes_of
from gradgraph.passes.normal.opsets.downgrade import rms_normalization

DOMAIN = "com.microsoft"

Form = Callable[..., Any]
_FORMS: dict[tuple[str, str], Form] = {}


def fused(*op_types: str, domain: str = DOMAIN) -> Callable[[Form], Form]:
    def register(form: Form) -> Form:
        _FORMS.update({(domain, op_type): form for op_type in op_types})
        return form

    return register


def forms() -> frozenset[tuple[str, str]]:
    """Return the domain and name of every fused operator that has a form."""
    return frozenset(_FORMS)


def decompose(model: ir.Model) -> bool:
    """Replace the operators in the table with standard operators; return True if anything was changed.

    Types and shapes of the nodes in between, and of operators of com.microsoft without a form, are inferred on the way,
    because forms and rules depend on them. Imports of unused
    domains are removed: onnxruntime imports every domain that it supports.

    Raises:
        ModelError: a node has an option that its form does not support.
    """
    if not any(_form_of(n) is not None or _is_open(n) for n in nodes_of(model)):
        _forget_unused_domains(model)
        return False
    editor = Editor(model)
    opset = model.opset_imports.get("", OPSET)
    changed = False
    for node in list(nodes_of(model)):
        form = _form_of(node)
        if form is not None:
            written = editor.write_form(node, form, "cannot be written with standard operators")
            changed |= bool(written) or (_is_open(node) and infer_kept(node))
            for new in written:
                new.version = new.version or OPSET
                for value in new.outputs:
                    shape_of(value)  # infers the shape again: an earlier call recorded it as unknown
        elif _is_open(node):
            changed |= infer_kept(node)
        elif any(v.type is None or v.shape is None or any(map(is_generated, as_dims(v.shape))) for v in node.outputs):
            infer_nodes([node], opset)
    _forget_unused_domains(model)
    return changed


def _is_open(node: ir.Node) -> bool:
    """Whether a node of com.microsoft has an output of unknown type or shape."""
    return node.domain == DOMAIN and any(v.type is None or v.shape is None for v in node.outputs)


def _forget_unused_domains(model: ir.Model) -> None:
    used = {"", *(n.domain for n in nodes_of(model))}
    for domain in set(model.opset_imports) - used:
        del model.opset_imports[domain]


def _form_of(node: ir.Node) -> Form | None:
    return _FORMS.get((node.domain, node.op_type))


def refuse(node: ir.Node, reason: str) -> ModelError:
    return ModelError(f"{describe(node)} {reason}, which standard operators cannot express; use the original model")


def reads_output(node: ir.Node, i: int) -> bool:
    return i < len(node.outputs) and is_wanted(node.outputs[i])


# --- products --------------------------------------------------------------------------------------------


@fused("FusedMatMul", "TransposeMatMul")
def fused_mat_mul(
    op: Builder,
    node: ir.Node,
    a: Var,
    b: Var,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Any:
    y = _transposed(op, a, transA, transBatchA) @ _transposed(op, b, transB, transBatchB)
    return y if alpha == 1.0 else y * alpha


def _transposed(op: Builder, x: Var, last: int, batch: int) -> Var:
    """Move axis 0 after the batch axes if ``batch``; swap the last two axes if ``last``. Vectors are not changed."""
    if x.rank < 2 or not (last or batch):
        return x
    perm = [*range(1, x.rank - 1), 0, x.rank - 1] if batch else list(range(x.rank))
    if last:
        perm[-2:] = perm[:-3:-1]
    return op.Transpose(x, perm=perm)


@fused("FusedGemm")
def fused_gemm(op: Builder, node: ir.Node, a: Var, b: Var, c: Var | None = None, **attrs: Any) -> Any:
    activation = _activation_of(attrs)
    return _activated(op, node, op.Gemm(a, b, c, **attrs), *activation)


@fused("FusedMatMulActivation")
def fused_mat_mul_activation(
    op: Builder, node: ir.Node, a: Var, b: Var, *, activation_axis: int | None = None, **attrs: Any
) -> Any:
    activation = _activation_of(attrs)
    return _activated(op, node, fused_mat_mul(op, node, a, b, **attrs), *activation)


def _activation_of(attrs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Remove the activation from the attributes of a product; return its name and its parameters."""
    prefix = "activation_"
    params = {name.removeprefix(prefix): attrs.pop(name) for name in [*attrs] if name.startswith(prefix)}
    return attrs.pop("activation", ""), params


@fused("FusedConv", "NhwcConv", "NhwcFusedConv")
def fused_conv(
    op: Builder,
    node: ir.Node,
    x: Var,
    w: Var,
    b: Var | None = None,
    added: Var | None = None,
    *,
    activation: str = "",
    activation_params: Any = (),
    **attrs: Any,
) -> Any:
    """Convolve x, add ``added``, and apply the activation.

    For Nhwc operators, x is [batch, *sizes, channels], and transposed before and after. NhwcConv also has the channels
    of its weight last, as onnxruntime's optimizer writes it.
    """
    is_last = node.op_type != "FusedConv"
    w = _channels_first(op, w) if node.op_type == "NhwcConv" else w
    y = op.Conv(_channels_first(op, x) if is_last else x, w, b, **attrs)
    y = _channels_last(op, y, x.rank) if is_last else y
    y = y if added is None else y + added
    names = ("min", "max") if activation == "Clip" else ("alpha", "beta")
    return _activated(op, node, y, activation, dict(zip(names, activation_params, strict=False)))


def _channels_first(op: Builder, x: Var) -> Var:
    return op.Transpose(x, perm=[0, x.rank - 1, *range(1, x.rank - 1)])


def _channels_last(op: Builder, x: Var, rank: int) -> Var:
    return op.Transpose(x, perm=[0, *range(2, rank), 1])


def _activated(op: Builder, node: ir.Node, x: Var, activation: str, params: dict[str, Any]) -> Any:
    """Apply the operator ``activation``, with its defaults for missing ``params``; return ``x`` if it is empty."""
    if not activation:
        return x
    if activation == "Clip":
        return op.Clip(x, params["min"], params["max"])
    if activation not in _ACTIVATIONS:
        raise refuse(node, f"has the activation '{activation}'")
    known = onnx.defs.get_schema(activation, OPSET).attributes
    return op.emit(activation, x, **{k: v for k, v in params.items() if k in known})


_ACTIVATIONS = frozenset(
    {"Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh"}
    | {"ThresholdedRelu"}
)


@fused("NhwcMaxPool")
def nhwc_max_pool(op: Builder, node: ir.Node, x: Var, **attrs: Any) -> Any:
    """Pool in NCHW layout, with Transposes before and after. The inputs are 8-bit integers, so no gradient passes."""
    return _channels_last(op, op.MaxPool(_channels_first(op, x), **attrs), x.rank)


# --- activations -----------------------------------------------------------------------------------------


@fused("Gelu")
def gelu(op: Builder, node: ir.Node, x: Var) -> Any:
    return op.Gelu(x)


@fused("BiasGelu")
def bias_gelu(op: Builder, node: ir.Node, x: Var, bias: Var) -> Any:
    return op.Gelu(x + bias)


@fused("FastGelu")
def fast_gelu(op: Builder, node: ir.Node, x: Var, bias: Var | None = None) -> Any:
    return op.Gelu(x if bias is None else x + bias, approximate="tanh")


@fused("QuickGelu")
def quick_gelu(op: Builder, node: ir.Node, x: Var, *, alpha: float = 1.702) -> Any:
    return x * op.Sigmoid(x if alpha == 1.0 else x * alpha)


@fused("ScaledSiLU")
def scaled_silu(op: Builder, node: ir.Node, x: Var, scale: Var | None = None, *, alpha: float = 1.0) -> Any:
    z = x * (alpha if scale is None else op.cast(scale, x.dtype))
    return z * op.Sigmoid(z)


@fused("BiasSplitGelu")
def bias_split_gelu(op: Builder, node: ir.Node, x: Var, bias: Var) -> Any:
    left, right = op.Split(x + bias, axis=-1, num_outputs=2, outputs=2)
    return left * op.Gelu(right)


@fused("BiasAdd")
def bias_add(op: Builder, node: ir.Node, x: Var, bias: Var, skip: Var) -> Any:
    return x + bias + skip


@fused("BiasDropout")
def bias_dropout(
    op: Builder,
    node: ir.Node,
    x: Var,
    bias: Var,
    residual: Var | None = None,
    ratio: Var | None = None,
    training: Var | None = None,
    *,
    seed: int | None = None,
) -> Any:
    y, mask = op.Dropout(x + bias, ratio, training, seed=seed, outputs=2)
    return (y if residual is None else y + residual), mask


@fused("BiasSoftmax")
def bias_softmax(op: Builder, node: ir.Node, x: Var, bias: Var, *, axis: int = 1, is_inner_broadcast: int) -> Any:
    """Apply a softmax over the axes from ``axis`` to the last one to ``x + bias``.

    The bias is repeated along the axes just before ``axis`` if ``is_inner_broadcast``, otherwise along the first axes.
    """
    axis = axis % x.rank
    if is_inner_broadcast and bias.rank < x.rank:
        missing = x.rank - bias.rank
        bias = op.Unsqueeze(bias, list(range(axis - missing, axis)))
    biased = x + bias
    if axis == x.rank - 1:
        return op.Softmax(biased, axis=-1)
    return op.Reshape(op.Softmax(op.Flatten(biased, axis=axis), axis=-1), op.shape(x))


# --- normalization ---------------------------------------------------------------------------------------


@fused("SimplifiedLayerNormalization")
@fused("SimplifiedLayerNormalization", domain="")
def simplified_layer_normalization(
    op: Builder, node: ir.Node, x: Var, scale: Var, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    y = rms_normalization(op, node, x, scale, axis=axis, epsilon=epsilon, stash_type=stash_type)
    if not reads_output(node, 1):
        return y
    axes = list(range(axis if axis < 0 else axis - x.rank, 0))
    return y, _inverse_rms(op, op.cast(x, ir.DataType(stash_type)), axes, epsilon)


def _inverse_rms(op: Builder, x: Var, axes: list[int], epsilon: float) -> Var:
    return op.Reciprocal(op.Sqrt(op.ReduceMean(x * x, axes, keepdims=1) + epsilon))


@fused("SkipLayerNormalization")
def skip_layer_normalization(
    op: Builder,
    node: ir.Node,
    x: Var,
    skip: Var,
    gamma: Var,
    beta: Var | None = None,
    bias: Var | None = None,
    *,
    epsilon: float = 1e-12,
) -> Any:
    total = x + skip if bias is None else x + skip + bias
    outputs = 3 if reads_output(node, 1) or reads_output(node, 2) else 1
    y, *statistics = all_of(op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon, outputs=outputs))
    return y, *(statistics or (None, None)), total


@fused("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(
    op: Builder, node: ir.Node, x: Var, skip: Var, gamma: Var, bias: Var | None = None, *, epsilon: float = 1e-12
) -> Any:
    total = x + skip if bias is None else x + skip + bias
    y = rms_normalization(op, node, total, gamma, epsilon=epsilon)
    inverse = _inverse_rms(op, total, [-1], epsilon) if reads_output(node, 2) else None
    return y, None, inverse, total


@fused("EmbedLayerNormalization")
def embed_layer_normalization(
    op: Builder,
    node: ir.Node,
    ids: Var,
    segments: Var | None,
    words: Var,
    places: Var,
    kinds: Var | None,
    gamma: Var,
    beta: Var,
    mask: Var | None = None,
    positions: Var | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
) -> Any:
    """Add and normalise the embeddings of word, position and, optionally, segment.

    The second output, ``mask_index``, is the length of each sample.
    """
    if positions is None:
        place = op.Slice(places, [0], op.dim(ids, 1), [0])
    else:
        place = op.Gather(places, positions)
    total = op.Gather(words, ids) + place
    if segments is not None and kinds is not None:
        total = total + op.Gather(kinds, segments)
    y = op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon)
    if not reads_output(node, 1):
        return y, None, total
    if mask is None:
        return y, op.full(op.dim(ids, 0), 0, ir.DataType.INT32), total
    return y, op.ReduceSum(op.cast(op.Equal(mask, 1), ir.DataType.INT32), [1], keepdims=0), total


@fused("GroupNorm")
def group_norm(
    op: Builder,
    node: ir.Node,
    x: Var,
    gamma: Var,
    beta: Var,
    *,
    groups: int,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
) -> Any:
    front = _channels_first(op, x) if channels_last else x
    gamma, beta = op.cast(gamma, x.dtype), op.cast(beta, x.dtype)
    y = op.GroupNormalization(front, gamma, beta, num_groups=groups, epsilon=epsilon)
    y = y * op.Sigmoid(y) if activation else y
    return _channels_last(op, y, x.rank) if channels_last else y


@fused("SkipGroupNorm")
def skip_group_norm(
    op: Builder, node: ir.Node, x: Var, gamma: Var, beta: Var, skip: Var, bias: Var | None = None, **attrs: Any
) -> Any:
    """Normalise ``x + skip + bias``; skip [samples, channels] and bias [channels] broadcast over the image axes."""
    image = [1, 2] if attrs.get("channels_last", 1) else [2, 3]
    if skip.rank == 2:
        skip = op.Unsqueeze(skip, image)
    if bias is not None and image == [2, 3]:
        bias = op.Unsqueeze(bias, [1, 2])
    total = x + skip if bias is None else x + skip + bias
    return group_norm(op, node, total, gamma, beta, **attrs), total


# --- quantized weights -------------------------------------------------------------------------------------


@fused("QuantizeLinear", "DequantizeLinear")
def quantization(
    op: Builder, node: ir.Node, x: Var, scale: Var, zero_point: Var | None = None, *, axis: int = 1
) -> Any:
    return op.emit(node.op_type, x, scale, zero_point, axis=axis)


@fused("MatMulNBits")
def mat_mul_n_bits(
    op: Builder,
    node: ir.Node,
    a: Var,
    packed: Var,
    scales: Var,
    zero_points: Var | None = None,
    group_index: Var | None = None,
    bias: Var | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Any:
    """Compute A · Wᵀ + bias with dequantized W.

    ``accuracy_level`` allows a runtime to round A; here the product is exact.
    """
    if weight_prepacked or group_index is not None:
        raise refuse(node, "has weights packed for one kind of processor" if weight_prepacked else "reorders groups")
    if zero_points is not None and zero_points.is_float:
        y = _by_sums_of_blocks(op, a, packed, scales, zero_points, (N, K), bits, block_size)
    else:
        y = None
    if y is None:
        w = dequantized(op, node, packed, scales, zero_points, (N, K), bits, block_size, a.dtype)
        y = a @ op.Transpose(w, perm=[1, 0])
    return y if bias is None else y + bias


def _by_sums_of_blocks(
    op: Builder, a: Var, packed: Var, scales: Var, points: Var, sizes: tuple[int, int], bits: int, block_size: int
) -> Var | None:
    """Compute A · Wᵀ for float zero points z from the weight as stored; return None if its layout does not allow that.

    ``Σ (q − z)·s·a = Σ (q − m)·s·a + Σ over blocks of (m − z)·s·(the sum of a in the block)``, with the stored integers
    q, the scales s, the entries a of A, and m = 2^(bits−1).
    """
    rows, columns = sizes
    if a.shape is None or scales.dtype != a.dtype:
        return None
    w = as_stored(op, packed, scales, None, sizes, bits, block_size)
    if w is None:
        return None
    per_block = [rows, columns // block_size]
    offsets = (2.0 ** (bits - 1) - op.cast(op.Reshape(points, per_block), a.dtype)) * op.Reshape(scales, per_block)
    in_blocks = op.Reshape(a, [*[0] * (a.rank - 1), per_block[1], block_size])
    sums = op.ReduceSum(in_blocks, [-1], keepdims=0)
    return a @ op.Transpose(w, perm=[1, 0]) + sums @ op.Transpose(offsets, perm=[1, 0])


def dequantized(
    op: Builder,
    node: ir.Node,
    packed: Var,
    scales: Var,
    zero_points: Var | None,
    sizes: tuple[int, int],
    bits: int,
    block_size: int,
    dtype: ir.DataType,
) -> Var:
    """Compute W[n, k] = (q[n, k] − zero[n, block]) · scale[n, block], of ``sizes`` (N, K), with ``bits`` bits per q."""
    rows, columns = sizes
    kept = as_stored(op, packed, scales, zero_points, sizes, bits, block_size) if scales.dtype == dtype else None
    if kept is not None:
        return kept
    blocks = -(-columns // block_size)
    q = op.cast(unpacked(op, node, packed, bits, [rows, blocks, block_size]), dtype)
    if zero_points is None:
        zero: Any = float(2 ** (bits - 1))
    elif zero_points.is_float:
        zero = op.Reshape(zero_points, [rows, blocks, 1])
    else:
        zero = op.cast(unpacked(op, node, zero_points, bits, [rows, blocks, 1]), dtype)
    w = op.Reshape((q - zero) * op.Reshape(op.cast(scales, dtype), [rows, blocks, 1]), [rows, blocks * block_size])
    return w if blocks * block_size == columns else op.Slice(w, [0], [columns], [1])


def unpacked(op: Builder, node: ir.Node, packed: Var, bits: int, shape: list[int]) -> Var:
    """Unpack numbers of 2, 4 or 8 bits, lowest bits first. Rows may end in unused bits.

    Constants are unpacked immediately, other tensors by nodes.
    """
    if bits not in (2, 4, 8):
        raise refuse(node, f"has weights of {bits} bits")
    rows, count = shape[0], shape[1] * shape[2]
    steps = [2**shift for shift in range(0, 8, bits)]
    if packed.const is not None:
        split = packed.const.reshape(rows, -1, 1).astype(np.int16) // np.array(steps, np.int16) % 2**bits
        return op.const(split.reshape(rows, -1)[:, :count].reshape(shape).astype(np.uint8))
    column = op.cast(op.Reshape(packed, [rows, -1, 1]), ir.DataType.INT32)
    split_now = op.Mod(op.Div(column, op.const(steps, ir.DataType.INT32)), 2**bits)
    return op.Reshape(op.Slice(op.Reshape(split_now, [rows, -1]), [0], [count], [1]), shape)
