"""What is extreme trains with native kernels as it does without: numbers that are not finite, tiny ones, many axes."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.runtime.execution.session import RuntimeOptions
from tests.kit.lowered_networks import batches, step
from tests.kit.native_node import run

pytestmark = pytest.mark.usefixtures("library")

EXTREMES = {"huge": 1e30, "overflowing": 3e38, "tiny": 1e-42, "infinite": np.inf, "nan": np.nan}
OPTIMIZERS = {"adamw": lambda: gg.optim.adamw(1e-3), "momentum": lambda: gg.optim.sgd(1e-3, momentum=0.9)}


def trained(built: gg.Step, given: list[dict[str, np.ndarray]], native_kernels: bool) -> dict[str, np.ndarray]:
    """The losses and the state after steps on what may not be finite."""
    options = RuntimeOptions(threads=1, native_kernels=native_kernels)
    trainer = gg.Trainer(built, device="cpu", options=options, check_loss=False)
    losses = np.array([trainer.step(batch)["loss"] for batch in given])
    return {"losses": losses, **trainer.state_dict()}


@pytest.mark.sweep(0.12)
@pytest.mark.parametrize("network", ["mlp", "residual", "separable"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.filterwarnings("ignore:overflow")
def test_numbers_that_are_not_finite_spread_no_further(network: str, optimizer: str, extreme: str) -> None:
    """A batch of extremes, then usual ones. Nothing is lost that stock onnxruntime keeps, and losses say when it is.

    (A slope of a Relu is 0 in a native kernel where x is NaN: docs/reference/conventions.md.)
    """
    built = step(network, 6, OPTIMIZERS[optimizer]())
    first, *others = batches(network, 6, 3)
    first["x"][:2] *= np.float32(EXTREMES[extreme])
    fast, stock = (trained(built, [first, *others], native) for native in (True, False))
    for name, wanted in stock.items():
        assert not (np.isfinite(wanted) & ~np.isfinite(fast[name])).any(), name
    np.testing.assert_array_equal(np.isfinite(fast["losses"]), np.isfinite(stock["losses"]))


@pytest.mark.parametrize("gradient", [0.0, 1e-30, 1e30, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("seen", [0.0, 1e-40, 1.0, np.inf, np.nan])
def test_adam_keeps_an_infinity_as_stock_does(gradient: float, seen: float) -> None:
    """An average of squares that has overflowed stays infinite, and its weight stays where it is."""
    with np.errstate(all="ignore"):
        p, g, m, v = (np.full(3, x, np.float32) for x in (0.5, gradient, 0.25, seen))
        takes = np.array([0.1, 0.001], np.float32)
        rate, floor = np.array(-0.1, np.float32), np.array(1e-8, np.float32)
        mean = np.float32(1 - 0.1) * m + takes[0] * g
        square = np.float32(1 - 0.001) * v + takes[1] * (g * g)
        wanted = (p + mean / (np.sqrt(square) + floor) * rate, mean, square)
        found = run("AdamUpdate", "takes = [0.1, 0.001]", 3, p, g, m, v, rate, floor)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-44)


NINE_AXES = """<ir_version: 10, opset_import: ["" : 21]>
many (float[1, 2, 1, 2, 1, 2, 1, 2, 3] x, float[1, 2, 1, 2, 1, 2, 1, 2, 3] w) => (float loss) {
    a = Mul (x, w)  r = Relu (a)  g = Gelu (r)  s = Softmax <axis = -1> (g)  q = Mul (s, s)
    loss = ReduceSum <keepdims = 0> (q)
}"""


def test_more_axes_than_kernels_know_are_left_to_onnxruntime() -> None:
    model = onnx.parser.parse_model(NINE_AXES)
    weight = np.linspace(-1, 1, 48, dtype=np.float32).reshape([1, 2] * 4 + [3])
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del model.graph.input[1]
    built = gg.build(model, None, gg.optim.adamw(0.01))
    batch = {"x": np.linspace(0.5, 2, 48, dtype=np.float32).reshape(weight.shape)}
    fast, stock = (trained(built, [batch] * 2, native) for native in (True, False))
    for name, wanted in stock.items():
        np.testing.assert_allclose(fast[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)
