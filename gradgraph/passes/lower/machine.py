"""From a saved step to one machine's form of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.collector import paused_collection
from gradgraph.normal.clean import clean_up
from gradgraph.normal.edit import Editor, nodes_of
from gradgraph.normal.fold import fold_constants
from gradgraph.normal.infer import infer_shapes
from gradgraph.operators import DOMAIN, describe, operator_of, write_portable
from gradgraph.optim import updates  # noqa: F401  (operators that a saved step may call)
from gradgraph.passes.functions import forget_functions
from gradgraph.passes.lower.chains import fuse_chains
from gradgraph.passes.lower.conv_norm import fold_norms
from gradgraph.passes.lower.layout import stay_in_blocks
from gradgraph.passes.lower.layout_forms import knows_blocks
from gradgraph.passes.lower.native_attention import fold_attentions
from gradgraph.passes.lower.native_conv import fuse_activations
from gradgraph.passes.lower.native_depthwise import fold_neighbours
from gradgraph.passes.lower.native_norm import fold_activations
from gradgraph.passes.lower.native_precision import HIGHEST, Precision, set_precision
from gradgraph.passes.lower.recurrent import share_states
from gradgraph.passes.lower.scalars import raise_numbers
from gradgraph.passes.lower.stacks import stack_products
from gradgraph.passes.lower.table import ORT_CPU_NATIVE, Call, Form, forms_of, has_own_forms, is_on_cpu

Choose = Callable[[Call, Sequence[Form]], Sequence[Form]]


@paused_collection()
def for_machine(
    model: onnx.ModelProto,
    target: str,
    dims: Mapping[str, int] | None = None,
    choose: Choose | None = None,
    precision: Precision = HIGHEST,
) -> onnx.ModelProto:
    """``model`` for one target; it is not changed.

    Args:
        model: a training or evaluation model of a step.
        target: one of ``TARGETS``, or ``ORT_CPU_NATIVE``.
        dims: sizes of symbolic dimensions, by name.
        choose: the forms to try for a call, in order; by default those whose ``when`` holds.
        precision: of native products, one of ``PRECISIONS``.
    """
    return ir.to_proto(written(opened(model, dims or {}), target, choose, precision))


def written(model: ir.Model, target: str, choose: Choose | None = None, precision: Precision = HIGHEST) -> ir.Model:
    """``model`` for one target, in place: lowered, cleaned up, its element-wise chains in one node each."""
    clean_up(lower(model, target, choose, precision))
    if target == ORT_CPU_NATIVE:
        fuse_chains(model)
    return model


def opened(model: onnx.ModelProto, dims: Mapping[str, int]) -> ir.Model:
    """``model`` with its gradient operators as plain nodes, and ``dims`` in place of their names."""
    work = ir.from_proto(model)
    forget_functions(work)
    bind(work, dims)
    return work


def bind(model: ir.Model, dims: Mapping[str, int]) -> None:
    """Replace symbolic dimensions by numbers, in place, and fold what becomes known."""
    if not dims:
        return
    for value in _values(model):
        if value.shape is not None and any(isinstance(d, ir.SymbolicDim) and d.value in dims for d in value.shape):
            value.shape = ir.Shape(
                dims.get(d.value or "", d.value) if isinstance(d, ir.SymbolicDim) else d for d in value.shape
            )
    _infer(model)
    while fold_constants(model):
        _infer(model)


def _infer(model: ir.Model) -> None:
    infer_shapes(model)
    for node in nodes_of(model):
        if operator_of(node) is not None:
            describe(node)


def _values(model: ir.Model) -> list[ir.Value]:
    own = [*model.graph.inputs, *model.graph.initializers.values()]
    return own + [v for node in nodes_of(model) for v in node.outputs]


def lower(model: ir.Model, target: str, choose: Choose | None = None, precision: Precision = HIGHEST) -> ir.Model:
    """Replace, in place, every node that ``target`` has a better form for, and every gradient operator."""
    if is_on_cpu(target):
        stack_products(model)
        share_states(model, target)
        if target == ORT_CPU_NATIVE:
            fold_attentions(model)
        fold_norms(model)
        _replace(model, target, choose, [n for n in nodes_of(model) if has_own_forms(target, n) or not knows_blocks(n)])
        fold_activations(model.graph)
        fold_neighbours(model)
        stay_in_blocks(model)  # of the others, those between blocked convolutions
    _replace(model, target, choose, nodes_of(model))
    if is_on_cpu(target):
        fuse_activations(model.graph)
        raise_numbers(model)
    set_precision(model, precision)
    model.opset_imports.pop(DOMAIN, None)
    for node in nodes_of(model):
        model.opset_imports.setdefault(node.domain, 1)  # onnxruntime's own operators
    return model


def _replace(model: ir.Model, target: str, choose: Choose | None, nodes: Iterable[ir.Node]) -> None:
    """Replace these nodes, and those that they are replaced by."""
    editor = Editor(model)
    op = editor.op
    waiting = deque(nodes)  # in graph order, as shapes become known in it
    while waiting:
        node = waiting.popleft()
        forms = forms_of(target, node)
        if not forms and operator_of(node) is None:
            continue
        op.scope = node.name or ""
        outputs = _first(op, Call.of(op, node), forms, choose or _preferred)
        if outputs is None and operator_of(node) is not None:
            outputs = write_portable(op, node)
        if outputs is not None:
            waiting.extend(editor.replace(node, *outputs))


def _preferred(call: Call, forms: Sequence[Form]) -> Sequence[Form]:
    return [f for f in forms if f.when(call)]


def _first(op: Builder, call: Call, forms: Sequence[Form], choose: Choose) -> tuple[Var, ...] | None:
    """What the first form that can serve writes."""
    for candidate in choose(call, forms):
        before = len(op.nodes), len(op.constants)
        written = candidate.write(op, *call.inputs, **call.attrs)
        if written is not None:
            return written if isinstance(written, tuple) else (written,)
        for node in op.nodes[before[0] :]:
            node.resize_inputs(0)
        del op.nodes[before[0] :]
    return None
