"""Cheap functions of what is kept are computed again: the same bits, less memory, and only where it is worth it."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir
import pytest

import gradgraph as gg
from gradgraph.autodiff.after import write_orders
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU, cheap_recomputation
from gradgraph.frontend import export, nn
from gradgraph.frontend import functional as F
from gradgraph.rules.named_operators import DOMAIN
from gradgraph.runtime.execution.walk import walked
from tests.kit.lowered_networks import feeds_of
from tests.kit.running import run

X = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)


class GroupNorm(nn.Module):
    """As exporters of PyTorch write it: groups are rows of an InstanceNormalization."""

    def __init__(self) -> None:
        super().__init__()
        self.ones, self.scale, self.bias = nn.GroupNorm(4, 8), nn.Parameter(np.ones(8)), nn.Parameter(np.zeros(8))
        self.rows = nn.InstanceNorm1d(4, affine=False)

    def forward(self, x: Any) -> Any:
        rows = self.rows(x.reshape(2, 4, -1)).reshape(2, 8, 6, 6)
        return rows * self.scale.reshape(8, 1, 1) + self.bias.reshape(8, 1, 1)


def blocks(norm: Any, activation: Any, layers: int = 3) -> onnx.ModelProto:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = norm(), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return x + self.conv(activation(self.norm(x)))

    return export(nn.Sequential(nn.Conv2d(8, 8, 1), *(Block() for _ in range(layers))), {"x": X.shape})


def by_layers() -> onnx.ModelProto:
    layers = (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)) for _ in range(3))
    return export(nn.Sequential(*layers), {"x": X.shape})


NETWORKS = {
    "group norm, SiLU": (lambda: blocks(lambda: nn.GroupNorm(4, 8), F.silu), {"InstanceNormalization", "Sigmoid"}),
    "as exporters write it": (lambda: blocks(GroupNorm, F.silu), {"InstanceNormalization", "Sigmoid"}),
    "layer norm, GELU": (by_layers, {"LayerNormalization"}),
}


def lowered(step: gg.Step, monkeypatch: pytest.MonkeyPatch, least: float) -> onnx.ModelProto:
    monkeypatch.setattr(cheap_recomputation, "LEAST", 1)
    monkeypatch.setattr(cheap_recomputation, "LEAST_OF_ALL", least)
    return for_machine(step.train, ORT_CPU)


def copies(model: onnx.ModelProto) -> Counter[str]:
    """The operators that are computed again."""
    names = (n for n in model.graph.node if n.name.startswith("again/") and not n.name.startswith("again/turn"))
    return Counter(node.op_type for node in names if "After" not in node.name)


@pytest.mark.sweep(0.34)
@pytest.mark.parametrize("name", NETWORKS)
def test_less_is_kept_and_bits_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected = NETWORKS[name]
    step = gg.build(make(), "mse", gg.optim.sgd(0.05))
    every, few = lowered(step, monkeypatch, np.inf), lowered(step, monkeypatch, 1)
    assert not copies(every) and expected <= set(copies(few))
    activations = [walked(model).peak["activations"] for model in (every, few)]
    assert activations[1] < 0.8 * activations[0]
    state = run(step.init)
    feeds = feeds_of(step.train, {"x": X, "target": X}, state)
    for name, value in run(every, feeds).items():
        np.testing.assert_array_equal(run(few, feeds)[name], value, err_msg=name)


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kernels", [False, None], ids=["stock", "native, where they are"])
def test_a_trainer_learns_the_same(name: str, kernels: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "off")  # which knows nothing of what is patched here
    step = gg.build(NETWORKS[name][0](), "mse", gg.optim.adamw(1e-2))
    monkeypatch.setattr(cheap_recomputation, "LEAST", 1)
    found = []
    for least in (np.inf, 1):
        monkeypatch.setattr(cheap_recomputation, "LEAST_OF_ALL", least)
        trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(threads=1, native_kernels=kernels))
        found.append([float(trainer.step({"x": X, "target": X})["loss"]) for _ in range(4)])
    np.testing.assert_allclose(found[1], found[0], rtol=0 if kernels is False else 1e-6)


def test_what_is_kept_and_what_is_not() -> None:
    """Not a sum of many residuals, what a body or the caller reads, or what follows from what is not kept; nor a view
    of what is kept, what follows from numbers alone, or what is small, from which others follow as from what is kept.
    """
    steps = "\n".join(f"s{i + 1} = Mul (s{i}, a)" for i in range(cheap_recomputation.MOST_NODES + 1))
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        step (float[1024, 1024] a, float[1024, 1] b, bool c)
        => (float[1024, 1024] out, float[1024, 1024] g, float[1024, 1024] l) {{
            s0 = Sigmoid (a)
            {steps}
            product = MatMul (a, a)
            far = Neg (product)
            out = Exp (a)
            inner = Sin (a)
            one = Add (s0, s1)
            l = If (c) <then_branch = yes () => (float[1024, 1024] p) {{ p = Neg (inner) }},
                        else_branch = no () => (float[1024, 1024] q) {{ q = Abs (inner) }}>
            view = Reshape (a, flat)
            other = Neg (numbers)
            small = Neg (b)
            wide = Add (small, a)
            again = Reshape (view, sizes)
            d = Sum (other, small, wide, again, s0, s{cheap_recomputation.MOST_NODES + 1}, far, out, inner)
            g = Add (d, one)
        }}""")
    numbers = {"numbers": X.repeat(2048).reshape(1024, -1)[:, :1024], "flat": np.array([-1]), "sizes": [1024, 1024]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(a), name) for name, a in numbers.items())
    graph = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph
    for node in graph:
        node.name = (
            f"grad/{node.outputs[0].name}" if node.outputs[0].name in ("again", "d", "g", "l") else node.outputs[0].name
        )
    ways = {
        y.name: [node.outputs[0].name for node in nodes] for y, nodes in cheap_recomputation.Kept(graph).again.items()
    }
    assert ways == {"s0": ["s0"], "one": ["s0", "s1", "one"], "wide": ["wide"]}


def test_copies_wait_for_a_float_that_has_numbers() -> None:
    """An empty gradient has no element to wait for; of integers there is none."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]> step (float[4] a, float[0] b) => (int64[1] g, float[4] y)
        { f = Neg (a) e = Neg (b) t = Cast <to = 7> (f) g = ReduceMax (t) y = Exp (a) }""")
    graph = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph
    for node in graph:
        node.name = f"grad/{node.outputs[0].name}"
    kept = cheap_recomputation.Kept(graph)
    turns = [None if y is None else y.name for y in cheap_recomputation._turns(kept)]
    assert set(turns) == {None, "f"}


UNARY, BINARY = ("Sin", "Cos", "Tanh", "Sigmoid", "Neg", "Identity"), ("Add", "Mul", "Sub")


def drawn(seed: int) -> onnx.ModelProto:
    """A forward pass of cheap functions and products, and gradients that read it and each other."""
    draw = random.Random(seed)
    nodes, forward, late = list[str](), ["a", "b"], list[str]()
    for i in range(draw.randint(4, 12)):
        operator = draw.choice(["MatMul", *UNARY, *BINARY])
        others = {"MatMul": ["square"], **{name: [draw.choice(forward)] for name in BINARY}}.get(operator, [])
        nodes.append(f"f{i} = {operator} ({', '.join([draw.choice(forward), *others])})")
        forward.append(f"f{i}")
    for i in range(draw.randint(3, 12)):
        first = draw.choice(late if late and draw.random() < 0.6 else forward)
        nodes.append(f"g{i} = {draw.choice(BINARY)} ({first}, {draw.choice(forward)})")
        late.append(f"g{i}")
    read = {word for node in nodes for word in re.findall(r"\w+", node.rpartition("(")[2])}
    results = ", ".join(f"float[4, 4] {y}" for y in (*forward[2:], *late) if y not in read)
    text = "\n".join(nodes)
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        step (float[4, 4] a, float[4, 4] b, float[4, 4] square) => ({results}) {{ {text} }}""")
    for node in model.graph.node:
        y = node.output[0]
        node.name = f"grad/{y}" if y in late else y
    return onnx.shape_inference.infer_shapes(model)


def test_drawn_graphs_have_no_circle_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cheap_recomputation, "LEAST", 1)
    monkeypatch.setattr(cheap_recomputation, "LEAST_OF_ALL", 1)
    rng, changed = np.random.default_rng(0), 0
    feeds = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in ("a", "b", "square")}
    for seed in range(60):
        plain = drawn(seed)
        work = onnx_ir.from_proto(plain)
        changed += cheap_recomputation.recompute_cheap_values(work)
        write_orders(work)
        work.opset_imports.pop(DOMAIN, None)
        found, expected = run(onnx_ir.to_proto(work), feeds), run(plain, feeds)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=f"{seed} {name}")
    assert changed > 20


def test_nothing_runs_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that nothing waits for would be computed before all updates, and the whole backward pass with it."""
    monkeypatch.setattr(cheap_recomputation, "LEAST", 1)
    monkeypatch.setattr(cheap_recomputation, "LEAST_OF_ALL", 1)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        step (float[64] x) => (float[64] loss, float[64] out) {
            a = Sigmoid (x)
            b = Neg (a)
            loss = Exp (b)
            first = Sin (x)
            second = Mul (first, a)
            third = Mul (second, b)
            out = Mul (third, x)
        }""")
    work = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))
    for i, node in enumerate(work.graph):
        node.name = f"{'forward' if i < 3 else 'grad'}/{node.outputs[0].name}"
    assert cheap_recomputation.recompute_cheap_values(work)
    found = onnx_ir.to_proto(write_orders(work))
    assert copies(found).keys() == {"Sigmoid", "Neg"}
    read = {x for node in found.graph.node for x in node.input} | {"loss", "out"}
    assert all(read.intersection(node.output) for node in found.graph.node)
    results = [run(each, {"x": X.reshape(-1)[:64]})["out"] for each in (found, model)]
    np.testing.assert_array_equal(*results)
