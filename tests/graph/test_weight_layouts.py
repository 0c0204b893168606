"""Layouts of weights: operators say them, they are found before a backward pass, and all who ask get one answer.

The same network with its matrices lying another way must train to the same weights, whatever optimizer trains it and
whatever is around that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.graph.weight_layouts import layout_of
from gradgraph.optim.weight_groups import layers
from tests.kit.small_models import real

HEADER = '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 6] x) => (float[n, 4] y)'
WRITTEN = {  # of the first matrix, with how the weight is turned; the second one is square
    "MatMul": ("{ a = MatMul(x, first_w) h = Tanh(a) b = MatMul(h, second_w) t = Tanh(b) y = MatMul(t, third_w) }",
               False),
    "Gemm": ("{ a = Gemm<transB = 1>(x, first_w) h = Tanh(a) b = Gemm<transB = 1>(h, second_w) t = Tanh(b) "
             "y = Gemm<transB = 1>(t, third_w) }", True),
    "turned": ("{ u = Transpose(first_w) v = Transpose(second_w) w = Transpose(third_w) a = MatMul(x, u) h = Tanh(a) "
               "b = MatMul(h, v) t = Tanh(b) y = MatMul(t, w) }", True),
    "Einsum": ('{ a = Einsum<equation = "nk,ok->no">(x, first_w) h = Tanh(a) '
               'b = Einsum<equation = "nk,ok->no">(h, second_w) t = Tanh(b) '
               'y = Einsum<equation = "nk,ok->no">(t, third_w) }', True),
}  # fmt: skip
WEIGHTS = {"first_w": real(6, 8), "second_w": real(8, 8), "third_w": real(8, 4)}
BATCH = {"x": real(16, 6), "target": 30 * real(16, 4)}


def network(written: str, dtype: type = np.float32) -> onnx.ModelProto:
    """``tanh(tanh(x·first)·second)·third``, of matrices as ``written``."""
    text, is_turned = WRITTEN[written]
    header = HEADER if dtype is np.float32 else HEADER.replace("float", "float16")
    model = onnx.parser.parse_model(f"{header} {text}")
    arrays = {n: np.ascontiguousarray(w.T if is_turned else w, dtype) for n, w in WEIGHTS.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


def trained(written: str, optimizer: optim.Optimizer, dtype: type = np.float32, **options: Any) -> dict[str, Any]:
    """The matrices after three steps, all as a MatMul reads them."""
    trainer = gg.Trainer(gg.build(network(written, dtype), "mse", optimizer, **options), device="cpu")
    for _ in range(3):
        trainer.step({n: a.astype(dtype) for n, a in BATCH.items()})
    found = {n: w for n, w in trainer.state_dict().items() if n in WEIGHTS}
    return {n: w.T if WRITTEN[written][1] else w for n, w in found.items()}


Wrap = Callable[[optim.Optimizer], optim.Optimizer]
AROUND: dict[str, tuple[Wrap, dict[str, Any]]] = {
    "nothing": (lambda o: o, {}),
    "sam": (lambda o: optim.sam(o, 0.01), {}),
    "adaptive sam": (lambda o: optim.sam(o, 0.01, adaptive=True), {}),
    "lookahead": (lambda o: optim.lookahead(o, 2), {}),
    "ema": (lambda o: o if any(t.averages for t in o.transforms) else optim.ema(o, 0.9), {}),
    "sam and accumulation": (optim.sam, {"accumulate": True}),
    "accumulation": (lambda o: o, {"accumulate": True}),
    "recomputation": (lambda o: o, {"recompute": "sqrt"}),
    "sam and recomputation": (optim.sam, {"recompute": "sqrt"}),
    "pruning": (lambda o: optim.magnitude_pruning(o, "2:4"), {}),
    "sam and pruning": (lambda o: optim.magnitude_pruning(optim.sam(o), "2:4"), {}),
    "separate": (lambda o: o, {"separate": True}),
    "bfloat16": (lambda o: o, {"precision": "bfloat16"}),
    "frozen": (lambda o: o, {"freeze": "third_w"}),
    "norm of gradients": (lambda o: o, {"grad_norm": True}),
}
NAMES = ("sgd", "adamw", "muon", "adafactor", "lamb", "lars", "lion", "schedule_free_adamw", "schedule_free_sgd")
ASKING: dict[str, Callable[[], optim.Optimizer]] = {
    **{name: lambda name=name: optim.by_name(name) for name in NAMES},
    "clipped by unit": lambda: optim.chain(optim.clip_by_unit_norm(0.01), optim.sgd(1.0)),
    "clipped schedule-free": lambda: optim.chain(optim.clip_by_unit_norm(0.01), optim.schedule_free_sgd(1.0)),
    "muon by rms": lambda: optim.muon(0.02, adjust_lr_fn="match_rms_adamw"),
    "layers decay": lambda: optim.muon(0.02, layer_decay=0.5),
    "groups": lambda: optim.chain(optim.clip_by_unit_norm(0.01), optim.muon(0.1, groups={"second*": optim.sgd(1.0)})),
}


@pytest.mark.sweep(0.006)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("written", [name for name in WRITTEN if name != "MatMul"])
def test_the_way_a_matrix_lies_changes_nothing(written: str, asking: str, around: str) -> None:
    wrap, options = AROUND[around]
    found, wanted = (trained(kind, wrap(ASKING[asking]()), **options) for kind in (written, "MatMul"))
    rtol = 1e-2 if around == "bfloat16" or "muon" in asking or asking in ("layers decay", "groups") else 1e-3
    for name, array in wanted.items():
        assert (array != WEIGHTS[name]).any()
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.sweep(0.12)
@pytest.mark.parametrize("asking", ["clipped by unit", "muon"])
@pytest.mark.parametrize("written", [name for name in WRITTEN if name != "MatMul"])
def test_float32_copies_lie_as_their_weights(written: str, asking: str) -> None:
    optimizer = ASKING[asking]()
    found, wanted = (trained(kind, optim.master_weights(optimizer), np.float16) for kind in (written, "MatMul"))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name].astype(float), array.astype(float), rtol=1e-2, atol=1e-2, err_msg=name)


@pytest.mark.sweep(0.22)
@pytest.mark.parametrize("around", ["nothing", "sam", "adaptive sam", "recomputation", "separate", "accumulation"])
@pytest.mark.parametrize("written", WRITTEN)
def test_each_unit_is_clipped_by_itself(written: str, around: str) -> None:
    """The loss is steep, so each column of what a MatMul reads moves as far as it may."""
    wrap, options = AROUND[around]
    optimizer = wrap(optim.chain(optim.clip_by_unit_norm(1e-3), optim.sgd(1.0)))
    trainer = gg.Trainer(gg.build(network(written), "mse", optimizer, **options), device="cpu")
    trainer.step(BATCH)
    for name, before in WEIGHTS.items():
        after = trainer.state_dict()[name]
        moved = np.linalg.norm((after.T if WRITTEN[written][1] else after) - before, axis=0)
        np.testing.assert_allclose(moved, 1e-3 * np.linalg.norm(before, axis=0), rtol=2e-2)


def test_a_loss_with_a_gradient_in_it_changes_no_layout() -> None:
    """Which reads the weights once more, the other way round."""

    def loss(out: Any, batch: Any) -> Any:
        slope = gg.frontend.grad(out["y"].sum(), out["x"])
        return ((out["y"] - batch["target"]) ** 2).mean() + 1e-3 * (slope**2).mean()

    found = {}
    for written in ("MatMul", "Gemm"):
        targets = {"target": gg.frontend.Input(("n", 4))}
        step = gg.build(network(written), loss, ASKING["clipped by unit"](), targets=targets)
        trainer = gg.Trainer(step, device="cpu")
        trainer.step(BATCH)
        found[written] = {n: trainer.state_dict()[n] for n in WEIGHTS}
    for name, array in found["MatMul"].items():
        np.testing.assert_allclose(found["Gemm"][name].T, array, rtol=1e-4, atol=1e-6)


READ = {  # text, sizes of w -> outputs, inputs
    "y = MatMul(x, w)": ((3, 4), (1,), 0),
    "y = MatMul(w, x)": ((3, 4), (0,), 1),
    "y = MatMul (x, w)": ((2, 3, 4), (0, 2), 1),
    "y = Gemm(x, w)": ((3, 4), (1,), 0),
    "y = Gemm<transB = 1>(x, w)": ((3, 4), (0,), 1),
    "y = Gemm<transA = 1>(w, x)": ((3, 4), (1,), 0),
    "t = Transpose(w) y = Gemm<transB = 1>(x, t)": ((3, 4), (1,), 0),
    "t = Transpose(w) c = Cast<to = 1>(t) y = MatMul(x, c)": ((3, 4), (0,), 1),
    "y = Conv(x, w)": ((3, 4, 2, 2), (0,), 1),
    "y = ConvTranspose(x, w)": ((3, 4, 2, 2), (1,), 0),
    "y = ConvTranspose<group = 3>(x, w)": ((3, 4, 2, 2), (0, 1), None),
    "y = Gather(w, x)": ((3, 4), (0,), None),
    "y = LSTM(x, w, w)": ((1, 8, 2), (0, 1), 2),
    'y = Einsum<equation = "bd,dhk->bhk">(x, w)': ((3, 4, 5), (1, 2), 0),
    "y = Add(x, w)": ((3, 4), (0,), None),
    "y = Mul(x, w)": ((3,), (), None),
    "a = Gather(w, x) t = Transpose(w) y = MatMul(a, t)": ((3, 4), (0,), None),  # of tied ones, the first
}


@pytest.mark.parametrize("text", READ)
def test_operators_say_how_a_weight_lies(text: str) -> None:
    sizes, outputs, inputs = READ[text]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g (float x) => (float y) {{ {text} }}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(sizes, np.float32), "w"))
    graph = ir.from_proto(model).graph
    found = layout_of(graph.initializers["w"])
    assert (found.outputs, found.inputs) == (outputs, inputs)
    assert layers(graph, [graph.initializers["w"]]) == {"w": 0}
    assert found.summed(len(sizes)) == [axis for axis in range(len(sizes)) if axis not in outputs]
