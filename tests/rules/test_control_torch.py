"""Loops written by hand against PyTorch's autograd on the same loop in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from tests.kit.running import run

torch = pytest.importorskip("torch", reason="PyTorch is the reference here")
pytestmark = pytest.mark.torch

Tensors = dict[str, Any]
Feeds = dict[str, np.ndarray]


def numbers(**shapes: tuple[int, ...]) -> Feeds:
    rng = np.random.default_rng(0)
    return {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}


# a gated recurrence that stops as soon as its state is large; W and U are read in every iteration
RECURRENCE = """
steps = Shape <start = 0, end = 1> (x)
zero = Constant <value_ints = [0]> ()
n = Squeeze(steps, zero)
h, rows = Loop <body = b (int64 i, bool c, float[B, 4] s) => (bool d, float[B, 4] t, float[B, 4] row) {
    xi = Gather(x, i)
    a = MatMul(xi, W)
    b = MatMul(s, U)
    z = Add(a, b)
    g = Sigmoid(z)
    k = Tanh(b)
    m = Mul(g, k)
    t = Add(s, m)
    row = Mul(t, g)
    e = ReduceMax <keepdims = 0> (t)
    d = Less(e, limit)
}> (n, , h0)
p = ReduceSum <keepdims = 0> (h)
q = ReduceSumSquare <keepdims = 0> (rows)
loss = Add(p, q)
"""


def recurrence(t: Tensors) -> Any:
    s, rows = t["h0"], []
    for xi in t["x"]:
        b = s @ t["U"]
        g = torch.sigmoid(xi @ t["W"] + b)
        s = s + g * torch.tanh(b)
        rows.append(s * g)
        if s.max() >= t["limit"]:
            break
    return s.sum() + (torch.stack(rows) ** 2).sum()


# Newton's iteration for the square root of x until it no longer moves
NEWTON = """
one = Constant <value_int = 1> ()
yes = Cast <to = 9> (one)
h = Loop <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) {
    r = Div(x, s)  u = Add(s, r)  t = Mul(u, half)
    v = Sub(t, s)  w = Abs(v)  e = ReduceMax <keepdims = 0> (w)  d = Greater(e, limit)
}> ( , yes, h0)
loss = ReduceProd <keepdims = 0> (h)
"""


def newton(t: Tensors) -> Any:
    s, moved = t["h0"], True
    while moved:
        new = (s + t["x"] / s) * t["half"]
        moved, s = bool((new - s).abs().max() > t["limit"]), new
    return s.prod()


# a list grows by what a branch makes of each row, and is joined
LIST = """
steps = Shape <start = 0, end = 1> (x)
zero = Constant <value_ints = [0]> ()
n = Squeeze(steps, zero)
start = SequenceEmpty()
items = Loop <body = b (int64 i, bool c, seq(float[]) s) => (bool d, seq(float[]) t) {
    xi = Gather(x, i)
    sum = ReduceSum <keepdims = 0> (xi)
    up = Greater(sum, limit)
    y = If (up) <
        then_branch = p () => (float[] p0) { p0 = MatMul(xi, W) },
        else_branch = q () => (float[] q0) { q1 = MatMul(xi, W) q2 = Exp(q1) q0 = Concat <axis = 0> (q2, h0) }
    >
    t = SequenceInsert(s, y)
    d = Identity(c)
}> (n, , start)
all = ConcatFromSequence <axis = 0> (items)
loss = ReduceLogSumExp <keepdims = 0> (all)
"""


def growing_list(t: Tensors) -> Any:
    items = []
    for xi in t["x"]:
        y = xi @ t["W"]
        items.append(y if xi.sum() > t["limit"] else torch.cat([torch.exp(y), t["h0"]]))
    return torch.logsumexp(torch.cat(items), 0)


LIMIT = "<float limit = {0.4}, float half = {0.5}>"
CASES: dict[str, tuple[str, Callable[[Tensors], Any], Feeds]] = {
    "recurrence": (RECURRENCE, recurrence, numbers(x=(9, 3, 2), W=(2, 4), U=(4, 4), h0=(3, 4))),
    "recurrence that stops at once": (
        RECURRENCE,
        recurrence,
        {**numbers(x=(9, 3, 2), W=(2, 4), U=(4, 4)), "h0": np.ones((3, 4), np.float32)},
    ),
    "recurrence of one step": (RECURRENCE, recurrence, numbers(x=(1, 1, 2), W=(2, 4), U=(4, 4), h0=(1, 4))),
    "newton": (NEWTON, newton, {"x": np.array([2, 9], np.float32), "h0": np.array([1, 40], np.float32)}),
    "list": (LIST, growing_list, numbers(x=(7, 3), W=(3, 2), h0=(2,))),
}


def tensors(feeds: Feeds) -> Tensors:
    limits = {"limit": torch.tensor(0.4, dtype=torch.float64), "half": 0.5}
    return limits | {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in feeds.items()}


@pytest.mark.parametrize("open_sizes", [False, True], ids=["sizes known", "sizes open"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_loops(name: str, open_sizes: bool) -> None:
    text, in_torch, feeds = CASES[name]
    inputs = ", ".join(
        f"float[{','.join(f'{k}{i}' if open_sizes else str(d) for i, d in enumerate(v.shape))}] {k}"
        for k, v in feeds.items()
    )
    m = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float loss) {LIMIT} {{ {text} }}'
    )
    result = gg.value_and_grad(m, output="loss", wrt=list(feeds))
    assert isinstance(result, onnx.ModelProto)
    got = run(result, feeds)
    exact = tensors(feeds)
    loss = in_torch(exact)
    loss.backward()
    np.testing.assert_allclose(got["loss"], loss.item(), rtol=1e-5)
    for k in feeds:
        np.testing.assert_allclose(got[f"{k}.grad"], exact[k].grad, rtol=1e-4, atol=1e-5, err_msg=k)


class Gated(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        y = torch.cond(x.sum() > 0, lambda v: self.a(v).tanh(), lambda v: self.b(v) * v, (x,))
        return (y * y).sum()


@pytest.mark.filterwarnings("ignore")  # the exporter's own
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_exported_branch(sign: float) -> None:
    pytest.importorskip("onnxscript", reason="PyTorch's exporter needs it")
    torch.manual_seed(0)
    net, x = Gated().eval(), sign * torch.rand(2, 3)
    program = torch.onnx.export(net, (x,), dynamo=True, optimize=False, verbose=False)
    m = program.model_proto
    assert "If" in {n.op_type for n in m.graph.node}
    wrt = [name for name, _ in net.named_parameters()]
    result = gg.value_and_grad(m, wrt=wrt)
    assert isinstance(result, onnx.ModelProto)
    got = run(result, {m.graph.input[0].name: x.numpy()})
    net(x).backward()
    for name, p in net.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        np.testing.assert_allclose(got[f"{name}.grad"], expected, rtol=1e-4, atol=1e-6, err_msg=name)
