"""A training step in a few lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx

from gradgraph.calls import operator_name
from gradgraph.errors import escaped, shown
from gradgraph.manifest import Manifest, StateSpec
from gradgraph.step_folder import MODELS


def summary(m: Manifest, train: onnx.ModelProto, eval_: onnx.ModelProto, nodes: Mapping[str, int]) -> str:
    """A few lines for people: what is trained, what is frozen, how large the state is, what goes in."""
    kinds: dict[str, list[StateSpec]] = {}
    for s in m.state:
        kinds.setdefault(s.kind, []).append(s)
    trainable = [s for s in kinds.get("parameter", []) if s.name in set(m.trainable)]
    frozen = [t for t in eval_.graph.initializer if t.name in set(m.frozen)]
    state_bytes = sum(s.nbytes for s in m.state)
    rows = [
        ("trainable", f"{_count(trainable)} in {len(trainable)} tensors"),
        ("frozen", f"{sum(_elements(t.dims) for t in frozen):,} in {len(m.frozen)} tensors"),
        *((f"{k} state", f"{_count(v)} in {len(v)} tensors") for k, v in kinds.items() if k != "parameter"),
        ("state", f"{len(m.state)} tensors, {_readable(state_bytes)}"),
        ("inputs", ", ".join(map(str, m.inputs)) or "none"),
        ("targets", ", ".join(map(str, m.targets)) or "none"),
        ("outputs", ", ".join(m.outputs) or "none"),
        ("loss", _call(m.loss)),
        ("optimizer", _call(m.optimizer)),
        ("fed per step", ", ".join(f"{k}={v:g}" for k, v in m.hyperparameters.items()) or "none"),
        ("nodes", _node_counts(nodes)),
        ("operators", _most_frequent(operator_name(node.op_type, node.domain) for node in train.graph.node)),
    ]
    return "\n".join(escaped(f"{label:16}{value}") for label, value in rows)


def _elements(dims: Any) -> int:
    return int(np.prod([int(d) for d in dims], dtype=object)) if len(dims) else 1


def _count(specs: list[StateSpec]) -> str:
    return f"{sum(_elements(s.shape) for s in specs):,}"


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _node_counts(nodes: Mapping[str, int]) -> str:
    """``train 57, init 7, eval 12 (train 80 before clean-up)``."""
    written = nodes.get("train_written", 0)
    removed = f" (train {written:,} before clean-up)" if written > nodes["train"] else ""
    return ", ".join(f"{name} {nodes[name]:,}" for name in MODELS) + removed


def _most_frequent(op_types: Iterable[str], shown_kinds: int = 8) -> str:
    """``Mul 59, Add 32 and 12 more``."""
    counts = Counter(op_types).most_common()
    more = len(counts) - shown_kinds
    listed = ", ".join(f"{shown(kind)} {count:,}" for kind, count in counts[:shown_kinds])
    return f"{listed} and {more} more kinds" if more > 0 else listed


def _call(part: Mapping[str, Any]) -> str:
    """``adamw(lr=0.001)`` from ``{"name": "adamw", "arguments": {"lr": 0.001}}``."""
    return f"{part['name']}({', '.join(f'{k}={v}' for k, v in part['arguments'].items())})"
