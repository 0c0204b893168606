"""Transposes by a kernel that divides the output among threads (``kernels/permute.cc``).

onnxruntime divides each image among its threads, and convolutions divide the images. On two cores without a common
cache, a Transpose therefore takes 3 to 4 times as long as on cores with one.

onnxruntime folds a Transpose of constants, fuses it into a product, or moves it to another one, where the two cancel.
The kernel replaces only those that stay.

The Transposes of a step that it computes take 0.62 to 0.97 of onnxruntime's time with AVX512, and 0.53 to 0.93 with
AVX2, if their inputs are not in the second-level cache. With one thread and inputs in this cache, single ones take up
to 1.14 times as long with AVX512.

Measured on an AMD EPYC (Zen 4), two threads, native steps with the kernel over those without: EfficientNet-B0 0.90,
ConvNeXt 0.96, MobileNetV3-small 0.98, ResNet-18 0.99; on cores without a common cache EfficientNet-B0 0.86,
MobileNetV3-small 0.91, ResNet-18 0.93. Steps without such nodes (TCN, BERT-mini, LSTM) take 1.00. With AVX2: ConvNeXt
0.97, CNN 0.98, ResNet-18 and MobileNetV2 0.99; on cores without a common cache EfficientNet-B0 0.92, MobileNetV3-small
0.99, LSTM 1.00.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from gradgraph.backends.ort_cpu.movement_forms import RESHAPED
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_native.library import DOMAIN, MOST_AXES
from gradgraph.backends.ort_native.native_table import pays_here
from gradgraph.backends.ort_native.strided import Strided, permutation, sizes_of
from gradgraph.backends.ort_operators import BLOCKED, CONTRIB
from gradgraph.graph.nodes import inputs_of, is_standard, made_by
from gradgraph.machine.hardware import levels_in_use
from gradgraph.rules.registry import key_of

LEAST = 1 << 12  # elements; with fewer, what a session spends on each node decides
LARGE = 3 << 18  # elements, 3 MB; with AVX2, larger ones take 0.9 to 1.5 of onnxruntime's time
PAGE = 4096  # bytes; with AVX2, matrices whose rows are a multiple of it take 1.4 to 1.6
SHORTEST = 16  # elements of the runs that are read and written: a side of a tile
_PRODUCTS = (("", "MatMul"), ("", "Gemm"), (CONTRIB, "FusedMatMul"))
_LAYERS = ("Conv", "ConvTranspose")
_POOLS = ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")


def transpose_by_kernel(model: ir.Model) -> None:
    """Replace the Transposes of the main graph that onnxruntime would execute as they are, in place."""
    if not pays_here("transpose") or library.here().has_tiles:  # not measured with AMX
        return
    computed = {v for v in model.graph.inputs if not v.is_initializer()}  # from inputs, so not folded
    moved = set[ir.Value]()  # to which onnxruntime may move a Transpose
    for node in model.graph:
        given = inputs_of(node)
        if any(v in computed for v in given) or any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values()):
            computed.update(node.outputs)
        if not is_standard(node, "Transpose"):
            if not _stops(node) and any(v in moved for v in given):
                moved.update(node.outputs)
        elif given[0] in computed and given[0] not in moved and _fits(node) and _stays(node):
            write_kernel(model, node)
        else:
            moved.update(node.outputs)


def write_kernel(model: ir.Model, node: ir.Node) -> None:
    """Make a Transpose of ``model`` a call of the kernel, in place."""
    node.attributes["perm"] = ir.AttrInt64s("perm", permutation(node, len(inputs_of(node)[0].shape or ())))
    node.domain, node.op_type = DOMAIN, "Permute"
    model.opset_imports.setdefault(DOMAIN, 1)


def is_faster(view: Strided) -> bool:
    """Return whether the kernel computes a Transpose with this output, a view of its input, at least as fast.

    Measured with two threads (``docs/how-it-works/native.json``).
    """
    if len(view.shape) > MOST_AXES or math.prod(view.shape) < LEAST:
        return False
    shortest = min(view.runs[-1][0], *(size for size, stride in view.runs if stride == 1))
    return shortest >= SHORTEST and ("avx512" in levels_in_use() or not _is_slow_with_avx2(view))


def _is_slow_with_avx2(view: Strided) -> bool:
    """Return whether the output is large, or a matrix whose rows all begin at the same place of a memory page."""
    is_aligned = len(view.runs) == 2 and 4 * view.runs[-1][0] % PAGE == 0
    return is_aligned or math.prod(view.shape) >= LARGE


def _fits(node: ir.Node) -> bool:
    view = view_of(node)
    return inputs_of(node)[0].dtype == ir.DataType.FLOAT and view is not None and is_faster(view)


def view_of(node: ir.Node) -> Strided | None:
    """Return the output of a Transpose as a view of its input."""
    sizes = sizes_of(node.inputs[0])
    return None if sizes is None else Strided.whole(sizes).transposed(permutation(node, len(sizes)))


def _stays(node: ir.Node) -> bool:
    """Return whether onnxruntime neither fuses the node into a neighbour nor moves it towards another Transpose."""
    if made_by(node.inputs[0], *_LAYERS, *_POOLS):  # onnxruntime may reorder its blocks of channels at once
        return False
    readers = [reader for reader, _ in node.outputs[0].uses()]
    if not all(_stops(reader) or is_standard(reader, *RESHAPED) for reader in readers):
        return False
    return not any(key_of(reader) in (("", "Transpose"), *_PRODUCTS) for reader in _readers_behind_reshapes(node))


def _readers_behind_reshapes(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the readers of a Transpose, also behind nodes that reshape, except where it cannot change places with them.

    It can if what they return is still a view of its input.
    """
    waiting = [(node.outputs[0], view_of(node))]
    while waiting:
        value, view = waiting.pop()
        for reader, _ in value.uses():
            sizes = sizes_of(reader.outputs[0])
            if not is_standard(reader, *RESHAPED):
                yield reader
            elif view is not None and sizes is not None and (seen := view.reshaped(sizes)) is not None:
                waiting.append((reader.outputs[0], seen))


def _stops(node: ir.Node) -> bool:
    """Return whether onnxruntime does not move a Transpose from the inputs of ``node`` to its outputs."""
    is_known = key_of(node) in _PRODUCTS or is_standard(node, *_LAYERS, "Gather", "LayerNormalization")
    return is_known or node.domain in (DOMAIN, BLOCKED)
