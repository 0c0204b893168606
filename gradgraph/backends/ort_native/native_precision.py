"""How exact the products of native kernels are: a user's choice, which each node that multiplies by tiles carries.

``highest`` is as exact as float32: three bfloat16 parts for each number, six tile products for each product. ``high``
takes two parts and three products, whose errors are at most 2⁻¹⁵ of the magnitudes that are added
(``kernels/amx.h``). The names are those of ``torch.set_float32_matmul_precision``.
"""

from __future__ import annotations

from typing import Final, Literal

import onnx_ir as ir

from gradgraph.backends.ort_native import library
from gradgraph.passes.normal.edit import nodes_of

Precision = Literal["highest", "high"]
HIGHEST: Final = "highest"
PRECISIONS: tuple[Precision, ...] = (HIGHEST, "high")
_ATTENTION = {"Attention", "AttentionGrad", "PackedAttentionGrad"}
TILED = frozenset({"MatMul", "Conv", "ConvGradInput", "ConvGradWeight", "LSTM", "LSTMGrad"} | _ATTENTION)


def set_precision(model: ir.Model, precision: Precision) -> None:
    """Write it into the nodes of ``model``, in place; those that say nothing have the highest."""
    if precision == HIGHEST:
        return
    for node in nodes_of(model):
        if node.domain == library.DOMAIN and node.op_type in TILED:
            node.attributes["parts"] = ir.AttrInt64("parts", 2)
