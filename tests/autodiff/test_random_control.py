"""Random graphs of If, Loop, Scan and SequenceMap: gradients and tangents, by a few of the tensors or all of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.random_control import Flow, flow
from tests.kit.running import run

Arrays = dict[str, np.ndarray]
SEEDS = range(120)


def wide(arrays: Arrays) -> Arrays:
    return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in arrays.items()}


def freed(f: Flow, model: onnx.ModelProto) -> tuple[onnx.ModelProto, Arrays]:
    """Its weights are inputs; all that it takes."""
    weights = {name: array for name, array in f.weights.items() if name.startswith("w")}
    constants = [t for t in model.graph.initializer if t.name not in weights]
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
    infos = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, list(w.shape)) for n, w in weights.items()]
    model.graph.input.extend(infos)
    return model, {**f.feeds, **weights}


@pytest.mark.sweep(0.037)
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_random_control_flow(seed: int) -> None:
    f, written = flow(seed)
    model, feeds = freed(f, written)
    names = [name for name, array in feeds.items() if array.dtype == np.float32]
    names = [name for name in names if f.flag(0.4)] or names  # what is left out stands still
    base, loss = wide(feeds), Oracle(in_float64(model))
    gradient = gg.value_and_grad(model, output="loss", wrt=names, allow_unused=True)
    expected = Oracle(in_float64(gradient))(base)
    directions = {f"{name}.tangent": f.rng.normal(size=feeds[name].shape) for name in names}
    slopes = []
    for name in names:
        step = 1e-6 * directions[f"{name}.tangent"]
        up, down = (float(loss(base | {name: base[name] + sign * step})["loss"]) for sign in (1, -1))
        slopes.append((up - down) / 2e-6)
        found = float(np.sum(expected[f"{name}.grad"] * directions[f"{name}.tangent"]))
        assert found == pytest.approx(slopes[-1], rel=1e-5, abs=1e-5), name
    for name, value in run(gradient, feeds).items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-3, atol=2e-4, err_msg=name)
    pushed = gg.jvp(model, wrt=names, allow_unused=True)
    tangent = Oracle(in_float64(pushed))(base | directions)["loss.tangent"]
    assert float(tangent) == pytest.approx(sum(slopes), rel=1e-5, abs=1e-5)
    single = {name: array.astype(np.float32) for name, array in directions.items()}
    assert float(run(pushed, feeds | single)["loss.tangent"]) == pytest.approx(sum(slopes), rel=5e-3, abs=5e-3)
