"""Gradient accumulation on each rank: gradients are exchanged only when an update is due."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx

from gradgraph.files.protos import copied, reads
from gradgraph.graph.prune import needed
from gradgraph.step.manifest import LEARNING_RATE, UPDATE
from gradgraph.step.step import Step

WEIGHT, SUM = "accumulated_weight", ".accumulated"  # name of the accumulated weight, and suffix of sums, in the state


def adds_up_here(step: Step) -> bool:
    """Return whether ranks can accumulate gradients, that is, if the step does not report their norm for each batch."""
    return UPDATE in step.manifest.hyperparameters and "grad_norm" not in step.manifest.reports


def always_due(step: Step) -> Step:
    """Return ``step`` with an apply.onnx that updates the weights in every run, regardless of accumulation."""
    apply = copied(step.separate["apply"])
    graph = apply.graph
    nodes, due = list[onnx.NodeProto](), set[str]()
    for node in graph.node:
        if UPDATE in node.input:
            due.update(node.output)
        if node.op_type != "If" or node.input[0] not in due:
            nodes.append(node)
            continue
        then = next(a.g for a in node.attribute if a.name == "then_branch")
        graph.initializer.extend(then.initializer)
        nodes += then.node
        pairs = zip(then.output, node.output, strict=True)
        nodes += [onnx.helper.make_node("Identity", [inner.name], [outer]) for inner, outer in pairs]
    del graph.node[:]
    graph.node.extend(nodes)
    kept = [v for v in graph.input if v.name != UPDATE]
    del graph.input[:]
    graph.input.extend(kept)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.float32), UPDATE))
    spec = step.manifest.separate
    assert spec is not None
    fed = tuple(name for name in spec.apply.hyperparameters if name != UPDATE)
    manifest = replace(step.manifest, separate=replace(spec, apply=replace(spec.apply, hyperparameters=fed)))
    halves = {**step.separate, "apply": apply}
    return replace(step, train=step.trains[""], manifest=manifest, separate=halves)


def rate_alone(apply: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the part of apply.onnx that computes a scheduled learning rate; None if the step has no schedule.

    A rank runs it, instead of apply.onnx, for batches without an update.
    """
    rate = next((o for o in apply.graph.output if o.name == LEARNING_RATE), None)
    if rate is None:
        return None
    nodes, names = needed(apply.graph.node, [LEARNING_RATE], lambda node: node.output, reads)
    part = onnx.ModelProto(ir_version=apply.ir_version, opset_import=apply.opset_import, functions=apply.functions)
    part.graph.name = LEARNING_RATE
    part.graph.node.extend(nodes)
    part.graph.output.append(rate)
    part.graph.input.extend(v for v in apply.graph.input if v.name in names)
    part.graph.initializer.extend(t for t in apply.graph.initializer if t.name in names)
    return part
