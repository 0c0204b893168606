"""Pass: convert the blocked layout of this machine's onnxruntime to plain layout, and compare the results."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from gradgraph.errors import ModelError, listed, shown
from gradgraph.files.models import to_proto
from gradgraph.graph.shapes import shape_of_type
from gradgraph.machine.hardware import nchwc_block
from gradgraph.passes.normal.dialects.nchwc import BLOCKED, REMEDY, has_blocks, undo_blocks

log = logging.getLogger("gradgraph")

_NAMED = 3  # the most weights that the warning lists
_SIZES = (32, 64, 224)  # sizes of image axes without a fixed size; tried in order until the model runs
_TOLERANCE = 1e-3  # relative to the largest number, for sums in another order; wrong blocks differ by far more


def undo_machine_blocks(model: ir.Model) -> bool:
    """Convert tensors in blocks of this machine's size to plain layout, in place; return True if there were any.

    Weights and gradients then differ in layout from the file, so a warning is logged.

    Raises:
        ModelError: see ``block_size`` and ``undo_blocks``.
    """
    if not has_blocks(model):
        return False
    block = block_size()
    if names := undo_blocks(model, block):
        log.warning(
            "onnxruntime saved the model in a machine-specific layout: %s are stored in blocks of %d channels; "
            "in training, in gradients and in exported models they have ONNX's own layout and the original sizes",
            listed(names, _NAMED),
            block,
        )
    return True


def block_size() -> int:
    """Return the number of channels in a block.

    Raises:
        ModelError: onnxruntime has no blocked layout on this machine.
    """
    block = nchwc_block()
    if not block:
        raise ModelError(
            "the model has blocked channels, which onnxruntime does not support on this machine, so the block size is "
            f"unknown; {REMEDY}"
        )
    return block


def check_same(saved: ir.Model, plain: ir.Model) -> None:
    """Check that ``plain`` computes the same results as the blocked model ``saved``.

    The outputs, and all values that leave the blocked region, are compared on synthetic inputs of the first of several
    sizes at which ``saved`` runs. If it runs at none of the sizes, nothing is compared.

    Raises:
        ModelError: the results differ, or only ``saved`` runs.
    """
    before, after = to_proto(saved.clone()), to_proto(plain.clone())
    leaving = {n.output[0] for n in before.graph.node if n.domain == BLOCKED and n.op_type == "ReorderOutput"}
    shared = leaving & {y for node in after.graph.node for y in node.output}
    for model in (before, after):  # add the same outputs, in the same order
        have = {v.name for v in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in sorted(shared - have))
    outputs = [v.name for v in before.graph.output]
    for size in _SIZES:
        feeds = _made_up(before.graph, size)
        with contextlib.suppress(ModelError):
            expected = _run(before, outputs, feeds)
            break
    else:
        log.info(
            "the model has blocked channels and does not run on synthetic inputs; its plain layout was not compared"
        )
        return
    for name, a, b in zip(outputs, expected, _run(after, outputs, feeds), strict=True):
        if a.dtype.kind == "f" and not np.allclose(a, b, rtol=0, atol=_TOLERANCE * np.abs(a).max(initial=0)):
            raise ModelError(f"'{shown(name)}' has other values after blocked channels are converted; {REMEDY}")


def _made_up(graph: onnx.GraphProto, size: int) -> dict[str, np.ndarray]:
    """Return inputs by name: random floats, zero integers, batch size 2, and ``size`` for other unknown dimensions."""
    given = {t.name for t in graph.initializer}
    rng = np.random.default_rng(0)
    feeds = {}
    for value in graph.input:
        kind = value.type.tensor_type
        dims = [d if isinstance(d, int) else size if i else 2 for i, d in enumerate(shape_of_type(value.type) or ())]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if value.name not in given:
            x = rng.standard_normal(dims) if dtype.kind == "f" else np.zeros(dims)
            feeds[value.name] = x.astype(dtype)
    return feeds


def _run(model: onnx.ModelProto, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run the model in onnxruntime without optimization, and return its outputs.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    import onnxruntime as ort  # imported here, because few models have blocked channels

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        known = {v.name for v in session.get_inputs()}
        results = session.run(list(outputs), {name: x for name, x in feeds.items() if name in known})
    except Exception as error:  # onnxruntime's errors have no common base
        raise ModelError(f"onnxruntime does not run the model: {shown(error)}") from error
    return [np.asarray(y) for y in results]
