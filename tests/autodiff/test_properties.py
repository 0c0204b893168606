"""Random graphs of up to 30 operators: their gradients against central differences, in onnxruntime, and PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings

import gradgraph as gg
from gradgraph.verify.reference import Oracle, in_float64
from tests.conformance.central_differences import (
    NotCleanError,
    Truth,
    against_differences,
    feeds_of,
    in_onnxruntime,
    measured,
)
from tests.conformance.node_cases import NodeCase
from tests.kit.random_graphs import Graph, graphs

# the same examples on every machine; how many, tests/conftest.py decides
fixed = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def _case(graph: Graph) -> NodeCase:
    feeds = {**graph.feeds, **graph.weights}
    return NodeCase("random", "", graph.model(), feeds, tuple(feeds), ())


def _gradient(case: NodeCase) -> onnx.ModelProto:
    outputs = [y.name for y in case.model.graph.output]
    result = gg.vjp(case.model, outputs=outputs, wrt=list(case.wrt), allow_unused=True)
    assert isinstance(result, onnx.ModelProto)
    return result


def _gradients(gradient: onnx.ModelProto, t: Truth) -> dict[str, Any]:
    results = Oracle(in_float64(gradient))(feeds_of(gradient, t))
    return dict(zip(t.case.wrt, list(results.values())[-len(t.case.wrt) :], strict=True))


@fixed
@given(graphs())
def test_gradients_of_random_graphs(graph: Graph) -> None:
    try:
        t = measured(_case(graph))
    except NotCleanError:
        assume(False)
    gradient = _gradient(t.case)
    found = _gradients(gradient, t)
    assert against_differences(t, found) == []
    assert in_onnxruntime(gradient, feeds_of(gradient, t), found) == []


@pytest.mark.torch
@fixed
@given(graphs())
def test_gradients_of_random_graphs_are_those_of_pytorch(graph: Graph) -> None:
    torch = pytest.importorskip("torch", reason="the gradients come from PyTorch")
    case = _case(graph)
    gradient = _gradient(case)
    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in case.feeds.items()}
    tensors = dict(leaves)
    for names, f, inputs in graph.steps:
        tensors.update(zip(names, f(*(tensors[x] for x in inputs)), strict=True))
    rng = np.random.default_rng(0)
    cotangents = {y.name: rng.uniform(-1, 1, tensors[y.name].shape) for y in case.model.graph.output}
    total = sum((tensors[y] * torch.tensor(c)).sum() for y, c in cotangents.items())
    expected = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = _gradients(gradient, Truth(case, cotangents, []))
    for (name, g), e in zip(found.items(), expected, strict=True):
        np.testing.assert_allclose(g, e.numpy(), rtol=1e-6, atol=1e-6 * max(1.0, float(e.abs().max())), err_msg=name)
