"""Arguments of losses, lengths and labels that cannot be meant: refused in one sentence before step 1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model

import gradgraph as gg
from gradgraph.arguments import Makers
from gradgraph.errors import BuildError
from gradgraph.frontend import functional as F
from gradgraph.losses import LOSSES

CLASSES = 3
WEIGHTED = {  # each argument that holds weights, of every loss
    (name, option) for name, make in LOSSES.items() for option in make().arguments if option in ("weight", "pos_weight")
}
WRONG: dict[str, tuple[Any, str]] = {
    "NaN": ([1.0, math.nan, 1.0], "holds nan"),
    "infinite": ([1.0, math.inf, 1.0], "holds inf"),
    "too many": ([1.0] * 4, r"the shape \[4\]"),
    "too few": ([1.0] * 2, r"the shape \[2\]"),
    "nothing": ([0.0] * CLASSES, "no number above zero"),
    "below zero": ([1.0, -1.0, 1.0], "holds -1"),
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
    with pytest.raises(BuildError, match="weight is a single number, and a loss takes one for each of the 3 classes"):
        gg.build(network(), gg.losses.cross_entropy(weight=2.0))


def test_functions_say_it_too() -> None:
    def loss(out: Any, batch: Any) -> Any:
        return F.cross_entropy(out["logits"], batch["t"], weight=[1.0, math.nan, 1.0])

    with pytest.raises(BuildError, match="weight holds nan"):
        gg.build(network(), loss, targets={"t": ("batch", "int64")})
