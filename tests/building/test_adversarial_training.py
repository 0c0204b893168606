"""Adversarial training: the options, and what surrounds the attack in a step. Its weights: the file beside this one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import GradgraphError
from gradgraph.frontend import Module, export, nn
from gradgraph.frontend import functional as F
from tests.kit.command_line import mlp
from tests.parallel.ranks_cases import wide

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
BATCH = {"x": X, "target": np.arange(8) % 3}


class Net(Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.one, self.norm, self.two, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), drop

    def forward(self, x: Any) -> Any:
        return self.two(F.dropout(F.relu(self.norm(self.one(x))), self.drop))


def net(drop: float = 0.0) -> onnx.ModelProto:
    frontend.manual_seed(1)
    return export(Net(drop), {"x": ("batch", 4)}, "y")


def trained(model: Any, batches: int = 3, **options: Any) -> dict[str, np.ndarray]:
    """The state after some steps."""
    trainer = gg.Trainer(gg.build(model, "cross_entropy", gg.optim.sgd(0.5), **options), device="cpu", seed=3)
    for _ in range(batches):
        trainer.step(BATCH)
    return trainer.state_dict()


def assert_alike(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float) -> None:
    for name in one.keys() & other.keys():
        np.testing.assert_allclose(one[name], other[name], atol=tolerance, rtol=0, err_msg=name)


def test_a_tiny_attack_is_ordinary_training_with_the_same_masks() -> None:
    model = net(0.5)
    plain, moved = trained(model), trained(model, adversarial=gg.PGD(1e-9, n=2))
    assert_alike(plain, moved, 1e-6)
    assert np.abs(trained(model, adversarial=gg.PGD(0.3, n=2))["one.weight"] - plain["one.weight"]).max() > 1e-3


def test_random_starts_differ_by_step_and_seed_and_are_resumed(tmp_path: Any) -> None:
    options = {"adversarial": gg.PGD(0.3, n=1, step=1e-9, random_start=True)}
    assert_alike(trained(net(), **options), trained(net(), **options), 0)
    step, other = (gg.build(net(), "cross_entropy", gg.optim.sgd(0.0), seed=seed, **options) for seed in (1, 2))
    losses = [float(gg.Trainer(one, device="cpu").step(BATCH)["loss"]) for one in (step, other)]
    trainer = gg.Trainer(step, device="cpu")
    several = [float(trainer.step(BATCH)["loss"]) for _ in range(3)]
    assert several[0] == losses[0] and len({*losses, *several[1:]}) == 4
    trainer.save(tmp_path / "run.ckpt")
    step.save(tmp_path / "step")
    again = gg.Trainer.resume(tmp_path / "step", tmp_path / "run.ckpt", device="cpu")
    assert float(again.step(BATCH)["loss"]) == float(trainer.step(BATCH)["loss"])


def test_random_operators_of_the_model_are_drawn_by_the_step() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[batch, 4] x) => (float[batch, 4] y) {
            noise = RandomNormalLike (x)
            moved = Add (x, noise)
            y = MatMul (moved, w)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    step = gg.build(model, "cross_entropy", gg.optim.sgd(0.1), adversarial=gg.PGD(0.3, n=2))
    losses = [float(gg.Trainer(step, device="cpu", seed=1).step(BATCH)["loss"]) for _ in range(2)]
    assert losses[0] == losses[1] and not any("Random" in n.op_type for n in step.train.graph.node)


def test_evaluation_and_export_use_the_original_inputs() -> None:
    step = gg.build(net(), "cross_entropy", gg.optim.sgd(0.1), adversarial="pgd(epsilon=0.5)")
    trainer = gg.Trainer(step, device="cpu")
    plain = gg.Trainer(gg.build(net(), "cross_entropy", gg.optim.sgd(0.1)), device="cpu")
    assert trainer.evaluate(BATCH) == plain.evaluate(BATCH)
    assert trainer.step(BATCH)["loss"] > plain.step(BATCH)["loss"]
    assert not any(node.op_type == "Scan" for node in trainer.export().graph.node)


def test_losses_that_read_inputs_and_several_losses() -> None:
    def loss(out: Any, batch: Any) -> Any:
        return F.mse_loss(out["y"], batch["x"][:, :3])

    for chosen, batch in ((loss, {"x": X}), ({"y": ("cross_entropy", 2.0)}, {"x": X, "y_target": BATCH["target"]})):
        step = gg.build(net(), chosen, gg.optim.sgd(0.1), adversarial=gg.PGD(0.2, clean=0.5))
        history = gg.Trainer(step, device="cpu").fit(batch, epochs=2, batch_size=8, progress=False)
        assert history["loss"][0] > history["clean_loss"][0] > 0


@pytest.mark.parametrize(
    "options",
    [{"optimizer": gg.optim.sam(gg.optim.sgd(0.1), 1e-9)}, {"separate": True}, {"recompute": "sqrt"},
     {"accumulate": True}, {"backend": "tinygrad"}, {"backend": "portable"}],
    ids=lambda given: next(iter(given)) + str(next(iter(given.values())))[:9],
)  # fmt: skip
def test_beside_other_options(options: dict[str, Any]) -> None:
    """The weights are those without the option, which must not change them here."""
    attack = gg.PGD(0.3, n=2, random_start=True)
    given = {"optimizer": gg.optim.sgd(0.1), "adversarial": attack}
    found = []
    for more in ({}, options):
        step = gg.build(net(), "cross_entropy", **{**given, **more})
        scans = sum(node.op_type == "Scan" for node in step.train.graph.node)
        assert scans == (0 if more.get("backend") == "tinygrad" else 2 if "sam" in str(more) else 1)
        trainer = gg.Trainer(step, device="cpu", seed=5)
        for _ in range(2):
            trainer.step(BATCH)
        found.append(trainer.state_dict())
    assert_alike(*found, 1e-5)


def test_a_named_step() -> None:
    plain = gg.StepOptions("cross_entropy", gg.optim.sgd(0.1))
    robust = gg.StepOptions("cross_entropy", gg.optim.sgd(0.1), adversarial=gg.PGD(0.3, n=2))
    trainer = gg.Trainer(gg.build(net(), steps={"plain": plain, "robust": robust}), device="cpu")
    losses = {name: float(trainer.step(name, BATCH)["loss"]) for name in ("plain", "robust")}
    assert losses["robust"] > losses["plain"]


def test_a_model_in_float64_reports_its_clean_loss() -> None:
    found = []
    for model, x in ((mlp(), X), (wide(mlp()), X.astype(np.float64))):
        step = gg.build(model, "cross_entropy", adversarial=gg.PGD(0.3, n=2, clean=0.5))
        found.append(gg.Trainer(step, device="cpu").step({**BATCH, "x": x})["clean_loss"])
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_bfloat16() -> None:
    alike, other = (trained(net(), adversarial=gg.PGD(0.3, n=2), precision=p) for p in ("bfloat16", "float32"))
    assert_alike(alike, other, 0.05)


TOKENS = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    net (int64[batch, 5] ids, float[batch, 2] x) => (float[batch, 3] y) <float[7, 3] table, float[2, 3] w> {
        rows = Gather (table, ids)
        found = ReduceMean <keepdims = 0> (rows, axes)
        moved = MatMul (x, w)
        y = Add (found, moved)
    }""")
TOKENS.graph.initializer.extend([
    onnx.numpy_helper.from_array(RNG.normal(size=(7, 3)).astype(np.float32), "table"),
    onnx.numpy_helper.from_array(RNG.normal(size=(2, 3)).astype(np.float32), "w"),
    onnx.numpy_helper.from_array(np.array([1]), "axes"),
])  # fmt: skip


@pytest.mark.parametrize(
    ("model", "attack", "said"),
    [
        (TOKENS, gg.PGD(inputs="ids"), "an attack moves floating-point inputs, and 'ids' is not one"),
        (
            TOKENS,
            gg.PGD(inputs="xx"),
            "'xx' in the inputs of the attack matches no input of the model; did you mean 'x'",
        ),
        (mlp(), "pgd(eps=0.1)", "the attack pgd has no argument 'eps'; did you mean 'epsilon'"),
        (mlp(), "fgsm", r"there is no attack 'fgsm'; pgd\(n=1, step=…\) is FGSM"),
        (mlp(), 0.1, r"adversarial is 0.1; it should be gradgraph.PGD\(...\), or text such as"),
        (mlp(), gg.PGD(bounds=("input", None)), "must be numbers or arrays, not 'input'"),
        (mlp(), gg.PGD(bounds=(np.zeros(9), None)), r"the lower bound of 'x' has shape \[9\]"),
    ],
)
def test_refused(model: Any, attack: Any, said: str) -> None:
    with pytest.raises(GradgraphError, match=said):
        gg.build(model, "cross_entropy", adversarial=attack)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epsilon": 0}, "epsilon is 0; it should be a number above 0"),
        ({"clean": 1}, "leaves none for the loss at the moved inputs"),
        ({"norm": "l1"}, "it should be one of linf, l2"),
        ({"n": 0}, "n is 0; it should be a whole number above zero"),
        ({"bounds": (1, 0)}, "in this order"),
    ],
)
def test_wrong_options(given: dict[str, Any], said: str) -> None:
    with pytest.raises(GradgraphError, match=said):
        gg.PGD(**given)


def test_a_model_of_tokens_and_a_loss_scale_are_refused() -> None:
    tokens = onnx.ModelProto()
    tokens.CopyFrom(TOKENS)
    del tokens.graph.input[1], tokens.graph.node[2:], tokens.graph.initializer[1]
    tokens.graph.output[0].name = "found"
    with pytest.raises(GradgraphError, match=r"moves floating-point inputs, and the model has 'ids' \(int64\)"):
        gg.build(tokens, "cross_entropy", adversarial="pgd")
    with pytest.raises(GradgraphError, match="does not support a loss scale; use precision='bfloat16'"):
        gg.build(mlp(), "cross_entropy", adversarial="pgd", precision="float16")
