"""Lowering: the same model, written the way one backend computes it fastest. The backend's lists say what is done.

``for_machine`` takes a training model as it is saved (named operators are calls of functions with portable bodies)
and returns one for a single backend, which is run and not saved. Symbolic dimensions that the caller knows (the batch
at hand) become numbers first, and what follows from them is folded.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from gradgraph.autodiff.after import is_order, write_orders
from gradgraph.autodiff.apart import forget_apart
from gradgraph.backends.backend import Backend
from gradgraph.backends.capability import RIGHT, Verdict
from gradgraph.backends.forms import Call, Form
from gradgraph.backends.functions import forget_functions, write_functions
from gradgraph.backends.known import work_out
from gradgraph.errors import BuildError, Finding
from gradgraph.graph import checks
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import forget_detached
from gradgraph.graph.shapes import OPSET
from gradgraph.machine.garbage_collection import paused_collection
from gradgraph.optim import updates  # noqa: F401  (operators that a saved step may call)
from gradgraph.passes.normal.edit import Editor, nodes_of
from gradgraph.passes.normal.opsets.older import check_opset
from gradgraph.passes.normal.opsets.opset import convert_to_opset
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.simplifying.fold import fold_constants
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.passes.normal.sizes.infer_each import infer_each
from gradgraph.passes.rewrites import run
from gradgraph.rules import families  # noqa: F401  (likewise)
from gradgraph.rules.named_operators import DOMAIN, describe, operator_of, write_portable

log = logging.getLogger("gradgraph")

MOST_NAMED = 8  # operators in one message
Choose = Callable[[Call, Sequence[Form]], Sequence[Form]]


@paused_collection()
def for_machine(
    model: onnx.ModelProto, backend: Backend, dims: Mapping[str, int] | None = None, choose: Choose | None = None
) -> onnx.ModelProto:
    """``model`` for one backend; it is not changed.

    Args:
        model: a training or evaluation model of a step.
        dims: sizes of symbolic dimensions, by name.
        choose: the forms to try for a call, in order; by default those whose ``when`` holds.
    """
    return ir.to_proto(lowered(opened(model, dims or {}), backend, choose))


def write_for(model: ir.Model, backend: Backend, file: str = "", spare: bool = False) -> ir.Model:
    """Write the named operators of ``model`` as ``backend`` has them, in place; see what its table says of the result.

    Args:
        file: of a step; messages name it.
        spare: training goes on without this file, so it may be one that the runtime refuses; that is told.

    Raises:
        BuildError: by its table, the runtime would refuse a node, or compute it wrong.
    """
    if backend.keeps_functions:
        run(backend.lowering.before, model)
        if backend.table is not None:
            check_against_table(backend, lowered(model.clone(), backend), file, spare)
        return write_functions(model)
    check_against_table(backend, lowered(model, backend), file, spare)
    return model


def write_init_for(model: ir.Model, backend: Backend) -> ir.Model:
    """Write init.onnx, which has no named operators, as ``backend`` takes it, in place.

    Raises:
        BuildError: by its table, the runtime would refuse a node, or compute it wrong.
    """
    if not backend.keeps_functions:
        run(backend.lowering.last, model)
    check_against_table(backend, model, "init.onnx")
    return model


def opset_for(backend: Backend, asked: int | None) -> int:
    """The opset to write at: the one that is asked for, or the newest that the runtime takes, by its table.

    Raises:
        BuildError: the runtime does not take it.
    """
    table = backend.table
    oldest, newest = (OPSET, OPSET) if table is None else table.opsets
    if asked is None:
        return min(OPSET, newest)
    check_opset(asked)
    if table is not None and not oldest <= asked <= newest:
        raise BuildError(f"{table.title} takes opsets {oldest} to {newest}, and not {asked}")
    return asked


def check_against_table(backend: Backend, model: ir.Model, file: str = "", spare: bool = False) -> None:
    """Refuse ``model``, which is lowered, if the table of ``backend`` does; log what is computed elsewhere.

    Without a table, nothing is refused. For ``file`` and ``spare`` see :func:`write_for`.

    Raises:
        BuildError: with a finding for each node that would be refused or wrong.
    """
    if (table := backend.table) is None:
        return
    known = model.clone()
    work_out(known)
    found = list(verdicts(known, backend))
    if not found:
        return
    of = f" of {file}" if file else ""
    if backend.for_all:
        bad = [(node, v) for node, v in found if v.fails]
        if bad:
            log.warning("not every runtime takes this%s, or right: %s (%s)", of, _counted(bad), bad[0][1].reason)
        return
    if fatal := [(node, v) for node, v in found if v.fails]:
        _refuse(fatal, f"cannot run in {table.title}", file, spare)
    count = sum(1 for _ in nodes_of(model))
    if away := [(node, v) for node, v in found if v.kind == "falls back"]:
        log.warning("%s does not take %d of %d nodes%s: %s", backend.name, len(away), count, of, _counted(away))
    if new := [(node, v) for node, v in found if v.kind == "untried"]:
        log.warning("nobody has tried %d of %d nodes%s in %s: %s", len(new), count, of, table.title, _counted(new))


def _refuse(fatal: Sequence[tuple[ir.Node, Verdict]], cannot: str, file: str, spare: bool) -> None:
    """Raise BuildError for these nodes of ``file``; where it is spare and refused, and not wrong, say so instead."""
    where = f"{file}: " if file else ""
    findings = [Finding(where + checks.describe(node), f"{cannot}: {v.reason}") for node, v in fatal]
    more = f" (and {len(fatal) - 1} more such nodes)" if len(fatal) > 1 else ""
    if not spare or any(v.kind == "wrong" for _, v in fatal):
        raise BuildError(f"{findings[0].problem}{more}", findings, remedy=_REMEDY, shell=_SHELL_REMEDY)
    log.warning("%s%s; the other files can: train there, and run %s elsewhere", findings[0].problem, more, file)


def verdicts(model: ir.Model, backend: Backend) -> Iterator[tuple[ir.Node, Verdict]]:
    """The nodes of ``model`` that are not known to be computed right, as the table of ``backend`` says."""
    known = backend.table
    if known is None:
        return
    by_design = set(backend.lowering.on_host(model))
    for node in nodes_of(model):
        verdict = RIGHT if node.op_type == "Constant" or node in by_design else known.verdict(node)
        if verdict is not RIGHT:
            yield node, verdict


_REMEDY = "build for a backend that computes it, or write that part of the model with other operators"
_SHELL_REMEDY = "build for another --backend, or write that part of the model with other operators"


def _counted(found: Sequence[tuple[ir.Node, Verdict]]) -> str:
    """How many nodes of each operator were found, as in ``2 Loop, 1 If``."""
    kinds = Counter(node.op_type for node, _ in found)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(MOST_NAMED))
    return named + (", …" if len(kinds) > MOST_NAMED else "")


def lowered(model: ir.Model, backend: Backend, choose: Choose | None = None) -> ir.Model:
    """``model`` for ``backend``, in place: lowered, cleaned up, and what the backend does last."""
    clean_up(lower(model, backend, choose))
    run(backend.lowering.last, model)
    return write_orders(model)


def opened(model: onnx.ModelProto, dims: Mapping[str, int]) -> ir.Model:
    """``model`` with its named operators as plain nodes, and ``dims`` in place of their names."""
    work: ir.Model = ir.from_proto(model)
    for value in work.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):  # the step knows its folder, and who lowers it does not
            value.const_value.base_dir = os.devnull
    forget_functions(work)
    forget_apart(work)
    forget_detached(nodes_of(work))  # what runs is not differentiated again
    convert_to_opset(work)
    bind(work, dims)
    return work


def bind(model: ir.Model, dims: Mapping[str, int]) -> None:
    """Replace symbolic dimensions by numbers, in place, and fold what becomes known."""
    if not dims:
        return
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for n in nodes_of(model) for v in n.outputs)]
    for value in values:
        if value.shape is not None and any(isinstance(d, ir.SymbolicDim) and d.value in dims for d in value.shape):
            value.shape = ir.Shape(
                dims.get(d.value or "", d.value) if isinstance(d, ir.SymbolicDim) else d for d in value.shape
            )
    _infer_all(model)
    while fold_constants(model):
        _infer_all(model)


def _infer_all(model: ir.Model) -> None:
    if not infer_each(model):
        infer_shapes(model)
    for node in nodes_of(model):
        if operator_of(node) is not None:
            describe(node)


def lower(model: ir.Model, backend: Backend, choose: Choose | None = None) -> ir.Model:
    """Replace, in place, every node that ``backend`` has a better form for, and every named operator."""
    run(backend.lowering.before, model)
    for layout in backend.lowering.layouts:
        taken = [n for n in nodes_of(model) if not layout.may_take(n) or backend.adds_forms(n)]
        _replace(model, backend, choose, taken)
        run(layout.rewrites, model)
    _replace(model, backend, choose, nodes_of(model))
    run(backend.lowering.after, model)
    model.opset_imports.pop(DOMAIN, None)
    for node in nodes_of(model):
        model.opset_imports.setdefault(node.domain, 1)  # onnxruntime's own operators
    return model


def _replace(model: ir.Model, backend: Backend, choose: Choose | None, nodes: Iterable[ir.Node]) -> None:
    """Replace these nodes by the first form that can serve, or the portable one; then what was written, likewise."""
    editor = Editor(model)
    op = editor.op
    waiting = deque(nodes)  # in graph order, as shapes become known in it
    with editor.replacing_many():
        while waiting:
            node = waiting.popleft()
            forms = backend.forms_of(node)
            if is_order(node) or (not forms and operator_of(node) is None):
                continue
            op.scope = node.name or ""
            call = Call.of(op, node)
            chosen = (f for f in forms if f.when(call)) if choose is None else choose(call, forms)
            outputs = _written(op, call, chosen)
            if outputs is None and operator_of(node) is not None:
                with op.naming_operators():  # a portable form may call others, which have forms
                    outputs = write_portable(op, node)
            if outputs is not None:
                waiting.extend(editor.replace(node, *outputs))


def _written(op: Builder, call: Call, forms: Iterable[Form]) -> tuple[Var, ...] | None:
    """Write the first form that can serve; return its outputs, None if there is none."""
    for candidate in forms:
        before = len(op.nodes), len(op.constants)
        written = candidate.write(op, *call.inputs, **call.attrs)
        if written is not None:
            return written if isinstance(written, tuple) else (written,)
        for node in op.nodes[before[0] :]:
            node.resize_inputs(0)
        del op.nodes[before[0] :]
    return None
