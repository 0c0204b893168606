"""Arguments of losses, lengths and labels that cannot be meant: refused in one sentence before step 1."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model

import gradgraph as gg
from gradgraph.arguments import Makers
from gradgraph.errors import BuildError, DataError, DivergedError, ModelError
from gradgraph.frontend import functional as F
from gradgraph.losses import LOSSES
from tests.kit.small_models import parsed, real

CLASSES = 3
WEIGHTED = {  # each argument that holds weights, of every loss
    (name, option) for name, make in LOSSES.items() for option in make().arguments if option in ("weight", "pos_weight")
}
WRONG: dict[str, tuple[Any, str]] = {
    "NaN": ([1.0, math.nan, 1.0], "contains nan"),
    "infinite": ([1.0, math.inf, 1.0], "contains inf"),
    "too many": ([1.0] * 4, r"the shape \[4\]"),
    "too few": ([1.0] * 2, r"the shape \[2\]"),
    "nothing": ([0.0] * CLASSES, "only zeros"),
    "below zero": ([1.0, -1.0, 1.0], "contains -1"),
}


def network(classes: str = "3", end: str = "") -> onnx.ModelProto:
    model = parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, {classes}] logits) <float[4, 3] w> {{
        logits = MatMul (x, w)
    }}""")
    w = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return model


def test_these_are_all_losses_with_weights() -> None:
    assert isinstance(LOSSES, Makers)
    assert {name for name, _ in WEIGHTED} == {
        "bce_with_logits", "cross_entropy", "focal", "multi_margin", "multilabel_soft_margin", "nll",
        "soft_cross_entropy",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("loss", "option"), sorted(WEIGHTED))
def test_weights_that_cannot_be_meant(loss: str, option: str, wrong: str) -> None:
    weights, words = WRONG[wrong]
    if loss == "multilabel_soft_margin" and wrong in ("nothing", "below zero"):
        return  # of elements
    for given in (weights, np.array(weights)):
        with pytest.raises(BuildError, match=f"{option}.* {words}") as error:
            gg.build(network(), LOSSES[loss](**{option: given}))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("loss", "option"), sorted(WEIGHTED))
def test_weights_that_fit(loss: str, option: str) -> None:
    for classes in ("3", "c"):
        gg.build(network(classes), LOSSES[loss](**{option: [0.0, 1.0, 2.0]}))
    if option == "pos_weight":
        gg.build(network(), LOSSES[loss](pos_weight=2.0))


def test_a_number_is_no_weight_of_each_class() -> None:
    with pytest.raises(
        BuildError, match="weight is a single number, but must be a list with a number for each of the 3 classes"
    ):
        gg.build(network(), gg.losses.cross_entropy(weight=2.0))


def test_functions_say_it_too() -> None:
    def loss(out: Any, batch: Any) -> Any:
        return F.cross_entropy(out["logits"], batch["t"], weight=[1.0, math.nan, 1.0])

    with pytest.raises(BuildError, match="weight contains nan"):
        gg.build(network(), loss, targets={"t": ("batch", "int64")})


# --- lengths and labels in batches ---------------------------------------------------------------------------

STEPS, ROWS, LABELS = 6, 4, 3


def sequences(steps: str = "time", classes: str = "5") -> onnx.ModelProto:
    model = parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, {steps}, 2] x) => (float[batch, {steps}, {classes}] scores) <float[2, 5] w> {{
        scores = MatMul (x, w)
    }}""")
    w = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return model


def spoken() -> dict[str, np.ndarray[Any, Any]]:
    """Right ones; what lies behind the lengths of labels is nobody's concern."""
    return {
        "x": np.random.default_rng(0).normal(size=(ROWS, STEPS, 2)).astype(np.float32),
        "target": np.array([[1, 2, 3], [4, -1, -1], [1, 99, 99], [2, 2, -1]]),
        "input_lengths": np.array([6, 6, 5, 6]),
        "target_lengths": np.array([3, 1, 1, 2]),
    }


WRONG_IN_A_BATCH = {
    "a length beyond the input": ("input_lengths", 2, 7, "contains 7 at index 2, but numbers must be from 0 to 6"),
    "a length below zero": ("input_lengths", 1, -1, "contains -1 at index 1"),
    "more labels than there are": ("target_lengths", 3, 4, "contains 4 at index 3, but numbers must be from 0 to 3"),
    "fewer than no labels": ("target_lengths", 0, -2, "contains -2 at index 0"),
    "a label below zero": ("target", (0, 1), -1, r"contains -1 at index \[0, 1\]"),
    "a label that is no class": (
        "target",
        (3, 1),
        5,
        r"contains 5 at index \[3, 1\], but numbers must be from 0 to 4",
    ),
}


@pytest.mark.sweep(0.24)
@pytest.mark.parametrize("sizes", [("time", "5"), ("6", "5")])
@pytest.mark.parametrize("wrong", WRONG_IN_A_BATCH)
def test_lengths_and_labels_that_cannot_be_meant(wrong: str, sizes: tuple[str, str]) -> None:
    trainer = gg.Trainer(gg.build(sequences(*sizes), gg.losses.ctc(batch_first=True)), device="cpu")
    name, place, number, words = WRONG_IN_A_BATCH[wrong]
    right, given = spoken(), spoken()
    given[name][place] = number
    before = trainer.state_dict()
    assert np.isfinite(trainer.evaluate(right)["loss"])
    for call in (
        lambda: trainer.step(given),
        lambda: trainer.evaluate(given),
        lambda: trainer.fit(given, 1, 2, shuffle=True, progress=False),
        lambda: trainer.fit([right, given], 1, progress=False),
    ):
        with pytest.raises(DataError, match=words):
            call()
        trainer.load_state_dict(before)
    assert np.isfinite(trainer.step(right)["loss"])


def test_all_of_a_column_is_looked_at_before_the_first_step() -> None:
    trainer = gg.Trainer(gg.build(sequences(), gg.losses.ctc(batch_first=True)), device="cpu")
    given = spoken()
    given["input_lengths"][3] = 60
    with pytest.raises(DataError, match="contains 60 at index 3"):
        trainer.fit(given, 1, 1, shuffle=False, progress=False)
    assert trainer.progress.steps == 0


LABELLED = [name for name, make in LOSSES.items() if make().labels and name != "ctc"]


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("classes", ["3", "c"])
@pytest.mark.parametrize("loss", LABELLED)
def test_labels_below_zero(loss: str, classes: str) -> None:
    """Also where nobody knows how many classes there are: -1 would be the last one."""
    trainer = gg.Trainer(gg.build(network(classes), loss), device="cpu")
    x = np.ones((ROWS, 4), np.float32)
    assert np.isfinite(trainer.step({"x": x, "target": np.array([0, 1, 2, 0])})["loss"])
    with pytest.raises(DataError, match=r"'target' contains .*-1 at index 2"):
        trainer.step({"x": x, "target": np.array([0, 1, -1, 0])})


def test_the_manifest_keeps_what_is_checked() -> None:
    manifest = gg.build(sequences(), gg.losses.ctc(batch_first=True)).manifest
    assert type(manifest).from_json(manifest.to_json()) == manifest
    assert [(t.most, t.counted_by) for t in manifest.targets] == [
        (4, "target_lengths"), ("time", None), ("labels", None)
    ]  # fmt: skip
    for field in ("most", "counted_by", "classes"):
        for wrong in (3.5, [1], True, {}):
            damaged = json.loads(manifest.to_json())
            damaged["targets"][0][field] = wrong
            with pytest.raises(ModelError, match="is ill-typed"):
                type(manifest).from_json(json.dumps(damaged))
    assert "most" not in gg.build(network(), "cross_entropy").manifest.to_json()


SHORTER = {"a formula": "floor((time - 2)/2) + 1", "a name of its own": "steps", "no name": ""}


def shortening(name: str) -> onnx.ModelProto:
    """Scores for every second step of the input, whose number the file calls so."""
    model = parsed("""(float[N, 2, time] x) => (float[N, steps, 5] y) {
        a = Conv <kernel_shape = [2], strides = [2]> (x, w, b) y = Transpose <perm = [0, 2, 1]> (a) }""",
        w=real(5, 2, 2), b=real(5))  # fmt: skip
    dim = model.graph.output[0].type.tensor_type.shape.dim[1]
    dim.Clear()
    if name:
        dim.dim_param = name
    return model


@pytest.mark.sweep(0.38)
@pytest.mark.parametrize("name", SHORTER)
def test_lengths_beyond_the_steps_that_a_model_gives_are_not_silent(name: str) -> None:
    step = gg.build(shortening(SHORTER[name]), gg.losses.ctc(batch_first=True))
    trainer = gg.Trainer(step, device="cpu")
    given = {"x": np.random.default_rng(0).normal(size=(ROWS, 2, 8)).astype(np.float32),  # 4 steps
             "target": np.ones((ROWS, 3), np.int64), "input_lengths": np.array([4, 3, 4, 2]),
             "target_lengths": np.array([2, 2, 1, 1])}  # fmt: skip
    assert np.isfinite(trainer.step(given)["loss"])
    with pytest.raises(DivergedError, match=r"became nan .* input length exceeds the steps of the model"):
        trainer.step({**given, "input_lengths": np.array([4, 5, 4, 2])})
    with pytest.raises(DivergedError, match=r"became inf .* more labels than the model's output has steps for"):
        trainer.step({**given, "target_lengths": np.array([2, 3, 3, 1])})
    assert np.isnan(trainer.evaluate({**given, "input_lengths": np.array([4, 5, 4, 2])})["loss"])
    assert np.isfinite(trainer.step(given)["loss"])
