"""Pass: types and shapes of all values, as far as ONNX's own inference tells."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import escaped
from gradgraph.files.protos import proto_graphs, types_in
from gradgraph.graph import shapes
from gradgraph.graph.ranks import axes_of
from gradgraph.machine.limits import limited_memory
from gradgraph.passes.normal.edit import calls_of, graphs_of, nodes_of
from gradgraph.passes.normal.sizes.ceil_mode import settle_windows
from gradgraph.passes.normal.sizes.known_sizes import better, is_generated
from gradgraph.passes.normal.sizes.long_vectors import LONG, has_long_vectors
from gradgraph.passes.normal.sizes.resize_scales import corrected, settle_scales
from gradgraph.passes.normal.sizes.told_ranks import record_told

_MOST_STEERING = 64  # elements of an initializer that may steer shapes (axes, sizes); larger ones are not worth copying
# bytes for one inference, beside what the file's own size allows: protobuf frees what it has not yet filled if memory
# ends, which does no harm where a block comes from the system and is 0, as those beyond 32 MB do
_ROOM = 220_000_000
_COPIES = 20  # of the message in memory, its names above all
_MISJUDGED = frozenset({"Attention", "Resize", "Upsample"})
_MOST_WRITTEN_OUT = 2**28  # elements of a vector that ONNX's inference had better not write out
_NAMED = "gradgraph.huge:"  # before the number, in the name that stands for it
_HIDDEN = "gradgraph.hidden"  # a domain about whose operators ONNX's inference knows nothing


def infer_shapes(model: ir.Model) -> None:
    """Record types and shapes.

    1. data are propagated (Shape, Gather, Concat, …), so symbolic dimensions survive shape arithmetic;
    2. larger initializers are passed as inputs, so that no weight is copied and no 2 GB limit met; small ones, which
       may be axes or sizes, are read even where they lie in a file, since ONNX's rules cannot and would give up;
    3. what is recorded already is kept, and completed where a dimension was unknown;
    4. negative dimensions, which old exporters wrote for "any", become unknown;
    5. inputs and outputs of the main graph get no symbolic dimension that the model did not have; elsewhere the names
       that an earlier inference made up (``unk__0``) are forgotten first, as this one may give them to other sizes.
    6. where ONNX's rules know nothing, our own are asked (``shapes.shape_of``), and the readers (``told_ranks.py``),
       and then ONNX's once more;
    7. STFT without ``onesided`` gets its default, 1, which ONNX's rule takes for 0;
    8. Attention, whose rule takes sizes that are unknown for 0, tells no sizes then;
    9. pools whose windows ONNX's rule miscounts are rewritten first (``ceil_mode.py``), and so are Resizes by scales
       that it takes for others than runtimes do (``resize_scales.py``).
    """
    for node in calls_of(model, "STFT"):
        node.attributes.setdefault("onesided", ir.AttrInt64("onesided", 1))
    while _infer(model):
        pass


def _infer(model: ir.Model) -> bool:
    """Infer once; True if another round may find more."""
    ends = {*model.graph.inputs, *model.graph.outputs}
    for value in _values(model):
        _forget(value, generated=value not in ends)
    known = {d for v in _values(model) if v.shape is not None for d in shapes.as_dims(v.shape) if isinstance(d, str)}
    proto = _without_weights(model)
    try:
        inferred = _inferred(proto, _bytes_allowed(model))
    except shapes.FAILURES:
        return False  # an unknown shape is an honest answer; a model that is really wrong is refused where it matters
    if settled := settle_windows(model, inferred):
        if any(settled.values()):
            _forget_all(model)
        return True
    if _forget_miscounted(model, inferred.graph):
        return True
    _record(model.graph, inferred.graph, known)
    if settle_scales(model):
        return True
    if model.opset_imports.get("") != shapes.OPSET:
        return False  # our own rules know that opset only
    untyped = [n for n in nodes_of(model) if n.outputs and n.outputs[0].type is None]
    unknown = [v for v in _values(model) if v.shape is None]
    shapes.ask_again(unknown)
    found = [v for v in unknown if shapes.shape_of(v) is not None]
    found_by_readers = record_told(v for v in unknown if v.shape is None)
    for node in untyped:
        shapes.infer_beyond_onnx(node)
    return bool(found) or found_by_readers or any(n.outputs[0].type is not None for n in untyped)


def _forget_miscounted(model: ir.Model, inferred: onnx.GraphProto) -> bool:
    """Forget all sizes that a file records if a Resize has one from ONNX's inference; True if so."""
    types = {v.name: v.type for v in (*inferred.value_info, *inferred.output)}
    hidden = {n.output[0] for n in inferred.node if n.domain == _HIDDEN and n.op_type != "Attention"}
    recorded = [v for n in model.graph for v in n.outputs if v.name in hidden and not v.is_graph_output()]
    pairs = [(shapes.recorded_shape(v) or (), shapes.shape_of_type(types[v.name or ""]) or ()) for v in recorded]
    wrong = any(shapes.clash(*pair) for pair in pairs)
    if wrong:
        _forget_all(model)
    return wrong


def _forget_all(model: ir.Model) -> None:
    """Forget what is recorded of intermediate values: some of it rests on a wrong size."""
    for value in (v for n in nodes_of(model) for v in n.outputs if not v.is_graph_output()):
        value.shape = None


def _inferred(proto: onnx.ModelProto, room: int) -> onnx.ModelProto:
    """Let ONNX infer, but hide operators whose rules err; changes ``proto``."""
    while True:
        inferred = _inferred_in_room(proto, room)
        opset = max((o.version for o in proto.opset_import if o.domain == ""), default=shapes.OPSET)
        if not _hide_misjudged(proto.graph, inferred.graph, opset, _Scope({}, {})):
            return inferred
        if all(o.domain != _HIDDEN for o in proto.opset_import):
            proto.opset_import.append(onnx.helper.make_opsetid(_HIDDEN, 1))


def _inferred_in_room(proto: onnx.ModelProto, room: int, strict: bool = False) -> onnx.ModelProto:
    """Let ONNX infer, without data if these do not fit into memory; return ``proto`` if types do not fit either."""
    room += _COPIES * proto.ByteSize()
    found = proto
    for data in (True, False) if _has_short_vectors(proto) else (False,):
        with contextlib.suppress(MemoryError), limited_memory(room):
            found = onnx.shape_inference.infer_shapes(proto, strict_mode=strict, data_prop=data)
            break
    for dim in _dims_of(found) if proto.metadata_props else ():
        if dim.dim_param.startswith(_NAMED):
            dim.dim_value = int(dim.dim_param.removeprefix(_NAMED))
    _forget_names_of_elements(found)
    return found


def _forget_names_of_elements(proto: onnx.ModelProto) -> None:
    """Forget names that ONNX's inference made up for sizes in which the elements of a sequence differ.

    Runtimes take one name for one size: onnxruntime would give the buffer of one element to another.
    """
    kinds = (info.type for g in proto_graphs(proto) for info in (*g.input, *g.value_info, *g.output))
    held = (shapes.shape_of_type(kind) or () for kind in kinds if not kind.HasField("tensor_type"))
    made_up = set(filter(is_generated, itertools.chain.from_iterable(held)))
    for dim in _dims_of(proto) if made_up else ():
        if dim.dim_param in made_up:
            dim.ClearField("dim_param")


def _has_short_vectors(proto: onnx.ModelProto) -> bool:
    """Whether ONNX's inference may write out each computed vector: it is short, or what computes its size bounds it."""
    inferred = onnx.shape_inference.infer_shapes(proto)
    if has_long_vectors(inferred.graph):
        return False
    del inferred.graph.input[:]  # weights among them, for which _bytes_allowed has room
    return all(len(dims) != 1 or dims[0].dim_value <= LONG for dims in _shapes_of(inferred))


def _shapes_of(proto: onnx.ModelProto) -> Iterator[Sequence[onnx.TensorShapeProto.Dimension]]:
    for graph in proto_graphs(proto):
        for info in (*graph.input, *graph.value_info, *graph.output):
            yield _tensor_type(info.type).shape.dim


def _tensor_type(kind: onnx.TypeProto) -> onnx.TypeProto.Tensor:
    """The type of a tensor, or of those that a sequence or optional holds."""
    while (held := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, held).elem_type
    return kind.tensor_type


def _dims_of(proto: onnx.ModelProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    yield from itertools.chain.from_iterable(_shapes_of(proto))


def _bytes_allowed(model: ir.Model) -> int:
    """Bytes that an inference of ``model`` may take, which writes vectors out, element by element."""
    stored = (v.const_value for v in model.graph.initializers.values())
    elements = sum(t.size for t in stored if t is not None and len(t.shape) == 1)
    return _ROOM + 100 * elements + 5_000 * sum(1 for _ in nodes_of(model))


class _Scope(NamedTuple):
    """Types and constants by name: those of a graph and of the graphs around it."""

    types: Mapping[str, onnx.TypeProto]
    constants: Mapping[str, np.ndarray]

    def within(self, graph: onnx.GraphProto) -> _Scope:
        constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        return _Scope({**self.types, **types_in(graph)}, {**self.constants, **constants})


def _hide_misjudged(graph: onnx.GraphProto, inferred: onnx.GraphProto, opset: int, outside: _Scope) -> bool:
    """Give misjudged nodes a domain without rules and record what is right; True if there were any.

    These are every Attention with an output that was inferred to be empty, though no input is, and the first Resize
    whose size was miscounted (``resize_scales.py``).
    """
    if not any(n.op_type in _MISJUDGED or any(a.HasField("g") for a in n.attribute) for n in graph.node):
        return False
    scope = outside.within(inferred)
    types = scope.types
    hidden = False
    for node, seen in zip(graph.node, inferred.node, strict=True):
        for mine, theirs in zip(node.attribute, seen.attribute, strict=True):
            hidden |= mine.type == onnx.AttributeProto.GRAPH and _hide_misjudged(mine.g, theirs.g, opset, scope)
        if node.domain == "" and node.op_type in ("Resize", "Upsample"):
            right = corrected(node, types, scope.constants, opset)
            if right is not None:
                node.domain = _HIDDEN
                _type_entry(graph, node.output[0]).CopyFrom(right)
                return True  # what was inferred of those behind it rests on this one
        sizes = ([shapes.shape_of_type(types.get(name)) or () for name in names] for names in (node.output, node.input))
        empty = (any(0 in each for each in every) for every in sizes)
        if (node.domain, node.op_type) == ("", "Attention") and list(empty) == [True, False]:
            node.domain = _HIDDEN
            hidden = True
            _describe_ranks(graph, {name: types[name] for name in node.output if name in types})
    return hidden


def _describe_ranks(graph: onnx.GraphProto, types: Mapping[str, onnx.TypeProto]) -> None:
    """Keep what is right about ``types``: element types, ranks, and the sizes that are not 0."""
    for kind in types.values():
        for dim in kind.tensor_type.shape.dim:
            if dim.dim_value == 0:
                dim.ClearField("dim_value")
    for name, kind in types.items():
        _type_entry(graph, name).CopyFrom(kind)


def _type_entry(graph: onnx.GraphProto, name: str) -> onnx.TypeProto:
    """The entry of ``graph`` that says which type ``name`` has."""
    known = next((v for v in (*graph.value_info, *graph.output) if v.name == name), None)
    return (known or graph.value_info.add(name=name)).type


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in graphs_of(model):
        yield from graph.inputs
        for node in graph:
            yield from node.outputs


def _forget(value: ir.Value, generated: bool) -> None:
    """Forget negative sizes, and if ``generated`` the names that an earlier inference made up."""

    def is_stale(dim: shapes.Dim) -> bool:
        return dim < 0 if isinstance(dim, int) else generated and is_generated(dim)

    old = shapes.recorded_shape(value)
    if old is not None and any(map(is_stale, old)):
        value.shape = ir.Shape(None if is_stale(d) else d for d in old)


def derived_shapes(model: ir.Model) -> dict[str, shapes.Shape]:
    """Shapes that follow from inputs and initializers of the main graph alone, whatever is recorded of other values.

    Values in bodies have them, too. Recorded shapes of other domains' outputs are believed.
    """
    proto = _without_weights(model)
    own = {name for node in proto.graph.node if node.domain for name in node.output}
    kept = [info for info in proto.graph.value_info if info.name in own]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(kept)
    _forget_shapes(proto.graph.output)
    for body in [*proto_graphs(proto)][1:]:
        _forget_shapes((*body.value_info, *body.output))
    try:
        proto = _inferred(proto, _bytes_allowed(model))
    except shapes.FAILURES:
        return {}
    derived: dict[str, shapes.Shape] = {}
    for graph in proto_graphs(proto):
        for info in (*graph.input, *graph.value_info, *graph.output):
            if (shape := shapes.shape_of_type(info.type)) is not None:
                derived[info.name] = shape
    return derived | {t.name: tuple(t.dims) for t in proto.graph.initializer}


def _forget_shapes(infos: Iterable[onnx.ValueInfoProto]) -> None:
    for info in infos:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")


def forget_lies(model: ir.Model) -> bool:
    """Record the derived shape of each computed value for which the model declares another; True if there were any.

    Bodies are corrected, too. A shape of a value that no such node gives is forgotten where nothing is derived.

    Exporters and tools leave wrong sizes behind, also of outputs; runtimes only warn of them. ONNX's inference errs now
    and then about the sizes of windows with ``auto_pad``: in such models it is believed about ranks alone.
    """
    nodes = [*nodes_of(model)]
    if all(v.shape is None for node in nodes for v in node.outputs):
        return False
    derived = derived_shapes(model)
    _derive_more(nodes, derived)
    only_ranks = any("auto_pad" in n.attributes for n in nodes)
    lies = {v for n in nodes for i, v in enumerate(n.outputs) if _is_lie(n, i, derived, only_ranks)}
    if lies:
        in_bodies = any(n.graph is not model.graph for n in nodes if not lies.isdisjoint(n.outputs))
        for value in (v for n in nodes if in_bodies or n.graph is model.graph for v in n.outputs):
            value.shape = None
        for value in lies:
            shapes.record_shape(value, derived.get(value.name or ""))
        infer_shapes(model)
    return bool(lies)


def _derive_more(nodes: Iterable[ir.Node], derived: dict[str, shapes.Shape]) -> None:
    """Add shapes that our own rules know and ONNX's do not: with kernels of unknown size, with groups."""
    for node in nodes:
        first = node.outputs[0].name if node.outputs and node.domain == "" else None
        if first and first not in derived:
            given = [None if v is None else derived.get(v.name or "") for v in node.inputs]
            if (shape := shapes.beyond_onnx(node, given)) is not None:
                derived[first] = shape


def _is_lie(node: ir.Node, i: int, derived: Mapping[str, shapes.Shape], only_ranks: bool) -> bool:
    """Is the shape of output ``i`` another than what is derived, or one that no such node gives?"""
    declared, right = shapes.recorded_shape(node.outputs[i]), derived.get(node.outputs[i].name or "")
    if declared is None or declared == right:
        return False
    if right is not None and (len(declared) != len(right) or (not only_ranks and shapes.clash(declared, right))):
        return True
    return not _gives(node, i, declared)


def _gives(node: ir.Node, i: int, shape: shapes.Shape) -> bool:
    """Can output ``i`` of ``node`` have as many axes? What is computed element by element has those of every input."""
    if shapes.is_elementwise(node):
        known = [shapes.shape_of(x) for x in shapes.operands(node) if x is not None]
        return all(len(shape) >= len(dims) for dims in known if dims is not None)
    axes = axes_of(node.op_type)[1] if node.domain == "" else ()
    return i >= len(axes) or shape in axes[i]


def objection(model: ir.Model) -> str | None:
    """The fault that ONNX's strict inference finds in ``model``, if any; the inference is wrong now and then."""
    try:
        _inferred_in_room(_without_weights(model), _bytes_allowed(model), strict=True)
    except shapes.FAILURES as error:
        return escaped(" ".join(re.sub(r"\[\w+Error\]|Inference error\(s\):", "", str(error)).split())[:300])
    return None


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    """The model without weights; if sizes are huge, with names for them and a mark."""
    proto = onnx.ModelProto(ir_version=shapes.IR_VERSION)
    proto.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items())
    graph = proto.graph
    graph.name = "g"
    graph.input.extend(ir.serde.serialize_value(v) for v in model.graph.inputs)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size <= _MOST_STEERING:
            inside = ir.Tensor(tensor.numpy(), tensor.dtype) if isinstance(tensor, ir.ExternalTensor) else tensor
            graph.initializer.add().CopyFrom(ir.serde.serialize_tensor(inside))
            graph.initializer[-1].name = value.name or ""
        elif tensor is not None and not value.is_graph_input():
            dims = [int(d) for d in tensor.shape.numpy()]
            graph.input.append(onnx.helper.make_tensor_value_info(value.name or "", int(tensor.dtype), dims))
    graph.node.extend(ir.serde.serialize_node(n) for n in model.graph)
    _repeat_in_bodies(proto)
    outputs = set(model.graph.outputs)
    described = (v for n in model.graph for v in n.outputs if v.name and v.type is not None and v not in outputs)
    graph.value_info.extend(ir.serde.serialize_value(v) for v in described)
    graph.output.extend(ir.serde.serialize_value(v) for v in model.graph.outputs)
    shaped = itertools.chain(_values(model), model.graph.initializers.values())
    if any(d > _MOST_WRITTEN_OUT for v in shaped for d in shapes.known_sizes(v.shape)):
        proto.metadata_props.add(key=_NAMED)
        for dim in _dims_of(proto):
            if dim.dim_value > _MOST_WRITTEN_OUT:
                dim.dim_param = f"{_NAMED}{dim.dim_value}"
    return proto


def _repeat_in_bodies(proto: onnx.ModelProto) -> None:
    """Give bodies the small constants of the main graph that they read: ONNX's inference looks into no outer graph."""
    main, *bodies = proto_graphs(proto)
    small = {tensor.name: tensor for tensor in main.initializer}
    for body in bodies:
        read = dict.fromkeys(name for node in body.node for name in node.input)
        body.initializer.extend(small[name] for name in read if name in small)


def _record(graph: ir.Graph, proto: onnx.GraphProto, known: set[str]) -> None:
    """Copy what was inferred for ``graph`` and the graphs nested in it."""
    ends = {*graph.inputs, *graph.outputs}
    stack = [(graph, proto)]
    while stack:
        graph, proto = stack.pop()
        found = {info.name: info.type for info in (*proto.value_info, *proto.output)}
        for value in (*graph.inputs, *graph.outputs, *(v for n in graph for v in n.outputs)):
            if value.name in found and value.name:
                _complete(value, found[value.name], known if value in ends else None)
        for node, node_proto in zip(graph, proto.node, strict=True):
            bodies = [a for a in node_proto.attribute if a.type == onnx.AttributeProto.GRAPH]
            stack.extend((node.attributes[a.name].as_graph(), a.g) for a in bodies)


def _complete(value: ir.Value, proto: onnx.TypeProto, known: set[str] | None) -> None:
    """Fill in what is missing; symbolic dimensions only from ``known``, if given."""
    if value.type is None:
        with contextlib.suppress(ir.serde.SerdeError):  # a sequence of nobody knows what
            value.type = ir.serde.deserialize_type_proto_for_type(proto)
    found = shapes.shape_of_type(proto)
    if found is None:
        return
    new = tuple([d if known is None or not isinstance(d, str) or d in known else None for d in found])
    old = shapes.as_dims(value.shape) if value.shape is not None else (None,) * len(new)
    if value.shape is None or (len(old) == len(new) and old != new):
        value.shape = ir.Shape([better(a, b) for a, b in zip(old, new, strict=True)])
