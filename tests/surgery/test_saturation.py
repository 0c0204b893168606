"""int8 weights that gradgraph writes cannot saturate on any processor; by arithmetic, as few processors would show it.

Where x86 has no VNNI, onnxruntime adds up two products of unsigned data and int8 weights in 16 bits, which saturate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend, surgery
from gradgraph.frontend import nn
from tests.surgery.test_integer_model import NETWORKS, ROWS, attention, data, tied
from tests.surgery.test_integer_products import DENSE, IMAGE, Samples, quantised

EVERY = {**NETWORKS, "attention": (attention, (7, 24)), "tied": (tied, (8,))}
SAID = "can saturate in onnxruntime on x86 processors without VNNI"


def worst_sum(model: onnx.ModelProto) -> int:
    """The largest sum of two products of a weight stored as int8, for any unsigned data, in any order of the sum."""
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    numbers = [v.ravel().astype(int) for v in stored.values() if v.dtype == np.int8 and v.ndim > 1]
    assert numbers
    return max(255 * max(np.sort(v)[-2:].sum(), -np.sort(v)[:2].sum()) for v in numbers)


def rows() -> onnx.ModelProto:
    return frontend.export(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), {"x": ("rows", 8)})


def trained(model: onnx.ModelProto) -> onnx.ModelProto:
    """The export after steps that are so large that weights leave the ranges that they began in."""
    trainer = gg.Trainer(gg.build(model, "mse", gg.optim.adam(0.3)), device="cpu")
    target = np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float32)
    trainer.fit({"x": data((8,)), "target": target}, epochs=5, progress=False)
    return trainer.export()


@pytest.mark.parametrize("name", EVERY)
def test_calibrated_exports(name: str) -> None:
    network, shape = EVERY[name]
    small = gg.quantize(network("batch"), {"x": data(shape)})
    assert worst_sum(small.result) < 1 << 15
    assert "weights int8 from -64 to 64, so that no processor saturates" in str(small)


@pytest.mark.sweep(0.6)
@pytest.mark.parametrize("activations", ["uint8", "int8"])
@pytest.mark.parametrize("ranges", ["observed", "learned"])
def test_training_through_the_rounding_and_going_on(ranges: str, activations: str) -> None:
    first = trained(gg.qat(rows(), {"x": data((8,))}, activations=activations, ranges=ranges))
    assert worst_sum(first) < 1 << 15
    for again in ("observed", "learned"):
        assert worst_sum(trained(gg.qat(first, ranges=again))) < 1 << 15
    calibrated = gg.quantize(rows(), {"x": data((8,))}).result
    assert worst_sum(trained(gg.qat(calibrated, ranges=ranges))) < 1 << 15


def test_a_new_head_on_rounded_data() -> None:
    first = gg.quantize(rows(), {"x": data((8,))}).result
    headed = gg.qat(gg.new_head(first, 4), target=["head", "*"])
    assert worst_sum(trained(headed)) < 1 << 15


@pytest.mark.parametrize("activations", [None, "uint16"])
def test_weights_that_multiply_other_data_have_all_8_bits(activations: str | None) -> None:
    model = trained(gg.qat(rows(), {"x": data((8,))}, activations=activations))
    assert worst_sum(model) > 1 << 15


@pytest.mark.parametrize("how", ["static by channel", "static QDQ by channel", "dynamic by channel"])
@pytest.mark.parametrize(("base", "shape"), [(DENSE, (8,)), (IMAGE, (3, 6, 6))], ids=["dense", "images"])
def test_merged_adapters(base: onnx.ModelProto, shape: tuple[int, ...], how: str, tmp_path: Path) -> None:
    adapted = gg.lora(quantised(base, how, data(shape), tmp_path), ["*first*", "*last*"], rank=2)
    rng = np.random.default_rng(0)
    state = {t.name: rng.normal(size=t.dims).astype(np.float32) for t in adapted.graph.initializer if "lora" in t.name}
    assert state
    assert worst_sum(surgery.merge_adapters(adapted, state, requantise=True)) < 1 << 15


def foreign(how: str, reduce_range: bool, folder: Path) -> onnx.ModelProto:
    """A file of onnxruntime's quantiser."""
    from onnxruntime.quantization import QuantFormat, quantize_dynamic, quantize_static

    onnx.save(DENSE, folder / "float.onnx")
    source, target = folder / "float.onnx", folder / "int8.onnx"
    if how == "dynamic":
        quantize_dynamic(source, target, per_channel=True, reduce_range=reduce_range)
    else:
        kind = QuantFormat[how]
        reader = Samples(data((8,)))
        quantize_static(source, target, reader, quant_format=kind, per_channel=True, reduce_range=reduce_range)
    return onnx.load(target)


ROADS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "its weights": gg.qat,
    "its weights and ranges": lambda model: gg.qat(model, ranges="learned"),
    "a new head": lambda model: gg.new_head(model, 3),
    "adapters": lambda model: gg.lora(model, "*", rank=2),
}


@pytest.mark.sweep(0.2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduce_range", [True, False])
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("how", ["QDQ", "QOperator"])
def test_a_file_that_can_saturate_is_said(how: str, road: str, reduce_range: bool, tmp_path: Path, caplog: Any) -> None:
    model = foreign(how, reduce_range, tmp_path)
    assert (worst_sum(model) < 1 << 15) == reduce_range
    changed = ROADS[road](model)
    with caplog.at_level(logging.WARNING, "gradgraph"):
        gg.build(changed, "mse")
    assert (SAID in caplog.text) == (not reduce_range)
    assert ("reduce_range=True" in caplog.text) == (not reduce_range)


@pytest.mark.parametrize("how", ["QDQ", "QOperator", "dynamic"])
def test_a_head_in_front_of_integers_that_stay(how: str, tmp_path: Path, caplog: Any) -> None:
    """Training nothing but a bias behind them, of a file that nothing has changed."""
    for reduce_range in (True, False):
        model = foreign(how, reduce_range, tmp_path)
        model.graph.node.add(op_type="Add", input=[model.graph.output[0].name, "b"], output=["z"])
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(5, np.float32), "b"))
        model.graph.output[0].name = "z"
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gradgraph"):
            gg.build(model, "mse", train="b")
        assert (SAID in caplog.text) == (not reduce_range)
