"""Random networks on sequences: the steps a Trainer takes, against the same file in float64; transforms; checkpoints.

Parameters are compared by how far they moved. Some gradients are nothing but rounding (those of biases behind a norm,
and of keys), so a part of the whole step is allowed beside a part of each tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.inliner
import pytest

import gradgraph as gg
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.random_sequences import Network

STEPS, TRANSFORMS, CHECKPOINTS = range(24), range(100, 112), range(200, 204)
OPTIONS = RuntimeOptions(threads=1)
Arrays = dict[str, np.ndarray[Any, Any]]


def wide(arrays: Arrays) -> Arrays:
    return {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in arrays.items()}


class Exact:
    """A step in float64."""

    def __init__(self, step: gg.Step) -> None:
        self.manifest = step.manifest
        self.run = Oracle(in_float64(onnx.inliner.inline_local_functions(step.train, False)))
        self.state = wide(Oracle(step.init)({}))
        self.rates = {name: np.array(rate) for name, rate in step.manifest.hyperparameters.items()}

    def __call__(self, batch: Arrays, state: Arrays) -> tuple[float, Arrays]:
        """The loss, and the next state."""
        results = self.run({**wide(batch), **self.rates, **state})
        loss = float(np.squeeze(results[self.manifest.loss_output]))
        return loss, {s.name: results[s.next] for s in self.manifest.state}

    def step(self, batch: Arrays) -> float:
        loss, self.state = self(batch, self.state)
        return loss


def losses(net: Network) -> list[gg.losses.Loss | None]:
    if net.own_loss:
        return [None]
    axis, weight = net.rank - 1, [0.5 + 0.1 * i for i in range(net.classes)]
    return [
        gg.losses.cross_entropy(axis=axis, ignore_index=0),
        gg.losses.cross_entropy(weight, axis=axis, label_smoothing=0.1),
        gg.losses.mse(),
        gg.losses.bce_with_logits(weight),
    ]


def optimizers() -> list[gg.optim.Optimizer]:
    rate = gg.optim.warmup(2, gg.optim.cosine(0.02, 5))
    clipped = gg.optim.chain(gg.optim.clip_by_global_norm(0.5), gg.optim.adamw(rate, eps=1e-2, weight_decay=0.1))
    return [gg.optim.sgd(0.05), gg.optim.sgd(0.05), clipped, gg.optim.rmsprop(rate, eps=0.1, momentum=0.5)]


def batches(net: Network, step: gg.Step, seed: int) -> list[Arrays]:
    """Three, the last one of other sizes where the model leaves them open."""
    found = []
    for i, sizes in enumerate([(None, None), (None, None), (5, 3)]):
        batch, rng = net.feeds(10 * seed + i, *sizes), np.random.default_rng((seed, i))
        for target in step.manifest.targets:
            shape = [*next(iter(batch.values())).shape[: net.rank - 1], net.classes]
            labels = rng.integers(0, net.classes, shape[:-1])
            labels.reshape(-1)[0] = 1  # not every label is ignored
            floats = rng.random(shape).astype(np.float32)
            batch[target.name] = labels if target.dtype == "int64" else floats
        found.append(batch)
    return found


def assert_moved_alike(found: Arrays, expected: Arrays, start: Arrays) -> None:
    moved = {name: np.asarray(expected[name] - start[name], np.float64) for name in expected}
    whole = np.sqrt(sum(np.sum(m**2) for name, m in moved.items() if expected[name].dtype.kind == "f"))
    for name, m in moved.items():
        off = np.linalg.norm(np.asarray(found[name], np.float64) - expected[name])
        stored = 4e-7 * np.linalg.norm(np.asarray(expected[name], np.float64))
        assert off <= 2e-4 * np.linalg.norm(m) + 3e-5 * whole + stored, name


@pytest.mark.sweep(0.07)
@pytest.mark.parametrize("seed", STEPS)
def test_steps_are_those_of_the_file_in_float64(seed: int) -> None:
    net = Network(seed, large=seed % 4 == 3)
    loss, optimizer = net.one_of(losses(net)), net.one_of(optimizers())
    step = gg.build(net.model, loss, optimizer, metrics=())
    exact, trainer = Exact(step), gg.Trainer(step, device="cpu", options=OPTIONS)
    start = dict(exact.state)
    for batch in batches(net, step, seed):
        expected = exact.step(batch)
        assert float(np.squeeze(trainer.step(batch)["loss"])) == pytest.approx(expected, rel=1e-4, abs=2e-5)
        assert_moved_alike(trainer.state_dict(), exact.state, start)


@pytest.mark.sweep(0.007)
@pytest.mark.parametrize("seed", [s for s in STEPS if not Network(s).random])
def test_gradients_are_slopes(seed: int) -> None:
    net = Network(seed)
    step = gg.build(net.model, net.one_of(losses(net)), gg.optim.sgd(1.0), metrics=(), backend="portable")
    exact, batch, rng = Exact(step), batches(net, step, seed)[0], np.random.default_rng(seed)
    start = exact.state
    along = {name: rng.normal(size=start[name].shape) for name in step.manifest.trainable}

    def difference(h: float) -> float:
        ahead, behind = (exact(batch, {**start, **{n: start[n] + s * along[n] for n in along}})[0] for s in (h, -h))
        return ahead - behind

    slope = (8 * difference(1e-4) - difference(2e-4)) / 12e-4
    after = exact(batch, start)[1]
    found = sum(np.sum((start[n] - after[n]) * along[n]) for n in along)
    assert found == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("seed", TRANSFORMS)
def test_transforms_agree(seed: int) -> None:
    net = Network(seed)
    model, names, rng = net.model, list(net.weights), np.random.default_rng(seed)
    feeds = wide(net.feeds(seed))
    u, v = ({n: rng.normal(size=net.weights[n].shape) for n in names} for _ in range(2))

    def tangents(direction: Arrays) -> Arrays:
        return {f"{n}.tangent": d for n, d in direction.items()}

    def inner(gradients: Arrays, direction: Arrays, suffix: str) -> float:
        return float(sum(np.sum(gradients[f"{n}.{suffix}"] * d) for n, d in direction.items()))

    y = net.output
    forward = Oracle(in_float64(gg.jvp(model, wrt=names)))({**feeds, **tangents(u)})
    cotangent = rng.normal(size=np.shape(forward[y]))
    backward = Oracle(in_float64(gg.vjp(model, wrt=names)))({**feeds, f"{y}.cotangent": cotangent})
    along = forward[f"{y}.tangent"]
    size = np.linalg.norm(cotangent) * np.linalg.norm(along)
    assert inner(backward, u, "grad") == pytest.approx(np.sum(cotangent * along), rel=1e-6, abs=1e-6 * size)
    if net.own_loss:
        curvature = Oracle(in_float64(gg.hvp(model, wrt=names)))
        of_u, of_v = (curvature({**feeds, **tangents(direction)}) for direction in (u, v))
        assert inner(of_u, v, "hvp") == pytest.approx(inner(of_v, u, "hvp"), rel=1e-5, abs=1e-7)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("seed", CHECKPOINTS)
def test_a_resumed_run_has_the_same_bits(seed: int, tmp_path: Path) -> None:
    net = Network(seed)
    step = gg.build(net.model, net.one_of(losses(net)), optimizers()[2], metrics=())
    step.save(str(tmp_path / "step"))
    first, *rest = batches(net, step, seed)
    trainer = gg.Trainer(step, device="cpu", options=OPTIONS)
    trainer.step(first)
    trainer.save(tmp_path / "run.ckpt")
    resumed = gg.Trainer.resume(tmp_path / "step", tmp_path / "run.ckpt", device="cpu", options=OPTIONS)
    for batch in rest:
        trainer.step(batch)
        resumed.step(batch)
    found, expected = resumed.state_dict(), trainer.state_dict()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
