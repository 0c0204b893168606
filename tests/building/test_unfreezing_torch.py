"""Groups that begin later: weights stay to the bit, then follow PyTorch's, where requires_grad is switched on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph import optim
from gradgraph.cli.app import run as command
from gradgraph.errors import BuildError
from tests.kit.command_line import arrays, mlp
from tests.kit.running import Loop

STEPS, FIRST, SECOND = 50, 9, 24
RNG = np.random.default_rng(0)
W = {"a.weight": RNG.normal(size=(5, 4)), "a.bias": RNG.normal(size=5), "b.weight": RNG.normal(size=(5, 5)),
     "b.bias": RNG.normal(size=5), "c.weight": RNG.normal(size=(3, 5)), "c.bias": RNG.normal(size=3)}  # fmt: skip
X = RNG.normal(size=(STEPS, 16, 4)).astype(np.float32)
Y = RNG.integers(0, 3, (STEPS, 16))
GROUPS: dict[str, Any] = {"a.*": {"start": SECOND}, "b.*": {"start": FIRST}}


def network() -> onnx.ModelProto:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[batch, 4] x) => (float[batch, 3] y) {
            u = Gemm <transB = 1> (x, aw, ab)
            v = Tanh (u)
            w = Gemm <transB = 1> (v, bw, bb)
            z = Tanh (w)
            y = Gemm <transB = 1> (z, cw, cb)
        }""")
    for node in model.graph.node:
        names = [{"w": ".weight", "b": ".bias"}[i[1]] if len(i) == 2 else "" for i in node.input]
        node.input[:] = [i[0] + n if n else i for i, n in zip(node.input, names, strict=True)]
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), k) for k, v in W.items())
    return model


def step_with(make: Callable[..., optim.Optimizer], clip: float | None = None, **more: Any) -> gg.Step:
    optimizer = make(groups=GROUPS)
    if clip is not None:
        optimizer = optim.chain(optim.clip_by_global_norm(clip), optimizer)
    return gg.build(network(), "cross_entropy", optimizer, **more)


# ours, and PyTorch's
OPTIMIZERS: dict[str, tuple[Callable[..., optim.Optimizer], Callable[[Any, Any], Any]]] = {
    "sgd": (lambda **g: optim.sgd(0.1, momentum=0.9, weight_decay=0.01, dampening=0.1, **g),
            lambda t, p: t.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, dampening=0.1)),
    "adam": (lambda **g: optim.adam(0.01, **g), lambda t, p: t.optim.Adam(p, 0.01)),
    "adamw": (lambda **g: optim.adamw(0.01, weight_decay=0.1, **g),
            lambda t, p: t.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "nadam": (lambda **g: optim.nadam(0.01, **g), lambda t, p: t.optim.NAdam(p, 0.01)),
    "radam": (lambda **g: optim.radam(0.01, **g), lambda t, p: t.optim.RAdam(p, 0.01)),
    "rmsprop": (lambda **g: optim.rmsprop(0.01, momentum=0.5, **g),
            lambda t, p: t.optim.RMSprop(p, 0.01, momentum=0.5)),
    "adagrad": (lambda **g: optim.adagrad(0.05, lr_decay=0.1, **g),
            lambda t, p: t.optim.Adagrad(p, 0.05, lr_decay=0.1)),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pytorch_gives_the_same(name: str, clip: float | None) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    ours, theirs = OPTIMIZERS[name]
    loop = Loop(step_with(ours, clip, grad_norm=True))
    weights = {k: torch.tensor(v, dtype=torch.float32) for k, v in W.items()}
    optimizer = theirs(torch, list(weights.values()))
    for i in range(STEPS):
        for k, w in weights.items():
            w.requires_grad_(i >= {"a": SECOND, "b": FIRST, "c": 0}[k[0]])
        h = torch.tensor(X[i])
        for part in "abc":
            h = torch.nn.functional.linear(
                torch.tanh(h) if part != "a" else h, weights[f"{part}.weight"], weights[f"{part}.bias"]
            )
        loss = torch.nn.functional.cross_entropy(h, torch.tensor(Y[i]))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([w for w in weights.values() if w.requires_grad], clip or 1e9)
        optimizer.step()
        found = loop({"x": X[i], "target": Y[i]})
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        for k in weights:
            if i < {"a": SECOND, "b": FIRST, "c": 0}[k[0]]:
                np.testing.assert_array_equal(loop.state[k], W[k].astype(np.float32))
    for k, w in weights.items():
        np.testing.assert_allclose(loop.state[k], w.detach().numpy(), rtol=1e-3, atol=1e-4)


def test_a_schedule_is_that_of_the_run() -> None:
    """SGD with a falling rate: what begins at step 24 moves by the rate of step 24."""
    loop = Loop(step_with(lambda **g: optim.sgd(optim.linear(0.1, 0.0, STEPS), **g)))
    plain = Loop(gg.build(network(), "cross_entropy", optim.sgd(optim.linear(0.1, 0.0, STEPS))))
    for i in range(SECOND + 1):
        before = {k: v.copy() for k, v in loop.state.items()}
        plain.state.update({k: v.copy() for k, v in before.items() if k in plain.state})
        loop({"x": X[i], "target": Y[i]})
        plain({"x": X[i], "target": Y[i]})
    for k in W:
        np.testing.assert_allclose(loop.state[k], plain.state[k], rtol=1e-5, atol=1e-7)


def test_until_then_nothing_of_the_group_changes() -> None:
    step = step_with(lambda **g: optim.nadam(0.01, weight_decay=0.1, **g))
    loop = Loop(step)
    start = {k: v.copy() for k, v in loop.state.items()}
    for i in range(FIRST):
        loop({"x": X[i], "target": Y[i]})
    asleep = [s.name for s in step.manifest.state if s.name.startswith(("a.", "b."))]
    assert len(asleep) == 12
    for name in asleep:
        np.testing.assert_array_equal(loop.state[name], start[name])
    loop({"x": X[0], "target": Y[0]})
    assert not np.array_equal(loop.state["b.weight"], start["b.weight"])
    np.testing.assert_array_equal(loop.state["a.weight"], start["a.weight"])


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("more", [{"accumulate": True}, {"ema": 0.9}, {}])
def test_a_run_resumes_to_the_bit_across_the_beginning(more: dict[str, Any], tmp_path: Path) -> None:
    step = step_with(lambda **g: optim.adamw(0.01, **g), 0.3, **more)
    data = {"x": X.reshape(-1, 4)[:96], "target": Y.reshape(-1)[:96]}
    fit: dict[str, Any] = {"epochs": 6, "batch_size": 16, "progress": False}
    fit |= {"accumulate": 2} if more.get("accumulate") else {}
    whole = gg.Trainer(step, device="cpu")
    whole.fit(data, **fit)
    part = gg.Trainer(step, device="cpu")
    part.fit(data, **fit, max_steps=8, checkpoint=tmp_path / "run.ckpt")
    again = gg.Trainer.resume(step, tmp_path / "run.ckpt", device="cpu")
    again.fit(data, **fit)
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], value)


def test_accumulation_counts_updates() -> None:
    step = step_with(lambda **g: optim.adamw(0.01, **g), accumulate=True)
    plain = step_with(lambda **g: optim.adamw(0.01, **g))
    a, b = gg.Trainer(step, device="cpu"), gg.Trainer(plain, device="cpu")
    for i in range(FIRST + 3):
        for half, due in ((slice(0, 8), 0.0), (slice(8, 16), 1.0)):
            a.step({"x": X[i][half], "target": Y[i][half]}, update=due)
        b.step({"x": X[i], "target": Y[i]})
    for k in W:
        np.testing.assert_allclose(a.state_dict()[k], b.state_dict()[k], rtol=2e-4, atol=1e-5)


def test_sam_does_not_climb_along_weights_that_wait() -> None:
    """As if they were frozen, which the first steps of one that freezes them are."""
    waiting = gg.build(network(), "cross_entropy", optim.sam(optim.sgd(0.1, groups={"[ab].*": {"start": 99}}), rho=0.1))
    frozen = gg.build(network(), "cross_entropy", optim.sam(optim.sgd(0.1), rho=0.1), freeze=["a.*", "b.*"])
    a, b = Loop(waiting), Loop(frozen)
    for i in range(5):
        a({"x": X[i], "target": Y[i]})
        b({"x": X[i], "target": Y[i]})
    for k in ("c.weight", "c.bias"):
        np.testing.assert_allclose(a.state[k], b.state[k], rtol=1e-5, atol=1e-6)


def test_groups_that_begin_at_once_are_as_others() -> None:
    a = gg.build(network(), "cross_entropy", optim.adamw(1e-3, groups={"a.*": {"lr": 1e-2}}))
    b = gg.build(network(), "cross_entropy", optim.adamw(1e-3, groups={"a.*": {"lr": 1e-2, "start": 0}}))
    assert a.train.graph == b.train.graph


@pytest.mark.parametrize("start", [-1, 2.5, "soon", True])
def test_what_is_no_beginning(start: Any) -> None:
    with pytest.raises(BuildError, match="pass the number of updates before its first one"):
        optim.adamw(1e-3, groups={"a.*": {"start": start}})


def test_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays(32))
    words = [
        "build",
        str(tmp_path / "model.onnx"),
        "--group",
        "first.*:start=3",
        "-o",
        str(tmp_path / "step"),
        "--json",
    ]
    assert command(words) == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert manifest["optimizer"]["arguments"]["groups"] == {"first.*": {"start": 3}}
    trainer = gg.Trainer(tmp_path / "step", device="cpu")
    before = trainer.state_dict()["first.weight"]
    moved = []
    for _ in range(4):
        trainer.step(arrays(32))
        moved.append(not np.array_equal(trainer.state_dict()["first.weight"], before))
    assert moved == [False, False, False, True]
