"""Correct the output sizes of a Resize by scales that ONNX's shape inference rounds differently from runtimes.

The inference multiplies in float64, runtimes in float32. For example, 7 pixels times 9/7, stored in float32 as
1.2857142686, are 8.99999988 in the inference, rounded down to 8, but 9 in runtimes. tf2onnx writes such scales whenever
the ratio of sizes is not an integer.

1. The right size is recorded instead of the inferred one.
2. At opset 21, if the scales are ratios of whole sizes, these sizes replace the scales: runtimes compute the same
   scales from them, and their own inference, which is ONNX's, becomes consistent.
3. If only some sizes are known, ONNX's rule rejects them as too few, so only the type and rank are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import is_standard
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.size_rules_of_operators import place_of_scales, scaled_size
from gradgraph.passes.normal.edit import Editor, attributes


def settle_scales(model: ir.Model) -> bool:
    """Replace scales by sizes, which were inferred, in each Resize that ONNX miscounts; return True if any."""
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
    """Return the output size of each resized axis if ONNX miscounts one and all scales are ratios of whole sizes."""
    dims = shape_of(node.inputs[0])
    scales = shapes.constant_of(place_of_scales("Resize", node.inputs, shapes.OPSET))
    attrs = attributes(node)
    if dims is None or scales is None or attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return None
    axes = [a % len(dims) for a in attrs.get("axes") or range(len(dims))]
    resized = [
        (a, dims[a], float(s), scaled_size(dims[a], s)) for a, s in zip(axes, scales.ravel(), strict=False) if s != 1
    ]
    known = [(a, n, s, size) for a, n, s, size in resized if isinstance(n, int) and n and isinstance(size, int)]
    if len(known) < len(resized) or all(int(n * s) == size for _, n, s, size in known):
        return None
    ratios = all(np.float32(size) / np.float32(n) == np.float32(s) for _, n, s, size in known)
    return {a: size for a, _, _, size in known} if ratios else None
