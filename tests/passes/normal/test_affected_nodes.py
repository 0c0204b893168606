"""Sweeps that skip nodes which no change affects write the same graphs as sweeps over all nodes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.frontend import Input, export, nn
from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.simplifying.affected_nodes import Changes
from gradgraph.passes.normal.simplifying.clean import clean_up

ROWS = (2, 3)


def read_twice(op: Builder, r: Var) -> Var:
    return op.Squeeze(op.Exp(op.Unsqueeze(r, [0])), [0, 2]) + op.Squeeze(r, [1])


MOVES: tuple[Callable[[Builder, Var, Var], Var], ...] = (
    lambda op, a, b: -a,
    lambda op, a, b: a + b,
    lambda op, a, b: a - b,
    lambda op, a, b: a * b,
    lambda op, a, b: a * 2.0,
    lambda op, a, b: a * 0.5,
    lambda op, a, b: a * 1.0,
    lambda op, a, b: a**2.0,
    lambda op, a, b: op.Identity(a),
    lambda op, a, b: op.Cast(op.Cast(a, to=int(ir.DataType.DOUBLE)), to=int(ir.DataType.FLOAT)),
    lambda op, a, b: op.Reshape(op.Reshape(a, [6]), [2, 3]),
    lambda op, a, b: op.Reshape(op.Reshape(a, [3, 2]), [2, 3]),
    lambda op, a, b: op.Transpose(op.Transpose(a, perm=[1, 0]), perm=[1, 0]),
    lambda op, a, b: op.Transpose(op.MatMul(op.Transpose(b, perm=[1, 0]), a), perm=[1, 0]) @ np.ones((3, 3), "f"),
    lambda op, a, b: op.Squeeze(op.Unsqueeze(a, [0]), [0]),
    lambda op, a, b: read_twice(op, op.Unsqueeze(a, [1])),
    lambda op, a, b: op.Expand(a, np.array([2, 3])) + b,
    lambda op, a, b: op.Add(op.Gemm(a, np.ones((3, 3), "f")), b),
    lambda op, a, b: op.Slice(op.Concat(op.Concat(a, b, axis=0), a, axis=0), [0], [2]),
    lambda op, a, b: op.Pad(op.Slice(a, [0], [1]), [0, 0, 1, 0]) + op.Pad(op.Slice(b, [1], [2]), [1, 0, 0, 0]),
    lambda op, a, b: op.ReduceSum(op.Unsqueeze(a, [1]), [1], keepdims=0),
    lambda op, a, b: op.Squeeze(op.ReduceSum(op.Unsqueeze(a, [2]), [2], keepdims=1), [2]),
)  # fmt: skip


def tensor(name: str, *shape: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def written(op: Builder, inputs: list[ir.Value], results: list[Var]) -> ir.Model:
    outputs = [op.Identity(result) for result in results]
    for output, result in zip(outputs, results, strict=True):
        output.value.shape = None if result.shape is None else ir.Shape(result.shape)
    graph = ir.Graph(inputs, [y.value for y in outputs], nodes=[], opset_imports={"": 21}, name="g")
    op.finish(graph)
    return ir.Model(graph, ir_version=10)


def walk(seed: int) -> ir.Model:
    """A random graph of nodes that peepholes rewrite, in which some nodes are equal."""
    rng, op = random.Random(seed), Builder()
    inputs = [tensor("x", *ROWS), tensor("y", *ROWS)]
    values = [*map(op.wrap, inputs)]
    for _ in range(rng.randrange(5, 40)):
        values.append(rng.choice(MOVES)(op, *rng.choices(values[-6:], k=2)))
    return written(op, inputs, rng.sample(values, min(3, len(values))))


def late() -> ir.Model:
    """A value loses a reader late in the first sweep, so the second one rewrites its other reader, and later nodes."""
    op, x, w = Builder(), tensor("x", 2, 2, 3), tensor("w", 2, 2, 4)
    shared = op.Unsqueeze(op.wrap(x), [0])
    swapped = op.Reshape(op.Transpose(op.Unsqueeze(shared, [0]), perm=[0, 1, 2, 4, 3]), [2, 3, 2])
    product = op.Transpose(op.MatMul(swapped, op.wrap(w)), perm=[0, 2, 1])
    return written(op, [x, w], [op.Exp(product), op.Exp(op.Squeeze(shared, [0]))])


def steps(network: nn.Module, x: Input) -> ir.Model:
    return ir.from_proto(gg.build(export(network, {"x": x}), "cross_entropy", gg.optim.adamw(1e-3)).train)


MODELS: dict[str, Callable[[], ir.Model]] = {
    "late": late,
    "convolutions": lambda: steps(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        Input(("batch", 3, 6, 6)),
    ),
    "transformer": lambda: steps(
        nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Flatten(), nn.Linear(32, 3)), Input(("batch", 4, 8))
    ),
    **{f"walk {seed}": lambda seed=seed: walk(seed) for seed in range(60)},  # type: ignore[misc]
}


def cleaned(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(clean_up(model)).SerializeToString(deterministic=True))


@pytest.mark.parametrize("kind", ["late", "convolutions", "transformer", "walk"])
def test_graphs_are_those_of_sweeps_over_all_nodes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [make for name, make in MODELS.items() if name.startswith(kind)]
    found = [cleaned(make()) for make in made]
    skipped = list[ir.Node]()

    def counted(changes: Changes, node: ir.Node) -> bool:
        skipped.extend([] if affects(changes, node) else [node])
        return True

    affects = Changes.affect
    monkeypatch.setattr(Changes, "affect", counted)
    assert found == [cleaned(make()) for make in made]
    assert skipped


def test_a_node_near_a_change_is_rewritten_in_a_later_sweep() -> None:
    assert [node.op_type for node in clean_up(late()).graph] == ["Transpose", "MatMul", "Exp", "Exp"]
