"""Checks that onnxruntime's CUDA provider places the gradient of each rule's cases as the table predicts.

Run in the environment of ``standins``; prints the fields of ``Verdict`` as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

import gradgraph.rules.families  # noqa: F401 (fills the table of rules)
from gradgraph.autodiff.append import append_vjp
from gradgraph.backends.engine import lower
from gradgraph.backends.ort_cuda import ORT_CUDA
from gradgraph.backends.ort_cuda.cuda_kernels import on_host, without_kernel
from gradgraph.files.models import to_proto
from gradgraph.graph.shapes import constant_of
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.rules.registry import RULES
from gradgraph.verify import cases

REASON = 400  # maximum number of characters of onnxruntime's message
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@dataclass
class Verdict:
    """The result of the checks; cases are named ``operator/index``.

    Attributes:
        gradients: the number of gradients checked.
        foretold: for each operator, the cases whose gradients run it on the CPU, or are rejected, as predicted.
        unforeseen: lines about placements that the table does not predict.
        refused: lines about gradients that no session accepts.
    """

    gradients: int = 0
    foretold: dict[str, list[str]] = field(default_factory=dict)
    unforeseen: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def main() -> None:
    verdict = Verdict()
    for name, model in gradients():
        verdict.gradients += 1
        judge(name, lower(model, ORT_CUDA), verdict)
    print(json.dumps(asdict(verdict)))


def gradients() -> Iterator[tuple[str, ir.Model]]:
    """Yield name and gradient of each case of each rule, with known and with symbolic shapes."""
    for rule in RULES.values():
        for i, case in enumerate(rule.cases):
            for unknown in (False, True):
                trial = cases.trial(rule, case, unknown=unknown, dtype=np.float32)
                forward = normalise(trial.model, parameters=trial.wrt)
                model = append_vjp(forward, trial.read, trial.wrt, allow_unused=True, named_operators=True)
                yield f"{rule.op_type}/{i}{', open sizes' if unknown else ''}", model


def judge(name: str, model: ir.Model, verdict: Verdict) -> None:
    strays = {stray.name: stray.operator for stray in without_kernel(model)}
    free = {node.name for node in (*on_host(model), *constant(model))}
    own = {node.name for node in nodes_of(model)}  # other nodes come from functions that onnxruntime inlined
    try:
        placed = placement(to_proto(model))
    except Exception as problem:  # onnxruntime raises several classes
        if not strays:
            verdict.refused.append(f"{name}: {problem}"[:REASON])
        for operator in strays.values():
            verdict.foretold.setdefault(operator, []).append(name)
        return
    on_cpu = {node: operator for node, (operator, provider) in placed.items() if provider == CPU}
    for node, operator in strays.items():
        if node in on_cpu:
            verdict.foretold.setdefault(operator, []).append(name)
        elif placed.get(node, ("", CPU))[1] == CUDA:
            verdict.unforeseen.append(f"{name}: {operator} ('{node}') runs on CUDA")
    for node, operator in on_cpu.items():
        if node in own and node not in strays and node not in free:
            verdict.unforeseen.append(f"{name}: {operator} ('{node}') runs on the CPU")


def constant(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that onnxruntime would fold if its optimizations were not disabled."""
    return [n for n in nodes_of(model) if all(v is None or constant_of(v) is not None for v in n.inputs)]


def placement(model: Any) -> dict[str, tuple[str, str]]:
    """Return operator and provider of each node, by name."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=[CUDA, CPU])
    return {
        node.name: (node.op_type, part.ep_name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    }


if __name__ == "__main__":
    main()
