"""Where nothing in a batch counts, loss and gradients are 0 and weights stay as they are, in a step and a Trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from running import Loop

import gradgraph as gg

MODEL = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 4] x) => (float[batch, 3] y) '
    "<float[4, 3] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.1, 0.2, 0.3}> { y = MatMul(x, w) }"
)
LABELS, VALUES = np.zeros(8, np.int64), np.ones((8, 3), np.float32)
UNWEIGHTED, UNSEEN = np.zeros(8, np.float32), np.zeros(8, bool)
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, np.ndarray]]] = {  # a loss, options, what is fed
    "class weight": (gg.losses.cross_entropy(weight=[0.0, 1.0, 1.0]), {}, {"target": LABELS}),
    "sample weight": ("mse", {"sample_weight": True}, {"target": VALUES, "sample_weight": UNWEIGHTED}),
    "mask": ("mse", {"mask": ["batch"]}, {"target": VALUES, "mask": UNSEEN}),
    "labels and weights": (
        "cross_entropy", {"sample_weight": True}, {"target": LABELS, "sample_weight": UNWEIGHTED},
    ),
    "labels and mask": ("cross_entropy", {"mask": True}, {"target": LABELS, "mask": UNSEEN}),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "norm": {"grad_norm": True}, "accumulate": {"accumulate": True}}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_nothing_counts(name: str, option: str) -> None:
    loss, options, targets = CASES[name]
    batch = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), **targets}
    optimizer = gg.optim.sgd(0.1)
    step = gg.build(MODEL, loss=loss, optimizer=optimizer, metrics=(), **options, **OPTIONS[option])
    trainer = gg.Trainer(step)
    assert float(trainer.step(batch)["loss"]) == 0.0
    trainer.fit(batch, epochs=1, batch_size=4)
    assert trainer.history.row()["loss"] == 0.0
    assert trainer.evaluate(batch)["loss"] == 0.0
    np.testing.assert_array_equal(trainer.state_dict()["w"], onnx.numpy_helper.to_array(MODEL.graph.initializer[0]))
    if option == "plain":
        assert float(Loop(step)(batch)["loss"]) == 0.0
