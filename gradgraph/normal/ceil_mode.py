"""Pools whose windows ONNX's shape inference miscounts.

With ``ceil_mode=1`` it counts a last window that starts behind the end of the axis, which runtimes drop (and which the
operator's specification drops, too, since opset 22). Such a pool is written with ``ceil_mode=0`` and explicit pads:

1. an axis whose last window is dropped has, rounded down, the right number of windows already;
2. an axis whose last window counts gets as much padding at its end as that window needs; so does not an average
   that counts padding, which tells the two kinds of padding apart: such a pool stays.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

_POOLS = ("MaxPool", "AveragePool", "LpPool")


def settle_windows(graph: ir.Graph, inferred: onnx.GraphProto) -> bool:
    """Rewrite the miscounted pools of ``graph`` in place, by the sizes in ``inferred``; True if there were any."""
    kinds = {v.name: v.type for v in (*inferred.input, *inferred.value_info, *inferred.output)}
    kinds |= {t.name: onnx.helper.make_tensor_type_proto(t.data_type, t.dims) for t in inferred.initializer}
    settled = [_settle(node, kinds) for node in graph if node.op_type in _POOLS and node.domain == ""]
    return any(settled)


def _settle(node: ir.Node, kinds: dict[str, onnx.TypeProto]) -> bool:
    attributes = {name: a.value for name, a in node.attributes.items()}
    sizes = _static_sizes(kinds.get((node.inputs[0] and node.inputs[0].name) or ""))
    if not attributes.get("ceil_mode") or sizes is None or attributes.get("auto_pad", "NOTSET") != "NOTSET":
        return False
    rank = len(sizes)
    kernel = attributes["kernel_shape"]
    strides, dilations = (attributes.get(name) or [1] * rank for name in ("strides", "dilations"))
    pads = attributes.get("pads") or [0] * (2 * rank)
    ends, dropped = [], False
    for size, k, s, d, begin, end in zip(sizes, kernel, strides, dilations, pads[:rank], pads[rank:], strict=True):
        reach = (k - 1) * d + 1
        last = -((reach - size - begin - end) // s)  # the number of the last window, rounded up
        behind = last * s >= size + begin
        dropped |= behind
        ends.append(end if behind else max(end, last * s + reach - size - begin))
    if not dropped or (attributes.get("count_include_pad") and list(ends) != list(pads[rank:])):
        return False
    node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
    node.attributes["pads"] = ir.AttrInt64s("pads", [*pads[:rank], *ends])
    return True


def _static_sizes(kind: onnx.TypeProto | None) -> list[int] | None:
    """The spatial sizes, if all are known."""
    dims = kind.tensor_type.shape.dim[2:] if kind is not None else ()
    return [d.dim_value for d in dims] if dims and all(d.HasField("dim_value") for d in dims) else None
