"""A step split into its frozen layers, computed once for each sample, and the rest, which trains."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from gradgraph.autodiff.path import reads as reads_of_node
from gradgraph.data.record.column_assignment import fitting
from gradgraph.data.record.specs import TensorSpec, numpy_dtype
from gradgraph.errors import BuildError, listed, shown
from gradgraph.files.external import external_entry, is_external
from gradgraph.files.protos import copied, reads
from gradgraph.graph.prune import needed
from gradgraph.runtime.features.cheapest_cut import cheapest_cut, takes_long
from gradgraph.runtime.features.static_values import OpenSizes, Row, Shapes, StaticValues, static_values
from gradgraph.step.inference import partial_model
from gradgraph.step.manifest import Manifest
from gradgraph.step.step import Step


@dataclass(frozen=True)
class Split:
    """A step split into two.

    Attributes:
        head: the step that reads the kept values in place of the inputs that they are computed from. It has the same
            state, targets, losses and metrics.
        trained, evaluated: models of the kept values, as train.onnx and eval.onnx compute them.
        kept: the shape and type of each kept value per sample, by name.
        passed: the inputs of the batch that the head reads itself.
        changing: a clause that names the first node after the frozen layers, and the reason why it runs in each epoch.
    """

    head: Step
    trained: onnx.ModelProto
    evaluated: onnx.ModelProto
    kept: Mapping[str, Row]
    passed: tuple[str, ...]
    changing: str

    def before(self, lowered: onnx.ModelProto) -> onnx.ModelProto | None:
        """Return the part of a lowered graph of the whole step that computes the kept values.

        None if lowering merged one of them with other nodes.
        """
        made = {name for node in lowered.graph.node for name in node.output}
        return _before(lowered, self.kept) if made.issuperset(self.kept) else None

    def after(self, lowered: onnx.ModelProto, head: onnx.ModelProto) -> onnx.ModelProto | None:
        """Return the part of a lowered graph of the whole step that computes the outputs of ``head``.

        It rounds as the whole graph does. None if lowering merged nodes before and after the cut.

        Args:
            lowered: train.onnx or eval.onnx of the whole step, lowered.
            head: the same graph of the head.
        """
        outputs = [o.name for o in head.graph.output]
        inputs = {v.name for v in head.graph.input}
        read = _read_after(lowered, outputs, self.kept)
        merged = {x for node in lowered.graph.node if not self.kept.keys().isdisjoint(node.output) for x in node.output}
        fed = {v.name for v in lowered.graph.input}
        if not read.isdisjoint((merged - self.kept.keys()) | (fed - inputs)):
            return None
        nodes, names = needed(_nodes_after(lowered, self.kept), outputs, lambda node: node.output, reads)
        part = partial_model(lowered, nodes, names)
        del part.graph.input[:]
        part.graph.input.extend(head.graph.input)
        part.graph.output.extend(o for o in lowered.graph.output if o.name in outputs)
        return part


def split(step: Step, shapes: Shapes, opened: OpenSizes | None = None) -> Split:
    """Split a step between its frozen layers and the rest.

    Args:
        step: a single step.
        shapes: the shapes of the inputs in a batch.
        opened: the sizes that differ between batches; None if there are none.

    Raises:
        BuildError: if there are several named steps, or no layer is the same in every epoch; the message names the
            first node that changes.
    """
    manifest = step.manifest
    if manifest.steps:
        raise BuildError(f"keep_features supports a single step only, but there are {listed(manifest.steps)}")
    train = step.trains[""]
    static = static_values(train, manifest, shapes, opened)
    inputs = {s.name for s in manifest.inputs}
    other = _otherwise(train, step.eval, [x.name or "" for x in static.rows])
    static.rows = {x: row for x, row in static.rows.items() if x.name in inputs or x.name not in other}
    cut = {x.name or "": static.rows[x] for x in cheapest_cut(static)}
    kept = {name: row for name, row in cut.items() if name not in inputs}
    before, _ = needed(
        static.nodes, kept, lambda node: [y.name or "" for y in node.outputs],
        lambda node: [x.name or "" for x in reads_of_node(node)],
    )  # fmt: skip
    if not any(map(takes_long, before)):
        raise BuildError(f"no frozen layer can be computed once for each sample: {_hindrance(static)}")
    results = [*manifest.results.values(), *(measure.sums for measure in manifest.columns_of_sums)]
    evaluated = _read_after(step.eval, results, kept)
    passed = tuple(s.name for s in manifest.inputs if s.name in cut or s.name in evaluated)
    outputs = [o for o in manifest.outputs if inputs & _read_after(step.eval, [o], kept) <= {*passed}]
    specs = _specs(manifest, kept, passed)
    halves = dict(step.separate)
    if halves:
        halves["gradient"] = _after(halves["gradient"], kept, specs, inputs)
    head = replace(
        step,
        train=_after(train, kept, specs, inputs),
        eval=_after(step.eval, kept, specs, inputs, [*dict.fromkeys([*results, *outputs])]),
        manifest=replace(
            manifest, inputs=specs, outputs=tuple(outputs), data=fitting(manifest.data, specs, manifest.targets)
        ),
        separate=halves,
    )
    trained, checked = _before(train, kept), _before(step.eval, kept)
    return Split(head, trained, checked, kept, passed, static.changing)


def _hindrance(static: StaticValues) -> str:
    """Return a clause that says why no value can be kept."""
    for node in static.nodes:
        if takes_long(node) and node not in static.mixing:
            for x in node.inputs:
                if x in static.merged:
                    return f"'{shown(x.name)}' merges samples with another axis"
    return static.changing


def _specs(manifest: Manifest, kept: Mapping[str, Row], passed: Collection[str]) -> tuple[TensorSpec, ...]:
    """Return the inputs of the head."""
    rows = next((s.shape[0] for s in manifest.inputs if s.shape), None)
    own = [TensorSpec(name, row.dtype, (rows, *row.dims)) for name, row in kept.items()]
    return (*(s for s in manifest.inputs if s.name in passed), *own)


# --- graphs ---------------------------------------------------------------------------------------------


def _nodes_after(model: onnx.ModelProto, kept: Collection[str]) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if not any(name in kept for name in node.output)]


def _read_after(model: onnx.ModelProto, outputs: Sequence[str], kept: Collection[str]) -> set[str]:
    """Return the names of all values that ``outputs`` depend on, where ``kept`` are inputs."""
    return needed(_nodes_after(model, kept), outputs, lambda node: node.output, reads)[1]


def _before(model: onnx.ModelProto, kept: Mapping[str, Row]) -> onnx.ModelProto:
    """Return the part of ``model`` that computes the ``kept`` values."""
    nodes, names = needed(model.graph.node, kept, lambda node: node.output, reads)
    part = partial_model(model, nodes, names)
    part.graph.output.extend(_declared(name, (None, *row.dims), row.dtype) for name, row in kept.items())
    return part


def _after(
    model: onnx.ModelProto,
    kept: Mapping[str, Row],
    specs: Sequence[TensorSpec],
    inputs: Collection[str],
    outputs: Sequence[str] | None = None,
) -> onnx.ModelProto:
    """Return the part of ``model`` that computes ``outputs``, by default all, from the ``kept`` values.

    Args:
        specs: the inputs of the head.
        inputs: the names of the inputs of the whole step.
    """
    results = [o.name for o in model.graph.output] if outputs is None else outputs
    nodes, names = needed(_nodes_after(model, kept), results, lambda node: node.output, reads)
    part = partial_model(model, nodes, names)
    declared = {v.name: v for v in model.graph.input}
    fed = [declared.get(s.name) or _declared(s.name, s.shape, s.dtype) for s in specs]
    fed += [v for v in model.graph.input if v.name not in inputs]
    del part.graph.input[:]
    part.graph.input.extend(v for v in fed if outputs is None or v.name in names)  # train.onnx declares all
    known = {o.name: o for o in model.graph.output}
    part.graph.output.extend(known[name] for name in results)
    part.metadata_props.extend(model.metadata_props)
    return part


def _declared(name: str, shape: Sequence[int | str | None], dtype: str) -> onnx.ValueInfoProto:
    kind = onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype))
    return onnx.helper.make_tensor_value_info(name, kind, list(shape))


# --- the same values in training and evaluation ---------------------------------------------------------


def _otherwise(train: onnx.ModelProto, eval_: onnx.ModelProto, names: Iterable[str]) -> set[str]:
    """Return those of ``names`` that two graphs compute differently, or that evaluation lacks."""
    a, b = _digests(train), _digests(eval_)
    return {name for name in names if a[name] != b.get(name)}


def _digests(model: onnx.ModelProto) -> dict[str, bytes]:
    """Return digests of how each value is computed from inputs and weights, by name."""
    found = {v.name: f"input {v.name}".encode() for v in model.graph.input}
    for tensor in model.graph.initializer:
        stored = copied(tensor, lambda field: field.name != "name")
        content = repr(external_entry(tensor)).encode() if is_external(tensor) else stored.SerializeToString()
        found[tensor.name] = hashlib.sha256(content).digest()
    for node in model.graph.node:
        of = hashlib.sha256(f"{node.domain} {node.op_type} {node.overload}".encode())
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            of.update(attribute.SerializeToString())
        for name in [*node.input, "|", *reads(node)]:
            of.update(found.get(name, name.encode()))
        for i, name in enumerate(node.output):
            found[name] = hashlib.sha256(of.digest() + bytes([i % 256])).digest()
    return found
