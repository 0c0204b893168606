"""Quantize- and DequantizeLinear of com.microsoft, as onnxruntime's quantiser writes them, are as those of ONNX."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import BuildError
from tests.kit.small_models import run
from tests.surgery.test_integer_products import DENSE, IMAGE, Samples, floats

quantization = pytest.importorskip("onnxruntime.quantization", reason="this onnxruntime comes without its quantiser")
KIND = quantization.QuantType
TYPES = {  # of data, of weights, with a scale for each channel
    "uint16, int16": (KIND.QUInt16, KIND.QInt16, False),
    "int16, by channel": (KIND.QInt16, KIND.QInt16, True),
    "uint16, int8, by channel": (KIND.QUInt16, KIND.QInt8, True),
    "uint8, int4, by channel": (KIND.QUInt8, KIND.QInt4, True),
    "uint16, uint4": (KIND.QUInt16, KIND.QUInt4, False),
}
NETWORKS = {"dense": (DENSE, floats(4, 8)), "images": (IMAGE, floats(2, 3, 6, 6))}
SURGERY = {
    "lora": lambda model: surgery.lora(model, "*", rank=2),
    "new_head": lambda model: surgery.new_head(model, 7),
    "qat": surgery.qat,
    "qat, ranges learned": lambda model: surgery.qat(model, ranges="learned"),
}

Quantised = tuple[onnx.ModelProto, onnx.ModelProto, dict[str, np.ndarray]]


CASES = [("dense", types) for types in TYPES] + [("images", types) for types in ("uint16, int16", "uint16, uint4")]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """A model with pairs of com.microsoft at opset 17, the same with those of ONNX at 21, and what both are fed."""
    (network, types), folder = request.param, tmp_path_factory.mktemp("quantised")
    source, target = folder / "float.onnx", folder / "quantised.onnx"
    base, x = NETWORKS[network]
    onnx.save(onnx.version_converter.convert_version(base, 17), source)
    data, weights, by_channel = TYPES[types]
    quantization.quantize_static(
        source, target, Samples(x), quant_format=quantization.QuantFormat.QDQ, activation_type=data,
        weight_type=weights, per_channel=by_channel, extra_options={"UseQDQContribOps": True},
    )  # fmt: skip
    fused = onnx.load(target)
    plain = onnx.ModelProto.FromString(fused.SerializeToString())
    pairs = [node for node in plain.graph.node if node.domain == "com.microsoft"]
    assert pairs
    for node in pairs:
        node.domain = ""
    del plain.opset_import[:]
    plain.opset_import.append(helper.make_opsetid("", 21))
    return fused, plain, {"x": x}


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("name", SURGERY)
def test_surgery_and_training_are_those_of_the_pairs_of_onnx(quantised: Quantised, name: str) -> None:
    fused, plain, feeds = quantised
    results, losses = [], []
    for source in (fused, plain):
        model = SURGERY[name](source)
        onnx.checker.check_model(model, full_check=True)
        results.append(run(model, feeds)[0])
        trainer = gg.Trainer(gg.build(model, "mse", gg.optim.adamw(1e-2)))
        losses.append([trainer.step({**feeds, "target": np.zeros_like(results[0])})["loss"] for _ in range(3)])
    np.testing.assert_array_equal(*results)
    assert losses[0] == losses[1] and losses[0][0] > losses[0][-1]
    if name != "new_head":
        np.testing.assert_allclose(results[0], run(fused, feeds)[0], rtol=1e-4, atol=1e-4)


def test_a_model_that_is_quantised_says_how_it_trains(quantised: Quantised) -> None:
    fused, _, _ = quantised
    with pytest.raises(BuildError, match=r"no parameters .*; gg\.qat\(model\) makes quantised weights trainable"):
        gg.build(fused, "mse")
