"""Recomputation: the same bits with less memory, and what cannot be had refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.backends.ort_cpu.blocked import cheapest_layout
from gradgraph.building.pipeline import build
from gradgraph.errors import ArgumentError, BuildError, UnknownNameError
from gradgraph.frontend import Input, export, nn
from gradgraph.frontend import functional as F
from gradgraph.step.origins import Origins
from tests.kit.running import Loop, run

RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((8, 16)).astype(np.float32)
IMAGES = RNG.standard_normal((4, 3, 12, 12)).astype(np.float32)
TOKENS = RNG.integers(0, 20, (4, 6))


def dense(layers: int = 4, **dims: Any) -> onnx.ModelProto:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.25)) for _ in range(layers)]
    return export(nn.Sequential(*blocks, nn.Linear(16, 5)), {"x": (dims.get("batch", "batch"), 16)})


def convolutional() -> onnx.ModelProto:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 1)
            self.norm, self.after = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

        def forward(self, x: Any) -> Any:
            return (x + self.after(self.b(self.norm(self.a(x)).relu()))).relu()

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return export(nn.Sequential(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), *(Block() for _ in range(3)), head),
                  {"x": ("batch", 3, 12, 12)})  # fmt: skip


def attending(approximate: str = "none", dropout: float = 0.0, by_hand: bool = False) -> onnx.ModelProto:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.RMSNorm(16)
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
            self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            q, k, v = (self.qkv(self.ln_1(x)).reshape(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4)[i] for i in range(3))
            if by_hand:
                y = F.softmax((q @ k.transpose(-2, -1)) / 2.5, -1) @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
            x = x + self.drop(self.proj(y.permute(0, 2, 1, 3).reshape(b, t, 16)))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate=approximate))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.blocks = nn.Embedding(20, 16), nn.Sequential(*(Block() for _ in range(3)))
            self.head = nn.Linear(16, 20)

        def forward(self, ids: Any) -> Any:
            return self.head(self.blocks(self.tokens(ids))).reshape(-1, 20)

    return export(Model(), {"ids": Input(("batch", "time"), "int64")})


CONTROL = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 4] x) => (float[batch, 4] y)
<float[4, 4] w1 = {0.1, 0.2, -0.3, 0.4, 0.5, -0.1, 0.2, 0.3, 0.1, 0.1, -0.2, 0.3, 0.4, 0.2, 0.1, 0.0},
 float[4, 4] w2 = {0.3, 0.1, -0.2, 0.1, 0.2, -0.4, 0.1, 0.3, 0.2, 0.1, -0.1, 0.2, 0.1, 0.3, 0.5, 0.1}, int64 n = {3}>
{
    a = MatMul(x, w1)
    b = Tanh(a)
    cond = Constant<value = bool {1}>()
    c = Loop(n, cond, b) <body = turn (int64 i, bool go, float[batch, 4] s) => (bool on, float[batch, 4] t) {
        on = Identity(go)
        u = MatMul(s, w1)
        v = Sin(u)
        t = Add(v, b)
    }>
    zero = Constant<value = float {0.0}>()
    sum = ReduceSum<keepdims = 0>(c)
    positive = Greater(sum, zero)
    d = If(positive) <then_branch = yes () => (float[batch, 4] p) { p = Mul(c, b) },
                      else_branch = no () => (float[batch, 4] q) { q = Sub(c, b) }>
    e = MatMul(d, w2)
    f = Sigmoid(e)
    y = MatMul(f, w2)
}""")

SGD = gg.optim.sgd(gg.optim.constant(0.1), momentum=0.5)
PLAIN = gg.optim.sgd(gg.optim.constant(0.1))
ADAMW = gg.optim.adamw(1e-2)
CLIPPED = gg.optim.chain(gg.optim.clip_by_global_norm(1.0), gg.optim.adamw(1e-2))
VECTOR_BATCH = {"x": VECTORS, "target": RNG.integers(0, 5, 8)}
TOKEN_BATCH = {"ids": TOKENS, "target": RNG.integers(0, 20, 24)}


def two_losses(out: Any, batch: Any) -> dict[str, Any]:
    logits = next(iter(out.values()))
    return {"far": F.cross_entropy(logits, batch["target"]), "near": 0.5 * (logits**2).mean()}


CASES: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any], dict[str, Any]]] = {
    "dense": (dense, VECTOR_BATCH, {}),
    "updates in products": (dense, VECTOR_BATCH, {"optimizer": PLAIN}),
    "clipped": (dense, VECTOR_BATCH, {"optimizer": CLIPPED}),
    "updates of several outputs": (dense, VECTOR_BATCH, {"optimizer": ADAMW}),
    "two passes": (dense, VECTOR_BATCH, {"optimizer": gg.optim.sam(SGD, 0.05)}),
    "averaged": (dense, VECTOR_BATCH, {"ema": 0.9, "grad_norm": True}),
    "accumulated": (dense, VECTOR_BATCH, {"accumulate": True}),
    "named": (dense, VECTOR_BATCH, {"recompute": ["0.1/*", "2.1/*"]}),
    "convolutional": (convolutional, {"x": IMAGES, "target": RNG.integers(0, 5, 4)}, {}),
    "attending": (attending, TOKEN_BATCH, {}),
    "attending, tanh": (lambda: attending("tanh"), TOKEN_BATCH, {}),
    "weights of attentions": (attending, TOKEN_BATCH, {"recompute": "attention"}),
    "with dropout": (lambda: attending(dropout=0.3), TOKEN_BATCH, {"recompute": "attention"}),
    "scaled scores": (lambda: attending(by_hand=True), TOKEN_BATCH, {"recompute": "attention"}),
    "in halves": (attending, TOKEN_BATCH, {"recompute": "attention", "precision": "bfloat16"}),
    "halves": (attending, TOKEN_BATCH, {"precision": "float16"}),
    "portable": (attending, TOKEN_BATCH, {"backend": "portable"}),
    "loops": (lambda: CONTROL, {"x": VECTORS[:, :4], "target": VECTORS[:, 4:8]}, {"loss": "mse", "recompute": "e"}),
    "two losses": (dense, VECTOR_BATCH, {"loss": two_losses, "targets": {"target": Input(("batch",), "int64")}}),
}


def assert_same_bits(expected: gg.Step, found: gg.Step, batch: dict[str, Any], steps: int = 2) -> None:
    """Both train alike, as they are saved, in onnxruntime with its own options."""
    first, second = Loop(expected), Loop(found)
    for _ in range(steps):
        results = first(batch), second(batch)
        for name in results[0]:
            np.testing.assert_array_equal(results[1][name], results[0][name], err_msg=name)
    for name, value in first.state.items():
        np.testing.assert_array_equal(second.state[name], value, err_msg=name)


def copies(model: onnx.ModelProto) -> list[str]:
    """The operators that are computed again."""
    own = {node.name for node in model.graph.node}
    return [node.op_type for node in model.graph.node if node.name.startswith("again/")
            and re.sub(r"_\d+$", "", node.name.removeprefix("again/")) in own]  # fmt: skip


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str) -> None:
    make, batch, options = CASES[name]
    model, options = make(), {"optimizer": SGD} | options
    keep = options.pop("recompute", "sqrt")
    step = build(model, **options, recompute=keep)
    assert len(copies(step.train)) >= 3
    read = {x for node in step.train.graph.node for x in node.input} | {o.name for o in step.train.graph.output}
    unread = [n.name for n in step.train.graph.node if n.name.startswith("again/") and n.output[0] not in read]
    assert not unread  # which onnxruntime would hold to the end
    assert_same_bits(build(model, **options), step, batch)


@pytest.mark.parametrize("backend", ["portable", "auto", "ort-cpu"])
@pytest.mark.parametrize("transform", [gg.value_and_grad, gg.vjp])
def test_transforms(transform: Any, backend: str) -> None:
    model = dense()
    (logits,) = model.graph.output
    model.graph.node.append(onnx.helper.make_node("ReduceMean", [logits.name], ["loss"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    options = {"output": "loss"} if transform is gg.value_and_grad else {"outputs": "loss"}
    feeds = VECTOR_BATCH | {"loss.cotangent": np.array(2, np.float32)}
    found = [transform(model, backend=backend, recompute=keep, **options) for keep in (None, "sqrt")]
    assert len(found[1].graph.node) > len(found[0].graph.node)
    results = [run(m, {i.name: feeds[i.name] for i in m.graph.input if i.name in feeds}) for m in found]
    for name, value in results[0].items():
        np.testing.assert_array_equal(results[1][name], value, err_msg=name)


def test_a_named_value_is_kept_and_what_lies_before_it_is_not() -> None:
    model = dense()
    names = [node.output[0] for node in model.graph.node if node.op_type == "Gelu"]
    step = build(model, optimizer=SGD, recompute=names[1])
    again = [node.output[0] for node in step.train.graph.node if node.name.startswith("again/")]
    assert any(f"again/{names[0]}" in name for name in again)
    assert not any(f"again/{name}" in other for name in names[2:] for other in again)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"by_hand": True}], ids=str)
def test_of_attentions_only_what_leads_to_their_weights(options: dict[str, Any]) -> None:
    """One product and one Softmax for each of three, and neither queries nor keys."""
    step = build(attending(**options), optimizer=SGD, recompute="attention")
    again = copies(step.train)
    assert (again.count("MatMul"), again.count("Softmax")) == (3, 3)
    assert {"Gemm", "LayerNormalization", "Gelu"}.isdisjoint(again)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize(
    ("make", "batch", "keep"),
    [
        (convolutional, CASES["convolutional"][1], "sqrt"),
        (attending, TOKEN_BATCH, "sqrt"),
        (attending, TOKEN_BATCH, "attention"),
        (lambda: attending(dropout=0.3), TOKEN_BATCH, "attention"),
    ],
)
def test_in_a_trainer(
    make: Callable[[], onnx.ModelProto], batch: dict[str, Any], keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forms of this machine compute copies as they compute the first ones, where they are the same forms.

    Which nodes between convolutions stay in blocks of channels depends on the whole graph, and on how long a block is
    on this processor; so bits are compared without.
    """
    gg.frontend.manual_seed(0)
    model = make()
    steps = [build(model, optimizer=SGD, recompute=kept) for kept in (None, keep)]
    rounding = 0.0 if keep == "attention" else 1e-4  # native kernels compute several operators in one pass
    in_blocks = cheapest_layout._cheapest
    for kernels, layout, tolerance in (
        (False, lambda forms: set(), 0.0),
        (False, in_blocks, rounding),
        (None, in_blocks, rounding),
    ):
        monkeypatch.setattr(cheapest_layout, "_cheapest", layout)
        options = gg.RuntimeOptions(native_kernels=kernels)
        trainers = [gg.Trainer(step, device="cpu", options=options) for step in steps]
        for _ in range(2):
            results = [trainer.step(batch) for trainer in trainers]
            np.testing.assert_allclose(results[1]["loss"], results[0]["loss"], rtol=tolerance / 10)
        first, second = (trainer.state_dict() for trainer in trainers)
        for name, value in first.items():
            if tolerance and ".b.bias" in name:  # the norm behind it cancels it, so its gradient is rounding alone
                continue
            np.testing.assert_allclose(second[name], value, rtol=tolerance, atol=tolerance / 1000, err_msg=name)


@pytest.mark.parametrize(("optimizer", "update"), [(ADAMW, "AdamUpdate"), (SGD, "MomentumUpdate")])
def test_gradients_are_freed_after_their_updates(optimizer: gg.optim.Optimizer, update: str) -> None:
    """Copies wait for the next moments, so that no gradient has to stay in memory until they begin."""
    nodes = build(dense(), optimizer=optimizer, recompute="sqrt").train.graph.node
    updates = [node for node in nodes if node.op_type.startswith(update)]
    readers = {x: [n.op_type for n in nodes if x in n.input] for u in updates for x in (u.input[1], u.output[-1])}
    assert len(updates) == 10
    assert all(readers[u.input[1]] == [u.op_type] for u in updates)
    assert any(readers[u.output[-1]] for u in updates)


def test_statistics_move_once() -> None:
    model = convolutional()
    first, second = (Loop(build(model, optimizer=SGD, recompute=keep)) for keep in (None, "sqrt"))
    batch = CASES["convolutional"][1]
    first(batch), second(batch)
    moved = [s.name for s in first.step.manifest.state if s.kind == "statistic"]
    assert moved
    for name in moved:
        np.testing.assert_array_equal(first.state[name], second.state[name], err_msg=name)


@pytest.mark.parametrize(
    ("keep", "error", "words"),
    [
        ("nowhere*", UnknownNameError, "matches no value of the forward pass"),
        ("x", UnknownNameError, "is an input or a weight"),
        ("u", BuildError, "is in the body of an If, Loop or Scan"),
        ("attention", BuildError, "no Softmax between two products"),
        ("2MB", BuildError, r"gradgraph.Recompute\(2000000, batch=32\)"),
        ("2kB batch=64", BuildError, "needs at least .* kB"),
        ("2MB lots=4", UnknownNameError, "no input has a dimension called 'lots'"),
        (0, ArgumentError, "it should be 'sqrt'"),
        (1.5, ArgumentError, "it should be 'sqrt'"),
        ([], ArgumentError, "it should be 'sqrt'"),
    ],
)
def test_refused(keep: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(CONTROL, "mse", SGD, recompute=keep)


@pytest.mark.parametrize("more", [{}, {"precision": "bfloat16"}, {"sample_weight": True}], ids=str)
def test_only_what_the_model_computes_is_offered(more: dict[str, Any]) -> None:
    """Not what a step adds: its loss, its metrics, the inside of operators, numbers of lower precision."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))
    model = export(layers, {"x": ("batch", 8)})
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.op_type, relu.domain, relu.name = "QuickGelu", "com.microsoft", ""
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    values = [y for node in model.graph.node for y in node.output]
    for wrong in ("nothere", "metrics", "zzzz", "Floor", "Mull", "bfloat16"):
        with pytest.raises(UnknownNameError) as raised:
            gg.build(model, "cross_entropy", recompute=wrong, metrics=["accuracy"], **more)
        said = str(raised.value)
        offered = re.findall(r"'([^']*)'\?$", said) or said.partition("; there is ")[2].split(", ")
        assert offered and set(offered) <= set(values)


def test_copies_say_what_they_are_copies_of() -> None:
    step = build(dense(), optimizer=SGD, recompute="sqrt")
    origins = Origins.of_step(step.manifest, step.eval, step.train)
    told = {n.name: origins(n.name) for n in step.train.graph.node if n.name.startswith("again/")}
    assert {o.role for o in told.values()} == {"backward"}
    assert any(o.module.endswith(".0") and o.forward for o in told.values())
    assert not any(o.forward for name, o in told.items() if name.startswith("again/turn/"))


def test_sizes_that_are_made_of_others_need_not_be_said() -> None:
    with pytest.raises(BuildError, match="needs the size of batch, time, which") as raised:
        build(attending(), optimizer=SGD, recompute=10**6)
    assert "batch=32, time=32" in str(raised.value)
    assert build(attending(), optimizer=SGD, recompute="1MB batch=4 time=6").train


@pytest.mark.sweep(0)
def test_bytes() -> None:
    """Less and less is computed again, the more bytes there are; a size says the batch."""
    model = dense(12)
    counts = [len(copies(build(model, optimizer=SGD, recompute=f"{kb}kB batch=256").train)) for kb in (320, 450, 9000)]
    assert counts[0] > counts[1] > counts[2] == 0, counts
    assert len(copies(build(model, optimizer=SGD, recompute=gg.Recompute(320_000, batch=256)).train)) == counts[0]
    assert copies(build(model, optimizer=SGD, recompute=320_000, sizes={"batch": 256}).train)


NORMS = [nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)]
IN_NORMS = [y for node in export(nn.Sequential(*NORMS), {"x": ("batch", 6)}).graph.node[:-1] for y in node.output]


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("name", IN_NORMS)
def test_a_cut_at_every_value(name: str) -> None:
    """Of a norm the result may be kept, and mean and deviation computed again: what is kept has its readers still."""
    model = export(nn.Sequential(*NORMS), {"x": ("batch", 6)})
    rng, states = np.random.default_rng(0), []
    batch = {"x": rng.standard_normal((5, 6)).astype(np.float32), "target": rng.integers(0, 3, 5)}
    for keep in (None, [name]):
        step = gg.build(model, "cross_entropy", gg.optim.sgd(gg.optim.constant(0.1)), recompute=keep)
        trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(native_kernels=False))
        trainer.step(batch)
        trainer.step(batch)
        states.append(trainer.state_dict())
    for key, value in states[0].items():
        np.testing.assert_allclose(states[1][key], value, rtol=1e-5, atol=1e-6, err_msg=key)
