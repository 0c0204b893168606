"""Fold BatchNormalization in training mode into the convolution before it: fewer passes over ``v = Conv(x, W)``.

Let g be the cotangent of the norm's output y, and a, k, s the ``batch_normalization_factors``. Then v has the cotangent
``a·u`` in each channel, with ``u = g − k·centred − s``. A convolution is linear, so the factor a needs no pass over u:

    ConvGradInput(a·u, W) = ConvGradInput(u, a·W)        ConvGradWeight(x, a·u) = a·ConvGradWeight(x, u)

A bias of the convolution only shifts the mean: u sums to 0, and so does the bias's gradient.

If a 1x1 kernel expands few channels to many, second moments replace v, which is never written. Let ``xc`` be x,
centred, and ``T = Σ xc xcᵀ`` over all n pixels. Then the variance of a channel of v is ``w T wᵀ / n``, where w is its
row of W. Products replace the passes over v (∘ multiplies elementwise, inv is 1/√(var + ε)):

    y  = (a W) xc + bias                 dW = a·(Q − k·(W T))    with Q = Σ g xcᵀ
    db = Σ g,  dscale = inv·Σ Q∘W        dx = (a W)ᵀ g − ((a W)ᵀ k W) xc − (a W)ᵀ s

Rounding errors: the mean of x does not matter, as x is centred first. But if the contributions of the channels of x to
a channel of v cancel, by the factor ``κ = Σ |w|·σ(x) / √(σ(v)² + ε)``, this variance has a relative error of κ²
roundings, compared with κ roundings for a variance computed from v. If κ² exceeds ``MOST_CANCELLED`` in any channel, v
is computed after all (in an If), for the variance only. In MobileNetV2, at the start and trained, κ² is 9 to 250, and
at most 400. The products of W and T cancel likewise, and so does dW. With few channels, some are often nearly linear
combinations of one or two others, as in an image of one colour. Layers with fewer than ``LEAST_CHANNELS`` channels
therefore keep the passes over v. With two channels, a dW that another norm had almost cancelled was wrong by 7 %.

Measured with onnxruntime 1.31 on two AVX512 cores, float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.conv import conv_pointwise
from gradgraph.backends.ort_cpu.conv.conv_images import MOST_PIXELS_UNBLOCKED
from gradgraph.backends.ort_cpu.conv.conv_table import layer_of
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_cpu.norm_forms import is_of_batch
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import is_standard, made_by
from gradgraph.graph.shapes import constant_of
from gradgraph.passes.normal.edit import Editor, attributes, discard, names_of
from gradgraph.rules.conv import input_gradient, weight_gradient
from gradgraph.rules.named_operators import DOMAIN
from gradgraph.rules.norm import (
    batch_normalization_factors,
    channel_sums,
    columns,
    inverse_deviation,
    unscaled_batch_normalization_gradient,
)
from gradgraph.rules.windows import spatial

# with this many channels of x, a product takes as long as the passes over v that it saves
CHANNELS_A_PASS_PAYS = 36
MOST_CANCELLED = 1000.0  # κ² up to which second moments are used: 2.5 times the largest in MobileNetV2
LEAST_CHANNELS = 8  # the minimum number of channels of x for second moments
LEAST_TIMES_THE_WEIGHTS = 8  # minimum size of v relative to W: saving a pass over v costs two over W


def fold_norms(model: ir.Model) -> ir.Model:
    """Fold, in place, each BatchNormalization used only by a convolution and its gradients; return ``model``."""
    editor = Editor(model, Builder(taken=names_of(model), named_operators=True))
    norms = [n for n in model.graph if is_standard(n, "BatchNormalization") and len(n.outputs) == 3]
    for norm in norms:
        found = _Normalized.of(editor.op, norm) if is_of_batch(attributes(norm)) else None
        if found is not None and _expands(found.layer):
            _fold_by_moments(editor, found, attributes(norm)["epsilon"])
        elif (
            found is not None
            and found.layer.images * found.layer.windows >= LEAST_TIMES_THE_WEIGHTS * found.layer.fan_in
        ):
            _fold_scale(editor, found)
    return model


def _expands(layer: Layer) -> bool:
    """Return whether y has so many more channels than x that second moments are faster than passes over v.

    Per element of v, they cost c²/m products and c/m passes more, with c channels of x and m of v.
    """
    pays = layer.c * (layer.c + CHANNELS_A_PASS_PAYS) <= CHANNELS_A_PASS_PAYS * layer.m
    return pays and layer.c >= LEAST_CHANNELS and conv_pointwise.serves(layer) and layer.windows > MOST_PIXELS_UNBLOCKED


# --- matching ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Normalized:
    """A convolution, the BatchNormalization that is the only forward reader of its output, and the gradients of both.

    Attributes:
        layer: the sizes of the convolution.
        conv, norm: the two nodes.
        gradient: the gradient operator of the norm.
        below: the gradient operators of the convolution, ConvGradInput and ConvGradWeight.
        sums: sums over space, whose sum over images is the gradient of the convolution's bias.
    """

    layer: Layer
    conv: ir.Node
    norm: ir.Node
    gradient: ir.Node
    below: list[ir.Node]
    sums: list[ir.Node]

    @classmethod
    def of(cls, op: Builder, norm: ir.Node) -> _Normalized | None:
        """Return the convolution and gradients around ``norm``; None for unknown sizes, or other readers of v or dv."""
        v = norm.inputs[0]
        conv = made_by(v, "Conv")
        if v is None or v.is_graph_output() or conv is None:
            return None
        layer = layer_of(Call.of(op, conv))
        readers = [u.node for u in v.uses() if u.node is not norm]
        if layer is None or not layer.images or len(readers) != 1 or not _is_gradient(readers[0], norm):
            return None
        dv = readers[0].outputs[0]
        reading = [u.node for u in dv.uses()]
        sums = [node for node in reading if _leads_to_bias(op, node, layer)]
        below = [node for node in reading if node not in sums]
        if dv.is_graph_output() or not all(_is_gradient_of(op, node, dv, conv, layer) for node in below):
            return None
        return cls(layer, conv, norm, readers[0], below, sums)


def _is_gradient(node: ir.Node, norm: ir.Node) -> bool:
    """Return whether ``node`` is the gradient of ``norm``, computed from its input, scale and statistics."""
    named = (node.domain, node.op_type) == (DOMAIN, "BatchNormalizationGrad") and node.graph is norm.graph
    return named and list(node.inputs[1:]) == [*norm.inputs[:2], *norm.outputs[1:]]


def _is_gradient_of(op: Builder, node: ir.Node, dv: ir.Value, conv: ir.Node, layer: Layer) -> bool:
    """Return whether ``node`` is a gradient of ``conv``, computed from ``dv`` and the inputs of ``conv``."""
    x, w = conv.inputs[:2]
    own = {"ConvGradInput": [dv, w], "ConvGradWeight": [x, dv]}.get(node.op_type)
    named = node.domain == DOMAIN and node.graph is conv.graph and list(node.inputs[:2]) == own
    return named and layer_of(Call.of(op, node)) == layer


def _leads_to_bias(op: Builder, node: ir.Node, layer: Layer) -> bool:
    """Return whether ``node`` sums over space, and only sums over images read it, as ``bias_gradient`` writes them."""
    if not _sums_over(op, node, list(range(2, 2 + len(layer.size)))):
        return False
    total = node.outputs[0]
    return not total.is_graph_output() and all(_sums_over(op, u.node, [0]) for u in total.uses())


def _sums_over(op: Builder, node: ir.Node, axes: list[int]) -> bool:
    if not is_standard(node, "ReduceSum") or len(node.inputs) != 2:
        return False
    chosen = constant_of(node.inputs[1])
    return chosen is not None and chosen.tolist() == axes and attributes(node).get("keepdims") == 0


def _replace_gradients(
    editor: Editor, found: _Normalized, dscale: Var, db: Var, below: dict[str, Callable[[], Var]]
) -> None:
    """Replace norm gradients with ``dscale`` and ``db``, and convolution gradients with results of ``below``."""
    editor.place(found.gradient)
    for node in found.below:
        editor.op.scope = node.name or ""
        editor.replace(node, below[node.op_type]())
    for sums in found.sums:
        for total in [u.node for u in sums.outputs[0].uses()]:
            editor.replace(total, editor.op.const(np.zeros(found.layer.group * found.layer.m, np.float32)))
        discard(sums)
    editor.replace(found.gradient, None, dscale, db)


# --- the scale --------------------------------------------------------------------------------------------------


def _fold_scale(editor: Editor, found: _Normalized) -> None:
    """Scale W (for dx) and dW by the factor a of v's cotangent a·u, instead of u (see the module docstring)."""
    op, gradient = editor.op, found.gradient
    op.scope = gradient.name or ""
    x, w = (op.wrap(v) for v in found.conv.inputs[:2] if v is not None)
    g, v, scale, mean, var = (op.wrap(v) for v in gradient.inputs if v is not None)
    epsilon = attributes(gradient)["epsilon"]
    u, a, dscale, db = unscaled_batch_normalization_gradient(op, g, v, scale, mean, var, epsilon=epsilon)
    a = op.Unsqueeze(a, list(range(1, w.rank)))
    where = {"group": found.layer.group, **found.layer.seen.attrs}
    below = {
        "ConvGradWeight": lambda: weight_gradient(op, x, u, w, **where) * a,
        "ConvGradInput": lambda: input_gradient(op, u, w * a, x, **where),
    }
    _replace_gradients(editor, found, dscale, db, below)


# --- by second moments ---------------------------------------------------------------------------------------


def _fold_by_moments(editor: Editor, found: _Normalized, epsilon: float) -> None:
    """Write y, dx and dW from xc and T, without v; the module's docstring has the formulas."""
    op = editor.op
    op.scope = found.norm.name or ""
    scale, bias = (op.wrap(v) for v in found.norm.inputs[1:3] if v is not None)
    expansion = _Expansion.of(op, found, epsilon)
    scaled = expansion.times(scale * inverse_deviation(op, expansion.var, epsilon))
    editor.replace(found.norm, op.Conv(expansion.xc, scaled, bias), expansion.mean, expansion.var)

    op.scope = found.gradient.name or ""
    (g,) = (op.wrap(v) for v in found.gradient.inputs[:1] if v is not None)
    q, db = weight_gradient(op, expansion.xc, g, expansion.w), channel_sums(op, g)
    dots = expansion.dots(q)
    dscale, a, k, s = batch_normalization_factors(op, g, scale, expansion.var, db, dots, epsilon)
    below = {
        "ConvGradWeight": lambda: expansion.weight_gradient(q, a, k),
        "ConvGradInput": lambda: input_gradient(op, g, scaled, expansion.xc) - expansion.back(scaled, k, s),
    }
    _replace_gradients(editor, found, dscale, db, below)
    discard(found.conv)


@dataclass(frozen=True)
class _Expansion:
    """A 1x1 convolution v = W x as a matrix product, with second moments of x.

    Attributes:
        w, rows: the weight, in its own shape and as a matrix W [M, C].
        xc: the centred input.
        mean, var: the statistics of v.
        along: W T.
    """

    op: Builder
    w: Var
    rows: Var
    xc: Var
    mean: Var
    var: Var
    along: Var

    @classmethod
    def of(cls, op: Builder, found: _Normalized, epsilon: float) -> _Expansion:
        layer, share = found.layer, 1 / (found.layer.images * found.layer.pixels)
        x, w, *b = (op.wrap(v) for v in found.conv.inputs if v is not None)
        mean_x = channel_sums(op, x) * share
        xc, rows = x - columns(op, mean_x, x), op.Reshape(w, [layer.m, layer.c])
        like_t = ir.Value(name="T", type=w.value.type, shape=ir.Shape([layer.c, layer.c, *layer.seen.kernel]))
        moments = op.Reshape(weight_gradient(op, xc, xc, op.wrap(like_t)), [layer.c, layer.c])
        along = rows @ moments
        mean = op.Reshape(rows @ op.Reshape(mean_x, [layer.c, 1]), [layer.m])
        var = op.Max(_row_sums(op, along * rows) * share, 0.0)
        deviations = op.Sqrt(_row_sums(op, moments * np.eye(layer.c, dtype=np.float32)) * share)
        var = _exact_where_it_cancels(op, var, xc, w, op.Abs(rows) @ _column(op, deviations), epsilon, share)
        return cls(op, w, rows, xc, op.sum_of([mean, *b]), var, along)

    def times(self, factors: Var) -> Var:
        """Return W with one factor per channel of y, in the shape of the weight."""
        return self.op.Reshape(self.rows * _column(self.op, factors), self.op.shape(self.w))

    def dots(self, q: Var) -> Var:
        """Return ``Σ Q∘W`` over the channels of x, which is ``Σ g·centred``."""
        return _row_sums(self.op, self.op.Reshape(q, self.op.shape(self.rows)) * self.rows)

    def weight_gradient(self, q: Var, a: Var, k: Var) -> Var:
        """Return ``dW = a·(Q − k·(W T))``."""
        op = self.op
        dw = (op.Reshape(q, op.shape(self.rows)) - self.along * _column(op, k)) * _column(op, a)
        return op.Reshape(dw, op.shape(self.w))

    def back(self, scaled: Var, k: Var, s: Var) -> Var:
        """Return ``((a W)ᵀ k W) xc + (a W)ᵀ s``, the part of dx to subtract; ``scaled`` is a W."""
        op = self.op
        turned = op.Transpose(op.Reshape(scaled, op.shape(self.rows)), perm=[1, 0])
        weights = op.Unsqueeze(turned @ (self.rows * _column(op, k)), spatial(self.w))
        return op.Conv(self.xc, weights, op.Reshape(turned @ _column(op, s), [-1]))


def _exact_where_it_cancels(op: Builder, var: Var, xc: Var, w: Var, reach: Var, epsilon: float, share: float) -> Var:
    """Return ``var``, the variance of v by moments, or the variance of ``Conv(xc, w)`` if ``var`` is inaccurate.

    ``reach`` is ``Σ |w|·σ(x)`` per channel, its square is compared with ``var + epsilon``; ``share`` is 1 / pixels.
    """
    reach = op.Reshape(reach, [-1])
    cancels = op.ReduceMax(reach * reach - MOST_CANCELLED * (var + epsilon), keepdims=0) > 0.0

    def exact() -> list[Var]:
        v = op.Conv(xc, w)
        return [op.like(channel_sums(op, v * v) * share, var)]

    then, otherwise = op.graph([], exact, "exact"), op.graph([], lambda: [var], "moments")
    chosen = op.If(cancels, then_branch=then, else_branch=otherwise)
    chosen.value.type = var.value.type
    return op.like(chosen, var)


def _row_sums(op: Builder, matrix: Var) -> Var:
    return op.ReduceSum(matrix, [1], keepdims=0)


def _column(op: Builder, v: Var) -> Var:
    return op.Unsqueeze(v, [1])
