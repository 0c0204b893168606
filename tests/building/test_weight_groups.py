"""Parameter groups: rates, decay and optimizers by glob, weights without decay, layer decay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.errors import ArgumentError, BuildError, UnknownNameError
from gradgraph.files.models import load_model
from gradgraph.frontend import export, nn
from gradgraph.optim.weight_groups import layers
from tests.kit.optim_cases import WEIGHTS, X, Y, batches, network
from tests.kit.running import Loop, resumed

STEPS = 50


def trained(optimizer: optim.Optimizer, steps: int = STEPS, **rates: float) -> dict[str, np.ndarray]:
    """The weights after ``steps``, in the plainest loop."""
    loop = Loop(gg.build(network(), "mse", optimizer))
    for batch in batches()[:steps]:
        loop(batch, **rates)
    return {name: loop.state[name] for name in WEIGHTS}


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_groups_are_those_of_torch(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    weights = {n: torch.tensor(w, requires_grad=True) for n, w in WEIGHTS.items()}
    w1, b1, w2, b2 = weights.values()
    more = {"momentum": 0.9} if kind == "SGD" else {}
    groups = [{"params": [w1], "lr": 0.02}, {"params": [w2]}, {"params": [b1, b2], "weight_decay": 0.0}]
    theirs = getattr(torch.optim, kind)(groups, lr=0.01, weight_decay=0.1, **more)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, STEPS)
    for batch in batches():
        theirs.zero_grad()
        h = torch.tanh(torch.tensor(batch["x"]) @ w1 + b1)
        torch.nn.functional.mse_loss(h @ w2 + b2, torch.tensor(batch["target"])).backward()
        theirs.step()
        schedule.step()
    rules = {"w1": {"lr": 0.02}, "b*": {"weight_decay": 0.0}}
    ours = optim.by_name(kind.lower(), lr=optim.cosine(0.01, STEPS), weight_decay=0.1, groups=rules, **more)
    assert_same(trained(ours), {n: w.detach().numpy() for n, w in weights.items()})


def test_a_group_follows_the_rate_that_is_fed() -> None:
    rules = {"w1": {"lr": 0.03}, "b*": {"lr_factor": 0.5}}
    moved = {n: w - WEIGHTS[n] for n, w in trained(optim.sgd(0.01, groups=rules), 1, learning_rate=0.1).items()}
    usual = {n: w - WEIGHTS[n] for n, w in trained(optim.sgd(0.1), 1).items()}
    for name, factor in {"w1": 3.0, "b1": 0.5, "w2": 1.0, "b2": 0.5}.items():
        np.testing.assert_allclose(moved[name], factor * usual[name], rtol=1e-3, atol=1e-6)


def test_a_group_may_have_a_schedule_or_an_optimizer_of_its_own() -> None:
    rules = {"w2": {"lr": optim.exponential(0.1, 0.5)}, "b*": optim.sgd(0.02, momentum=0.9)}
    ours = trained(optim.adam(0.01, groups=rules), 1)
    assert_same({"w1": ours["w1"]}, {"w1": trained(optim.adam(0.01), 1)["w1"]})
    assert_same({"w2": ours["w2"]}, {"w2": trained(optim.adam(0.1), 1)["w2"]})
    assert_same({"b1": ours["b1"]}, {"b1": trained(optim.sgd(0.02), 1)["b1"]})


def test_muon_for_matrices_and_adamw_for_the_rest() -> None:
    step = gg.build(network(), "mse", optim.muon(0.02, groups={"b*": optim.adamw(1e-3)}))
    slots = {s.name for s in step.manifest.state if s.kind == "optimizer"}
    assert slots == {"w1.momentum_buffer", "w2.momentum_buffer", "b1.exp_avg", "b1.exp_avg_sq", "b2.exp_avg",
                     "b2.exp_avg_sq"}  # fmt: skip


def test_groups_that_say_nothing_change_nothing() -> None:
    grouped = trained(optim.adamw(0.01, groups={"*": {"weight_decay": 1e-2}}))
    assert all(np.array_equal(grouped[n], w) for n, w in trained(optim.adamw(0.01)).items())


def test_a_global_norm_is_over_all_groups() -> None:
    clip = optim.clip_by_global_norm(1e-3)
    moved = trained(
        optim.chain(clip, optim.sgd(1.0, groups={"w1": {"lr_factor": 1.0}, "b*": {"weight_decay": 0.0}})), 1
    )
    total = sum(((w - WEIGHTS[n]) ** 2).sum() for n, w in moved.items())
    assert np.sqrt(total) == pytest.approx(1e-3, rel=1e-2)


def test_master_weights_keep_groups() -> None:
    wrapped = optim.master_weights(optim.adamw(0.01, groups={"w1": {"lr": 0.1}}))
    assert_same(trained(wrapped, 3), trained(optim.adamw(0.01, groups={"w1": {"lr": 0.1}}), 3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stack() -> onnx.ModelProto:
    return export(Stack(), {"x": ("batch", 4)}, outputs=["y"])


def resolved(optimizer: optim.Optimizer, model: onnx.ModelProto) -> dict[str, float]:
    """The decay that each weight gets."""
    graph = load_model(model).graph
    params = list(graph.initializers.values())
    assert optimizer.groups is not None
    found = {}
    for group in optimizer.groups.resolve(graph, params):
        decay = sum(t.decay or 0.0 for t in group.transforms)
        found |= {params[i].name or "": decay for i in group.members}
    return found


def test_norms_and_biases_may_have_no_decay() -> None:
    decays = resolved(optim.adamw(weight_decay=0.1, no_decay="norm_and_bias"), stack())
    assert {n for n, d in decays.items() if d} == {n for n in decays if n.endswith(("linear.weight", "embed.weight",
                                                                                    "head.weight"))}  # fmt: skip
    decays = resolved(optim.adamw(weight_decay=0.1, no_decay=["*.bias", "embed.*"]), stack())
    assert {n for n, d in decays.items() if not d} == {n for n in decays if n.endswith("bias") or n.startswith("embed")}


def test_each_block_is_a_layer() -> None:
    graph = load_model(stack()).graph
    depths = layers(graph, [v for v in graph.initializers.values() if v.name])
    assert {n: depths[n] for n in depths if n.endswith(".weight")} == {
        "embed.weight": 0, "blocks.0.norm.weight": 1, "blocks.0.linear.weight": 1, "blocks.1.norm.weight": 2,
        "blocks.1.linear.weight": 2, "blocks.2.norm.weight": 3, "blocks.2.linear.weight": 3, "norm.weight": 4,
        "head.weight": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"], [0, 0, 1, 1]),
        (["w1", "b1", "w2", "b2"], [0, 0, 1, 1]),
        (["layer1.0.conv1.weight", "layer1.0.bn.bias", "layer1.1.conv1.weight", "fc.bias"], [0, 0, 1, 2]),
        (["h.0.w", "onnx::MatMul_7", "h.1.w", "h.1.b"], [0, 0, 1, 1]),
    ],
)
def test_layers_are_found_by_their_names(names: list[str], expected: list[int]) -> None:
    model = network()
    for old, new in zip(WEIGHTS, names, strict=True):
        next(t for t in model.graph.initializer if t.name == old).name = new
        for node in model.graph.node:
            node.input[:] = [new if i == old else i for i in node.input]
    graph = load_model(model).graph
    found = layers(graph, list(graph.initializers.values()))
    assert [found[n] for n in names] == expected


def test_layer_decay_lowers_the_rate_towards_the_input() -> None:
    moved = {n: w - WEIGHTS[n] for n, w in trained(optim.sgd(0.1, layer_decay=0.5), 1).items()}
    usual = {n: w - WEIGHTS[n] for n, w in trained(optim.sgd(0.1), 1).items()}
    for name, factor in {"w1": 0.5, "b1": 0.5, "w2": 1.0, "b2": 1.0}.items():
        np.testing.assert_allclose(moved[name], factor * usual[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: optim.adamw(groups={"head.*": {"lr": 0.1}}), "'head.*', a group of the optimizer"),
        (lambda: optim.adamw(no_decay="head.*"), "'head.*', in no_decay, matches no"),
        (lambda: optim.adamw(groups={"w*": {"lr": 0.1}, "*1": {"lr": 0.2}}), r"'w\*' and '\*1' both set 'lr' of 'w1'"),
        (lambda: optim.adamw(groups={"w*": optim.sgd(), "*1": {"lr": 0.2}}), "both set 'lr' of 'w1'"),
        (lambda: optim.adamw(groups={"w*": {"lrr": 0.1}}), "sets 'lrr', which adamw does not have; did you mean 'lr'"),
        (lambda: optim.adamw(groups={"w*": {"weight_decay": -1.0}}), "weight_decay must not be negative"),
        (lambda: optim.adamw(groups={"w*": {"lr_factor": -1.0}}), "lr_factor -1.0"),
        (lambda: optim.adamw(groups={"w*": 0.1}), "groups is a dict; it should be a dict of globs"),
        (lambda: optim.adamw(layer_decay=1.5), "layer_decay must be between"),
        (lambda: optim.rprop(no_decay="b*"), "rprop has no weight decay"),
        (lambda: optim.adamw(0.0, groups={"w*": {"lr": 0.1}}), "cannot follow a learning rate of 0"),
        (lambda: optim.chain(optim.adamw(groups={"w*": {"lr": 0.1}}), optim.clip_by_value(1.0)), "last part of"),
        (lambda: optim.adamw(groups={"w*": optim.master_weights(optim.sgd())}), "use one without them"),
    ],
)  # fmt: skip
def test_groups_that_make_no_sense_are_refused(make: Callable[[], optim.Optimizer], says: str) -> None:
    with pytest.raises((BuildError, UnknownNameError, ArgumentError), match=says):
        gg.build(network(), "mse", make())


def test_a_resumed_run_with_groups_is_the_same_to_the_bit(tmp_path: Path) -> None:
    rules = {"w1": {"lr": optim.cosine(0.1, 20)}, "b*": optim.nadam(1e-2)}
    step = gg.build(network(), "mse", optim.nadam(0.01, groups=rules, layer_decay=0.9))
    data = {"x": X[:6].reshape(-1, 4), "target": Y[:6].reshape(-1, 3)}
    resumed(step, data, tmp_path, 7, epochs=2, batch_size=16)
