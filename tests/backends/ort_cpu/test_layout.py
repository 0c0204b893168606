"""Chains of nodes in blocked layout: the same numbers, and no reordering where none is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine, lower
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_cpu.blocked.cheapest_layout import write_blocked_forms
from gradgraph.backends.ort_cpu.conv.conv_blocks import ordered, reordered
from gradgraph.backends.portable import PORTABLE
from gradgraph.frontend import Module, nn
from gradgraph.frontend import functional as F
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.machine.hardware import nchwc_block
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.rules.named_operators import OPERATORS
from tests.kit.running import run

BLOCK = nchwc_block()
pytestmark = pytest.mark.skipif(not BLOCK, reason="this processor has no blocked layout")
C = 2 * max(BLOCK, 1)
FLOAT = ir.TensorType(ir.DataType.FLOAT)

# --- nodes between two reorders --------------------------------------------------------------------------------

Between = Callable[..., Any]


def between(write: Between, *sizes: tuple[int | str, ...]) -> ir.Model:
    """``write`` of inputs that come out of blocks; what it gives goes into blocks if it is an image, and out again."""
    op = Builder(named_operators=True)
    inputs = [ir.Value(name=f"x{i}", type=FLOAT, shape=ir.Shape(size)) for i, size in enumerate(sizes)]
    results = write(op, *(ordered(op, reordered(op, x), x.dim(1)) if x.rank == 4 else x for x in map(op.wrap, inputs)))
    ys = [
        y if y.rank != 4 else ordered(op, reordered(op, y), y.dim(1)) for y in np.atleast_1d(np.array(results, object))
    ]
    outputs = [op.Identity(y, name=f"y{i}").value for i, y in enumerate(ys)]
    graph = ir.Graph(inputs, outputs, nodes=(), name="between", opset_imports={"": OPSET})
    op.finish(graph)
    return ir.Model(graph, ir_version=IR_VERSION)


def numbers(model: ir.Model, stay: bool, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    work = model.clone()
    if stay:
        write_blocked_forms(work)
    return run(ir.to_proto(lower(work, PORTABLE)), feeds)


def drawn(model: ir.Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {v.name: [d if isinstance(d, int) else 3 for d in v.shape or ()] for v in model.graph.inputs}
    return {str(name): rng.normal(0.3, 1, size).astype(np.float32) for name, size in sizes.items()}


def reorders(model: ir.Model) -> int:
    return sum(node.op_type.startswith("Reorder") for node in model.graph)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    for name, expected in a.items():
        np.testing.assert_allclose(b[name], expected, rtol=2e-5, atol=2e-5 * max(1, np.abs(expected).max()))


def batch_normalization(op: Builder, x: Var, scale: Var, bias: Var, **attrs: Any) -> tuple[Var, ...]:
    scratch = [-scale, -bias]
    return op.BatchNormalization(x, scale, bias, *scratch, outputs=3, training_mode=1, **attrs)


def max_pool_gradient(op: Builder, dy: Var, x: Var, **attrs: Any) -> Any:
    return OPERATORS["MaxPoolGrad"].call(op, dy, x, **attrs)


def turned(op: Builder, dy: Var, w: Var) -> Any:
    """The input gradient of a convolution with 1x1 kernels ``w``."""
    x = ir.Value(name="x", type=FLOAT, shape=ir.Shape([dy.dim(0), w.dim(1), *(dy.shape or ())[2:]]))
    return OPERATORS["ConvGradInput"].call(op, dy, w, op.wrap(x))


FLOOR = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def resize(op: Builder, x: Var, *where: Any, **attrs: Any) -> Any:
    return op.Resize(x, None, *where, **attrs)


def scales(*of: float) -> np.ndarray:
    return np.array(of, np.float32)


def with_ties(**attrs: Any) -> Between:
    return lambda op, dy, x: max_pool_gradient(op, dy, op.Relu(x), **attrs)


def with_infinities(op: Builder, dy: Var, x: Var) -> Any:
    """Windows, rows of windows and single pixels; above 0.8 everything is the largest."""
    x = op.Where(x < 0.5, -np.inf, op.Where(x > 0.8, np.inf, x))
    return max_pool_gradient(op, dy, x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])


def batch_normalization_gradient(kind: str) -> Between:
    def write(op: Builder, dy: Var, x: Var, scale: Var) -> Any:
        mean, var = scale * 0.1, op.Abs(scale)
        return OPERATORS[f"{kind}BatchNormalizationGrad"].call(op, dy, x, scale, mean, var, epsilon=0.1)

    return write


X, Y, WIDE = (3, C, 6, 5), (3, C, 2, 2), (3, C, 6, 4)
OPEN = ("n", C, 6, 5)
NORMALIZED = {  # means and sums per channel are computed in another order for many images, and for large ones
    "": X,
    ", large images": (3, C, 12, 8),
    ", many images": (9, C, 3, 3),
    ", many large images": (9, C, 12, 8),
}
CASES: dict[str, tuple[Between, list[Any]]] = {
    "relu": (lambda op, x: op.Relu(x), [X]),
    "open batch": (lambda op, x: op.Tanh(x) * 2.0, [OPEN]),
    "mask": (lambda op, x, dy: dy * op.cast(x > 0.0, x.dtype), [X, X]),
    "open mask": (lambda op, x, dy: dy * op.cast(x > 0.0, x.dtype), [OPEN, OPEN]),
    "where": (lambda op, x, y: op.Where(op.Not(op.Equal(op.Relu(x), 0.0)), y, 0.5), [X, X]),
    "clip": (lambda op, x: op.Clip(x, 0.0, 0.6), [X]),
    "clip from below": (lambda op, x: op.Clip(x, 0.1), [X]),
    "sum of three": (lambda op, x, y: op.Sum(x, y, op.Exp(x)), [X, X]),
    "times column": (lambda op, x, c: x * op.Reshape(c, [C, 1, 1]), [X, (C,)]),
    "column plus": (lambda op, x, c: op.Reshape(c, [1, C, 1, 1]) + x, [OPEN, (C,)]),
    "less column": (lambda op, x, c: x - op.Reshape(c, [C, 1, 1]), [X, (C,)]),
    "times column of images": (lambda op, x, c: op.Reshape(c, [3, C, 1, 1]) * x, [X, (3, C)]),
    "column of images plus": (lambda op, x, c: x + op.Reshape(c, [3, C, 1, 1]), [X, (3, C)]),
    "less column of images": (lambda op, x, c: x - op.Reshape(c, [3, C, 1, 1]), [X, (3, C)]),
    "mean backwards": (
        lambda op, x, c: op.Relu(x) + op.Reshape(c, [3, C, 1, 1]) * np.full([1, 1, 6, 5], 1 / 30, np.float32),
        [X, (3, C)],
    ),
    "1x1 kernels": (lambda op, x, w, b: op.Conv(x, op.Reshape(w, [BLOCK, C, 1, 1]), b), [X, (BLOCK, C), (BLOCK,)]),
    "1x1 kernels, wider": (lambda op, x, w: op.Relu(op.Conv(x, op.Reshape(w, [3 * C, C, 1, 1]))), [X, (3 * C, C)]),
    "1x1 kernels backwards": (lambda op, dy, w: turned(op, dy, op.Reshape(w, [C, BLOCK, 1, 1])), [X, (C, BLOCK)]),
    "1x1 kernels backwards, wider": (
        lambda op, dy, w: turned(op, dy, op.Reshape(w, [C, 3 * C, 1, 1])),
        [X, (C, 3 * C)],
    ),
    "resize": (lambda op, x: resize(op, x, scales(1, 1, 2, 3), **FLOOR), [X]),
    "resize to sizes": (lambda op, x: resize(op, x, None, np.array([3, C, 12, 10]), mode="nearest"), [X]),
    "max pool": (lambda op, x: op.MaxPool(x, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]), [X]),
    "average": (lambda op, x: op.AveragePool(x, kernel_shape=[2, 2], pads=[1, 1, 0, 0]), [X]),
    "average with pads": (
        lambda op, x: op.AveragePool(x, kernel_shape=[2, 2], pads=[1, 1, 0, 0], count_include_pad=1),
        [OPEN],
    ),
    "pool to a pixel": (lambda op, x: op.Reshape(op.MaxPool(x, kernel_shape=[6, 5]), [3, C]), [X]),
    "global average": (lambda op, x: op.Reshape(op.GlobalAveragePool(x), [-1, C]), [OPEN]),
    "image sums": (lambda op, x: op.ReduceSum(x, [2, 3], keepdims=0), [X]),
    "image means": (lambda op, x: op.Reshape(op.ReduceMean(x, [-1, -2], keepdims=1), [-1, C]), [OPEN]),
    "max pool backwards": (
        lambda op, dy, x: max_pool_gradient(op, dy, x, kernel_shape=[3, 2], strides=[3, 2]),
        [Y, WIDE],
    ),
    "max pool backwards, ties": (with_ties(kernel_shape=[3, 2], strides=[3, 2]), [Y, WIDE]),
    **{
        f"overlapping, {name}": (with_ties(kernel_shape=k, strides=s, pads=p), [(3, C, *y), (3, C, *x)])
        for name, k, s, p, y, x in [
            ("3x3 by 2", [3, 3], [2, 2], [1, 1, 1, 1], (3, 4), (6, 8)),
            ("3x3 by 2, odd", [3, 3], [2, 2], [1, 1, 1, 1], (4, 5), (7, 9)),
            ("3x3 by 2, no padding", [3, 3], [2, 2], [0, 0, 0, 0], (3, 2), (7, 6)),
            ("3x3 by 1", [3, 3], [1, 1], [1, 1, 1, 1], (5, 4), (5, 4)),
            ("3x3 by 1, no padding", [3, 3], [1, 1], [0, 0, 0, 0], (3, 2), (5, 4)),
            ("2x2 by 1", [2, 2], [1, 1], [0, 0, 0, 0], (4, 3), (5, 4)),
            ("2x2 by 1, padded", [2, 2], [1, 1], [0, 1, 1, 0], (5, 4), (5, 4)),
            ("2x3 by 2, one side", [2, 3], [2, 2], [0, 0, 0, 1], (3, 4), (6, 8)),
            ("1x3 by 2", [1, 3], [1, 2], [0, 1, 0, 1], (5, 3), (5, 6)),
            ("3x1 by 3, a rest", [3, 1], [3, 1], [0, 0, 0, 0], (2, 4), (8, 4)),
            ("5x4 by 3", [5, 4], [3, 3], [1, 1, 1, 1], (2, 3), (6, 8)),
        ]
    },
    "overlapping, infinities": (with_infinities, [(3, C, 3, 4), (3, C, 6, 8)]),
    "concat": (lambda op, x, y: op.Concat(x, op.Relu(y), x, axis=1), [X, (3, BLOCK, 6, 5)]),
    "split": (lambda op, x: op.Split(op.Relu(x), [BLOCK, BLOCK], axis=1, outputs=2), [OPEN]),
    "pad": (lambda op, x: op.Pad(x, [0, 0, 1, 2, 0, 0, 0, 3]), [X]),
    "pad by a number, and crop": (lambda op, x: op.Pad(x, [0, 0, 2, -1, 0, 0, -1, 3], -1.5), [OPEN]),
    **{
        f"norm{which}": case
        for images, x in NORMALIZED.items()
        for which, case in {
            images: (lambda op, *v: batch_normalization(op, *v, momentum=0.0, epsilon=0.1), [x, (C,), (C,)]),
            f"{images} backwards": (batch_normalization_gradient(""), [x, x, (C,)]),
            f"{images} backwards, unscaled": (batch_normalization_gradient("Unscaled"), [x, x, (C,)]),
        }.items()
    },
    "residual": (lambda op, x, c: op.Relu(x * op.Reshape(c, [C, 1, 1]) + op.Sigmoid(x)), [X, (C,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nodes_between_blocks_stay_in_blocks(name: str) -> None:
    write, sizes = CASES[name]
    model = between(write, *sizes)
    feeds = drawn(model)
    same(numbers(model, False, feeds), numbers(model, True, feeds))
    inputs = sum(len(size) == 4 for size in sizes)
    stayed = model.clone()
    write_blocked_forms(stayed)
    images = sum(node.op_type == "ReorderOutput" and node.outputs[0].uses()[0].node.op_type == "Identity"
                 for node in stayed.graph)  # fmt: skip
    assert reorders(stayed) == inputs + images  # one for each input and each image that is an output


ODD: dict[str, tuple[Between, list[Any]]] = {
    "half a block": (lambda op, x: op.Relu(x), [(3, BLOCK // 2, 6, 5)]),
    "one and a half": (lambda op, x: op.Relu(x), [(3, BLOCK + BLOCK // 2, 6, 5)]),
    "a pixel": (lambda op, x: op.Relu(x), [(3, C, 1, 1)]),
    "unknown channels": (lambda op, x: op.Relu(x), [(3, "c", 6, 5)]),
    "unknown rows": (lambda op, x: op.Relu(x), [(3, C, "h", 5)]),
    "row": (lambda op, x, c: x * c, [X, (5,)]),
    "column of images": (lambda op, x, c: x * op.Reshape(c, [3, 1, 1, 1]), [X, (3,)]),
    "column less": (lambda op, x, c: op.Reshape(c, [C, 1, 1]) - x, [X, (C,)]),
    "broadcast image": (lambda op, x, y: x + y, [(3, C, 6, 5), (3, C, 1, 5)]),
    "column of images less": (lambda op, x, c: op.Reshape(c, [3, C, 1, 1]) - x, [X, (3, C)]),
    "column of open images": (lambda op, x, c: x * op.Reshape(c, [-1, C, 1, 1]), [OPEN, ("n", C)]),
    "resize in between": (lambda op, x: resize(op, x, scales(1, 1, 2.1, 2.1), **FLOOR), [(3, C, 3, 3)]),
    "resize, rounded down": (
        lambda op, x: resize(op, x, scales(1, 1, 3, 3), mode="nearest", nearest_mode="floor"),
        [X],
    ),
    "1x1 kernels of half a block": (
        lambda op, x, w: op.Conv(x, op.Reshape(w, [BLOCK // 2, C, 1, 1])),
        [X, (BLOCK // 2, C)],
    ),
    "1x1 kernels by 2": (lambda op, x, w: op.Conv(x, op.Reshape(w, [C, C, 1, 1]), strides=[2, 2]), [X, (C, C)]),
    "1x1 kernels, padded": (lambda op, x, w: op.Conv(x, op.Reshape(w, [C, C, 1, 1]), pads=[0, 1, 0, 0]), [X, (C, C)]),
    "1x1 kernels in groups": (
        lambda op, x, w: op.Conv(x, op.Reshape(w, [C, BLOCK, 1, 1]), group=2),
        [X, (C, BLOCK)],
    ),
    "1x1 kernels of open images": (lambda op, x, w: op.Conv(x, op.Reshape(w, [C, C, 1, 1])), [OPEN, (C, C)]),
    "over channels": (lambda op, x: op.Softmax(x, axis=1), [X]),
    "parts of blocks": (lambda op, x: op.Split(x, [1, C - 1], axis=1, outputs=2), [X]),
    "rows joined": (lambda op, x, y: op.Concat(x, y, axis=2), [X, X]),
    "padded channels": (lambda op, x: op.Pad(x, [0, 1, 0, 0, 0, C - 1, 0, 0]), [X]),
    "reflected": (lambda op, x: op.Pad(x, [0, 0, 1, 1, 0, 0, 1, 1], mode="reflect"), [X]),
    "winners": (lambda op, x: op.MaxPool(x, kernel_shape=[2, 2], outputs=2)[1] * 2, [X]),
    "dilated": (lambda op, x: op.MaxPool(x, kernel_shape=[2, 2], dilations=[2, 2]), [X]),
    "much padding": (lambda op, *v: max_pool_gradient(op, *v, kernel_shape=[5, 5], pads=[2, 2, 2, 2]), [X, X]),
    "gaps": (lambda op, *v: max_pool_gradient(op, *v, kernel_shape=[1, 1], strides=[2, 2]), [(3, C, 3, 3), X]),
    "running statistics": (lambda op, *v: batch_normalization(op, *v, momentum=0.9)[0], [X, (C,), (C,)]),
    "open norm": (lambda op, *v: batch_normalization(op, *v, momentum=0.0)[0], [OPEN, (C,), (C,)]),
}


@pytest.mark.parametrize("name", ODD)
def test_other_nodes_stay_as_they_are(name: str) -> None:
    write, sizes = ODD[name]
    model = between(write, *sizes)
    stayed = model.clone()
    write_blocked_forms(stayed)
    assert [n.op_type for n in stayed.graph] == [n.op_type for n in model.graph]


# --- where -------------------------------------------------------------------------------------------------------


def test_sums_over_large_maps_round_little() -> None:
    """Added one after the other, 16,384 tenths are off by 1e-4."""
    means = between(lambda op, x: op.Reshape(op.GlobalAveragePool(x), [-1, C]), (1, C, 128, 128))
    tenths = {"x0": np.full((1, C, 128, 128), 0.1, np.float32)}
    (found,) = numbers(means, True, tenths).values()
    np.testing.assert_allclose(found, np.float32(0.1), rtol=5e-6)

    image = (1, C, 128, 128)
    norm = between(batch_normalization_gradient(""), image, image, (C,))  # of x0 = 0.1 and x1 - 0.1 = 1
    given = {**tenths, "x1": 1 + tenths["x0"], "x2": np.ones(C, np.float32)}
    _, dscale, _ = numbers(norm, True, given).values()
    np.testing.assert_allclose(dscale, 0.1 * 128 * 128 / np.sqrt(1 + 0.1), rtol=5e-6)


def test_a_value_that_is_read_in_both_layouts_is_reordered_once() -> None:
    def write(op: Builder, x: Var) -> tuple[Var, ...]:
        y = op.Relu(x)
        return y, op.Softmax(y, axis=1), op.CumSum(y, op.const(np.int64(3)))

    model = between(write, X)
    feeds = drawn(model)
    same(numbers(model, False, feeds), numbers(model, True, feeds))
    write_blocked_forms(model)
    clean_up(model)
    source = next(n for n in model.graph if n.op_type == "Relu").outputs[0]
    assert [n.op_type for n, _ in source.uses()].count("ReorderOutput") == 1


def test_a_value_that_is_an_output_has_its_plain_layout() -> None:
    op = Builder()
    x = ir.Value(name="x0", type=FLOAT, shape=ir.Shape(X))
    y = op.Relu(ordered(op, reordered(op, op.wrap(x))), name="y")
    z = op.Identity(ordered(op, reordered(op, y)), name="z")
    graph = ir.Graph([x], [y.value, z.value], nodes=(), name="g", opset_imports={"": OPSET})
    op.finish(graph)
    model = ir.Model(graph, ir_version=IR_VERSION)
    feeds = drawn(model)
    for result in numbers(model, True, feeds).values():
        np.testing.assert_array_equal(result, np.maximum(feeds["x0"], 0))


def test_reorders_move_to_where_tensors_are_small() -> None:
    """A pool makes them a quarter of the size; nothing but a plain node reads the chain."""

    def write(op: Builder, x: Var) -> Var:
        return op.Softmax(op.MaxPool(op.Tanh(x), kernel_shape=[2, 2], strides=[2, 2]), axis=1)

    model = between(write, (3, C, 8, 8))
    write_blocked_forms(model)
    (pool,) = (n for n in model.graph if n.op_type == "MaxPool")
    assert pool.domain.endswith("nchwc")
    assert [n.op_type for n, _ in pool.outputs[0].uses()] == ["ReorderOutput"]


def sums(model: ir.Model) -> list[int]:
    """How many inputs each node has that adds tensors, after the pass."""
    write_blocked_forms(model)
    return [len(n.inputs) for n in model.graph if n.op_type == "Add" or (n.op_type == "Conv" and len(n.inputs) == 4)]


def test_a_tensor_that_was_read_before_is_added_by_the_convolution() -> None:
    """Its mean over all images is a factor of what is added to it; somebody else reads it later."""

    def write(op: Builder, x: Var, z: Var) -> tuple[Var, Var]:
        y = op.Tanh(x)
        return y, y + z * op.Reshape(op.ReduceMean(y, [0, 2, 3], keepdims=0), [C, 1, 1])

    def alone(op: Builder, x: Var, z: Var) -> Var:
        return write(op, x, z)[1]

    def read_again(op: Builder, x: Var, z: Var) -> tuple[Var, Var]:
        y, total = write(op, x, z)
        return total, op.Exp(y)

    for kind, inputs in ((alone, 4), (read_again, 2)):
        model = between(kind, X, X)
        feeds = drawn(model)
        same(numbers(model, False, feeds), numbers(model, True, feeds))
        assert sums(model) == [inputs]


# --- whole steps --------------------------------------------------------------------------------------------------


class Pooled(Module):
    """conv-relu-maxpool-conv, a residual sum and its Relu, with and without normalization."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        between = (lambda: [nn.BatchNorm2d(C), nn.ReLU()]) if norm else (lambda: [nn.ReLU()])
        self.stem = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), *between(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(C, C, 3, padding=1), *between(), nn.Conv2d(C, C, 3, padding=1))
        self.tail = nn.Conv2d(C, C, 3, padding=1)
        self.head = nn.Linear(64 * C, 4)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        x = F.relu(x + self.body(x))
        return self.head(F.max_pool2d(F.relu(self.tail(x)), 2).flatten(1))


class Inverted(Module):
    """A residual block that expands channels by 1x1 kernels, convolves each, and projects them back."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        sizes = ((C, 2 * C, 1, 1), (2 * C, 2 * C, 3, 2 * C), (2 * C, C, 1, 1))
        layers = [
            [nn.Conv2d(c, m, k, padding=k // 2, groups=group), *([nn.BatchNorm2d(m)] if norm else []), nn.ReLU()]
            for c, m, k, group in sizes
        ]
        self.stem = nn.Conv2d(3, C, 3, padding=1)
        self.body = nn.Sequential(*[layer for each in layers for layer in each][:-1])
        self.head = nn.Linear(C, 4)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        return self.head(F.relu(x + self.body(x)).mean((2, 3)))


def lowered_step(
    norm: bool, rows: int | str, kind: type[Pooled | Inverted] = Pooled
) -> tuple[gg.Step, onnx.ModelProto]:
    gg.frontend.manual_seed(1)  # with 0 a value falls beside the kink of a Relu, and rounds to its other side
    exported = gg.frontend.export(kind(norm), {"x": (rows, 3, 32, 32)})
    step = gg.build(exported, "cross_entropy", gg.optim.sgd(0.05, momentum=0.9))
    return step, for_machine(step.train, ORT_CPU, {"n": 8})


def reordered_between(model: onnx.ModelProto) -> list[str]:
    """ReorderInput nodes to which, through nodes that have a blocked form, a ReorderOutput leads."""
    passing = {"Relu", "Add", "Mul", "Sub", "Cast", "Greater", "MaxPool", "BatchNormalization", "Pad"}
    tainted: set[str] = set()
    found = []
    for node in model.graph.node:
        if node.op_type == "ReorderInput" and tainted & set(node.input):
            found.append(node.name)
        if node.op_type == "ReorderOutput" or (node.op_type in passing and tainted & set(node.input)):
            tainted.update(node.output)
    return found


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_nothing_is_reordered_between_convolutions(norm: bool) -> None:
    _, lowered = lowered_step(norm, 8)
    assert reordered_between(lowered) == []
    count = Counter(node.op_type for node in lowered.graph.node)
    # in: the cotangent of the head; out: what the head reads, dy of four layers and x of three, for their weights
    assert (count["ReorderInput"], count["ReorderOutput"]) == (1, 8)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_nothing_is_reordered_around_kernels_of_one_pixel(norm: bool) -> None:
    _, lowered = lowered_step(norm, 8, Inverted)
    pointwise = [
        n for n in lowered.graph.node if n.domain.endswith("nchwc") and n.op_type == "Conv" and is_pointwise(n)
    ]
    assert reordered_between(lowered) == []
    assert len(pointwise) >= 4  # two layers, forward and backward
    assert [n.op_type for n in lowered.graph.node].count("ReorderInput") == 1  # the cotangent of the head


def is_pointwise(conv: onnx.NodeProto) -> bool:
    found = {a.name: onnx.helper.get_attribute_value(a) for a in conv.attribute}
    return list(found["kernel_shape"]) == [1, 1] and found["group"] == 1


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("rows", [8, "n"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("kind", [Pooled, Inverted])
def test_steps_in_blocks_train_alike(norm: bool, rows: int | str, kind: type[Pooled | Inverted]) -> None:
    step, lowered = lowered_step(norm, rows, kind)
    rng = np.random.default_rng(0)
    given = {
        "x": rng.normal(2, 1, (8, 3, 32, 32)).astype(np.float32),
        "target": rng.integers(0, 4, 8),
        "learning_rate": np.array(0.05, np.float32),
    }
    states = [run(step.init), run(step.init)]
    for _ in range(3):
        for i, model in enumerate((step.train, lowered)):
            results = run(model, {v.name: {**given, **states[i]}[v.name] for v in model.graph.input})
            states[i] = {s.name: results[s.next] for s in step.manifest.state} | {"loss": results["loss"]}
    for key, value in states[0].items():
        scale = max(1.0, float(np.abs(value).max(initial=0.0)))
        np.testing.assert_allclose(states[1][key], value, rtol=1e-3, atol=1e-4 * scale, err_msg=key)
