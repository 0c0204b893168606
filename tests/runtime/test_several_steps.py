"""Several named steps over one state: the folder, single steps, exports, what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import (
    BuildError,
    DivergedError,
    ModelError,
    UnknownNameError,
)
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn
from gradgraph.step.manifest import Manifest
from gradgraph.step.step import Step
from tests.kit.gan_steps import (
    IMAGES,
    LABELLED,
    Gan,
    deceiving,
    gan_step,
    same,
    two_heads,
)
from tests.kit.running import run, session


@pytest.fixture(scope="module")
def gan() -> Step:
    return gan_step()


def test_a_folder_has_one_manifest_and_a_train_graph_for_each(gan: Step, tmp_path: Path) -> None:
    folder = gan.save(tmp_path / "gan")
    names = ["eval.onnx", "init.onnx", "manifest.json", "train.discriminator.onnx", "train.generator.onnx"]
    assert sorted(p.name for p in folder.iterdir()) == names
    document = json.loads((folder / "manifest.json").read_text())
    assert document["version"] == 1
    assert "loss" not in document
    assert set(document["digests"]) == set(names) - {"manifest.json"}
    again = Step.load(folder)
    assert again.manifest == gan.manifest
    globs = {*gan.taken}  # of the build; the folder does not have them
    assert again.summary().split("\n") == [s for s in gan.summary().split("\n") if s[16:] not in globs]
    d, g = gan.manifest.steps["discriminator"], gan.manifest.steps["generator"]
    assert not set(d.writes) & set(g.writes)
    assert {"generator.0.weight", "discriminator.0.weight"} <= {*d.reads} & {*g.reads}
    assert d.metrics == ("discriminator.real", "discriminator.made")
    assert "discriminator.rng" in d.writes
    assert not any(name.startswith("generator.generator") for name in d.reads)  # slots of the other optimizer
    with pytest.raises(ModelError, match=r"several train graphs \('discriminator', 'generator'\); use one of"):
        _ = gan.train


def test_the_plainest_loop_gives_the_same_numbers(gan: Step) -> None:
    """All that a runtime needs: the state by name, of which each train graph takes and gives some."""
    trainer, state = gg.Trainer(gan, seed=1), run(gan.init)
    sessions = {name: session(model) for name, model in gan.trains.items()}
    for name in ("discriminator", "generator", "discriminator", "generator", "generator"):
        part = gan.manifest.steps[name]
        rates = {k: np.array(v, np.float32) for k, v in part.hyperparameters.items()}
        fed = {k: state[k].copy() for k in part.reads}
        outputs = [o.name for o in sessions[name].get_outputs()]
        found = dict(zip(outputs, sessions[name].run(None, {**IMAGES, **rates, **fed}), strict=True))
        state |= {s.name: found[s.next] for s in gan.manifest.state if s.name in part.writes}
        assert float(trainer.step(name, IMAGES)["loss"]) == pytest.approx(float(found[part.loss_output]), rel=1e-5)
    for name, value in trainer.state_dict().items():
        np.testing.assert_allclose(value, state[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["steps"]["generator"].update(reads=[]), "'generator.0.weight', which does not exist"),
        (lambda d: d["steps"]["generator"].update(inputs=["other"]), "'other', which does not exist"),
        (
            lambda d: d["steps"]["generator"].update(trainable=["discriminator.0.weight"]),
            "'discriminator.0.weight', which does not exist",
        ),
        (lambda d: d["steps"].update({"a/b": d["steps"].pop("generator")}), "'a/b', which is not a valid name"),
        (lambda d: d["steps"]["generator"].update(writes="x"), "should be a list"),
        (lambda d: d["steps"]["generator"].pop("loss"), "damaged"),
        (lambda d: d.update(version=2), "has version 2, written by"),
        (lambda d: d["steps"]["generator"].update(metrics=["generator.loss"]), "twice"),
    ],
)
def test_a_forged_manifest_is_refused(gan: Step, change: Any, says: str) -> None:
    data = json.loads(gan.manifest.to_json())
    change(data)
    with pytest.raises(ModelError, match=says):
        Manifest.from_json(json.dumps(data))


def test_train_graphs_that_are_exchanged_are_refused(gan: Step) -> None:
    d, g = gan.trains.values()
    with pytest.raises(ModelError, match=r"train\.discriminator\.onnx has"):
        Step({"discriminator": g, "generator": d}, gan.init, gan.eval, gan.manifest)  # type: ignore[arg-type]


# --- single steps ----------------------------------------------------------------------------------------------


def test_a_step_moves_its_own_part_of_the_state_only(gan: Step) -> None:
    trainer = gg.Trainer(gan)
    for name, part in gan.manifest.steps.items():
        before = trainer.state_dict()
        columns = {"discriminator": {"loss", "real", "made"}, "generator": {"loss", "grad_norm", "learning_rate"}}[name]
        assert set(trainer.step(name, IMAGES)) == columns
        after = trainer.state_dict()
        moved = {n for n in before if not np.array_equal(before[n], after[n])}
        assert moved == set(part.writes)
    assert trainer.progress.counts == {"discriminator": 1, "generator": 1}


@pytest.mark.sweep(0)
def test_steps_draw_numbers_of_their_own() -> None:
    """Two steps that do the same draw other numbers; with a seed of their own they draw what is said."""
    frontend.manual_seed(0)
    model = frontend.export(Gan(), {"image": ("rows", 2)})

    def first(**seeds: int) -> list[float]:
        both = {n: gg.StepOptions(deceiving, "sgd", train="generator.*", seed=seeds.get(n)) for n in ("a", "b")}
        trainer = gg.Trainer(gg.build(model, steps=both, seed=2))
        state = trainer.state_dict()
        found = []
        for name in both:
            trainer.load_state_dict(state)
            found.append(float(trainer.step(name, IMAGES, learning_rate=0.0)["loss"]))
        return found

    a, b = first()
    assert a != b
    assert first() == [a, b]
    assert len(set(first(a=7, b=7))) == 1


def test_two_steps_on_one_target_have_columns_of_their_own() -> None:
    both = {
        "left": gg.StepOptions("cross_entropy", gg.optim.sgd(0.1), output="left", train=["trunk.*", "a.*"]),
        "right": gg.StepOptions(
            "cross_entropy", gg.optim.sgd(0.1), output="left", train=["trunk.*", "a.*"], metrics=["f1"]
        ),
    }
    trainer = gg.Trainer(gg.build(two_heads(), steps=both))
    found = trainer.evaluate(LABELLED)
    assert list(found) == ["left.loss", "left.accuracy", "right.loss", "right.f1"]
    assert found["left.loss"] == found["right.loss"]
    assert [t.name for t in trainer.manifest.targets] == ["target"]
    assert set(trainer.step("right", LABELLED)) == {"loss", "f1"}
    history = trainer.fit(LABELLED, epochs=2, batch_size=16, progress=False, steps=["right", "left"])
    assert list(history) == [
        "epoch", "step", "right.loss", "left.loss", "left.accuracy", "right.f1",
        "left.learning_rate", "right.learning_rate",
    ]  # fmt: skip


def test_each_step_has_its_average_and_its_accumulation() -> None:
    both = {
        "left": gg.StepOptions("cross_entropy", gg.optim.sgd(0.1), output="left", train="a.*", accumulate=True),
        "right": gg.StepOptions("cross_entropy", gg.optim.sgd(0.1), output="right", train="b.*", ema=0.5),
    }
    step = gg.build(two_heads(), steps=both)
    assert set(step.manifest.averages) == {"b.weight", "b.bias"}
    trainer = gg.Trainer(step)
    start = trainer.parameters
    trainer.fit(LABELLED, batch_size=8, accumulate=2, every={"right": 2}, progress=False, shuffle=False)
    alone = gg.Trainer(
        gg.build(two_heads(), "cross_entropy", gg.optim.sgd(0.1), output="left", train="a.*", accumulate=True)
    )
    alone.fit(LABELLED, batch_size=8, accumulate=2, progress=False, shuffle=False)  # after batches 2, 4 and 5
    np.testing.assert_allclose(trainer.parameters["a.weight"], alone.parameters["a.weight"], rtol=1e-6)
    seldom = gg.Trainer(step)
    seldom.fit(LABELLED, batch_size=8, accumulate=2, every={"left": 2}, progress=False, shuffle=False)
    rows = [*range(8, 16), *range(24, 32)]  # one update, after batches 2 and 4
    by_hand = gg.Trainer(gg.build(two_heads(), "cross_entropy", gg.optim.sgd(0.1), output="left", train="a.*"))
    by_hand.step({name: value[rows] for name, value in LABELLED.items()})
    np.testing.assert_allclose(seldom.parameters["a.weight"], by_hand.parameters["a.weight"], rtol=1e-6)
    assert not np.array_equal(trainer.parameters["b.weight"], start["b.weight"])
    plain, averaged = trainer.evaluate(LABELLED, averaged=False), trainer.evaluate(LABELLED)
    assert plain["left.loss"] == averaged["left.loss"]
    assert plain["right.loss"] != averaged["right.loss"]


def test_means_count_the_labels_of_their_own_step() -> None:
    both = {
        "a": gg.StepOptions("cross_entropy", "sgd", output="left", train=["a.*", "trunk.*"]),
        "b": gg.StepOptions("cross_entropy", "sgd", output="right", train="b.*", target_name="other"),
    }
    trainer = gg.Trainer(gg.build(two_heads(), steps=both))
    other = LABELLED["target"].copy()
    other[:9] = -100
    data = {**LABELLED, "other": other}
    whole, parts = trainer.evaluate(data, 40), trainer.evaluate(data, 10)
    assert {n: round(v, 5) for n, v in whole.items()} == {n: round(v, 5) for n, v in parts.items()}


def test_export_has_what_the_outputs_need(gan: Step, tmp_path: Path) -> None:
    trainer = gg.Trainer(gan)
    trainer.fit(IMAGES, epochs=2, batch_size=16, progress=False)
    model = trainer.export(tmp_path / "critic.onnx", outputs=["real_score"])
    assert [v.name for v in model.graph.input] == ["image"]
    weights = {t.name for t in model.graph.initializer if "." in t.name}
    assert weights == {f"discriminator.{name}" for name in ("0.weight", "0.bias", "3.weight", "3.bias")}
    np.testing.assert_allclose(run(model, IMAGES)["real_score"], trainer.predict(IMAGES)["real_score"], atol=1e-6)
    made = trainer.export(outputs="fake")
    weight = next(onnx.numpy_helper.to_array(t) for t in made.graph.initializer if t.name == "generator.0.weight")
    state = trainer.state_dict()
    assert np.array_equal(weight, state[gan.manifest.averages["generator.0.weight"]])


@pytest.mark.parametrize(
    "optimizer",
    [
        gg.optim.chain(gg.optim.clip_by_global_norm(0.1), gg.optim.adam(0.1)),
        gg.optim.sam(gg.optim.adamw(0.1, groups={"*bias": {"lr_factor": 2}}, layer_decay=0.5)),
        gg.optim.lookahead(gg.optim.sgd(gg.optim.one_cycle(0.1, 20), momentum=0.9)),
    ],
    ids=["clipped", "sam with groups", "lookahead with a schedule"],
)
def test_a_named_step_is_the_step_by_itself_to_the_bit(optimizer: Any) -> None:
    arguments: dict[str, Any] = {"loss": "cross_entropy", "optimizer": optimizer}
    mine = {"output": "left", "train": ["trunk.*", "a.*"]}
    other = gg.StepOptions(**arguments, output="right", train=["trunk.*", "b.*"])
    alone = gg.Trainer(gg.build(two_heads(), **arguments, **mine))
    named = gg.Trainer(gg.build(two_heads(), steps={"x": gg.StepOptions(**arguments, **mine), "y": other}))
    for _ in range(4):
        assert alone.step(LABELLED)["loss"] == named.step("x", LABELLED)["loss"]
    state = named.state_dict()
    for name, value in alone.state_dict().items():
        assert np.array_equal(value, state[name if name in state else f"x.{name}"]), name


def test_losses_that_the_model_computes_are_left_out_of_exports() -> None:
    """Each step minimises an output of the model; what compares with labels goes."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Any, y: Any) -> dict[str, Any]:
            left, right = self.a(x), self.b(x)
            return {"left": left, "right": right, "one": F.mse_loss(left, y), "two": F.l1_loss(right, y)}

    model = frontend.export(Own(), {"x": ("rows", 3), "y": ("rows", 2)})
    both = {"a": gg.StepOptions(None, output="one", train="a.*"), "b": gg.StepOptions(None, output="two", train="b.*")}
    trainer = gg.Trainer(gg.build(model, steps=both))
    data = {"x": LABELLED["x"], "y": np.zeros((40, 2), np.float32)}
    assert set(trainer.evaluate(data)) == {"a.loss", "b.loss"}
    assert list(trainer.fit(data, progress=False)) == [
        "epoch",
        "step",
        "a.loss",
        "b.loss",
        "a.learning_rate",
        "b.learning_rate",
    ]
    exported = trainer.export()
    assert [v.name for v in exported.graph.input] == ["x"]
    assert [v.name for v in exported.graph.output] == ["left", "right"]


def test_steps_of_every_backend_train_alike() -> None:
    both = {
        "left": gg.StepOptions("cross_entropy", gg.optim.sgd(0.1), output="left", train=["trunk.*", "a.*"]),
        "right": gg.StepOptions("cross_entropy", gg.optim.adam(0.1), output="right", train="b.*"),
    }
    found = []
    for backend in ("auto", "portable", "ort-cpu"):
        trainer = gg.Trainer(gg.build(two_heads(), steps=both, backend=backend), device="cpu")
        found.append([float(trainer.step(name, LABELLED)["loss"]) for name in ("left", "right") * 3])
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)


# --- fits --------------------------------------------------------------------------------------------------------


def test_weights_may_lie_in_memory_once(gan: Step) -> None:
    shared = gg.Trainer(gan, device="cpu", options=gg.RuntimeOptions(in_place=True))
    plain = gg.Trainer(gan, device="cpu")
    for trainer in (shared, plain):
        trainer.fit(IMAGES, batch_size=16, every={"generator": 2}, progress=False, drop_last=True)
    same(shared, plain)
    assert shared.state.shared


def test_a_step_without_names_has_none() -> None:
    trainer = gg.Trainer(gg.build(two_heads(), output="left"))
    with pytest.raises(UnknownNameError, match="there is no step 'left': this is a single step"):
        trainer.step("left", LABELLED)
    with pytest.raises(BuildError, match="has a single step"):
        trainer.fit(LABELLED, steps=["left"])
    assert set(trainer.step(batch=LABELLED)) == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("steps", "more", "says"),
    [
        ({}, {}, "steps is empty"),
        ({"a b": gg.StepOptions()}, {}, "a step is called 'a b'; a name"),
        ({"a": gg.StepOptions(), "A": gg.StepOptions()}, {},
         "the step names 'a' and 'A' differ only in case"),
        ({"a": gg.StepOptions()}, {"loss": "mse"}, "cannot be passed to build together with steps"),
        (dict.fromkeys("ab", gg.StepOptions(output="left", ema=0.9)), {}, "two steps average"),
        ({"a": gg.StepOptions("mse", output="left"), "b": gg.StepOptions(output="left")}, {}, "two steps"),
    ],
)  # fmt: skip
def test_what_build_refuses(steps: dict[str, gg.StepOptions], more: dict[str, Any], says: str) -> None:
    with pytest.raises(BuildError, match=says):
        gg.build(two_heads(), steps=steps, **more)


def test_weights_that_no_step_trains_are_named(caplog: pytest.LogCaptureFixture) -> None:
    left = gg.StepOptions(output="left", train="a.*")
    right = gg.StepOptions(output="right", train="b.*")
    with caplog.at_level(logging.WARNING, "gradgraph"):
        step = gg.build(two_heads(), steps={"left": left, "right": right})
    assert "the weights 'trunk.weight', 'trunk.bias' are not trained by any step" in caplog.text
    assert [f.severity for f in step.findings] == ["warning"]
    caplog.clear()
    frozen = gg.StepOptions(output="left", freeze=["trunk.*"])
    assert not gg.build(two_heads(), steps={"left": frozen, "right": right}).findings


def test_where_nan_comes_from_in_one_of_several(gan: Step) -> None:
    trainer = gg.Trainer(gan)
    before = trainer.state_dict()
    with pytest.raises(DivergedError) as raised:
        trainer.step("discriminator", {"image": np.full((4, 2), np.nan, np.float32)})
    error = raised.value
    assert error.step == "discriminator"
    assert "find_nonfinite('discriminator', error.batch)" in str(error)
    assert "image" in str(trainer.find_nonfinite(error.step, error.batch, **error.hyperparameters))
    assert all(np.array_equal(value, before[name]) for name, value in trainer.state_dict().items())


def test_each_step_has_a_profile_of_its_own(gan: Step) -> None:
    trainer = gg.Trainer(gan, device="cpu")
    before = trainer.state_dict()
    found = trainer.profile("generator", {"image": np.zeros((4, 2), np.float32)}, steps=1)
    assert {n.layer for n in found.nodes if n.place == "update"} >= {"generator.0", "generator.2"}
    assert not any(n.layer.startswith("discriminator") for n in found.nodes if n.place == "update")
    assert trainer.progress.counts == {}
    for name, value in trainer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
