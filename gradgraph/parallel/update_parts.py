"""Sharding of an update: the weights that each rank updates, and the parts of apply.onnx that it runs.

Most of an update treats each weight separately. Where an update combines several gradients (their norm, a check that
all are finite), it first reduces each gradient to a number. So apply.onnx is cut at these numbers: every rank computes
the numbers of its own weights, ranks exchange the numbers, and each rank continues with its own weights (Rajbhandari et
al., ZeRO, arXiv 1910.02054, stage 1).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from gradgraph.errors import BuildError, shown
from gradgraph.files.protos import copied
from gradgraph.graph.prune import needed
from gradgraph.graph.shapes import all_sizes, shape_of_type
from gradgraph.step.manifest import Manifest
from gradgraph.step.step import Step

NOTHING = "nothing"  # the dummy output of a part without outputs
UNEVEN = 1.25  # a weight larger than this times a rank's equal share is reported
SMALL = 1024  # the maximum number of elements of an exchanged value
_TOLD = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BOOL}


@dataclass(frozen=True)
class Told:
    """A value that one rank computes and sends to all ranks.

    Attributes:
        owner: the rank that computes it.
        level: the index of the message that sends it.
        dtype, shape: its type and shape.
    """

    owner: int
    level: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """The parts of an update.

    Attributes:
        owners: for each weight and its optimizer state, the rank that updates it.
        gathered: the names of tensors in ``owners`` that all ranks keep: weights, and averages of weights.
        told: the values exchanged between the parts, by name.
    """

    owners: Mapping[str, int]
    gathered: tuple[str, ...]
    told: Mapping[str, Told]
    _apply: onnx.ModelProto
    _nexts: Mapping[str, str]
    _reports: tuple[str, ...] = field(default=())

    def of(self, rank: int) -> list[str]:
        """Return the names of the tensors that ``rank`` updates."""
        return [name for name, owner in self.owners.items() if owner == rank]

    def elsewhere(self, rank: int) -> list[str]:
        """Return the names of the tensors that ``rank`` does not keep: optimizer state that other ranks update."""
        return [n for n, owner in self.owners.items() if owner != rank and n not in self.gathered]

    @property
    def levels(self) -> int:
        """The number of messages between the parts."""
        return max((told.level + 1 for told in self.told.values()), default=0)

    def before(self, level: int, rank: int) -> onnx.ModelProto:
        """Return the part that computes the numbers in message ``level`` of ``rank``."""
        outputs = [n for n, told in self.told.items() if (told.level, told.owner) == (level, rank)]
        return _part(self._apply, outputs, {n: told for n, told in self.told.items() if told.level < level})

    def last(self, rank: int) -> onnx.ModelProto:
        """Return the part that updates the weights of ``rank``, and tensors that no single rank owns."""
        mine = [after for name, after in self._nexts.items() if self.owners.get(name, rank) == rank]
        return _part(self._apply, [*mine, *self._reports], self.told)


def balanced(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign each tensor, largest first, to the rank with the fewest elements so far; return the ranks by name."""
    load, found = [0] * ranks, dict[str, int]()
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        rank = min(range(ranks), key=load.__getitem__)
        found[name] = rank
        load[rank] += sizes[name]
    return {name: found[name] for name in sizes}


def too_large(manifest: Manifest, ranks: int) -> tuple[str, float] | None:
    """Return the largest weight and its share of all parameters if well above 1 / ``ranks``, else None."""
    sizes = {s.name: math.prod(int(d or 0) for d in s.shape) for s in manifest.state if s.name in manifest.trainable}
    largest = max(sizes, key=sizes.__getitem__)
    part = sizes[largest] / max(1, sum(sizes.values()))
    return (largest, part) if part > UNEVEN / ranks else None


def shards_of(step: Step, ranks: int) -> Shards:
    """Return the update of ``step``, sharded over ``ranks`` ranks.

    Raises:
        BuildError: if the update combines whole tensors of several weights.
    """
    manifest, apply = step.manifest, copied(step.separate["apply"])
    spec = manifest.separate
    assert spec is not None
    state = {s.name: s for s in manifest.state}
    shapes = {name: tuple(int(d or 0) for d in state[name].shape) for name in spec.gradients}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    of_gradient = {gradient: shapes[name] for name, gradient in spec.gradients.items()}
    for value in apply.graph.input:
        if value.name in of_gradient:
            dtype = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, dtype, of_gradient[value.name]))
    weights = balanced(sizes, ranks)
    owners = dict(weights)
    for name in state.keys() - owners.keys():
        if (weight := _weight_of(name, weights)) is not None and state[name].kind == "optimizer":
            owners[name] = weights[weight]
    owners = {name: owners[name] for name in state if name in owners}
    _split_branches(apply.graph)
    everywhere = {*weights, *manifest.averages.values()}
    gathered = tuple(name for name in owners if name in everywhere)
    nexts = {name: state[name].next for name in spec.apply.writes}
    reports = tuple(o.name for o in apply.graph.output if o.name not in nexts.values())
    begin = {**owners, **{gradient: weights[name] for name, gradient in spec.gradients.items()}}
    walk = _Walk(begin, _types(apply), manifest)
    for node in apply.graph.node:
        walk.visit(node)
    walk.tell([*reports, *(after for name, after in nexts.items() if name not in owners)])
    for name in spec.gradient.reads:
        if name in owners and name not in everywhere:
            raise walk.refusal(name)
    for name, after in nexts.items():
        if name in owners and walk.owner.get(after, owners[name]) != owners[name]:
            raise walk.refusal(after)
    return Shards(owners, gathered, walk.told, apply, nexts, reports)


def _weight_of(name: str, weights: Collection[str]) -> str | None:
    """Return the weight of an optimizer tensor: ``layer.weight`` of ``layer.weight.exp_avg``; None if it has none."""
    stems = (name[:i] for i in range(len(name) - 1, 0, -1) if name[i] == ".")
    return next((stem for stem in stems if stem in weights), None)


class _Walk:
    """A traversal of apply.onnx that finds the ``owner`` of each value, and the values to exchange (``told``)."""

    def __init__(
        self, owners: Mapping[str, int], types: Mapping[str, tuple[int, tuple[int, ...] | None]], manifest: Manifest
    ) -> None:
        self.owner: dict[str, int] = dict(owners)
        self.told: dict[str, Told] = {}
        self._level: dict[str, int] = {}
        self._types, self._optimizer = types, manifest.optimizer

    def visit(self, node: onnx.NodeProto) -> None:
        reads = reads_of(node)
        whose = {self.owner[x] for x in reads if x in self.owner}
        if len(whose) > 1:
            if any(a.type == onnx.AttributeProto.GRAPH for a in node.attribute):
                raise self.refusal(node.output[0])
            self.tell(reads)
            whose = set()
        level = max((self._level.get(x, 0) + (x in self.told) for x in reads), default=0)
        for output in node.output:
            self._level[output] = level
            if whose:
                self.owner[output] = next(iter(whose))

    def tell(self, names: Iterable[str]) -> None:
        """Mark ``names`` that only one rank can compute for exchange; raise BuildError if they are too large."""
        for name in names:
            if name in self.owner and name not in self.told:
                dtype, shape = self._types.get(name, (0, None))
                if shape is None or math.prod(shape) > SMALL or dtype not in _TOLD:
                    raise self.refusal(name)
                told = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
                self.told[name] = Told(self.owner[name], self._level.get(name, 0), told, shape)
                del self.owner[name]

    def refusal(self, name: str) -> BuildError:
        return BuildError.of_options(
            f"the optimizer {shown(str(self._optimizer.get('name')))} combines several whole weights "
            f"('{shown(name)}'), so its state cannot be sharded; "
            "remove --shard-state"
        )


def _split_branches(graph: onnx.GraphProto) -> None:
    """Split each If into one If per output."""
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        nodes += [_one_output(node, i) for i in range(len(node.output))] if node.op_type == "If" else [node]
    del graph.node[:]
    graph.node.extend(nodes)


def _one_output(node: onnx.NodeProto, i: int) -> onnx.NodeProto:
    branches = {}
    for attribute in node.attribute:
        body = attribute.g
        nodes, names = needed(body.node, [body.output[i].name], lambda n: n.output, reads_of)
        initializers = [t for t in body.initializer if t.name in names]
        branches[attribute.name] = onnx.helper.make_graph(nodes, body.name, [], [body.output[i]], initializers)
    return onnx.helper.make_node("If", node.input, [node.output[i]], name=f"{node.name}.{i}", **branches)


def reads_of(node: onnx.NodeProto) -> list[str]:
    """Return the names of the values that ``node`` reads, also in its subgraphs."""
    found = [x for x in node.input if x]
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            own = {v.name for v in (*attribute.g.input, *attribute.g.initializer)}
            for inner in attribute.g.node:
                found += [x for x in reads_of(inner) if x not in own]
                own.update(inner.output)
            found += [o.name for o in attribute.g.output if o.name not in own]
    return found


def _types(model: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...] | None]]:
    """Return the element type and shape (None if unknown) of each value, by name."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    found = {t.name: (t.data_type, tuple(t.dims)) for t in graph.initializer}
    return found | {v.name: _type(v) for v in (*graph.input, *graph.value_info, *graph.output)}


def _type(value: onnx.ValueInfoProto) -> tuple[int, tuple[int, ...] | None]:
    sizes = all_sizes(shape_of_type(value.type))
    return value.type.tensor_type.elem_type, None if sizes is None else tuple(sizes)


def _part(model: onnx.ModelProto, outputs: Sequence[str], fed: Mapping[str, Told]) -> onnx.ModelProto:
    """Return the part of ``model`` that computes ``outputs`` from its inputs and the values ``fed``."""
    graph = model.graph
    nodes, names = needed(graph.node, outputs, lambda node: [y for y in node.output if y not in fed], reads_of)
    inputs = [v for v in graph.input if v.name in names]
    types = {name: onnx.helper.np_dtype_to_tensor_dtype(told.dtype) for name, told in fed.items()}
    inputs += [onnx.helper.make_tensor_value_info(n, types[n], told.shape) for n, told in fed.items() if n in names]
    inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
    known = {v.name: v for v in (*inferred, *graph.value_info, *graph.output)}
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    part.metadata_props.extend(model.metadata_props)
    if not outputs:  # with more ranks than weights, some update nothing; onnxruntime requires a node
        nodes, outputs = [onnx.helper.make_node("Constant", [], [NOTHING], value_float=0.0)], [NOTHING]
        known[NOTHING] = onnx.helper.make_tensor_value_info(NOTHING, onnx.TensorProto.FLOAT, ())
    part.graph.CopyFrom(
        onnx.helper.make_graph(
            [_without(node, fed) for node in nodes], graph.name, inputs, [known[n] for n in outputs],
            [t for t in graph.initializer if t.name in names],
        )
    )  # fmt: skip
    return part


def _without(node: onnx.NodeProto, fed: Collection[str]) -> onnx.NodeProto:
    """Return ``node`` with its outputs in ``fed`` renamed, as these names are inputs of the part."""
    if not any(y in fed for y in node.output):
        return node
    own = copied(node)
    own.output[:] = [f"{y}.own" if y in fed else y for y in node.output]
    return own
