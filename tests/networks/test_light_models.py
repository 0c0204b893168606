"""Networks nobody here wrote: the onnx wheel's ResNet-50, SqueezeNet and DenseNet-121, with random weights.

Their gradients agree with PyTorch's tensor by tensor, and a few training steps follow PyTorch's own losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import gradgraph as gg
from tests.kit.running import Loop, run

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
# the value before the last Softmax, and the input
NETWORKS = {
    "resnet50": ("r174", "gpu_0/data_0"),
    "squeezenet": ("r65", "data_0"),
    "densenet121": ("fc6_1", "data_0"),
}
SIZE = {"resnet50": 224, "squeezenet": 224, "densenet121": 224}


def with_random_weights(name: str) -> onnx.ModelProto:
    """The light file, its generated constant weights folded into initializers and drawn at random (He's variance)."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    graph = model.graph
    rng = np.random.default_rng(0)
    shapes = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    kept = [n for n in graph.node if n.op_type != "ConstantOfShape"]
    generated = {n.output[0]: shapes[n.input[0]] for n in graph.node if n.op_type == "ConstantOfShape"}
    vectors = {t.name: numpy_helper.to_array(t).shape for t in graph.initializer if t.data_type == 1}
    statistics = {s for n in kept if n.op_type == "BatchNormalization" for s in n.input[3:5]}
    variances = {n.input[4] for n in kept if n.op_type == "BatchNormalization"}
    images = [i for i in graph.input if i.name == NETWORKS[name][1]]
    del graph.node[:], graph.input[:]
    graph.input.extend(images)
    graph.node.extend(kept)
    integers = [t for t in graph.initializer if t.data_type != 1 and not t.name.endswith("__SHAPE")]
    del graph.initializer[:]
    graph.initializer.extend(integers)
    for tensor, shape in {**generated, **vectors}.items():
        data = _draw(rng, tuple(int(d) for d in shape), tensor in variances, tensor in statistics)
        graph.initializer.append(numpy_helper.from_array(data, tensor))
    return model


def _draw(rng: np.random.Generator, shape: tuple[int, ...], variance: bool, statistic: bool) -> np.ndarray:
    if variance:
        data = rng.uniform(0.5, 1.5, shape)
    elif len(shape) > 1:
        data = rng.normal(size=shape) * np.sqrt(2 / max(1, int(np.prod(shape[1:]))))
    else:
        data = rng.normal(size=shape) * 0.1 + (0.0 if statistic else 0.5)
    return data.astype(np.float32)


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Iterator[tuple[str, onnx.ModelProto]]:
    yield request.param, with_random_weights(request.param)


def image(name: str) -> dict[str, np.ndarray]:
    return {NETWORKS[name][1]: np.random.default_rng(1).normal(size=(1, 3, SIZE[name], SIZE[name])).astype(np.float32)}


@pytest.mark.sweep(0.5)
@pytest.mark.slow
@pytest.mark.torch
def test_gradients_agree_with_torch(network: tuple[str, onnx.ModelProto]) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    from tests.networks.in_torch import InTorch, split_inputs

    name, model = network
    logits = NETWORKS[name][0]
    target = np.array([42])
    step = gg.build(model, "cross_entropy", gg.optim.sgd(1.0), output=logits)
    names = list(step.manifest.trainable)
    # the loss of eval.onnx, differentiated: its parameters are inputs
    gradients = gg.value_and_grad(step.eval, output="loss", wrt=names)
    state = run(step.init)
    fed = {i.name for i in gradients.graph.input}
    feeds = {**image(name), "target": target.reshape(_label_shape(step)), **state}
    ours = run(gradients, {k: v for k, v in feeds.items() if k in fed})

    theirs = InTorch(model, names, torch.float64, training=False)
    prediction = theirs(logits, **split_inputs(image(name)))
    torch.nn.functional.cross_entropy(prediction.flatten(1), torch.tensor(target)).backward()
    wrong = {}
    for parameter, weight in zip(names, theirs.trained, strict=True):
        expected = weight.grad.numpy()
        error = np.linalg.norm(ours[f"{parameter}.grad"] - expected) / max(np.linalg.norm(expected), 1e-12)
        if not error < 1e-4:
            wrong[parameter] = error
    assert not wrong


@pytest.mark.sweep(0)
@pytest.mark.slow
@pytest.mark.torch
def test_losses_follow_torch(network: tuple[str, onnx.ModelProto]) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    from tests.networks.in_torch import InTorch, split_inputs

    name, model = network
    model = without_dropout(model)
    logits = NETWORKS[name][0]
    step = gg.build(model, "cross_entropy", gg.optim.sgd(1e-4, momentum=0.9), output=logits)
    loop = Loop(step)
    target = np.array([42])
    feeds = {**image(name), "target": target.reshape(_label_shape(step))}
    theirs = InTorch(model, list(step.manifest.trainable), torch.float32, training=True)
    optimizer = torch.optim.SGD(theirs.trained, lr=1e-4, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        prediction = theirs(logits, **split_inputs(image(name)))
        expected = torch.nn.functional.cross_entropy(prediction.flatten(1), torch.tensor(target))
        expected.backward()
        optimizer.step()
        np.testing.assert_allclose(loop(feeds)["loss"], expected.detach().numpy(), rtol=1e-4)


def without_dropout(model: onnx.ModelProto) -> onnx.ModelProto:
    """Dropout with ratio 0: masks are drawn by another generator than torch's."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type == "Dropout":
            node.ClearField("attribute")
            node.attribute.append(onnx.helper.make_attribute("ratio", 0.0))
    return copy


def _label_shape(step: gg.Step) -> list[int]:
    return [1 if not isinstance(d, int) else d for d in step.manifest.targets[0].shape]
