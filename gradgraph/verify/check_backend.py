"""Check of a model for a runtime: a table says whether the runtime supports each node and computes it correctly."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from gradgraph.arguments import TEXT, checked
from gradgraph.backends import checked_backends, named
from gradgraph.backends.capability import Kind, Table
from gradgraph.backends.engine import verdicts
from gradgraph.backends.static_facts import derive_facts
from gradgraph.errors import BuildError
from gradgraph.files.models import Source, load_model
from gradgraph.graph.checks import describe
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.functions.inline import inline_functions
from gradgraph.passes.normal.opsets.opset import convert_old, convert_to_opset
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.passes.normal.spelling.names import make_names_unique, write_one_domain
from gradgraph.step.folder import MANIFEST_FILE
from gradgraph.step.manifest import train_file
from gradgraph.step.step import Step


@dataclass(frozen=True)
class NodeVerdict:
    """A problem of a node, or of a whole model: a runtime rejects it, or may not compute it correctly.

    Attributes:
        file: the file of the model in a step; empty for a single model.
        node: the description as in errors, such as ``node '/head/Gemm' (Gemm)``; ``the model`` for the whole model.
        operator: the operator of the node; empty for the whole model.
        verdict: ``"refused"``, ``"wrong"`` (silently wrong numbers), ``"falls back"`` (onnxruntime computes it on the
            CPU) or ``"untried"``.
        reason: a clause such as "it has no operator Loop".
    """

    file: str
    node: str
    operator: str
    verdict: Kind
    reason: str

    def __str__(self) -> str:
        return f"{self.file + ': ' if self.file else ''}{self.node}: {self.verdict}, {self.reason}"


@dataclass(frozen=True)
class BackendReport:
    """The result of ``check_backend``.

    Attributes:
        backend: the name of the backend.
        runtime: the runtime of the table, with its version.
        tested: whether the table was measured in that runtime; if not, it was taken from its documentation.
        source: the origin of the table.
        nodes: the number of nodes in all models, with functions inlined.
        notes: the changes made to the models before nodes were looked up, such as inlined functions.
        findings: the problems found.
    """

    backend: str
    runtime: str
    tested: bool
    source: str
    nodes: int
    notes: tuple[str, ...]
    findings: tuple[NodeVerdict, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding has the verdict ``"refused"`` or ``"wrong"``."""
        return not any(f.verdict in ("refused", "wrong") for f in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings of each verdict."""
        return dict(Counter(f.verdict for f in self.findings))


@checked(backend=TEXT)
def check_backend(model: Source | Step, backend: str) -> BackendReport:
    """Find nodes of a model or a step that the runtime of ``backend`` would reject, run elsewhere, or compute wrongly.

    Nothing is run: each node is looked up in the table of that runtime. A model of an opset other than 21 is converted
    to 21 first, and functions are inlined.

    Args:
        model: a path (of a model or a step folder), an ``onnx.ModelProto``, an ``onnx_ir.Model`` or a ``Step``.
        backend: one of ``gradgraph.backends.BACKENDS`` that has a table.

    Raises:
        BuildError: if there is no backend of this name, or it has no table.
        ModelError: if the model is damaged.
    """
    chosen = named(backend)
    table = chosen.table
    if table is None:
        known = ", ".join(checked_backends())
        raise BuildError(f"the backend '{backend}' has no table of supported operators; use {known}")
    count, notes, findings = 0, list[str](), list[NodeVerdict]()
    for name, source, folder in _models(model):
        work = load_model(source, folder)
        findings += [NodeVerdict(name, "the model", "", "refused", reason) for reason in _refusals(work, table)]
        notes += [f"{name + ': ' if name else ''}{note}" for note in _prepared(work)]
        count += sum(1 for _ in nodes_of(work))
        findings += [
            NodeVerdict(name, describe(node), node.op_type, v.kind, v.reason) for node, v in verdicts(work, chosen)
        ]
    return BackendReport(backend, table.title, table.tested, table.source, count, tuple(notes), tuple(findings))


def _models(source: Source | Step) -> Iterator[tuple[str, Source, Path | None]]:
    """Yield the name of each file, its model, and the folder of its external data; a step has several files."""
    if isinstance(source, str | os.PathLike) and _is_step_folder(Path(source)):
        source = Step.load(source)
    if not isinstance(source, Step):
        yield "", source, None
        return
    models = {train_file(name): model for name, model in source.trains.items()}
    models |= {f"{name}.onnx": model for name, model in source.separate.items()}
    for name, model in {**models, "init.onnx": source.init, "eval.onnx": source.eval}.items():
        yield name, model, source.folder


def _is_step_folder(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # an invalid path is reported when it is read
        return (path / MANIFEST_FILE).is_file()
    return False


def _refusals(model: ir.Model, table: Table) -> Iterator[str]:
    """Yield the reasons why the runtime would reject the whole model: its opset, IR version or functions."""
    opset, (oldest, newest) = model.opset_imports.get("", OPSET), table.opsets
    if not oldest <= opset <= newest:
        yield f"it has opset {opset}, but {table.title} supports {oldest} to {newest}"
    (oldest, newest), version = table.ir_versions, model.ir_version
    if not oldest <= version <= newest:
        yield f"it has IR version {version}, but {table.title} supports {oldest} to {newest}"
    if model.functions and not table.functions:
        yield f"it calls {len(model.functions)} functions, which {table.title} does not support"


def _prepared(model: ir.Model) -> Iterator[str]:
    """Rewrite ``model`` in place so that its nodes can be looked up; yield a note on each change."""
    write_one_domain(model)
    make_names_unique(model)
    functions = len(model.functions)
    if functions:
        inline_functions(model)
        make_names_unique(model)
        yield f"{functions} functions were inlined"
    opset = model.opset_imports.get("", OPSET)
    old = convert_old(model)
    infer_shapes(model)
    if convert_to_opset(model) or old:
        make_names_unique(model)
        yield f"opset {opset} was converted to {OPSET}"
    derive_facts(model)
