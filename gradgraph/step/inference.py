"""The inference model of a step: eval.onnx without loss, metrics and targets, with its weights inside.

The model has its own outputs, or the requested ones, with their names and order. A loss that the model itself computes
from labels is dropped if the model has another output. State tensors that the outputs need become initializers. Unused
nodes, weights, functions and inputs are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from gradgraph.data.record.data_names import NAMES_KEY
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.protos import node_graphs, reads
from gradgraph.graph.marks import TEACHER
from gradgraph.graph.prune import needed
from gradgraph.step.manifest import Manifest


def inference_model(
    eval_model: onnx.ModelProto,
    manifest: Manifest,
    state: Mapping[str, np.ndarray[Any, Any]],
    outputs: Sequence[str] | None = None,
) -> onnx.ModelProto:
    """Return the inference model, with the values of ``state`` as its weights.

    Args:
        eval_model: eval.onnx of a step.
        state: at least the parameters and statistics that the outputs need, by name.
        outputs: the model's outputs to keep; by default all (see ``own_outputs``).

    Raises:
        ModelError: if there are no outputs, an output needs a target, or a state tensor is missing or has a different
            type or shape.
        UnknownNameError: if the model has no output of a requested name.
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
    """Return a copy of eval.onnx with only the model's own ``outputs``; state tensors remain inputs."""
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

    model = onnx.ModelProto(ir_version=eval_model.ir_version)
    model.opset_import.extend(eval_model.opset_import)
    model.functions.extend(called(eval_model, nodes))
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
