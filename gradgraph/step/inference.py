"""The inference model of a step: eval.onnx without loss, metrics and targets, with its weights inside.

Cases: the model's own outputs stay, in their order and with their names, or the requested ones of them; a loss that the
model computes from labels is dropped if there is another output; a state tensor that they need becomes an initializer
of its name; unused nodes, weights, functions and inputs are dropped. It is an error if all outputs need a target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from gradgraph.errors import ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.protos import node_graphs, reads
from gradgraph.graph.marks import TEACHER
from gradgraph.graph.prune import needed
from gradgraph.step.data_names import NAMES_KEY
from gradgraph.step.manifest import Manifest, numpy_dtype


def inference_model(
    eval_model: onnx.ModelProto,
    manifest: Manifest,
    state: Mapping[str, np.ndarray[Any, Any]],
    outputs: Sequence[str] | None = None,
) -> onnx.ModelProto:
    """Return the model without its training parts, with the values of ``state``.

    Args:
        eval_model: eval.onnx of a step.
        manifest: the manifest of that step.
        state: at least the parameters and statistics that the outputs need, by name.
        outputs: which of the model's outputs to keep; by default all (see ``own_outputs``).

    Raises:
        ModelError: there are no outputs, one of them needs a target, or a state tensor is missing or does not fit.
        UnknownNameError: the model has no such output.
    """
    model = without_loss(eval_model, manifest, outputs)
    specs = {s.name: s for s in manifest.state}
    inputs = list(model.graph.input)
    del model.graph.input[:]
    for value in inputs:
        if value.name in specs:
            model.graph.initializer.append(_tensor(specs[value.name], state))
        else:
            model.graph.input.append(value)
    return model


def own_outputs(eval_model: onnx.ModelProto, manifest: Manifest) -> tuple[str, ...]:
    """Return the outputs of the model, without a loss that it computes from inputs which no other output needs
    (labels).
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
    """Copy eval.onnx, keeping only the model's own outputs, or some of them; the state tensors stay inputs."""
    source = eval_model.graph
    if not manifest.outputs:
        raise ModelError("the step has no output of the model besides its loss; name its outputs when building")
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
            raise ModelError(f"an output of the model needs the target '{target.name}'; build with outputs that do not")

    model = onnx.ModelProto(ir_version=eval_model.ir_version)
    model.opset_import.extend(eval_model.opset_import)
    model.functions.extend(_called(eval_model, nodes))
    model.metadata_props.extend(p for p in eval_model.metadata_props if p.key not in ("gradgraph", TEACHER, NAMES_KEY))
    graph = model.graph
    graph.name, graph.doc_string = source.name or "model", source.doc_string
    graph.node.extend(nodes)
    graph.input.extend(v for v in source.input if v.name in names)
    known = {v.name: v for v in source.output}
    graph.output.extend(known[name] for name in outputs)
    graph.initializer.extend(t for t in source.initializer if t.name in names)
    graph.value_info.extend(v for v in source.value_info if v.name in names)
    return model


def _called(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> list[onnx.FunctionProto]:
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


def _tensor(spec: Any, state: Mapping[str, np.ndarray[Any, Any]]) -> onnx.TensorProto:
    if spec.name not in state:
        raise ModelError(f"the value of '{spec.name}' is missing; pass every parameter and statistic of the step")
    value = state[spec.name]
    if value.shape != spec.shape or value.dtype != numpy_dtype(spec.dtype):
        raise ModelError(
            f"'{spec.name}' is {value.dtype}{list(value.shape)}, but the step has {spec.dtype}{list(spec.shape)}; "
            "pass the state of this step"
        )
    return onnx.numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), spec.name)
