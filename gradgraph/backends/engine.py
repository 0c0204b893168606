"""Lowering: rewrite a model into the form that a backend computes fastest, by the backend's rewrites and forms.

``for_machine`` lowers a saved training model, in which named operators are calls of functions with portable bodies, for
one backend. The result is run, not saved. Known symbolic dimensions (such as the batch size) are replaced by numbers
first, and constants that follow from them are folded.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from gradgraph.autodiff.after import is_order, write_orders
from gradgraph.autodiff.separate_buffers import restore_sizes
from gradgraph.backends.backend import Backend
from gradgraph.backends.capability import ALWAYS, RIGHT, Verdict
from gradgraph.backends.forms import Call, Form
from gradgraph.backends.functions import forget_functions, write_functions
from gradgraph.backends.static_facts import derive_facts
from gradgraph.errors import BuildError, Finding
from gradgraph.files.models import structured
from gradgraph.graph import checks
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import forget_detached
from gradgraph.graph.shapes import OPSET
from gradgraph.machine.garbage_collection import paused_collection
from gradgraph.optim import updates  # noqa: F401  (registers operators that a saved step may call)
from gradgraph.passes.normal.edit import Editor, nodes_of
from gradgraph.passes.normal.opsets.older import check_opset
from gradgraph.passes.normal.opsets.opset import convert_to_opset
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.simplifying.fold import fold_constants
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.passes.rewrites import run
from gradgraph.rules import families  # noqa: F401  (likewise)
from gradgraph.rules.named_operators import DOMAIN, describe, operator_of, write_portable

log = logging.getLogger("gradgraph")

MOST_NAMED = 8  # maximum operators listed in one message
Choose = Callable[[Call, Sequence[Form]], Sequence[Form]]


@paused_collection()
def for_machine(
    model: onnx.ModelProto, backend: Backend, dims: Mapping[str, int] | None = None, choose: Choose | None = None
) -> onnx.ModelProto:
    """Return a copy of ``model`` lowered for one backend.

    Args:
        dims: sizes of symbolic dimensions, by name.
        choose: returns the forms to try for a call, in order; by default the forms whose ``when`` is true.
    """
    return ir.to_proto(lowered(opened(model, dims or {}), backend, choose))


def write_for(model: ir.Model, backend: Backend, file: str = "", spare: bool = False) -> ir.Model:
    """Write the named operators of ``model`` for ``backend``, in place, and check the model; return ``model``.

    Args:
        file: the name of the file in the step folder, for messages.
        spare: whether training works without this file, so that unsupported nodes in it only cause a warning.

    Raises:
        BuildError: if, according to the table, the runtime would reject a node or compute it incorrectly.
    """
    if backend.keeps_functions:
        run(backend.lowering.before, model)
        if backend.table is not None:
            check_against_table(backend, lowered(model.clone(), backend), file, spare)
        return write_functions(model)
    check_against_table(backend, lowered(model, backend), file, spare)
    return model


def write_init_for(model: ir.Model, backend: Backend) -> ir.Model:
    """Rewrite init.onnx, without named operators, for ``backend``, in place, check it against its table, and return it.

    Raises:
        BuildError: if, according to the table, the runtime would reject a node or compute it incorrectly.
    """
    if not backend.keeps_functions:
        run(backend.lowering.last, model)
    check_against_table(backend, model, "init.onnx")
    return model


_HOLD = {ALWAYS, "captures", "open"}  # facts of a Scan whose body reads weights, for an open batch


def unrolls(backend: Backend, asked: bool | None = None) -> bool:
    """Whether to write loops without Scan: ``asked``, or by default if the runtime has no Scan that reads weights."""
    table = None if asked is not None or backend.for_all else backend.table
    row = None if table is None else table.rows.get("Scan")
    if table is None:
        return bool(asked)
    if row is None:
        return table.complete and not table.falls_back
    return any(set(c.terms) <= _HOLD for c in (*row.refused, *row.wrong))


def opset_for(backend: Backend, asked: int | None) -> int:
    """Return the opset to write: ``asked`` if set, otherwise the newest that the runtime's table supports.

    Raises:
        BuildError: if the runtime does not support the requested opset.
    """
    table = backend.table
    oldest, newest = (OPSET, OPSET) if table is None else table.opsets
    if asked is None:
        return min(OPSET, newest)
    check_opset(asked)
    if table is not None and not oldest <= asked <= newest:
        raise BuildError(f"{table.title} supports opsets {oldest} to {newest}, not {asked}; pass one of these")
    return asked


def check_against_table(backend: Backend, model: ir.Model, file: str = "", spare: bool = False) -> None:
    """Reject the lowered ``model`` if the table of ``backend`` does; log nodes that fall back to the CPU.

    Does nothing for a backend without a table. For ``file`` and ``spare`` see :func:`write_for`.

    Raises:
        BuildError: with a finding for each node that the runtime would reject or compute incorrectly.
    """
    if (table := backend.table) is None:
        return
    known = model.clone()
    derive_facts(known)
    found = list(verdicts(known, backend))
    if not found:
        return
    of = f" of {file}" if file else ""
    if backend.for_all:
        bad = [(node, v) for node, v in found if v.fails]
        if bad:
            log.warning(
                "some runtimes reject nodes%s or compute them incorrectly: %s (%s)",
                of,
                _counted(bad),
                bad[0][1].reason,
            )
        return
    if fatal := [(node, v) for node, v in found if v.fails]:
        _refuse(fatal, f"cannot run in {table.title}", file, spare)
    count = sum(1 for _ in nodes_of(model))
    if away := [(node, v) for node, v in found if v.kind == "falls back"]:
        log.warning("%s does not support %d of %d nodes%s: %s", backend.name, len(away), count, of, _counted(away))
    if new := [(node, v) for node, v in found if v.kind == "untried"]:
        log.warning("%d of %d nodes%s are untested in %s: %s", len(new), count, of, table.title, _counted(new))


def _refuse(fatal: Sequence[tuple[ir.Node, Verdict]], cannot: str, file: str, spare: bool) -> None:
    """Raise BuildError for ``fatal`` nodes; only log for a spare ``file`` without incorrectly computed nodes."""
    where = f"{file}: " if file else ""
    findings = [Finding(where + checks.describe(node), f"{cannot}: {v.reason}") for node, v in fatal]
    more = f" (and {len(fatal) - 1} more such nodes)" if len(fatal) > 1 else ""
    if not spare or any(v.kind == "wrong" for _, v in fatal):
        raise BuildError(f"{findings[0].problem}{more}", findings, remedy=_REMEDY, shell=_SHELL_REMEDY)
    log.warning(
        "%s%s; train there with the other files, and run %s in another runtime", findings[0].problem, more, file
    )


def verdicts(model: ir.Model, backend: Backend) -> Iterator[tuple[ir.Node, Verdict]]:
    """Yield the nodes of ``model`` that the table of ``backend`` does not list as supported, with their verdicts."""
    known = backend.table
    if known is None:
        return
    by_design = set(backend.lowering.on_host(model))
    for node in nodes_of(model):
        verdict = RIGHT if node.op_type == "Constant" or node in by_design else known.verdict(node)
        if verdict is not RIGHT:
            yield node, verdict


_REMEDY = "build for a backend that supports it, or write that part of the model with other operators"
_SHELL_REMEDY = "build for another --backend, or write that part of the model with other operators"


def _counted(found: Sequence[tuple[ir.Node, Verdict]]) -> str:
    """Return the number of nodes per operator, such as ``2 Loop, 1 If``."""
    kinds = Counter(node.op_type for node, _ in found)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(MOST_NAMED))
    return named + (", …" if len(kinds) > MOST_NAMED else "")


def lowered(model: ir.Model, backend: Backend, choose: Choose | None = None) -> ir.Model:
    """Lower ``model`` for ``backend`` in place, clean it up, apply the final rewrites, and return it."""
    clean_up(lower(model, backend, choose))
    run(backend.lowering.last, model)
    return write_orders(model)


def opened(model: onnx.ModelProto, dims: Mapping[str, int]) -> ir.Model:
    """Return ``model`` with named operators as plain nodes, and with the sizes in ``dims`` for symbolic dimensions.

    Raises:
        ModelError: if ``model`` is malformed.
    """
    work = structured(model)
    for value in work.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):  # lowering never reads external data
            value.const_value.base_dir = os.devnull
    forget_functions(work)
    restore_sizes(work)
    forget_detached(nodes_of(work))  # a running model is not differentiated again
    convert_to_opset(work)
    bind(work, dims)
    return work


def bind(model: ir.Model, dims: Mapping[str, int]) -> None:
    """Replace the symbolic dimensions in ``dims`` with numbers, in place, and fold constants that follow from them."""
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
    infer_shapes(model)
    for node in nodes_of(model):
        if operator_of(node) is not None:
            describe(node)


def lower(model: ir.Model, backend: Backend, choose: Choose | None = None) -> ir.Model:
    """Replace nodes by better forms for ``backend``, and all named operators, in place; return ``model``."""
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
    """Replace ``nodes`` with their first applicable form, or the portable one; repeat for the nodes this creates."""
    editor = Editor(model)
    op = editor.op
    waiting = deque(nodes)  # in graph order, as shapes become known in that order
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
                with op.naming_operators():  # a portable form may call named operators that have forms
                    outputs = write_portable(op, node)
            if outputs is not None:
                waiting.extend(editor.replace(node, *outputs))


def _written(op: Builder, call: Call, forms: Iterable[Form]) -> tuple[Var, ...] | None:
    """Write the first applicable form; return its outputs, or None if no form applies."""
    for candidate in forms:
        before = len(op.nodes), len(op.constants)
        written = candidate.write(op, *call.inputs, **call.attrs)
        if written is not None:
            return written if isinstance(written, tuple) else (written,)
        for node in op.nodes[before[0] :]:
            node.resize_inputs(0)
        del op.nodes[before[0] :]
    return None
