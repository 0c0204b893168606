"""A bias that a normalisation in training mode subtracts again has a gradient of exactly zero, and no other one has."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.frontend import export, manual_seed, nn

X = np.random.default_rng(0).normal(size=(8, 4, 5, 5)).astype(np.float32)
TARGET = np.arange(8) % 3


class Net(nn.Module):
    """A convolution, ``middle``, and a head."""

    def __init__(self, *middle: Any) -> None:
        super().__init__()
        self.conv, self.middle = nn.Conv2d(4, 4, 3), nn.Sequential(*middle)
        self.head = nn.Linear(36, 3)

    def forward(self, x: Any) -> Any:
        x = self.middle(self.conv(x)).relu()
        return self.head(x.reshape(x.shape[0], 36))


class Residual(Net):
    """What a normalisation reads is read by another node, too."""

    def forward(self, x: Any) -> Any:
        x = self.conv(x)
        return self.head((self.middle(x) + x).reshape(x.shape[0], 36))


class Gated(Net):
    """The bias decides on a factor of what is normalised."""

    def forward(self, x: Any) -> Any:
        x = self.conv(x)
        x = self.middle(x * x.mean((2, 3), keepdim=True).sigmoid()).relu()
        return self.head(x.reshape(x.shape[0], 36))


NETWORKS: dict[str, tuple[Any, bool]] = {  # and whether the convolution's bias is cancelled
    "batch": (lambda: Net(nn.BatchNorm2d(4)), True),
    "instance": (lambda: Net(nn.InstanceNorm2d(4, affine=True)), True),
    "a group of one channel": (lambda: Net(nn.GroupNorm(4, 4)), True),
    "groups": (lambda: Net(nn.GroupNorm(2, 4)), False),
    "layer": (lambda: Net(nn.LayerNorm(3)), True),  # of rows of pixels
    "an activation between": (lambda: Net(nn.Tanh(), nn.BatchNorm2d(4)), False),
    "none": (lambda: Net(nn.Identity()), False),
    "residual": (lambda: Residual(nn.BatchNorm2d(4)), False),
    "gated": (lambda: Gated(nn.BatchNorm2d(4)), False),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "separate": {"separate": True}, "accumulate": {"accumulate": True}, "recompute": {"recompute": "sqrt"},
    "norm": {"grad_norm": True}, "portable": {"backend": "portable"}, "openvino": {"backend": "openvino"},
    "uphill": {"optimizer": gg.optim.sam(gg.optim.adam(0.01))},
}  # fmt: skip


@pytest.mark.sweep(0.61)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_bias_of_a_convolution(name: str) -> None:
    make, is_cancelled = NETWORKS[name]
    manual_seed(0)
    check(export(make(), {"x": ("batch", 4, 5, 5)}, ["y"]), {"conv.bias": not is_cancelled})


@pytest.mark.sweep(0.3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", OPTIONS)
def test_every_way_to_train(option: str) -> None:
    manual_seed(0)
    check(export(Net(nn.BatchNorm2d(4)), {"x": ("batch", 4, 5, 5)}, ["y"]), {"conv.bias": False}, **OPTIONS[option])


@pytest.mark.parametrize("form", ["Add(x, b)", "Add(x, b4)", "Add(x, Unsqueeze)", "Transpose", "scaled"])
def test_forms_of_adding_a_bias(form: str) -> None:
    nodes, moves = {
        "Add(x, b)": ("s = Add (x, b)", True),  # along the last axis
        "Add(x, b4)": ("b4 = Reshape (b, shape) s = Add (x, b4)", False),
        "Add(x, Unsqueeze)": ("b4 = Unsqueeze (b, axes) s = Add (x, b4)", False),
        "Transpose": ("t = Transpose <perm: ints = [0, 2, 3, 1]> (x) a = Add (t, b) "
                      "s = Transpose <perm: ints = [0, 3, 1, 2]> (a)", False),
        "scaled": ("b4 = Unsqueeze (b, axes) a = Add (x, b4) f4 = Unsqueeze (f, axes) s = Mul (a, f4)", False),
    }[form]  # fmt: skip
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[batch, 4, 5, 4] x) => (float[batch, 4] y)
        <float[4] b = {{1, 2, 3, 4}}, float[4] f = {{1, 2, 3, 4}}, float[4] scale = {{1, 1, 1, 1}},
         float[4] shift = {{0, 0, 0, 0}}, float[4] mean = {{0, 0, 0, 0}}, float[4] var = {{1, 1, 1, 1}},
         int64[4] shape = {{1, 4, 1, 1}}, int64[2] axes = {{1, 2}}> {{
        {nodes} n = BatchNormalization (s, scale, shift, mean, var) r = Relu (n) c = Flatten (r) y = MatMul (c, w)
    }}""")
    weight = np.linspace(-1, 1, 320, dtype=np.float32).reshape(80, 4)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    check(model, {"b": moves}, train=["b", "scale", "shift", "w"])  # fmt: skip


def check(model: onnx.ModelProto, moves: dict[str, bool], **options: Any) -> None:
    step = gg.build(model, "cross_entropy", **{"optimizer": gg.optim.adam(0.01), **options})
    trainer = gg.Trainer(step, device="cpu")
    (spec,) = step.manifest.inputs
    x = X if spec.shape[3] == 5 else X[..., :4]
    before = trainer.state_dict()
    for _ in range(3):
        trainer.step({"x": x, "target": TARGET})
    after = trainer.state_dict()
    assert {name: bool((after[name] != before[name]).any()) for name in moves} == moves
