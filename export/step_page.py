"""A page that shows a training step: a single HTML file that works offline.

The file contains data as JSON, which ``page/step.js`` draws. Names from a model are inserted as text, never as markup.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.data.record.specs import TensorSpec, dtype_name
from gradgraph.export.pages import as_script_data, text_of, whole_page
from gradgraph.files.atomic import write_atomically
from gradgraph.files.models import read_message
from gradgraph.files.protos import reads
from gradgraph.files.suffixes import check_suffix
from gradgraph.graph.scoped_names import operator_name
from gradgraph.graph.shapes import shape_of_type
from gradgraph.runtime.execution.memory import Prediction
from gradgraph.runtime.execution.profiler import Profile
from gradgraph.runtime.execution.walk import Walk
from gradgraph.step.origins import ROLES, Origins, kept_of
from gradgraph.step.step import Step


def save_page(
    source: Step | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    profiles: Mapping[str, Profile] | None = None,
    **sizes: int,
) -> None:
    """Write a page of a step: its graph by module, memory and time of its nodes, and its weights.

    Args:
        source: a :class:`gradgraph.Step`, or its folder; or an ``.onnx``, for its graph and weights.
        path: the path of the page.
        title: the title; by default the name of the folder or file.
        profiles: the results of ``Trainer.profile``, by the name of the step; ``""`` for a single step.
        sizes: the sizes of symbolic dimensions, such as ``batch=32``, for the memory; 1 by default.

    Raises:
        ModelError: if ``source`` is damaged.
        UnknownNameError: if the step has no dimension of a given name.
        OutputError: if ``path`` cannot be written.
    """
    check_suffix(path, ".html")
    if not isinstance(source, Step):
        title = title or Path(source).resolve().name
    if isinstance(source, Step) or Path(source).is_dir():
        step = source if isinstance(source, Step) else Step.load(source)
        data = step_data(step, profiles or {}, sizes)
    else:
        data = model_data(read_message(Path(source)))
    write_atomically(path, page(title or "a training step", data).encode())


def page(title: str, data: Mapping[str, Any]) -> str:
    """Return the HTML of the page that shows ``data``."""
    body = text_of("step.html").replace("/* step.js */", text_of("step.js"))
    return whole_page(title, body.replace("/* data */", as_script_data({"title": title, **data})), text_of("step.css"))


def model_data(model: onnx.ModelProto) -> dict[str, Any]:
    """Return the data of the page of a model: facts, nodes and weights."""
    graph, origins = model.graph, Origins.of_model(model)
    stored = {t.name for t in graph.initializer}
    inputs = [_declared(i) for i in graph.input if i.name not in stored]
    facts = [("inputs", _signatures(inputs)), ("outputs", _signatures(map(_declared, graph.output)))]
    nodes = [_node(node, origins, str(i)) for i, node in enumerate(graph.node)]
    shown: dict[str, Any] = {"name": "", "nodes": nodes, "inputs": {}, "moments": [], "times": None}
    weights = [_stored(t, "stored") for t in graph.initializer]
    return {"facts": _told(facts), "parts": ROLES, "graphs": [shown], "weights": weights}


def _declared(value: onnx.ValueInfoProto) -> TensorSpec:
    return TensorSpec(value.name, dtype_name(value.type.tensor_type.elem_type), shape_of_type(value.type) or ())


def step_data(step: Step, profiles: Mapping[str, Profile], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the data of the page of a step: facts, train graphs and weights."""
    m = step.manifest
    prediction = Prediction.here(step, None, sizes)
    graphs = [_graph(step, name, prediction.walks[name], profiles.get(name)) for name in m.parts]
    return {"facts": _told(_facts(step, prediction.sizes)), "parts": ROLES, "graphs": graphs, "weights": _weights(step)}


def _facts(step: Step, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    m = step.manifest
    for name, part in m.parts.items():
        yield (f"{name}: " if name else "") + "trained by", f"{part.loss['name']}, {part.optimizer['name']}"
    yield "inputs", _signatures(m.inputs)
    yield "targets", _signatures(m.targets)
    yield "backend", m.backend
    yield "written by", f"gradgraph {m.gradgraph}"
    yield "memory for", ", ".join(f"{name}={size}" for name, size in sizes.items())


def _told(facts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, text) for name, text in facts if text]


def _signatures(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{s.name} {s.dtype}[{', '.join('?' if d is None else str(d) for d in s.shape)}]" for s in specs)


# --- graphs ------------------------------------------------------------------------------------------------


def _graph(step: Step, name: str, walk: Walk, profile: Profile | None) -> dict[str, Any]:
    """Return the data of the train graph ``name``: nodes, memory over time, and times in ``profile``."""
    train = step.trains[name]
    origins = Origins.of_step(step.manifest, step.eval, train)
    at = {node.name: i for i, node in enumerate(train.graph.node)}
    return {
        "name": name,
        "nodes": [_node(node, origins) for node in train.graph.node],
        "inputs": {i.name: _kind_of_input(step, i.name) for i in train.graph.input},
        "moments": _moments(walk, origins, at),
        "times": None if profile is None else _times(profile, origins, at),
    }


def _node(node: onnx.NodeProto, origins: Origins, number: str = "") -> dict[str, Any]:
    """Return the data of a node, under the keys that ``step.js`` reads; a node without a name gets ``number``."""
    origin = origins(node.name)
    known = {
        "o": operator_name(node.op_type, node.domain),
        "d": node.domain,
        "n": node.name or f"{node.op_type} {number}",
        "p": ROLES.index(origin.role),
        "r": origin.node,
        "f": origin.forward,
        "m": origin.module,
        "w": origin.weight,
        "i": [x for x in dict.fromkeys([*node.input, *sorted(reads(node))]) if x],
        "u": [y for y in node.output if y],
    }
    return {key: value for key, value in known.items() if value or key == "p"}


def _kind_of_input(step: Step, name: str) -> str:
    m = step.manifest
    if any(s.name == name for s in m.inputs):
        return "batch"
    if any(s.name == name for s in m.targets):
        return "target"
    kind = next((s.kind for s in m.state if s.name == name), "")
    return {"parameter": "weight", "": "hyperparameter"}.get(kind, kind)


def _moments(walk: Walk, origins: Origins, at: Mapping[str, int]) -> list[list[int]]:
    """Return the index in the train graph, the allocated bytes and the bytes in use by kind, for each executed node.

    A node with a truncated name gets the index of the previous node of its role, or −1.
    """
    found: list[list[int]] = []
    last: dict[str, int] = dict.fromkeys(ROLES, -1)
    for node, *sizes in zip(walk.nodes, walk.made, *walk.alive.values(), strict=True):
        name = node.name or ""
        role = origins(name).role
        last[role] = at.get(origins.place(name), last[role])
        found.append([last[role], *sizes])
    return found


def _times(profile: Profile, origins: Origins, at: Mapping[str, int]) -> dict[str, Any]:
    nodes: dict[int, float] = {}
    for timed in profile.nodes:
        i = at.get(origins.place(timed.name), -1)
        nodes[i] = nodes.get(i, 0.0) + timed.seconds
    places = {place: seconds for place, seconds in profile.places().items() if seconds}
    return {"seconds": profile.seconds, "steps": profile.steps, "places": places, "nodes": nodes}


# --- weights -----------------------------------------------------------------------------------------------


def _weights(step: Step) -> list[dict[str, Any]]:
    """Return element type, shape, role, and size in bytes with optimizer state of each weight, in model order."""
    m = step.manifest
    trained, slots, kept = set(m.trainable), Counter[str](), kept_of(m)
    for s in m.state:
        slots[kept.get(s.name, "")] += s.nbytes
    frozen = set(m.frozen)
    rows = [
        {"n": s.name, "t": s.dtype, "s": s.shape, "k": "trained" if s.name in trained else s.kind, "b": s.nbytes,
         "x": slots[s.name]}
        for s in m.state if s.kind in ("parameter", "statistic")
    ]  # fmt: skip
    return rows + [_stored(t, "frozen") for t in step.eval.graph.initializer if t.name in frozen]


def _stored(tensor: onnx.TensorProto, kind: str) -> dict[str, Any]:
    bits = 0 if tensor.data_type == onnx.TensorProto.STRING else ir.DataType(tensor.data_type).bitwidth
    size = -(-math.prod(tensor.dims) * bits // 8)
    return {"n": tensor.name, "t": dtype_name(tensor.data_type), "s": list(tensor.dims), "k": kind, "b": size, "x": 0}
