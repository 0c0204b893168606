"""Correct the output sizes of a Resize by scales that ONNX's shape inference rounds differently from runtimes.

The inference multiplies in float64, runtimes in float32: seven pixels times 9/7, which float32 stores as 1.2857142686,
are 8.99999988 for the inference and 9 for runtimes. tf2onnx writes such scales whenever the ratio of sizes is not an
integer.

1. The right size is recorded instead of the inferred one.
2. At opset 21, if the scales are ratios of whole sizes, these sizes replace the scales: runtimes compute the same
   scales from them, and their own inference, which is ONNX's, becomes consistent.
3. If only some sizes are known, ONNX's rule rejects them as too few, so only the type and rank are recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import is_standard
from gradgraph.passes.normal.edit import Editor, attributes


def true_sizes(op_type: str, dims: Sequence[Any], scales: np.ndarray | None, attrs: Mapping[str, Any]) -> list[Any]:
    """Return the sizes that runtimes compute from ``dims`` by float32 scales; None for sizes that are not known."""
    crops = attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    axes = [a % len(dims) for a in attrs.get("axes") or range(len(dims))]
    if op_type not in ("Resize", "Upsample") or crops or scales is None or np.size(scales) != len(axes):
        return [None] * len(dims)
    factors = dict(zip(axes, np.asarray(scales, np.float32).ravel(), strict=True))
    one = np.float32(1)
    return [int(np.float32(d) * factors.get(a, one)) if isinstance(d, int) else None for a, d in enumerate(dims)]


def place_of_scales(op_type: str, inputs: Sequence[Any], opset: int) -> Any:
    """Return the one of ``inputs`` holding the scales of a Resize or Upsample at ``opset``; None if absent."""
    i = 2 if op_type == "Resize" and opset >= 11 else 1
    return inputs[i] if i < len(inputs) else None


def corrected(
    node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], constants: Mapping[str, np.ndarray], opset: int
) -> onnx.TypeProto | None:
    """Return the right type of the output of ``node`` if the inferred one (in ``types``) is wrong, else None."""
    source, output = types.get(node.input[0] if node.input else ""), types.get(node.output[0] if node.output else "")
    dims = shapes.shape_of_type(source)
    if source is None or dims is None:
        return None
    if output is None or not output.HasField("tensor_type"):
        return onnx.helper.make_tensor_type_proto(source.tensor_type.elem_type, [None] * len(dims))
    if not output.tensor_type.HasField("shape"):
        return None
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    mode = attrs.get("coordinate_transformation_mode")
    attrs["coordinate_transformation_mode"] = mode.decode() if isinstance(mode, bytes) else mode
    scales = constants.get(place_of_scales(node.op_type, node.input, opset) or "")
    right = copy.deepcopy(output)
    for dim, size in zip(right.tensor_type.shape.dim, true_sizes(node.op_type, dims, scales, attrs), strict=False):
        if size is not None:
            dim.dim_value = size
    return None if right == output else right


def settle_scales(model: ir.Model) -> bool:
    """Replace scales with inferred sizes in each Resize that ONNX miscounts, in place; return True if any."""
    if model.opset_imports.get("", shapes.OPSET) != shapes.OPSET:
        return False
    resizes = [n for n in model.graph if is_standard(n, "Resize")]
    found = [(n, x, sizes) for n in resizes if (x := n.inputs[0]) is not None and (sizes := _resized_sizes(n))]
    editor = Editor(model)
    for node, x, sizes in found:
        given = _all_sizes(editor.op, Var(editor.op, x), sizes)
        editor.place(node)
        node.resize_inputs(4)
        node.replace_input_with(2, None)
        node.replace_input_with(3, given.value)
        node.attributes.pop("axes", None)
    return bool(found)


def _all_sizes(op: Builder, x: Var, known: Mapping[int, int]) -> Var:
    """Return the sizes of all axes: the sizes in ``known``, by axis, and the sizes of ``x`` on all other axes.

    A Where selects them, as ONNX shape inference would reject partly known sizes as too few if it evaluated them. The
    attribute ``axes`` is no alternative: onnxruntime ignores it when it moves a Transpose past the Resize.
    """
    sizes = [known.get(a, d) for a, d in enumerate(x.shape or ())]
    if shapes.is_static(sizes):
        return op.const(np.array(sizes, np.int64))
    resized = np.array([a in known for a in range(x.rank)])
    return op.Where(resized, np.array([known.get(a, 0) for a in range(x.rank)], np.int64), op.Shape(x))


def _resized_sizes(node: ir.Node) -> dict[int, int] | None:
    """Return the output size by resized axis, or None unless ONNX miscounts one and all scales are ratios of sizes."""
    dims = shapes.shape_of(node.inputs[0])
    scales = shapes.constant_of(place_of_scales("Resize", node.inputs, shapes.OPSET))
    attrs = attributes(node)
    if dims is None or scales is None:
        return None
    axes = [a % len(dims) for a in attrs.get("axes") or range(len(dims))]
    sizes = true_sizes("Resize", dims, scales, attrs)
    resized = [(a, dims[a], float(s), sizes[a]) for a, s in zip(axes, scales.ravel(), strict=False) if s != 1]
    known = [(a, n, s, size) for a, n, s, size in resized if isinstance(n, int) and n and isinstance(size, int)]
    if len(known) < len(resized) or all(int(n * s) == size for _, n, s, size in known):
        return None
    ratios = all(np.float32(size) / np.float32(n) == np.float32(s) for _, n, s, size in known)
    return {a: size for a, _, _, size in known} if ratios else None
