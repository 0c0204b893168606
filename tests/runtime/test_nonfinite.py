"""Where NaN and infinity come from: the node, and its place in the user's model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.runtime.execution.nonfinite import NonFinite
from gradgraph.runtime.execution.session import RuntimeOptions

X = np.ones((8, 4), np.float32)
Y = np.zeros(8, np.int64)


def trainer(body: str, weights: dict[str, Any] | None = None, dtype: str = "float", **options: Any) -> gg.Trainer:
    """A step of a model from x [8, 4] over ``body`` to h and logits; nodes are called ``/<number>/<operator>``."""
    net = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net ({dtype}[batch, 4] x) => ({dtype}[batch, 4] logits) {{
            {body}
            logits = MatMul (h, top)
        }}""")
    for i, node in enumerate(net.graph.node):
        node.name = f"/{i}/{node.op_type}"
    kind = onnx.helper.tensor_dtype_to_np_dtype(net.graph.input[0].type.tensor_type.elem_type)
    values = {"top": np.ones((4, 4)), "w": np.ones((4, 4)), **(weights or {})}
    for name, value in values.items():
        if any(name in node.input for node in net.graph.node):
            net.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, kind), name))
    options = {"optimizer": gg.optim.sgd(0.1), **options}
    return gg.Trainer(gg.build(net, **options), device="cpu", options=RuntimeOptions(threads=1))


def found(t: gg.Trainer, x: np.ndarray) -> NonFinite | None:
    before = t.state_dict()
    result = t.find_nonfinite({"x": x, "target": Y})
    assert t.progress.steps == 0
    assert all(np.array_equal(value, t.state_dict()[name], equal_nan=True) for name, value in before.items())
    return result


def x_with(value: float) -> np.ndarray:
    x = X.copy()
    x[3, 1] = value
    return x


def test_nothing_is_found_where_all_is_finite() -> None:
    assert found(trainer("m = MatMul (x, w) h = Log (m)"), X) is None


@pytest.mark.parametrize(
    ("body", "x", "node", "nan", "inf", "reads"),
    [
        ("m = MatMul (x, w) h = Log (m)", x_with(-9), "/1/Log", 4, 0, {"m": "ranges from -6 to 4"}),
        ("m = MatMul (x, w) h = Sqrt (m)", x_with(-9), "/1/Sqrt", 4, 0, {"m": "ranges from -6 to 4"}),
        ("m = Exp (x) h = MatMul (m, w)", x_with(100), "/0/Exp", 0, 1, {"x": "ranges from 1 to 100"}),
        ("m = Reciprocal (x) h = MatMul (m, w)", x_with(0), "/0/Reciprocal", 0, 1, {"x": "ranges from 0 to 1"}),
    ],
)
def test_the_node_of_the_model(body: str, x: Any, node: str, nan: int, inf: int, reads: dict[str, str]) -> None:
    result = found(trainer(body), x)
    assert result is not None
    assert (result.node, result.nan, result.inf, dict(result.inputs)) == (node, nan, inf, reads)
    assert result.place == "model"
    assert f"node '{node}' ({result.op_type}): its output '" in str(result)


def test_nan_that_is_made_of_infinity_names_both() -> None:
    result = found(trainer("m = MatMul (x, w) e = Exp (m) h = Sub (e, e)"), x_with(200))
    assert result is not None
    assert (result.node, result.inf) == ("/1/Exp", 4)
    assert result.after is not None
    assert result.after.node == "/2/Sub"
    assert "NaN results from it in node '/2/Sub' (Sub): its output 'h' has 4 NaN of 32 elements" in str(result)


def test_infinities_of_a_mask_are_not_blamed() -> None:
    """The mask makes -inf at each step, and a Softmax takes it; the logarithm behind it is what fails."""
    body = "m = MatMul (x, w) z = Sub (m, m) c = Log (z) s = Max (c, m) p = Softmax (s) q = Sub (p, x) h = Log (q)"
    result = found(trainer(body), x_with(2))
    assert result is not None
    assert result.node == "/6/Log"


def test_the_gradient_of_a_node() -> None:
    """The square root of 0 has an infinite slope."""
    result = found(trainer("m = MatMul (x, w) h = Sqrt (m)"), x_with(-3))
    assert result is not None
    assert result.place == "gradient"
    assert str(result).startswith("the gradient of node '/1/Sqrt'")


def test_batch_and_state() -> None:
    t = trainer("h = MatMul (x, w)")
    assert "'x' of the batch has 1 NaN of 32 elements" in str(found(t, x_with(np.nan)))
    t.load_state_dict({**t.state_dict(), "w": np.full((4, 4), np.inf, np.float32)})
    assert "'w' of the state (written by an earlier step) has 16 infinite of 16 elements" in str(found(t, X))


def test_after_divergence_the_error_leads_to_the_node() -> None:
    t = trainer("m = MatMul (x, w) h = Log (m)")
    with pytest.raises(gg.errors.DivergedError, match=r"trainer\.find_nonfinite\(error\.batch\)") as caught:
        t.fit({"x": x_with(-9), "target": Y}, learning_rate=0.01, progress=False)
    result = t.find_nonfinite(caught.value.batch, **caught.value.hyperparameters)
    assert result is not None
    assert result.node == "/1/Log"
    t.step({"x": X, "target": Y})  # the defaults are back, and nothing is lost
    assert t.progress.steps == 1


def test_float16() -> None:
    t = trainer("m = MatMul (x, w) h = Log (m)", dtype="float16")
    result = t.find_nonfinite({"x": x_with(-9).astype(np.float16), "target": Y})
    assert result is not None
    assert (result.node, result.nan) == ("/1/Log", 4)
