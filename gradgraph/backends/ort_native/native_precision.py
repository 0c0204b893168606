"""The precision of products in native kernels, selected by the user and stored in each node that uses AMX tiles.

``highest`` is as accurate as float32: it splits each number into three bfloat16 numbers, and needs six tile products
per product. ``high`` uses two numbers and three tile products, with errors of at most 2⁻¹⁵ of the sum of the terms'
magnitudes (``kernels/amx.h``). The names are taken from ``torch.set_float32_matmul_precision``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

import onnx_ir as ir

from gradgraph.backends.backend import Backend
from gradgraph.backends.ort_native import ORT_NATIVE, library
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.rewrites import Rewrite

Precision = Literal["highest", "high"]
HIGHEST: Final = "highest"
PRECISIONS: tuple[Precision, ...] = (HIGHEST, "high")
_ATTENTION = {"Attention", "AttentionGrad", "PackedAttentionGrad"}
TILED = frozenset({"MatMul", "Conv", "ConvGradInput", "ConvGradWeight", "LSTM", "LSTMGrad"} | _ATTENTION)


def at_precision(precision: Precision) -> Backend:
    """Return the native backend with products computed at ``precision``."""
    if precision == HIGHEST:
        return ORT_NATIVE
    return replace(ORT_NATIVE, load=lambda: replace(ORT_NATIVE.lowering, after=(*ORT_NATIVE.lowering.after, _HIGH)))


def set_high(model: ir.Model) -> None:
    """Store the precision ``high`` in the nodes of ``model``, in place; nodes without the attribute use the highest."""
    for node in nodes_of(model):
        if node.domain == library.DOMAIN and node.op_type in TILED:
            node.attributes["parts"] = ir.AttrInt64("parts", 2)


_HIGH = Rewrite(set_high, "each node that multiplies by tiles stores the choice")
