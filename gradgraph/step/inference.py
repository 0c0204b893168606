"""The inference model of a step: eval.onnx without loss, metrics and targets.

The model has its own outputs, or the requested ones, with their names and order. A loss that the model itself computes
from labels is dropped if the model has another output. Unused nodes, weights, functions and inputs are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import onnx

from gradgraph.data.record.data_names import NAMES_KEY
from gradgraph.errors import ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.protos import node_graphs, reads
from gradgraph.graph.marks import TEACHER
from gradgraph.graph.prune import needed
from gradgraph.step.manifest import Manifest


def own_outputs(eval_model: onnx.ModelProto, manifest: Manifest) -> tuple[str, ...]:
    """Return the model's own outputs.

    A loss that the model computes itself is excluded if only it needs certain inputs, namely labels.
    """
    losses = {part.loss_output for part in manifest.parts.values()}
    others = tuple(name for name in manifest.outputs if name not in losses)
    if not others or len(others) == len(manifest.outputs):
        return manifest.outputs
    nodes = eval_model.graph.node
    fed = {s.name for s in manifest.inputs}
    every, plain = (needed(nodes, names, lambda node: node.output, reads)[1] for names in (manifest.outputs, others))
    return manifest.outputs if fed & every == fed & plain else others


def without_loss(
    eval_model: onnx.ModelProto, manifest: Manifest, outputs: Sequence[str] | None = None
) -> onnx.ModelProto:
    """Return a copy of eval.onnx with only the model's own ``outputs``; state tensors remain inputs.

    Args:
        outputs: the outputs to keep; by default all (see ``own_outputs``).

    Raises:
        ModelError: if there are no outputs, or an output needs a target.
        UnknownNameError: if the model has no output of a requested name.
    """
    source = eval_model.graph
    if not manifest.outputs:
        raise ModelError("the only output of the model in this step is its loss; build the step with outputs")
    if outputs is None:
        outputs = own_outputs(eval_model, manifest)
    for name in outputs:
        if name not in manifest.outputs:
            raise UnknownNameError(f"the model has no output '{shown(name)}'{suggestion(name, manifest.outputs)}")
    if not outputs:
        raise ModelError("a model needs an output; name at least one")
    nodes, names = needed(source.node, outputs, lambda node: node.output, reads)
    for target in manifest.targets:
        if target.name in names and target.name not in {s.name for s in manifest.inputs}:
            raise ModelError(
                f"an output of the model is computed from the target '{target.name}', which inference does not have; "
                "build the step with outputs that do not need it"
            )

    model = partial_model(eval_model, nodes, names)
    model.metadata_props.extend(p for p in eval_model.metadata_props if p.key not in ("gradgraph", TEACHER, NAMES_KEY))
    graph = model.graph
    graph.name, graph.doc_string = source.name or "model", source.doc_string
    known = {v.name: v for v in source.output}
    graph.output.extend(known[name] for name in outputs)
    return model


def partial_model(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], names: Collection[str]) -> onnx.ModelProto:
    """Return a model of ``nodes``, without outputs: the functions that they call, and what ``names`` name.

    These are inputs, initializers and types of values; metadata are not copied.
    """
    source = model.graph
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=called(model, nodes))
    part.graph.name = source.name
    part.graph.node.extend(nodes)
    part.graph.input.extend(v for v in source.input if v.name in names)
    part.graph.initializer.extend(t for t in source.initializer if t.name in names)
    part.graph.value_info.extend(v for v in source.value_info if v.name in names)
    return part


def called(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> list[onnx.FunctionProto]:
    """Return the model-local functions that ``nodes`` call, directly or through others."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    called, stack = set(), list(nodes)
    while stack and functions:
        node = stack.pop()
        key = (node.domain, node.op_type, node.overload)
        if key in functions and key not in called:
            called.add(key)
            stack.extend(functions[key].node)
        stack.extend(inner for graph in node_graphs(node) for inner in graph.node)
    return [f for key, f in functions.items() if key in called]
