"""A graph attention as PyTorch's legacy exporter writes it: scatter_reduce with branches that declare wrong ranks."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import pytest

import gradgraph as gg
from tests.kit.running import run

torch = pytest.importorskip("torch", reason="PyTorch is the reference here")
pytestmark = pytest.mark.torch

NODES = 4
EDGES = torch.tensor([[0, 1, 1, 2, 3, 3], [1, 0, 2, 3, 0, 1]])


class Attention(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(3, 8)
        self.score = torch.nn.Parameter(torch.randn(1, 2, 4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        h = self.project(x).view(-1, 2, 4)
        each = (h * self.score).sum(-1)
        scores = torch.nn.functional.leaky_relu(each.index_select(0, source) + each.index_select(0, target), 0.2)
        places = target.view(-1, 1).expand_as(scores)
        most = scores.new_zeros(x.size(0), 2).scatter_reduce(0, places, scores.detach(), "amax", include_self=True)
        weights = (scores - most.index_select(0, target)).exp()
        total = scores.new_zeros(x.size(0), 2).scatter_reduce(0, places, weights, "sum")
        sent = (weights / total.index_select(0, target)).unsqueeze(-1) * h.index_select(0, source)
        everywhere = target.view(-1, 1, 1).expand_as(sent)
        return sent.new_zeros(x.size(0), 2, 4).scatter_reduce(0, everywhere, sent, "sum").view(-1, 8)


@pytest.mark.parametrize("axes", [None, {"x": {0: "nodes"}, "edges": {1: "edges"}}], ids=["fixed", "open"])
def test_attention_over_a_graph(axes: dict[str, dict[int, str]] | None) -> None:
    torch.manual_seed(0)
    module, x = Attention().eval(), torch.randn(NODES, 3, requires_grad=True)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter is deprecated
        names = {"input_names": ["x", "edges"], "output_names": ["y"]}
        torch.onnx.export(module, (x, EDGES), file, dynamo=False, opset_version=18, dynamic_axes=axes, **names)
    seed = np.random.default_rng(0).normal(size=(NODES, 8)).astype(np.float32)
    module(x, EDGES).backward(torch.from_numpy(seed))
    expected = {"x": x.grad, "project.bias": module.project.bias.grad, "score": module.score.grad}
    gradient = gg.vjp(onnx.load_model_from_string(file.getvalue()), wrt=list(expected))
    found = run(gradient, {"x": x.detach().numpy(), "edges": EDGES.numpy(), "y.cotangent": seed})
    for name, value in expected.items():
        np.testing.assert_allclose(found[f"{name}.grad"], value.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
