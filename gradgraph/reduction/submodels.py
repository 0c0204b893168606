"""Submodels: models of a subset of a model's nodes."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from gradgraph.errors import GradgraphError
from gradgraph.files.models import load_model, to_proto
from gradgraph.files.protos import copied, proto_graphs, reads, types_in
from gradgraph.graph.prune import needed
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.verify.feeds import candidates
from gradgraph.verify.reference import Oracle, in_float64

_TRIES = 4  # random feeds, of different sizes, with which a model is run until one works
_MOST_KEPT = 64  # elements of an integer tensor that determines shapes: a shape, axes, indices


@dataclass(frozen=True)
class Facts:
    """The facts about a model that are needed to cut out submodels, found by type inference and by running the model.

    Attributes:
        types: the types of values by name.
        integers: small integer values by name, which may determine shapes.
        ran: whether the model could be run.
    """

    types: Mapping[str, onnx.TypeProto]
    integers: Mapping[str, np.ndarray]
    ran: bool


Learn = Callable[[onnx.ModelProto], Facts]


def learnt(model: onnx.ModelProto, values: str | None) -> Facts:
    """Return the facts about a model: inferred types, and the shapes and integers in ``values``.

    ``values`` is the result of ``values_of``; None, or any other text, if running the model failed.
    """
    types = types_in(_typed(model).graph)
    found: dict[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # no answer, or a message about the end of the process
        found = json.loads(values or "")
    for name, (shape, _) in found.items():
        tensor = types[name].tensor_type if name in types else None
        if tensor is not None and tensor.elem_type and not tensor.HasField("shape"):
            types[name] = onnx.helper.make_tensor_type_proto(tensor.elem_type, shape)
    kept = {n: np.array(v, np.int64).reshape(shape) for n, (shape, v) in found.items() if v is not None}
    return Facts(types, kept, bool(found))


def values_of(model: onnx.ModelProto) -> str | None:
    """Run a model in the reference implementation; return the shapes of all values, and small int64 values, as JSON.

    The JSON maps each name to a pair: the shape, and the elements or null. Returns None if the model cannot be run.
    """
    typed = _typed(model)
    types = types_in(typed.graph)
    names = [y for node in model.graph.node for y in node.output if y and types.get(y)]
    del typed.graph.output[:]
    typed.graph.output.extend(onnx.helper.make_value_info(n, types[n]) for n in names)
    rng = np.random.default_rng(0)
    for feeds in itertools.islice(candidates(load_model(model).graph, rng), _TRIES):
        wide = {n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in feeds.items()}
        try:
            results = Oracle(in_float64(typed))(wide)
        except Exception:  # the reference implementation raises any error of its NumPy code
            continue
        arrays = {n: y for n, y in results.items() if isinstance(y, np.ndarray)}
        steering = {n: y.ravel().tolist() for n, y in arrays.items() if y.dtype == np.int64 and y.size <= _MOST_KEPT}
        return json.dumps({n: (y.shape, steering.get(n)) for n, y in arrays.items()})
    return None


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of ``model`` with inferred types; a plain copy if the model cannot be loaded."""
    try:
        work = load_model(model)
        infer_shapes(work)
        return to_proto(work)
    except GradgraphError:
        return copied(model)


def part(model: onnx.ModelProto, kept: Collection[int], facts: Facts) -> onnx.ModelProto | None:
    """Return a model of the nodes at the indices ``kept``; None if it has no output, or a needed type is unknown.

    A value that these nodes read and do not compute becomes an input, or a constant if it is a small integer tensor.
    The part has the outputs of ``model`` that these nodes compute or, if there are none, all values that these nodes
    compute but do not read.
    """
    kept = set(kept)
    small = copied(model)
    nodes = [n for i, n in enumerate(model.graph.node) if i in kept]
    made = {y for n in nodes for y in n.output if y}
    outputs = [o for o in model.graph.output if o.name in made]
    if not outputs:
        read = set().union(*map(reads, nodes))
        ends = [y for n in nodes for y in n.output if y and y not in read]
        if any(y not in facts.types for y in ends):
            return None
        outputs = [onnx.helper.make_value_info(y, facts.types[y]) for y in ends]
    if not outputs:
        return None
    nodes, _ = needed(nodes, [o.name for o in outputs], lambda node: node.output, reads)
    made = {y for n in nodes for y in n.output if y}
    wanted = set().union(*map(reads, nodes)) - made
    inside = {y for g in proto_graphs(model) for n in g.node for y in n.output} - {
        y for n in model.graph.node for y in n.output
    }
    inside |= {v.name for g in [*proto_graphs(model)][1:] for v in (*g.input, *g.initializer)}
    graph = small.graph
    inputs = [v for v in graph.input if v.name in wanted]
    weights = [t for t in graph.initializer if t.name in wanted]
    given = {v.name for v in (*inputs, *weights)}
    for name in sorted(wanted - given - inside):
        if name in facts.integers:
            weights.append(onnx.numpy_helper.from_array(facts.integers[name], name))
        elif name in facts.types:
            inputs.append(onnx.helper.make_value_info(name, facts.types[name]))
        else:
            return None
    described = [v for v in graph.value_info if v.name in made]
    for field, content in (("node", nodes), ("input", inputs), ("initializer", weights), ("output", outputs),
                           ("value_info", described)):  # fmt: skip
        own = [*map(copied, content)]
        graph.ClearField(field)
        getattr(graph, field).extend(own)
    return small
