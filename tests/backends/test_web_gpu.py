"""What WebGPU computes wrong is written in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph.backends.web_gpu.web_gpu_lowering import fill_fours
from gradgraph.frontend import export, manual_seed, nn
from tests.kit.running import run
from tests.runtimes.browsing import in_browser, missing, trains

RNG = np.random.default_rng(0)


def convolution(channels: int | str, into: int | str, spatial: int = 2, group: int = 1) -> onnx.ModelProto:
    """With all sizes of the weight known, or not."""
    inner = channels // group if isinstance(channels, int) else channels
    shapes = {"x": [2, channels, *[5] * spatial], "w": [into, inner, *[3] * spatial], "b": [into]}
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[1, 0] * spatial, group=group)
    outputs = [helper.make_tensor_value_info("y", 1, None)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("channels", "into", "sizes", "filled"),
    [
        (6, 8, (6, 8), True),
        (9, 4, (9, 4), True),
        ("n", 8, (18, 8), True),
        ("n", 8, (16, 8), True),
        ("n", "m", (6, 4), True),
        (3, 8, (3, 8), False),
        (12, 8, (12, 8), False),
        (5, 8, (5, 8), False),
        (6, 6, (6, 6), False),
    ],
)
@pytest.mark.parametrize("spatial", [1, 2])
def test_channels_are_filled_up_to_fours(
    channels: int | str, into: int | str, sizes: tuple[int, int], filled: bool, spatial: int
) -> None:
    before = convolution(channels, into, spatial)
    model = ir.from_proto(before)
    fill_fours(model)
    assert any(node.op_type == "Pad" for node in model.graph) == filled
    real, out = sizes
    shapes = {"x": (2, real, *[5] * spatial), "w": (out, real, *[3] * spatial), "b": (out,)}
    feeds = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    after = ir.to_proto(model)
    np.testing.assert_allclose(run(after, feeds)["y"], run(before, feeds)["y"], rtol=1e-5, atol=1e-5)
    conv = next(node for node in after.graph.node if node.op_type == "Conv")
    if filled:
        after.graph.output.extend([helper.make_tensor_value_info(conv.input[1], 1, None)])
        assert run(after, feeds)[conv.input[1]].shape[1] % 4 == 0


def test_groups_stay() -> None:
    model = ir.from_proto(convolution(12, 8, group=2))
    fill_fours(model)
    assert [node.op_type for node in model.graph] == ["Conv"]


def of_any_size() -> tuple[Any, Any, list[dict[str, np.ndarray]]]:
    """The gradient of the weights is a convolution whose channels are the images: 18 of them are added up in threes."""
    manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    model = export(net, {"x": ("batch", 1, 4, 4)}, outputs=["logits"])
    batches = [(RNG.normal(size=(n, 1, 4, 4)).astype(np.float32), RNG.integers(0, 5, n)) for n in (18, 18, 6, 9, 16)]
    return model, "cross_entropy", [{"x": x, "target": target} for x, target in batches]


def language_model() -> tuple[Any, Any, list[dict[str, np.ndarray]]]:
    """Adapters on one whose weights have 4 bits."""
    adapted = gg.lora(Path(__file__).parents[2] / "examples" / "tiny_llama_int4.onnx", "*1.attn*", rank=8)
    tokens = RNG.integers(1, 98, (2, 2, 17))
    batches = [{"input_ids": t[:, :-1], "target": t[:, 1:]} for t in tokens]
    return gg.surgery.language_model(adapted), gg.losses.cross_entropy(axis=-1), batches


@pytest.mark.browser
@pytest.mark.sweep(0)
@pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")
def test_losses_are_those_of_the_processor(tmp_path: Path) -> None:
    jobs, expected = [], []
    for number, (model, loss, data) in enumerate((of_any_size(), language_model())):
        folder = tmp_path / str(number)
        gg.build(model, loss, gg.optim.sgd(0.5), backend="web-gpu", seed=0).save(folder)
        jobs.append(trains(folder, data))
        trainer = gg.Trainer(folder, device="cpu")
        expected.append([float(trainer.step(batch)["loss"]) for batch in data])
    for found, own in zip(in_browser(jobs, "webgpu"), expected, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-5)


@pytest.mark.browser
@pytest.mark.sweep(0)
@pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")
@pytest.mark.parametrize(
    ("backend", "provider", "says"),
    [("web", "webgpu", 'build it with backend="web-gpu"'), ("web-gpu", "jsep", "trains some networks incorrectly")],
)
def test_the_library_refuses_what_trains_wrong(backend: str, provider: str, says: str, tmp_path: Path) -> None:
    manual_seed(0)
    model = export(nn.Linear(4, 3), {"x": ("batch", 4)}, outputs=["logits"])
    gg.build(model, "cross_entropy", gg.optim.sgd(0.5), backend=backend).save(tmp_path / "step")
    data = [{"x": RNG.normal(size=(8, 4)).astype(np.float32), "target": RNG.integers(0, 3, 8)}]
    [found] = in_browser([trains(tmp_path / "step", data)], provider)
    assert isinstance(found, RuntimeError)
    assert says in str(found)
