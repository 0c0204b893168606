"""Facts about a model as plain data, for ``inspect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from gradgraph.autodiff.path import Path as GradientPath
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.review import as_data, reasons, review
from gradgraph.autodiff.select import running_statistics, trainable
from gradgraph.building.outputs import output_name, output_of
from gradgraph.building.selection import frozen_below, parameters_of
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import dtype_name
from gradgraph.errors import BuildError
from gradgraph.files.model_metadata import adapter_weights
from gradgraph.graph.marks import TEACHER, TEACHERS, is_marked_constant
from gradgraph.graph.shapes import recorded_shape
from gradgraph.machine.garbage_collection import paused_collection
from gradgraph.passes.normal import has_body, normalise
from gradgraph.rules import registry
from gradgraph.verify.operator_status import qualified, status


@dataclass(frozen=True)
class Selection:
    """The options of ``gradgraph build`` that select the trained weights and the output."""

    train: Sequence[str] = ()
    freeze: Sequence[str] = ()
    output: str | None = None
    freeze_below: Sequence[str] = ()

    @property
    def is_made(self) -> bool:
        return bool(self.train or self.freeze or self.output or self.freeze_below)


@paused_collection()
def describe(path: Path, selection: Selection) -> dict[str, Any]:
    """Return facts about the model at ``path``: header, inputs, outputs, weights with their roles, operators, and
    operators without a gradient.

    Raises:
        ModelError: if the model cannot be read.
        UnknownNameError, BuildError: if the selection does not match the model.
    """
    header: dict[str, Any] = {"file": str(path)}
    stored: list[dict[str, Any]] = []
    below: list[str] = []

    def look(read: ir.Model) -> None:
        header.update(
            producer=" ".join(filter(None, (read.producer_name, read.producer_version))),
            ir_version=read.ir_version,
            opset={domain or "ai.onnx": version for domain, version in read.opset_imports.items()},
            nodes=sum(1 for _ in read.graph.all_nodes()),
            functions=len(read.functions),
        )
        values = (v for v in read.graph.initializers.values() if not v.is_graph_input())
        stored.extend({**_tensor(v), "bytes": _size(v)} for v in values)
        below.extend(frozen_below(read, selection.freeze_below))

    named = [*selection.train, *selection.freeze]
    model = normalise(path, parameters=named, look=look)
    graph = model.graph
    ends = {"inputs": [_tensor(v) for v in graph.inputs], "outputs": [_tensor(v) for v in graph.outputs]}
    trained = _trained(model, selection, below)
    targets = _targets(graph, selection)
    usual = {v.name or "" for v in trainable(graph, targets)}
    why = reasons(graph, targets)
    is_adapted = not selection.train and bool(adapter_weights(model.metadata_props))
    left_out = "the model's adapters are trained instead" if is_adapted else "excluded by --train or --freeze"
    for name in usual.difference(trained):
        why[name] = "upstream of a value of --freeze-below" if name in below else left_out
    if TEACHER in model.metadata_props:
        theirs = (name for name in graph.initializers if name.startswith(TEACHERS))
        why |= dict.fromkeys(theirs, "part of a teacher, which stays frozen")
    weights = {n for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v)}
    others = [facts for facts in stored if facts["name"] not in weights]
    counts = Counter(registry.key_of(node) for node in graph.all_nodes())
    return {
        **header,
        **ends,
        "names": DataNames.read_from(model.metadata_props).as_data(),
        "weights": _weights(graph, trained, why),
        "numbers": [{**n, "reason": why.get(n["name"]) or f"its type is {n['dtype']}"} for n in others],
        "findings": as_data(review(graph, targets, trained, by_default=not named and not below)),
        "operators": [{"operator": qualified(k), "count": n, "status": status(k)} for k, n in sorted(counts.items())],
        "missing": _missing(graph, selection, trained),
    }


def _trained(model: ir.Model, selection: Selection, below: Sequence[str]) -> list[str]:
    """Return the names of the trained weights; empty for the default selection of a model without trainable weights."""
    graph = model.graph
    try:
        output = output_of(graph, output_name(graph, selection.output))
        return parameters_of(model, [output], selection.train or "*", selection.freeze, below)
    except BuildError:
        if selection.is_made:
            raise
        return []


def _tensor(value: ir.Value) -> dict[str, Any]:
    shape = recorded_shape(value)
    return {"name": value.name, "dtype": "" if value.dtype is None else dtype_name(int(value.dtype)), "shape": shape}


def _targets(graph: ir.Graph, selection: Selection) -> list[ir.Value]:
    floating = any(carries(v) for v in graph.outputs)
    name = output_name(graph, selection.output) if floating or selection.output else ""
    return [v for v in graph.outputs if v.name == name]


def _weights(graph: ir.Graph, trained: Sequence[str], why: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return element type, shape, size in bytes, role (trained, frozen or statistic) and reason for the role of each
    floating-point initializer except constants.
    """
    chosen, statistics = set(trained), running_statistics(graph)
    rows = []
    for name, value in graph.initializers.items():
        if not carries(value) or is_marked_constant(value):
            continue
        role = "trained" if name in chosen else "statistic" if value in statistics else "frozen"
        rows.append({**_tensor(value), "bytes": _size(value), "role": role, "reason": why.get(name, "")})
    return rows


def _size(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes


def _missing(graph: ir.Graph, selection: Selection, trained: Sequence[str]) -> list[dict[str, Any]]:
    """Return operator and name of each node on the gradient path without a gradient rule or function body."""
    if not trained:
        return []
    path = GradientPath(graph, _targets(graph, selection), [graph.initializers[n] for n in trained])
    nodes = [n for n in path.nodes if registry.rule_of(n) is None and not has_body(n)]
    return [{"operator": qualified(registry.key_of(n)), "node": n.name or ""} for n in nodes]
