"""Static values: values of a train graph that are the same in every epoch, and can be computed once for each sample.

A static value depends only on inputs of the batch and on frozen weights. It does not depend on trained weights, running
statistics, targets or random numbers; nor on other samples of its batch, or on their number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.autodiff.path import is_tensor
from gradgraph.autodiff.path import reads as reads_of_node
from gradgraph.autodiff.samples import Mixed, Place, places_of
from gradgraph.data.record.specs import dtype_name, numpy_dtype
from gradgraph.errors import BuildError, shown
from gradgraph.files.protos import reads
from gradgraph.graph.checks import DRAWING, describe
from gradgraph.graph.node_forms import described
from gradgraph.graph.shapes import OPSET, Dim, all_sizes, as_dims, constant_of, is_elementwise, sizes_or
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.step.manifest import Manifest

Shapes = Mapping[str, Sequence[Dim]]

RANDOM = "draws random numbers"
ALL = set(range(64))  # the positions of a vector of sizes that all depend on the number of samples
_SAMPLES = "samples"  # name of the batch dimension if the model has none
# operators whose inputs at these places only determine the shape of the output
_STEERED = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Pad": (1, 3),
    "Reshape": (1,),
    "Resize": (2, 3),
    "Slice": (1, 2, 3, 4),
    "Tile": (1,),
}
_REPEATING = frozenset({"Expand", "Tile"})
_TAKING = frozenset({"Cast", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})  # parts of a vector
_OF_SIZES = frozenset({"Concat", "Gather", "ReduceProd", "Reshape", "Slice", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class Row:
    """The shape and type of the part of a value that belongs to one sample.

    Attributes:
        shape: the shape without the sample axis; for sizes that differ between batches, the largest ones.
        dtype: the element type, as in specs.
        open: for each axis of ``shape``, the name of a size that differs between batches, or None; empty if all sizes
            are the same in each batch.
    """

    shape: tuple[int, ...]
    dtype: str
    open: tuple[str | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    @property
    def dims(self) -> tuple[int | str, ...]:
        """The shape without the sample axis, with the names of sizes that differ between batches."""
        return tuple(name or size for name, size in itertools.zip_longest(self.open, self.shape))


@dataclass(frozen=True)
class OpenSizes:
    """Sizes of inputs that differ between batches.

    Attributes:
        shapes: the shapes of the inputs in another batch, where all these sizes are different.
        names: the names of these sizes, by the values in both batches.
    """

    shapes: Shapes
    names: Mapping[tuple[int, int], str]

    def of(self, row: Row, other: Row | None) -> Row | None:
        """Return a row whose shape differs from that in the other batch in such sizes only; None for other rows."""
        if other is None or len(other.shape) != len(row.shape):
            return None
        pairs = list(zip(row.shape, other.shape, strict=True))
        if any(a != b and (a, b) not in self.names for a, b in pairs):
            return None
        return Row(row.shape, row.dtype, tuple(None if a == b else self.names[a, b] for a, b in pairs))


@dataclass
class StaticValues:
    """The part of a train graph that is the same in every epoch.

    Attributes:
        nodes: its nodes that depend on the batch, in order.
        rows: the values that can be kept for each sample, including inputs of the batch.
        mixing: the nodes whose result may depend on other samples, and the reason (a verb phrase).
        read: the values that the rest of the step reads.
        changing: the first node that has to run in each epoch, and the reason.
        merged: the values whose samples are merged with another axis, so that they cannot be kept.
        sizes: bytes per sample of all values whose sizes are known.
    """

    nodes: list[ir.Node] = field(default_factory=list)
    rows: dict[ir.Value, Row] = field(default_factory=dict)
    mixing: dict[ir.Node, str] = field(default_factory=dict)
    read: list[ir.Value] = field(default_factory=list)
    changing: str = "no node reads the batch"
    merged: set[ir.Value] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)


def changes(manifest: Manifest) -> dict[str, str]:
    """Return the reason why nodes that read a target or state tensor change in each epoch, by the tensor's name.

    Reasons are verb phrases.
    """
    found = {t.name: f"reads the target '{shown(t.name)}'" for t in manifest.targets}
    kinds = {
        "parameter": "reads the trained weight",
        "statistic": "reads the running statistic",
        "optimizer": "reads the optimizer's",
    }
    for spec in manifest.state:
        kind = kinds.get(spec.kind)
        found[spec.name] = RANDOM if kind is None else f"{kind} '{shown(spec.name)}'"
    return found


def static_values(
    model: onnx.ModelProto, manifest: Manifest, shapes: Shapes, opened: OpenSizes | None = None
) -> StaticValues:
    """Return the part of a train graph that is the same in every epoch.

    Args:
        model: train.onnx, or another graph of a step with the same inputs.
        shapes: the shapes of the inputs in a batch; sizes may be unknown.
        opened: the sizes that differ between batches; None if there are none.

    Raises:
        BuildError: if the opset of the step differs from that of the rules for samples.
    """
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), OPSET)
    if opset != OPSET:
        raise BuildError(f"keep_features supports steps of opset {OPSET} only, but this one has {opset}; build it "
                         "without opset")  # fmt: skip
    found = StaticValues()
    nodes, outside, changing = _static_nodes(model, manifest)
    trunk = _trunk(model, manifest, nodes)
    work = ir.from_proto(trunk)
    _read_sizes_directly(work.graph)
    _declare_batch(work, shapes)
    values = {v.name or "": v for v in (*work.graph.inputs, *(y for node in work.graph for y in node.outputs))}
    found.sizes = {name: _bytes(v) for name, v in values.items() if v.shape is not None and v.dtype is not None}
    _Independence(work.graph, found).judge()
    found.read = [values[name] for name in outside]
    reasons = [
        (node.outputs[0].name, f"{describe(node)} {reason}")
        for node, reason in found.mixing.items()
        if any(x in found.rows for x in reads_of_node(node))
    ]
    position = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
    first = min([*changing, *reasons], key=lambda each: position[each[0] or ""], default=None)
    found.changing = first[1] if first else found.changing
    if opened is not None:
        others = {x.name: row for x, row in static_values(model, manifest, opened.shapes).rows.items()}
        rows = {x: opened.of(row, others.get(x.name)) for x, row in found.rows.items()}
        found.rows = {x: row for x, row in rows.items() if row is not None}
    return found


def _static_nodes(
    model: onnx.ModelProto, manifest: Manifest
) -> tuple[list[onnx.NodeProto], list[str], list[tuple[str, str]]]:
    """Return the nodes that read no changing value, and how the other nodes depend on the batch.

    The second result is the values that depend on the batch and are read by other nodes; the third is an output of each
    of these nodes, with the reason why it changes.
    """
    inputs = {s.name for s in manifest.inputs}
    phrases = changes(manifest)
    why = {v.name: phrases.get(v.name, f"reads '{shown(v.name)}'") for v in model.graph.input if v.name not in inputs}
    depends, nodes, outside = set(inputs), list[onnx.NodeProto](), dict[str, None]()
    changing = list[tuple[str, str]]()
    for node in model.graph.node:
        read = [name for name in reads(node) if name]
        of_batch = [name for name in read if name in depends]
        cause = next((why[name] for name in read if name in why), None)
        if node.op_type in DRAWING and not node.domain:
            cause = RANDOM
        if cause is None:
            nodes.append(node)
            depends.update(node.output if of_batch else ())
            continue
        if of_batch:
            outside.update(dict.fromkeys(of_batch))
            subject = described(node.name, node.domain, node.op_type, node.output)
            changing.append((node.output[0], f"{subject} {cause}"))
        why.update(dict.fromkeys((name for name in node.output if name), cause))
    outside.update(dict.fromkeys(v.name for v in model.graph.output if v.name in depends))
    return nodes, list(outside), changing


def _trunk(model: onnx.ModelProto, manifest: Manifest, nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    """Return a model of the ``nodes`` alone, with the inputs of the batch."""
    trunk = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    read = {name for node in nodes for name in reads(node)}
    inputs = {s.name for s in manifest.inputs}
    trunk.graph.name = "trunk"
    trunk.graph.node.extend(nodes)
    trunk.graph.input.extend(v for v in model.graph.input if v.name in inputs)
    trunk.graph.initializer.extend(t for t in model.graph.initializer if t.name in read)
    return trunk


def _read_sizes_directly(graph: ir.Graph) -> None:
    """Bypass, in place, nodes by which PyTorch replaces sizes of -1 by 1, where no size is negative.

    Shape inference cannot see through them.
    """
    for node in graph:
        if node.op_type != "Where" or len(node.inputs) != 3:
            continue
        condition, sizes = node.inputs[0], node.inputs[2]
        equal = None if condition is None else condition.producer()
        if sizes is None or equal is None or equal.op_type != "Equal" or sizes not in equal.inputs:
            continue
        other = next((x for x in equal.inputs if x is not None and x is not sizes), None)
        compared = None if other is None else constant_of(other)
        if compared is not None and (compared < 0).all() and _is_size(sizes):
            node.outputs[0].replace_all_uses_with(sizes)


def _is_size(x: ir.Value | None) -> bool:
    """Whether ``x`` is computed from the shapes of values, so that it is not negative."""
    if x is None:
        return False
    if (known := constant_of(x)) is not None:
        return bool((known >= 0).all())
    node = x.producer()
    if node is None or node.op_type in ("Shape", "Size"):
        return node is not None
    if node.op_type in ("Add", "Concat", "Mul"):
        return all(map(_is_size, node.inputs))
    return node.op_type in _TAKING and _is_size(node.inputs[0])


def _declare_batch(model: ir.Model, shapes: Shapes) -> None:
    """Infer the shapes of ``model`` for inputs of these ``shapes``, except for the number of samples."""
    dims = {x: as_dims(x.shape) if x.shape is not None else () for x in model.graph.inputs}
    first = next((d[0] for d in dims.values() if d and d[0] is not None), _SAMPLES)
    for x, known in dims.items():
        if known:
            x.shape = ir.Shape([first, *shapes[x.name or ""][1:]])
    infer_shapes(model)


def _bytes(value: ir.Value) -> int:
    """Return the bytes of a value per sample, where unknown sizes count as 1."""
    itemsize = 1 if value.dtype in (None, ir.DataType.STRING) else value.dtype.itemsize
    return int(itemsize * math.prod(sizes_or(value.shape, 1)))


def _row(value: ir.Value) -> Row | None:
    """Return the row of a value with one row per sample; None if it cannot be kept, or its sizes are unknown."""
    if value.shape is None or value.dtype is None or not is_tensor(value):
        return None
    if value.dtype == ir.DataType.STRING or numpy_dtype(dtype_name(int(value.dtype))).kind == "V":
        return None  # onnxruntime returns no arrays of types that NumPy lacks, such as bfloat16
    sizes = all_sizes(as_dims(value.shape)[1:])
    return None if sizes is None else Row(tuple(sizes), dtype_name(int(value.dtype)))


def _size_at(x: ir.Value | None, axis: int, y: ir.Value) -> Dim:
    """Return the size of ``x``, broadcast to ``y``, along ``axis`` of ``y``; None if it is unknown."""
    if x is None or x.shape is None or y.shape is None:
        return None
    own = axis - len(y.shape) + len(x.shape)
    return as_dims(x.shape)[own] if own >= 0 else 1


def _among_sliced(node: ir.Node, positions: set[int]) -> set[int]:
    """Return the positions among the results of a Slice of a vector; ALL if it is not known what is sliced."""
    x, *given = node.inputs
    bounds = [None if v is None else constant_of(v) for v in given]
    count = x.shape[0] if x is not None and x.shape is not None and len(x.shape) == 1 else None
    if not isinstance(count, int) or any(v is not None and b is None for v, b in zip(given, bounds, strict=True)):
        return ALL
    start, end, _, step = (None if b is None else int(b.ravel()[0]) for b in (*bounds, None, None)[:4])
    return {i for i, at in enumerate(range(count)[start:end:step]) if at in positions}


class _Independence:
    """One pass over the static nodes, which finds those whose results may depend on other samples.

    For each value that depends on the batch, it records the sample axis (``places``), or for an integer vector of sizes
    the positions of sizes that depend on the number of samples (``sizes``). Such sizes may only shape other values. A
    constant that is repeated for each sample has a sample axis, too.
    """

    def __init__(self, graph: ir.Graph, found: StaticValues) -> None:
        self.graph, self.found = graph, found
        inputs = [x for x in graph.inputs if x.shape is not None and len(x.shape)]
        self.places = dict.fromkeys(inputs, Place(0))
        self.samples = next((str(as_dims(x.shape)[0]) for x in inputs if x.shape is not None), _SAMPLES)
        self.sizes: dict[ir.Value, set[int]] = {}
        self.depends: set[ir.Value] = set(graph.inputs)

    def judge(self) -> None:
        for x in self.places:
            self._keep(x)
        for node in self.graph:
            if self.depends.isdisjoint(reads_of_node(node)):
                continue
            self.found.nodes.append(node)
            self.depends.update(node.outputs)
            try:
                self._judge(node)
            except Mixed as reason:
                self.found.mixing[node] = str(reason).rstrip(",")

    def _keep(self, x: ir.Value) -> None:
        """Record that ``x`` can be kept, if it has one row for each sample."""
        place = self.places.get(x)
        if place == Place(0) and (row := _row(x)) is not None:
            self.found.rows[x] = row
        elif place is not None and place != Place(place.axis):
            self.found.merged.add(x)

    def _judge(self, node: ir.Node) -> None:
        """Record the outputs of ``node``; raise Mixed if they may depend on other samples."""
        read = list(reads_of_node(node))
        if node.op_type in ("Shape", "Size") and not node.domain:
            self._measure(node)
            return
        sizes = [x for x in read if self.sizes.get(x)]
        samples = [x for x in read if x in self.places]
        others = [x for x in read if x in self.depends and x not in self.sizes and x not in self.places]
        if others:
            raise Mixed("reads values that may depend on other samples")
        if sizes and not self._shapes_only(node):
            self._of_sizes(node, bool(samples))
        elif samples:
            self._of_samples(node)
        elif sizes:
            self._repeated(node)
        else:  # of sizes that do not depend on the number of samples
            self.sizes.update((y, set()) for y in node.outputs)

    def _measure(self, node: ir.Node) -> None:
        """Record the result of Shape or Size."""
        x, y = node.inputs[0], node.outputs[0]
        place = None if x is None else self.places.get(x)
        if x in self.sizes:
            self.sizes[y] = set()
        elif place is not None and node.op_type == "Shape" and x is not None and x.shape is not None:
            start = node.attributes.get_int("start", 0) or 0
            first = max(start + len(x.shape), 0) if start < 0 else start
            one = ALL if place != Place(place.axis) else {place.axis - first}
            self.sizes[y] = one if place.axis >= first else set()
        elif place is not None:
            self.sizes[y] = ALL
        else:
            raise Mixed("reads values that may depend on other samples")

    def _shapes_only(self, node: ir.Node) -> bool:
        """Whether sizes that depend on the number of samples only determine the shape of the outputs."""
        steering = _STEERED.get(node.op_type, ()) if not node.domain else ()
        return all(i in steering for i, x in enumerate(node.inputs) if x is not None and self.sizes.get(x))

    def _repeated(self, node: ir.Node) -> None:
        """Record a constant that is repeated for each sample."""
        fills = node.op_type == "ConstantOfShape"
        x, y = None if fills else node.inputs[0], node.outputs[0]
        axis = self._axis_of_rows(y, node.inputs[0 if fills else 1])
        if axis is not None and (fills or (node.op_type in _REPEATING and _size_at(x, axis, y) == 1)):
            self.places[y] = Place(axis)
            self._keep(y)
            return
        raise Mixed("may depend on the number of samples")

    def _axis_of_rows(self, y: ir.Value, sizes: ir.Value | None) -> int | None:
        """Return the axis of ``y``, made by ``sizes``, whose size is the number of samples; None if it is unknown.

        No other size of ``y`` depends on the number of samples.
        """
        dims = as_dims(y.shape) if y.shape is not None else ()
        positions = self.sizes.get(sizes, ALL) if sizes is not None else ALL
        if len(positions) == 1 and sizes is not None and sizes.shape is not None:
            count = as_dims(sizes.shape)[0]
            return len(dims) - count + min(positions) if isinstance(count, int) and len(dims) >= count else None
        axes = [i for i, size in enumerate(dims) if not isinstance(size, int)]
        return axes[0] if len(axes) == 1 and dims[axes[0]] == self.samples else None

    def _of_sizes(self, node: ir.Node, has_samples: bool) -> None:
        """Record which sizes computed by ``node`` from other sizes depend on the number of samples."""
        if has_samples or node.domain or not (is_elementwise(node) or node.op_type in _OF_SIZES):
            raise Mixed("computes with the number of samples")
        self.sizes.update((y, self._moved(node)) for y in node.outputs)

    def _moved(self, node: ir.Node) -> set[int]:
        """Return the positions of the number of samples among sizes that ``node`` copies; ALL if they are unknown."""
        varying = [set[int]() if x is None else self.sizes.get(x, set()) for x in node.inputs]
        if ALL in varying:
            return ALL
        if node.op_type == "Gather" and (chosen := constant_of(node.inputs[1])) is not None:
            flat = np.ravel(chosen)  # a negative index counts from an end that may be unknown
            return {i for i, at in enumerate(flat.tolist()) if at in varying[0]} if (flat >= 0).all() else ALL
        if node.op_type == "Slice":
            return _among_sliced(node, varying[0])
        if node.op_type in ("Reshape", "Squeeze", "Unsqueeze") and not any(varying[1:]):
            return varying[0]
        counts = all_sizes([x.shape[0] if x is not None and x.shape else None for x in node.inputs])
        if node.op_type != "Concat" or counts is None:
            return ALL
        firsts = itertools.accumulate(counts, initial=0)
        return {first + at for first, positions in zip(firsts, varying, strict=False) for at in positions}

    def _of_samples(self, node: ir.Node) -> None:
        if (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits"):
            found = self._of_rows(node)
        else:
            found = places_of(node, self.places, self.samples)
        for y, place in zip(node.outputs, found, strict=False):
            if place is not None:
                self.places[y] = place
                self._keep(y)
            elif y.uses():
                raise Mixed("has a result without a sample axis")

    def _of_rows(self, node: ir.Node) -> list[Place | None]:
        """Return the place of the samples in a product of rows with constant weights."""
        x = node.inputs[0]
        place = None if x is None else self.places.get(x)
        last = x is None or x.shape is None or place is None or place.axis >= len(x.shape) - 1
        if place is None or last or any(v in self.places for v in node.inputs[1:] if v is not None):
            raise Mixed("may mix samples")
        return [place]
