"""No operation changes the model that it is given, and each gives back the kind that it got."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser

from gradgraph import surgery
from gradgraph.errors import OutputError

OPERATIONS: dict[str, Callable[..., Any]] = {
    "distill": lambda m, **out: surgery.distill(m, language_model(), **out),
    "cut": lambda m, **out: surgery.cut(m, inputs="e", outputs="n", **out),
    "fix_inputs": lambda m, **out: surgery.fix_inputs(m, {"x": 1}, **out),
    "forget_sizes": lambda m, **out: surgery.forget_sizes(surgery.lora(m, "*"), **out),
    "in_float32": lambda m, **out: surgery.in_float32(surgery.lora(m, "*"), **out),
    "switchable": lambda m, **out: surgery.switchable(surgery.lora(m, "*"), **out),
    "use_adapters": lambda m, **out: surgery.use_adapters(surgery.lora(m, "*"), {"default": 0.5}, **out),
    "lora": lambda m, **out: surgery.lora(m, "*", **out),
    "merge_adapters": lambda m, **out: surgery.merge_adapters(surgery.lora(m, "*"), **out),
    "load_weights": lambda m, **out: surgery.load_weights(m, {"val_92": np.ones((4, 5))}, strict=False, **out),
    "name_weights": surgery.name_weights,
    "new_head": lambda m, **out: surgery.new_head(m, 3, **out),
    "open_axes": lambda m, **out: surgery.open_axes(m, {"x": {0: "batch"}}, **out),
    "qat": lambda m, **out: surgery.qat(m, activations=None, **out),
    "reset_weights": lambda m, **out: surgery.reset_weights(m, "*", **out),
    "resize_embedding": lambda m, **out: surgery.resize_embedding(m, "words", 9, **out),
    "untie_weights": lambda m, **out: surgery.untie_weights(surgery.tie_weights(m, "shift", "scale"), "scale", **out),
    "tie_weights": lambda m, **out: surgery.tie_weights(m, "val_92", "words", **out),
}


def language_model() -> onnx.ModelProto:
    """Everything has a name of its own, and the target of the Reshape is a Constant."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (int64[2, 3] x) => (float[6, 5] y) {
        e = Gather(words, x) n = LayerNormalization<axis=-1>(e, scale, shift) p = MatMul(n, val_92)
        t = Constant<value_ints=[6, 5]>() y = Reshape(p, t) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"words": (5, 4), "scale": (4,), "shift": (4,), "val_92": (4, 5)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


def test_every_operation_is_here() -> None:
    public = {name for name in dir(surgery) if callable(getattr(surgery, name))}
    elsewhere = {
        "below",
        "load_adapter",
        "save_adapter",
        "language_model",
        "pair_model",
        "answer_pairs",
        "reference",
        "next_tokens",
        "quantize",
        "Quantized",
    }  # they have files of their own
    assert public - elsewhere == set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_message_stays_as_it_was(name: str) -> None:
    model = language_model()
    before = model.SerializeToString(deterministic=True)
    made = OPERATIONS[name](model)
    assert isinstance(made, onnx.ModelProto)
    assert model.SerializeToString(deterministic=True) == before
    assert made.SerializeToString(deterministic=True) != before


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_model_of_onnx_ir_stays_as_it_was(name: str) -> None:
    model = ir.from_proto(language_model())
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    made = OPERATIONS[name](model)
    assert isinstance(made, ir.Model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_file_stays_as_it_was(name: str, tmp_path: Path) -> None:
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(language_model(), path)
    before = path.read_bytes()
    OPERATIONS[name](path, out=out)
    assert path.read_bytes() == before
    onnx.checker.check_model(out, full_check=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_model_is_not_written_under_the_name_of_another_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"'m.safetensors' has the extension of weights alone, .* call it 'm.onnx'"):
        OPERATIONS[name](language_model(), out=tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())
