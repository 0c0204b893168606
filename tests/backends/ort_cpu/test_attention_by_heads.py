"""Attention of short heads, group of heads by group: the same results, with fewer scores in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU, attention_by_heads
from gradgraph.frontend import export, nn
from gradgraph.frontend import functional as F
from gradgraph.runtime.execution.walk import walked
from tests.kit.lowered_networks import feeds_of
from tests.kit.running import run

LENGTH, SIZE = 64, 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, LENGTH, 3 * SIZE)).astype(np.float32)
HIDDEN = np.where(RNG.random((1, LENGTH)) < 0.2, -9.0, 0.0).astype(np.float32)
SEEN = RNG.random((2, 1, LENGTH, LENGTH)) < 0.5
SEEN[0, :, 3] = False


class Attending(nn.Module):
    """Three heads of ``size`` on two sequences, with a mask or without."""

    def __init__(
        self,
        mask: Any = None,
        causal: bool = False,
        size: int = SIZE,
        reads: bool = False,
        guarded: Any = None,
        separate: bool = False,
    ) -> None:
        super().__init__()
        self.mask, self.causal, self.size, self.reads, self.guarded = mask, causal, size, reads, guarded
        self.separate = separate
        self.qkv, self.out = nn.Linear(3 * SIZE, 9 * size), nn.Linear(3 * size, 1)

    def forward(self, x: Any) -> Any:
        b, n, _ = x.shape
        if self.separate:  # keys are transposed twice
            q, k, v = (part.reshape(b, n, 3, self.size).permute(0, 2, 1, 3) for part in self.qkv(x).chunk(3, -1))
        else:
            q, k, v = (self.qkv(x).reshape(b, n, 3, 3, self.size).permute(2, 0, 3, 1, 4)[i] for i in range(3))
        if self.reads:
            p = F.softmax(q @ k.transpose(-2, -1), -1)
            return self.out((p @ v).permute(0, 2, 1, 3).reshape(b, n, -1)) + p.sum()
        if self.guarded is not None:  # as exporters of PyTorch write it
            p = F.softmax(F.where(self.guarded, q @ k.transpose(-2, -1), -np.inf), -1)
            return self.out((F.where(F.isnan(p), 0.0, p) @ v).permute(0, 2, 1, 3).reshape(b, n, -1))
        y = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal)
        return self.out(y.permute(0, 2, 1, 3).reshape(b, n, -1))


NETWORKS = {
    "plain": Attending(),
    "heads on the third axis": Attending(separate=True),
    "causal": Attending(causal=True),
    "a mask for all": Attending(HIDDEN),
    "a mask with axes of one": Attending(HIDDEN.reshape(1, 1, 1, LENGTH)),
    "a mask for each sequence": Attending(np.stack([HIDDEN, 0 * HIDDEN])[:, None]),
    "a condition for each sequence, a row without keys": Attending(guarded=SEEN),
}
OTHERS = {
    "a mask for each head": Attending(np.stack([HIDDEN] * 3)),
    "long heads": Attending(size=72),
    "probabilities are read": Attending(reads=True),
}


def lowered(network: Attending, monkeypatch: pytest.MonkeyPatch, least: int, **options: Any) -> tuple[gg.Step, Any]:
    step = gg.build(export(network, {"x": X.shape}), "mse", gg.optim.sgd(0.05), **options)
    monkeypatch.setattr(attention_by_heads, "LEAST_SCORES", least)
    monkeypatch.setattr(attention_by_heads, "MOST_AT_ONCE", 2 * LENGTH**2)
    return step, for_machine(step.train, ORT_CPU)


def scans(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Scan" for node in model.graph.node)


@pytest.mark.parametrize("recompute", [None, "attention"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_step_with_fewer_scores_in_memory(name: str, recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, whole = lowered(NETWORKS[name], monkeypatch, 1 << 40, recompute=recompute)
    _, split = lowered(NETWORKS[name], monkeypatch, 1, recompute=recompute)
    assert (scans(whole), scans(split)) == (0, 2)
    most, least = (sum(walked(model).peak.values()) for model in (whole, split))
    assert least < most - 4 * 2 * 3 * LENGTH**2 // 2
    feeds = feeds_of(step.train, {"x": X, "target": X[..., :1]}, run(step.init))
    found = run(split, feeds)
    for output, value in run(whole, feeds).items():
        np.testing.assert_allclose(found[output], value, rtol=1e-5, atol=1e-6, err_msg=output)


@pytest.mark.parametrize("name", OTHERS)
def test_other_attentions_stay_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = lowered(OTHERS[name], monkeypatch, 1)
    assert not scans(model)


@pytest.mark.parametrize("most, heads", [(1, 1), (LENGTH**2, 1), (2 * LENGTH**2, 2), (5 * LENGTH**2, 3)])
def test_groups_are_as_large_as_allowed(most: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = gg.build(export(NETWORKS["plain"], {"x": X.shape}), "mse", gg.optim.sgd(0.05))
    monkeypatch.setattr(attention_by_heads, "LEAST_SCORES", 1)
    monkeypatch.setattr(attention_by_heads, "MOST_AT_ONCE", most)
    bodies = [
        a.g
        for n in for_machine(step.train, ORT_CPU).graph.node
        if n.op_type == "Scan"
        for a in n.attribute
        if a.name == "body"
    ]
    sizes = {body.input[-1].type.tensor_type.shape.dim[0].dim_value for body in bodies}
    assert sizes == {heads}
