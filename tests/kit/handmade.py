"""Steps whose graphs are written by hand, to test the runtime without the builder.

``regression`` has one linear layer and plain SGD. ``classifier`` has two inputs, two outputs, a hidden layer, a frozen
scale, a running mean, a counter and SGD with momentum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.step.step import Manifest, StateSpec, Step

HIDDEN, CLASSES, FEATURES = 8, 3, 4


class Sketch:
    """A model under construction."""

    def __init__(self) -> None:
        self.op = Builder(scope="step")
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []

    def input(self, name: str, dtype: str, shape: tuple[Any, ...]) -> Var:
        kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
        self.inputs.append(ir.Value(name=name, type=kind, shape=ir.Shape(shape)))
        return self.op.wrap(self.inputs[-1])

    def output(self, name: str, x: Var, shape: tuple[Any, ...]) -> None:
        out = self.op.Identity(x, name=name).value
        out.shape = ir.Shape(shape)
        self.outputs.append(out)

    def model(self) -> onnx.ModelProto:
        graph = ir.Graph(self.inputs, self.outputs, nodes=[], opset_imports={"": OPSET}, name="step")
        self.op.finish(graph)
        proto = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION))
        onnx.checker.check_model(proto)
        return proto


def initial(values: dict[str, np.ndarray]) -> onnx.ModelProto:
    sketch = Sketch()
    for name, value in values.items():
        sketch.output(name, sketch.op.const(value), value.shape)
    return sketch.model()


def regression(features: int = 3, batch: int | str = "batch") -> Step:
    """Return a step with loss = mean((x w - t)²) and the update w ← w - lr dloss/dw; the output is ``y``."""

    def forward(s: Sketch) -> tuple[Var, Var, Var, Var]:
        x, t = s.input("x", "float32", (batch, features)), s.input("t", "float32", (batch, 1))
        w = s.input("w", "float32", (features, 1))
        y = x @ w
        s.output("loss", s.op.ReduceMean((y - t) * (y - t), keepdims=0), ())
        return x, t, w, y

    train = Sketch()
    x, t, w, y = forward(train)
    lr = train.input("learning_rate", "float32", ())
    n = train.op.cast(train.op.Squeeze(train.op.dim(t, 0)), ir.DataType.FLOAT)
    train.output("w.next", w - lr * (train.op.Transpose(x, perm=[1, 0]) @ (2.0 * (y - t) / n)), (features, 1))
    evaluation = Sketch()
    evaluation.output("y", forward(evaluation)[3], (batch, 1))
    start = {"w": np.linspace(-1, 1, features, dtype=np.float32).reshape(features, 1)}
    return Step(
        train.model(),
        initial(start),
        evaluation.model(),
        Manifest(
            inputs=(TensorSpec("x", "float32", (batch, features)),),
            targets=(TargetSpec("t", "float32", (batch, 1)),),
            outputs=("y",),
            loss={"name": "mse", "arguments": {}},
            optimizer={"name": "sgd", "arguments": {}},
            hyperparameters={"learning_rate": 0.1},
            state=(StateSpec("w", "float32", (features, 1), "w.next", "parameter"),),
            trainable=("w",),
        ),
    )


SHAPES = {"w1": (FEATURES, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}
SCALE = np.array([1.0, 0.5, 2.0, 1.0], np.float32)


def _forward(s: Sketch, training: bool) -> dict[str, Var]:
    op = s.op
    v = {name: s.input(name, "float32", ("batch", FEATURES)) for name in ("x", "z")}
    v["target"] = s.input("target", "int64", ("batch",))
    v |= {name: s.input(name, "float32", shape) for name, shape in SHAPES.items()}
    v["mean"] = s.input("mean", "float32", (FEATURES,))
    batch_mean = op.ReduceMean(v["x"], [0], keepdims=0)
    v["mean.next"] = 0.9 * v["mean"] + 0.1 * batch_mean
    v["a0"] = ((v["x"] - (batch_mean if training else v["mean"])) + v["z"]) * op.const(SCALE)
    v["h"] = v["a0"] @ v["w1"] + v["b1"]
    v["a1"] = op.Relu(v["h"])
    v["logits"] = v["a1"] @ v["w2"] + v["b2"]
    v["hot"] = op.OneHot(v["target"], CLASSES, np.array([0, 1], np.float32), axis=-1)
    row = op.ReduceSum(op.LogSoftmax(v["logits"], axis=-1) * v["hot"], [1], keepdims=0)
    right = op.Equal(op.ArgMax(v["logits"], axis=1, keepdims=0), v["target"])
    s.output("loss", op.Neg(op.ReduceMean(row, keepdims=0)), ())
    s.output("accuracy", op.ReduceMean(op.cast(right, ir.DataType.FLOAT), keepdims=0), ())
    return v


def _gradients(s: Sketch, v: dict[str, Var]) -> dict[str, Var]:
    op = s.op
    n = op.cast(op.Squeeze(op.dim(v["target"], 0)), ir.DataType.FLOAT)
    dlogits = (op.Softmax(v["logits"], axis=-1) - v["hot"]) / n
    dh = (dlogits @ op.Transpose(v["w2"], perm=[1, 0])) * op.cast(v["h"] > 0.0, ir.DataType.FLOAT)
    return {
        "w1": op.Transpose(v["a0"], perm=[1, 0]) @ dh,
        "b1": op.ReduceSum(dh, [0], keepdims=0),
        "w2": op.Transpose(v["a1"], perm=[1, 0]) @ dlogits,
        "b2": op.ReduceSum(dlogits, [0], keepdims=0),
    }


def classifier(ignore_index: int | None = None) -> Step:
    train = Sketch()
    v = _forward(train, training=True)
    rate, momentum = (train.input(name, "float32", ()) for name in ("learning_rate", "momentum"))
    for name, gradient in _gradients(train, v).items():
        velocity = train.input(f"{name}.velocity", "float32", SHAPES[name])
        moved = momentum * velocity + gradient
        train.output(f"{name}.velocity.next", moved, SHAPES[name])
        train.output(f"{name}.next", v[name] - rate * moved, SHAPES[name])
    train.output("mean.next", v["mean.next"], (FEATURES,))
    train.output("count.next", train.input("count", "int64", ()) + 1, ())

    evaluation = Sketch()
    e = _forward(evaluation, training=False)
    evaluation.output("logits", e["logits"], ("batch", CLASSES))
    evaluation.output("probs", evaluation.op.Softmax(e["logits"], axis=-1), ("batch", CLASSES))

    random = np.random.default_rng(0)
    start: dict[str, np.ndarray] = {k: random.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    start |= {f"{k}.velocity": np.zeros(s, np.float32) for k, s in SHAPES.items()}
    start |= {"mean": np.zeros(FEATURES, np.float32), "count": np.array(0, np.int64)}
    kinds = {"mean": "statistic", "count": "counter"}
    state = [
        StateSpec(
            name,
            value.dtype.name,
            value.shape,
            f"{name}.next",
            "parameter" if name in SHAPES else kinds.get(name, "optimizer"),  # type: ignore[arg-type]
        )
        for name, value in start.items()
    ]
    features = ("batch", FEATURES)
    return Step(
        train.model(),
        initial(start),
        evaluation.model(),
        Manifest(
            inputs=(TensorSpec("x", "float32", features), TensorSpec("z", "float32", features)),
            targets=(TargetSpec("target", "int64", ("batch",), CLASSES, ignore_index),),
            outputs=("logits", "probs"),
            loss={"name": "cross_entropy", "arguments": {}},
            metrics=("accuracy",),
            optimizer={"name": "sgd", "arguments": {"momentum": 0.9}},
            hyperparameters={"learning_rate": 0.1, "momentum": 0.9},
            state=tuple(state),
            trainable=tuple(SHAPES),
        ),
    )


def points(n: int = 96, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random points of three well separated classes in four dimensions, each split into two summands."""
    random = np.random.default_rng(seed)
    target = random.integers(0, CLASSES, n)
    x = 0.7 * random.normal(size=(n, FEATURES)) + 3.0 * np.eye(CLASSES, FEATURES)[target]
    z = 0.1 * random.normal(size=(n, FEATURES))
    return {"x": x.astype(np.float32), "z": z.astype(np.float32), "target": target.astype(np.int64)}
