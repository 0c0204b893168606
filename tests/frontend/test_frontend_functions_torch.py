"""Every function computes what PyTorch's of the same name does: one expression, read by both."""

import re
from pathlib import Path

import numpy as np
import pytest

from gradgraph import losses
from gradgraph.frontend import functional, nn
from tests.kit.frontend_parity import declared_shapes_hold, drawn, model_of, run_model

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch


class Theirs:
    """torch.nn.functional, then torch."""

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name, None) or getattr(torch, name)


R = {"x": ((2, 3, 4), "real")}
P = {"x": ((2, 3, 4), "positive")}
U = {"x": ((2, 3, 4), "unit")}
RR = {"x": ((2, 3, 4), "real"), "y": ((2, 3, 4), "real")}
RB = {"x": ((2, 3, 4), "real"), "y": ((3, 1), "real")}
RP = {"x": ((2, 3, 4), "real"), "y": ((2, 3, 4), "positive")}
PR = {"x": ((2, 3, 4), "positive"), "y": ((2, 3, 4), "real")}
I7 = {"x": ((2, 3, 4), 7)}
II = {"x": ((2, 3, 4), 7), "y": ((2, 3, 4), 5)}
M = {"x": ((2, 3, 4), "mask")}
RM = {"x": ((2, 3, 4), "real"), "m": ((2, 3, 4), "mask")}
MM = {"x": ((2, 3, 4), "mask"), "y": ((2, 3, 4), "mask")}
IMG = {"x": ((2, 3, 5, 6), "real")}
VOLUME = {"x": ((2, 2, 4, 5, 6), "real")}
QKV = {"q": ((2, 2, 5, 4), "real"), "k": ((2, 2, 6, 4), "real"), "v": ((2, 2, 6, 3), "real")}
CLS = {"x": ((4, 5), "real"), "t": ((4,), 5)}
CLS2 = {"x": ((4, 5, 2, 3), "real"), "t": ((4, 2, 3), 5)}
UU = {"x": ((4, 5), "unit"), "t": ((4, 5), "unit")}
RU = {"x": ((4, 5), "real"), "t": ((4, 5), "unit")}
DIFF = {"x": ((4, 5), "real"), "t": ((4, 5), "real")}
PAIR = {"x": ((4, 5), "real"), "y": ((4, 5), "real")}


def each(names, spec, call="x"):
    """The functions of these names with the same arguments."""
    return [(f"F.{name}({call})", spec) for name in names.split()]


ELEMENTWISE = [
    *[
        (f"F.{f}(x)", R)
        for f in [
            "abs",
            "sign",
            "neg",
            "exp",
            "exp2",
            "expm1",
            "square",
            "sin",
            "cos",
            "tan",
            "atan",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "erf",
            "erfc",
        ]
    ],
    *each("floor ceil round trunc frac sigmoid isnan isinf isfinite nan_to_num", R),
    *each("log log2 log10 log1p sqrt rsqrt reciprocal", P),
    *each("asin acos atanh logit", U),
    ("F.acosh(x + 1.1)", P),
    *each("relu relu6 elu celu selu gelu silu mish hardswish hardsigmoid hardtanh", R),
    *each("logsigmoid softplus softsign tanhshrink softshrink hardshrink leaky_relu", R),
    ("F.threshold(x, 0.2, -3.0)", R),
    ("F.glu(x)", R),
    ("F.softmax(x, dim=1) + F.softmin(x, -1) + F.log_softmax(x, 0)", R),
    ("F.logit(x, 0.2)", U),
    *each("add sub mul maximum minimum eq ne lt le gt ge logaddexp", RB, "x, y"),
    *each("div floor_divide remainder fmod", RP, "x, y"),
    *each("logical_and logical_or logical_xor", MM, "x, y"),
    ("F.logical_not(x)", M),
    ("F.add(x, y, alpha=2) + F.sub(x, y, alpha=3)", RR),
    ("F.div(x, y, rounding_mode='floor') + F.div(x, y, rounding_mode='trunc')", RP),
    ("F.div(x, y + 1, rounding_mode='trunc')", II),
    ("F.pow(x, 2)", R),
    ("F.pow(x, 3.0) + x ** -1", P),
    ("F.pow(x, y)", PR),
    ("2.0 ** x", R),
    ("2 ** x", R),
    ("x ** 2", I7),
    ("F.clamp(x, -0.3, 0.4) + F.clamp(x, min=0.1) + F.clamp(x, max=0.2)", R),
    ("F.clamp(x, y - 1, y)", RR),
    ("x.clamp(1, 5)", I7),
    ("F.where(x > y, x, y * 2)", RR),
    ("F.where(m, x, 0.0)", RM),
    ("x.masked_fill(m, -1.5)", RM),
    ("F.lerp(x, y, 0.3)", RR),
    ("F.addcmul(x, x, y, value=0.5) + F.addcdiv(x, x, y, value=0.3)", RP),
    # promotion of types
    ("x + 1", I7),
    ("x + 1.5", I7),
    ("x / 2", I7),
    ("x // 2 - (-x) // 4 + (-x) % 5", I7),
    ("x % 0.7", R),
    ("x // 0.7", R),
    ("1 - x", R),
    ("3.0 / x", P),
    ("7 // (x + 1) + 5 % (x + 1)", I7),
    ("x * y", II),
    ("x + m", RM),
    ("x * (x > 0)", R),
    ("x + y", MM),
    ("x * y", MM),
    ("(x & y) | ~x ^ y", MM),
    ("(x & y) | (x ^ 3)", II),
    ("-x + abs(x)", R),
    ("(x > 0).float() + (x > 1).long()", R),
    ("x.double() + x.half().float()", R),
    ("x.int() + 1", R),
    ("x.bool()", I7),
]

REDUCTIONS = [
    ("x.sum()", R),
    ("x.sum(1) + x.sum(dim=1, keepdim=True).squeeze(1)", R),
    ("x.sum((0, -1))", R),
    ("x.sum(0)", I7),
    ("x.sum(2)", M),
    ("x.mean() + x.mean(-1)", R),
    ("x.mean((1, 2), keepdim=True)", R),
    ("x.prod(1)", R),
    ("x.max() - x.min()", R),
    ("x.max(1)[0]", R),
    ("x.max(1).indices", R),
    ("x.min(-1, keepdim=True).values", R),
    ("x.max(dim=2)[1]", I7),
    ("F.max(x, y) + F.min(x, y)", RR),
    ("x.amax(1) + x.amin((1,))", R),
    ("x.argmax(1)", R),
    ("x.argmin()", R),
    ("x.argmax(-1, keepdim=True)", R),
    ("x.var()", R),
    ("x.var(1) + x.std(1, unbiased=False)", R),
    ("x.var((0, 2), correction=0, keepdim=True)", R),
    ("F.std(x, 0)", R),
    ("F.logsumexp(x, 1)", R),
    ("F.logsumexp(x * 100, (0, 2), keepdim=True)", R),
    ("x.norm(dim=1) + x.norm(p=1, dim=1) + x.norm(p=3, dim=1)", R),
    ("x.norm(p=float('inf'), dim=1)", R),
    ("x.any()", M),
    ("x.any(1)", M),
    ("x.all(0)", M),
    ("x.cumsum(1)", R),
    ("x.cumsum(-1)", I7),
    ("x.topk(2)[0]", R),
    ("F.topk(x, 2, dim=1, largest=False).indices", R),
    ("x.sort(1, descending=True)[0]", R),
    ("F.sort(x)[0]", R),
    ("F.argsort(x, 1)", R),
    ("F.normalize(x) + F.normalize(x, p=1, dim=2)", R),
    ("F.cosine_similarity(x, y, dim=1)", RR),
]

SHAPES = [
    ("x.reshape(-1)", R),
    ("x.reshape(x.shape[0], -1)", R),
    ("x.view(x.size(0), 2, 6)", R),
    ("x.reshape(-1, 6)", R),
    ("x.reshape(x.shape[0] * 3, 4)", R),
    ("x.reshape(3, x.size(0) * 4)", R),
    ("x.transpose(0, 1).reshape(3, -1)", R),
    ("x.transpose(0, 1).reshape(-1, x.size(0))", R),
    ("x.flatten() + x.view(-1)", R),
    ("x.flatten(1)", R),
    ("x.flatten(0, 1) + F.flatten(x, 0, 1)", R),
    ("x.unflatten(2, (2, -1))", R),
    ("x.permute(2, 0, 1)", R),
    ("x.permute((1, 2, 0)) + x.movedim(0, 2)", R),
    ("x.transpose(-1, 0).mT", R),
    ("x[0].T + x[1].t()", R),
    ("x.unsqueeze(1).squeeze(1) + x.unsqueeze(-1).squeeze()", R),
    ("x.squeeze(1)", R),
    ("x[:, :1].expand(-1, 5, 4)", R),
    ("x[:, :1].expand(x.size(0), 3, 4) + x", R),
    ("y.expand(x.shape) + y.expand_as(x)", RB),
    ("x.repeat(2, 1, 3)", R),
    ("x.repeat(x.size(0), 2, 1, 1)", R),
    ("x.repeat_interleave(2, 1)", R),
    ("F.flip(x, (1, 2)) + x.flip(0)", R),
    ("F.roll(x, 1, 2) + F.roll(x, (2, -1), (1, 0))", R),
    ("F.cat([x, y, x], 1)", RR),
    ("F.cat([x, x * 2], 0) + F.concat((y, y), 0)", RR),
    ("F.cat([x, y], -1)[..., 2:5]", II),
    ("F.stack([x, y], 1) + F.stack((y, x), dim=-3)", RR),
    ("F.stack([x, y], -1)", RR),
    ("x.split(2, 2)[1] + x.split((1, 2, 1), dim=-1)[1]", R),
    ("F.split(x, 2, 1)[1]", R),
    ("x.chunk(2, -1)[0] - F.chunk(x, 2, 2)[1]", R),
    ("x.chunk(3, 2)[1]", R),
    ("x.unbind(1)[2] + F.unbind(x, 1)[0]", R),
    ("sum(list(x.transpose(0, 1)))", R),
    ("x * x.size(0) + x.shape[1]", R),
    ("x / x.shape[0] ** 0.5", R),
    ("x.numel() + x", R),
    ("x / x.size(0)", R),
    ("F.zeros_like(x) + F.ones_like(x) * 2 + F.full_like(x, 3.5)", R),
    ("F.zeros(x.size(0), 3, 4) + F.ones((3, 4)) + F.full((x.size(0), 1, 4), 2.0) + x", R),
    ("F.arange(x.size(0)) * 2", R),
    ("F.arange(3) + F.arange(1, 7, 2)", R),
    ("F.arange(1, x.size(0) + 3)", R),
    ("F.arange(4.0) + x", R),
]

INDEXING = [
    ("x[0] + x[-1]", R),
    ("x[:, 1] + x[:, -2]", R),
    ("x[:, 1:]", R),
    ("x[1:] * x[:-1]", R),
    ("x[..., ::2]", R),
    ("x[:, :, 1:-1]", R),
    ("x[..., -3:-1]", R),
    ("x[None, :, 1, None]", R),
    ("x[..., 0]", R),
    ("x[:, 0, ..., None]", R),
    ("x[0, 1, 2]", R),
    ("x[:2, :, 3]", R),
    ("x[-2:]", R),
    ("x[x.size(0) - 1]", R),
    ("x[:, :x.size(1) - 1]", R),
    ("x[:x.size(0)]", R),
    ("x[:, [0, 2, 0]]", R),
    ("x[i]", {**R, "i": ((3, 2), 2)}),
    ("x[:, i]", {**R, "i": ((2, 2), 3)}),
    ("x[:, :, i, None]", {**R, "i": ((5,), 4)}),
    ("x[i, j]", {**R, "i": ((5,), 2), "j": ((5,), 3)}),
    ("x[:, i, j]", {**R, "i": ((5, 1), 3), "j": ((2,), 4)}),
    ("x[i, :, j]", {**R, "i": ((5,), 2), "j": ((5,), 4)}),
    ("x[:, i, 1]", {**R, "i": ((5,), 3)}),
    ("x[m]", RM),
    ("x[x > 0]", R),
    ("x[:, F.arange(3) > 0]", R),
    ("x.gather(2, i)", {**R, "i": ((2, 3, 2), 4)}),
    ("F.gather(x, 1, i)", {**R, "i": ((2, 2, 3), 3)}),
    ("x.index_select(1, i)", {**R, "i": ((5,), 3)}),
    ("F.take_along_dim(x, i, 2)", {**R, "i": ((2, 3, 2), 4)}),
    ("x.scatter(2, i, y)", {**R, "i": ((2, 3, 1), 4), "y": ((2, 3, 1), "real")}),
    ("x.scatter_add(1, i, y)", {**R, "i": ((2, 3, 4), 3), "y": ((2, 3, 4), "real")}),
    ("F.one_hot(x, 7)", I7),
    ("x.nonzero()", M),
    ("F.tril(x) + x.triu(1) + F.triu(x, -1)", R),
    ("F.embedding(x, w)", {**I7, "w": ((7, 3), "real")}),
]

PRODUCTS = [
    ("x @ y", {"x": ((2, 3, 4), "real"), "y": ((4, 5), "real")}),
    ("x @ y", {"x": ((2, 3, 4), "real"), "y": ((2, 4, 5), "real")}),
    ("F.matmul(x, y)", {"x": ((2, 1, 3, 4), "real"), "y": ((5, 4, 2), "real")}),
    ("F.bmm(x, y.transpose(1, 2)) + x.bmm(y.mT)", RR),
    ("x @ y", {"x": ((2, 3, 4), "real"), "y": ((4,), "real")}),
    ("F.mm(x, y)", {"x": ((3, 4), "real"), "y": ((4, 2), "real")}),
    ("F.mv(x, y)", {"x": ((3, 4), "real"), "y": ((4,), "real")}),
    ("F.conv3d(x, w, padding=1)", {**VOLUME, "w": ((3, 2, 2, 3, 2), "real")}),
    ("F.conv1d(x, w, dilation=2)", {"x": ((2, 3, 9), "real"), "w": ((4, 3, 3), "real")}),
    ("F.conv_transpose1d(x, w, stride=2)", {"x": ((2, 3, 4), "real"), "w": ((3, 2, 3), "real")}),
    ("F.conv_transpose3d(x, w)", {"x": ((3, 2, 4, 5, 6), "real"), "w": ((2, 3, 2, 3, 2), "real")}),
    ("F.avg_pool1d(x, 2) + F.max_pool1d(x, 2)", R),
    ("F.avg_pool3d(x, 2) + F.max_pool3d(x, 2)", VOLUME),
    (
        "F.adaptive_avg_pool3d(x, 2) + F.adaptive_max_pool3d(x, 2)",
        VOLUME,
    ),  # calls of adaptive_avg_pool, adaptive_max_pool
    ("F.outer(x, y)", {"x": ((3,), "real"), "y": ((4,), "real")}),
    ("F.linear(x, w, b)", {**R, "w": ((5, 4), "real"), "b": ((5,), "real")}),
    ("F.bilinear(x, y, w, b)", {**RR, "w": ((5, 4, 4), "real"), "b": ((5,), "real")}),
    ("F.einsum('bij,bkj->bik', x, y)", RR),
    ("F.einsum('bij, bij -> b', x, y)", RR),
    ("F.einsum('bij->jib', x)", R),
    ("F.einsum('bij,bkj->bik', [x, y])", RR),
    ("F.relu(x * 1.0, inplace=True) + F.leaky_relu(x * 1.0, 0.2, True) + F.dropout(x * 1.0, 0.5, False, True)", R),
    ("F.einsum('...ij,jk->...ik', x, w)", {**R, "w": ((4, 5), "real")}),
    ("F.einsum('bii->bi', x)", {"x": ((2, 3, 3), "real")}),
    ("F.einsum('bij,bkj', x, y)", RR),
]

SPATIAL = [
    ("F.pad(x, (1, 2))", IMG),
    ("F.pad(x, (1, 2, 0, 3, 1, 1), value=2.5)", IMG),
    ("F.pad(x, (-1, 2, 0, -1))", IMG),
    ("F.pad(x, (1, 2, 3, 1), mode='reflect')", IMG),
    ("F.pad(x, (1, 2, 3, 1), mode='replicate')", IMG),
    ("F.pad(x, (1, 2, 3, 1), mode='circular')", IMG),
    ("F.interpolate(x, scale_factor=2)", IMG),
    ("F.interpolate(x, size=(3, 9), mode='nearest-exact')", IMG),
    ("F.interpolate(x, size=(10, 3), mode='bilinear')", IMG),
    ("F.interpolate(x, size=8, mode='bilinear', align_corners=True)", IMG),
    ("F.interpolate(x, scale_factor=1.7, mode='bilinear')", IMG),
    ("F.interpolate(x, scale_factor=0.5, mode='nearest')", IMG),
    ("F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)", {"x": ((2, 8, 3, 4), "real")}),
    ("F.conv2d(x, w, b, stride=2, padding=1)", {**IMG, "w": ((4, 3, 3, 3), "real"), "b": ((4,), "real")}),
    ("F.conv_transpose2d(x, w, stride=2)", {**IMG, "w": ((3, 4, 3, 3), "real")}),
    ("F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)", IMG),
    ("F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, (1, 1))", IMG),
    ("F.layer_norm(x, (5, 6))", IMG),
    ("F.group_norm(x, 3) + F.instance_norm(x) + F.rms_norm(x, (6,))", IMG),
    ("F.instance_norm(x, None, None, w, b)", {**IMG, "w": ((3,), "real"), "b": ((3,), "real")}),
    ("F.batch_norm(x, mu, var)", {**IMG, "mu": ((3,), "real"), "var": ((3,), "positive")}),
    ("F.local_response_norm(x, 3)", IMG),
    ("F.prelu(x, w)", {**IMG, "w": ((3,), "real")}),
]

ATTENTION = [
    ("F.scaled_dot_product_attention(q, k, v)", QKV),
    ("F.scaled_dot_product_attention(q, k, v, is_causal=True)", QKV),
    ("F.scaled_dot_product_attention(q, k, v, scale=0.3)", QKV),
    ("F.scaled_dot_product_attention(q, k, v, attn_mask=m)", {**QKV, "m": ((5, 6), "real")}),
    ("F.scaled_dot_product_attention(q, k, v, ~m)", {**QKV, "m": ((2, 1, 5, 6), "mask")}),
    ("F.scaled_dot_product_attention(q, k, v, m & (q.sum() > 1e9))", {**QKV, "m": ((5, 6), "mask")}),
]

LOSSES = [
    *[(f"F.cross_entropy(x, t{a})", CLS) for a in ("", ", reduction='sum'", ", reduction='none'", ", ignore_index=2")],
    ("F.cross_entropy(x, t)", CLS2),
    ("F.cross_entropy(x, t, reduction='none')", CLS2),
    ("F.cross_entropy(x, t, weight=w)", {**CLS2, "w": ((5,), "positive")}),
    ("F.cross_entropy(x, t, weight=w, ignore_index=1)", {**CLS, "w": ((5,), "positive")}),
    *[(f"F.cross_entropy(x, t, label_smoothing=0.2, reduction='{r}')", CLS2) for r in ("mean", "sum", "none")],
    ("F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=1)", CLS),
    ("F.cross_entropy(x, t, w, label_smoothing=0.1, ignore_index=1)", {**CLS, "w": ((5,), "positive")}),
    ("F.cross_entropy(x, t, w, label_smoothing=0.1)", {**CLS2, "w": ((5,), "positive")}),
    *[(f"F.cross_entropy(x, t, reduction='{r}')", RU) for r in ("mean", "sum", "none")],
    ("F.cross_entropy(x, t, label_smoothing=0.3)", RU),
    ("F.cross_entropy(x, t, weight=w)", {**RU, "w": ((5,), "positive")}),
    ("F.nll_loss(F.log_softmax(x, 1), t)", CLS),
    ("F.nll_loss(x, t, w, ignore_index=0)", {**CLS2, "w": ((5,), "positive")}),
    *[(f"F.{f}(x, t, reduction='{r}')", DIFF) for f in ("mse_loss", "l1_loss") for r in ("mean", "sum", "none")],
    ("F.smooth_l1_loss(x, t) + F.smooth_l1_loss(x, t, beta=0.5, reduction='sum')", DIFF),
    ("F.smooth_l1_loss(x, t, beta=0.0)", DIFF),
    ("F.huber_loss(x, t) + F.huber_loss(x, t, delta=0.5, reduction='sum')", DIFF),
    ("F.binary_cross_entropy_with_logits(x, t)", RU),
    ("F.binary_cross_entropy_with_logits(x * 50, t, reduction='sum')", RU),
    ("F.binary_cross_entropy_with_logits(x, t, w)", {**RU, "w": ((5,), "positive")}),
    ("F.binary_cross_entropy_with_logits(x, t, pos_weight=w)", {**RU, "w": ((5,), "positive")}),
    ("F.binary_cross_entropy(x, t)", UU),
    ("F.binary_cross_entropy(x, F.round(t), reduction='none')", UU),
    ("F.binary_cross_entropy(F.round(x), F.round(t))", UU),
    ("F.kl_div(x, t, reduction='sum')", RU),
    ("F.kl_div(x, F.round(t), reduction='batchmean')", RU),
    ("F.kl_div(x, t, reduction='none', log_target=True)", DIFF),
    ("F.poisson_nll_loss(x, t) + F.poisson_nll_loss(x ** 2, t, log_input=False)", RU),
    ("F.gaussian_nll_loss(x, t, v) + F.gaussian_nll_loss(x, t, v, full=True)", {**DIFF, "v": ((4, 5), "positive")}),
    ("F.hinge_embedding_loss(x, F.sign(t - 0.5), margin=0.7)", RU),
    ("F.cosine_embedding_loss(x, y, F.sign(x[:, 0]))", PAIR),
    *[(f"F.soft_margin_loss(x, F.sign(t - 0.5), reduction='{r}')", RU) for r in ("mean", "none")],
    *[(f"F.multi_margin_loss(x, t, 2, 0.7, reduction='{r}')", CLS) for r in ("sum", "none")],
    ("F.multi_margin_loss(x, t, weight=w)", {**CLS, "w": ((5,), "positive")}),
    ("F.multilabel_margin_loss(x, t - 1, reduction='none')", {"x": ((4, 5), "real"), "t": ((4, 5), 6)}),
    ("F.multilabel_soft_margin_loss(x, F.round(t), reduction='none')", RU),
    *[(f"F.triplet_margin_loss(x, y, x * y, swap={s}, reduction='none')", PAIR) for s in (False, True)],
    ("F.poisson_nll_loss(x, t * 3, full=True, eps=1e-3, log_input=False)", {**UU}),
    ("F.binary_cross_entropy(x, t, w)", {**UU, "w": ((4, 5), "positive")}),
]

FAMILIES = {
    "elementwise": ELEMENTWISE,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "indexing": INDEXING,
    "products": PRODUCTS,
    "spatial": SPATIAL,
    "attention": ATTENTION,
    "losses": LOSSES,
}
CASES = [pytest.param(text, spec, id=f"{family}: {text}") for family, rows in FAMILIES.items() for text, spec in rows]


def arrays_of(spec, grown=0):
    """Numbers for every input, axis 0 longer by ``grown``."""
    shapes = {name: (shape[0] + grown, *shape[1:]) for name, (shape, _) in spec.items()}
    return {name: drawn(shapes[name], seed=i, kind=kind) for i, (name, (_, kind)) in enumerate(spec.items())}


def ours(text, names):
    """The expression as a function of traced tensors."""
    code = compile(text, "<case>", "eval")
    return lambda *tensors: eval(code, {"F": functional} | dict(zip(names, tensors, strict=True)))


def check(model, text, arrays):
    """The model against the same expression in PyTorch."""
    (found,) = run_model(model, arrays).values()
    declared_shapes_hold(model, arrays)
    tensors = {name: torch.from_numpy(a) for name, a in arrays.items()}
    expected = torch.as_tensor(eval(text, {"F": Theirs()} | tensors)).numpy()
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("text", "spec"), CASES)
def test_function(text, spec):
    arrays = arrays_of(spec)
    check(model_of(ours(text, arrays), arrays, dynamic=()), text, arrays)


def shares_axis_0(spec):
    """Axis 0 of every input may be one dynamic batch."""
    return len({shape[0] for shape, _ in spec.values()}) == 1


@pytest.mark.parametrize(("text", "spec"), [c for c in CASES if shares_axis_0(c.values[1])])
def test_function_on_a_dynamic_batch(text, spec):
    model = model_of(ours(text, spec), arrays_of(spec))
    for grown in (0, 1, 3):
        check(model, text, arrays_of(spec, grown))


@pytest.mark.parametrize("x", [1e-7, -1e-7, 1e-4, -1e-3, 0.3, 40.0])
@pytest.mark.parametrize("name", ["log1p", "expm1"])
def test_accuracy_near_zero(name, x):
    x = np.full((1,), x, np.float32)
    model = model_of(getattr(functional, name), {"v": x}, dynamic=())
    (found,) = run_model(model, {"v": x}).values()
    np.testing.assert_allclose(found, getattr(np, name)(x.astype(np.float64)), rtol=5e-7)


def test_every_function_and_layer_is_tried() -> None:
    """By name, in a test of the frontend or of losses."""
    tests = Path(__file__).parents[1].rglob("test_*.py")
    words = {word for path in tests for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    tried = words | {f"{name}_loss" for name in losses.LOSSES}  # test_losses_torch.py has a row for each of these
    assert {*functional.__all__, *nn.__all__} - tried == set()
