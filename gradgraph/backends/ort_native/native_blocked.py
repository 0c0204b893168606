"""Native kernels in onnxruntime's blocked layout: they support both layouts, so only reordering is saved."""

from __future__ import annotations

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.blocked.blocked_forms import STOCK, BlockedForms, fits, inputs_of, is_alike
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_native.native_forms import native_kernel
from gradgraph.graph.builder import Builder, Written
from gradgraph.graph.shape_inference import shape_of
from gradgraph.machine.hardware import nchwc_block

WITH_NATIVE = BlockedForms(extends=STOCK)
in_blocks = WITH_NATIVE.add


def _has_images_that_fit(call: Call) -> bool:
    """Return whether all inputs and outputs, except filters [C, 1, ...] and a bias, can be in the NCHWc layout."""
    shapes = {v: shape_of(v) or () for v in (*call.node.inputs, *call.node.outputs) if v is not None}
    images = [v for v, dims in shapes.items() if len(dims) == 4 and dims[1] != 1]
    return len(images) > 0 and all(map(fits, images))


def _has_no_tiles(call: Call) -> bool:
    """Return whether inputs may be in the NCHWc layout, and the processor has no AMX matrix tiles.

    Kernels for AMX tiles support only the plain layout, NCHW.
    """
    return not library.here().has_tiles and all(fits(x.value) for x in inputs_of(call))


@in_blocks("ConvGradWeight", when=_has_no_tiles, domain=library.DOMAIN)
@in_blocks("Elementwise", when=is_alike, domain=library.DOMAIN)
@in_blocks("BatchNormalization", when=lambda call: fits(inputs_of(call)[0].value), domain=library.DOMAIN)
@in_blocks(
    *("BatchNormalizationGrad", "UnscaledBatchNormalizationGrad", "MaxPoolGrad"),
    when=lambda call: all(fits(x.value) for x in inputs_of(call)[:2]),
    domain=library.DOMAIN,
)
@in_blocks(
    *("DepthwiseConv", "DepthwiseConvGradInput", "DepthwiseConvGradWeight", "DepthwiseConvGrad"),
    when=_has_images_that_fit,
    domain=library.DOMAIN,
)
def same_kernel(op: Builder, call: Call) -> Written:
    """Copy the native node of ``call`` for NCHWc inputs, with the block size as its attribute ``block``."""
    attrs = {**call.attrs, "block": nchwc_block()} if "block" in call.attrs else call.attrs
    written = native_kernel(op, call.node.op_type, call.inputs, [op.wrap(y) for y in call.node.outputs], **attrs)
    assert written is not None
    return written
