"""Average pools between DequantizeLinear and QuantizeLinear, which onnxruntime fuses, are written without dilations."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.frontend import export, nn
from gradgraph.passes.normal.simplifying.fragile_quantization import omit_dilations
from tests.kit.running import run

RNG = np.random.default_rng(0)
ROWS, CLASSES = 12, 4


def test_a_quantised_model_with_average_pools_trains_and_is_exported() -> None:
    x = RNG.normal(size=(ROWS, 3, 8, 8)).astype(np.float32)
    layers = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten())
    network = export(nn.Sequential(*layers, nn.Linear(8, 6)), {"x": ("rows", 3, 8, 8)})
    model = gg.new_head(gg.quantize(network, {"x": x}).result, CLASSES)
    trainer = gg.Trainer(gg.build(model, "cross_entropy", gg.optim.sgd(0.1), train="head.*"), device="cpu")
    batch = {"x": x, "target": np.arange(ROWS) % CLASSES}
    first = float(trainer.step(batch)["loss"])
    assert float(trainer.evaluate(batch)["loss"]) < first
    trained = trainer.export()
    np.testing.assert_allclose(trainer.predict(x), run(trained, {"x": x})[trained.graph.output[0].name], rtol=1e-5)


@pytest.mark.parametrize(
    ("dilation", "last", "kept"),
    [(1, "QuantizeLinear(p, s)", []), (2, "QuantizeLinear(p, s)", [2]), (1, "Identity(p)", [1])],
)
def test_only_dilations_of_1_between_quantised_values_are_omitted(dilation: int, last: str, kept: list[int]) -> None:
    kind = "uint8" if "Quantize" in last else "float"
    model = ir.from_proto(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (uint8[1, 1, 8] x) => ({kind}[1, 1, n] y) <float s = {{0.1}}>
        {{ d = DequantizeLinear(x, s)  p = AveragePool <kernel_shape = [2], dilations = [{dilation}]> (d)  y = {last} }}
    """)
    )
    omit_dilations(model)
    assert list(model.graph.node(1).attributes.get_ints("dilations", [])) == kept
