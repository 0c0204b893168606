"""The text of ``Step.summary()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from gradgraph.errors import counted, escaped, readable_bytes, shown
from gradgraph.graph.scoped_names import operator_name
from gradgraph.step.manifest import Manifest, StateSpec
from gradgraph.step.modules import Module, modules, tree

WRITTEN = "_written"  # suffix of a model's name: nodes before clean-up


def summary(
    m: Manifest,
    trains: Mapping[str, onnx.ModelProto],
    eval_: onnx.ModelProto,
    nodes: Mapping[str, int],
    sizes: Mapping[str, int] | None = None,
    taken: Sequence[str] = (),
) -> str:
    """Return the text of ``Step.summary()``.

    ``trains`` are the train graphs by name, ``nodes`` the counts of ``Step.nodes``, ``sizes`` the sizes of symbolic
    dimensions (1 by default), and ``taken`` notes of the build.
    """
    kinds: dict[str, list[StateSpec]] = {}
    for s in m.state:
        kinds.setdefault(s.kind, []).append(s)
    trainable = [s for s in kinds.get("parameter", []) if s.name in set(m.trainable)]
    frozen = [t for t in eval_.graph.initializer if t.name in set(m.frozen)]
    state_bytes = sum(s.nbytes for s in m.state)
    rows = [
        ("trainable", f"{_count(trainable)} in {counted(len(trainable), 'tensor')}"),
        ("frozen", f"{sum(_elements(t.dims) for t in frozen):,} in {counted(len(m.frozen), 'tensor')}"),
        *(("taken" if line is taken[0] else " ", line) for line in taken),
        *((f"{k} state", f"{_count(v)} in {counted(len(v), 'tensor')}") for k, v in kinds.items() if k != "parameter"),
        ("state", f"{len(m.state)} tensors, {readable_bytes(state_bytes)}"),
        ("inputs", ", ".join(map(str, m.inputs)) or "none"),
        ("targets", ", ".join(map(str, m.targets)) or "none"),
        ("outputs", ", ".join(m.outputs) or "none"),
        *([("precision", _call(m.precision))] if m.precision else []),
    ]
    for name, part in m.parts.items():
        if name:
            rows += [("", ""), ("step", name), ("trains", f"{counted(len(part.trainable), 'tensor')}")]
            rows.append(("reads", ", ".join(map(shown, part.inputs)) or "none"))
        rows += [
            ("loss", _call(part.loss)),
            ("optimizer", _call(part.optimizer)),
            ("fed per step", ", ".join(f"{k}={v:g}" for k, v in part.hyperparameters.items()) or "none"),
        ]
    if m.steps:
        rows.append(("", ""))
    operators = (operator_name(n.op_type, n.domain) for model in trains.values() for n in model.graph.node)
    rows += [("nodes", _node_counts(nodes)), ("operators", _most_frequent(operators))]
    found, unknown = modules(m, eval_, sizes)
    rows.append(("MACs", _all_macs(m, found, unknown, sizes or {})))
    lines = [f"{label:16}{value}" if label else "" for label, value in rows]
    return "\n".join(map(escaped, [*lines, *_table(tree(found))]))


def _all_macs(m: Manifest, found: list[Module], unknown: int, sizes: Mapping[str, int]) -> str:
    """Return multiply-accumulates as text: ``1,024 forward (batch=1)``."""
    dims = dict.fromkeys(d for s in m.inputs for d in s.shape if isinstance(d, str))
    at = ", ".join(f"{shown(d)}={sizes.get(d, 1)}" for d in dims)
    rest = f", and {unknown} products of unknown size" if unknown else ""
    return f"{sum(x.macs for x in found):,} forward{f' ({at})' if at else ''}{rest}"


def _table(rows: list[Module]) -> list[str]:
    """Return the lines of the table of modules, with a header; empty if there is only one module."""
    if len(rows) < 2:
        return []
    wide = max(6, *(len(shown(row.name)) for row in rows)) + 2
    header = f"{'module':{wide}}{'trainable':>14}{'frozen':>14}{'MACs':>18}"
    cells = (f"{shown(r.name) or '-':{wide}}{r.trainable:>14,}{r.frozen:>14,}{r.macs:>18,}" for r in rows)
    return ["", header, *cells]


def _elements(dims: Any) -> int:
    return int(np.prod([int(d) for d in dims], dtype=object)) if len(dims) else 1


def _count(specs: list[StateSpec]) -> str:
    return f"{sum(_elements(s.shape) for s in specs):,}"


def _node_counts(nodes: Mapping[str, int]) -> str:
    """Return numbers of nodes as text: ``train 57, init 7, eval 12 (train 80 before clean-up)``."""
    counts = {name: count for name, count in nodes.items() if not name.endswith(WRITTEN)}
    written = {name: nodes.get(f"{name}{WRITTEN}", 0) for name in counts}
    removed = ", ".join(f"{name} {count:,}" for name, count in written.items() if count > counts[name])
    kept = ", ".join(f"{name} {n:,}" for name, n in counts.items())
    return f"{kept} ({removed} before clean-up)" if removed else kept


def _most_frequent(op_types: Iterable[str], shown_kinds: int = 8) -> str:
    """Return the most frequent operators as text: ``Mul 59, Add 32 and 12 more kinds``."""
    counts = Counter(op_types).most_common()
    more = len(counts) - shown_kinds
    listed = ", ".join(f"{shown(kind)} {count:,}" for kind, count in counts[:shown_kinds])
    return f"{listed} and {more} more kinds" if more > 0 else listed


def _call(part: Mapping[str, Any]) -> str:
    """Return ``adamw(lr=0.001)`` for ``{"name": "adamw", "arguments": {"lr": 0.001}}``."""
    return f"{part['name']}({', '.join(f'{k}={v}' for k, v in part['arguments'].items())})"
