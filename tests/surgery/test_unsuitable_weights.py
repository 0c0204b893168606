"""Weights that would be loaded without their scales, adapters or settings are refused, also with strict=False."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from gradgraph import surgery
from gradgraph.errors import BuildError, DataError
from tests.surgery import merged_decoder
from tests.surgery.test_adapters import made, node
from tests.surgery.test_pretrained_weights import Exporter, Tensors, folder, run, tensors

UP = "model.layers.0.mlp.up_proj"
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def with_scale(given: Tensors, name: str, dtype: type = ml_dtypes.float8_e4m3fn) -> Tensors:
    scale = np.abs(given[f"{UP}.weight"]).max().reshape(1, 1) / 100
    return given | {f"{UP}.weight": (given[f"{UP}.weight"] / scale).astype(dtype), f"{UP}.{name}": scale}


def packed(given: Tensors, **parts: np.ndarray) -> Tensors:
    return {n: a for n, a in given.items() if n != f"{UP}.weight"} | {f"{UP}.{n}": a for n, a in parts.items()}


INTEGERS = np.ones((2, 48), np.int32)
QUANTISED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "float8 in blocks": (lambda t: with_scale(t, "weight_scale_inv"), "weight' has dtype float8_e4m3fn"),
    "float8": (lambda t: with_scale(t, "weight_scale", ml_dtypes.float8_e5m2), "weight' has dtype float8_e5m2"),
    "floats with a scale": (lambda t: with_scale(t, "weight_scale_inv", np.float32),
                            "weight_scale_inv' belongs to 'model.layers.0.mlp.up_proj.weight'"),
    "int8": (lambda t: with_scale(t, "SCB", np.int8), "has dtype int8|SCB' belongs to a quantised layer"),
    "4 bits": (lambda t: packed(t, weight=np.ones((384, 1), np.uint8), **{"weight.absmax": np.ones(6, np.float32)}),
               "has dtype uint8"),
    "GPTQ": (lambda t: packed(t, qweight=INTEGERS, qzeros=INTEGERS, scales=np.ones((1, 48), np.float16)),
             "(qweight|qzeros)' belongs to a quantised layer"),
    "MXFP4": (lambda t: packed(t, weight_blocks=INTEGERS.astype(np.uint8), weight_scales=INTEGERS.astype(np.uint8)),
              "weight_scales' belongs to 'model.layers.0.mlp.up_proj.weight_blocks'"),
}  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", QUANTISED)
def test_quantised_weights_are_refused(form: str, strict: bool, tmp_path: Path) -> None:
    change, says = QUANTISED[form]
    path = folder(tmp_path / "hf", change(tensors(1)))
    model = Exporter(tensors(0), "float", False).model()
    for given in (path, path / "model.safetensors"):
        with pytest.raises(DataError, match=f"contains quantised weights, which are not supported: .*({says})"):
            surgery.load_weights(model, given, strict=strict)
    with pytest.raises(DataError, match="contains quantised weights"):
        surgery.load_weights(model, folder(tmp_path / "new", tensors(1)), exported_from=path)


@pytest.mark.parametrize("strict", [True, False])
def test_quantised_weights_under_the_names_of_the_model_are_refused(strict: bool) -> None:
    model = made([node("MatMul", ["x", "fc.weight"], ["y"])], {"fc.weight": np.ones((4, 5), np.float32)}, ["rows", 4])
    given = {"fc.weight": np.full((4, 5), 2).astype(ml_dtypes.float8_e4m3fn), "fc.weight_scale": np.ones(1, np.float32)}
    with pytest.raises(DataError, match="contains quantised weights"):
        surgery.load_weights(model, given, strict=strict)


def test_scales_of_the_model_itself_are_weights_like_others() -> None:
    stored = {"fc.weight": np.ones((4, 5), np.int8), "fc.weight_scale": np.ones(5, np.float32)}
    nodes = [node("DequantizeLinear", [*stored], ["wide"], axis=1), node("MatMul", ["x", "wide"], ["y"])]
    new = {name: 3 * array for name, array in stored.items()}
    found = surgery.load_weights(made(nodes, stored, ["rows", 4]), new)
    for tensor in found.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), new[tensor.name])


@pytest.mark.parametrize("strict", [True, False])
def test_layers_with_adapters_are_refused(strict: bool, tmp_path: Path) -> None:
    """As in the state dict of a PeftModel: without the adapter, they are those of before the training."""
    given = {f"base_model.model.{n}": a for n, a in packed(tensors(1)).items()}
    layer = f"base_model.model.{UP}"
    given |= {f"{layer}.base_layer.weight": tensors(1)[f"{UP}.weight"],
              f"{layer}.lora_A.default.weight": np.ones((2, 16), np.float32),
              f"{layer}.lora_B.default.weight": np.ones((48, 2), np.float32)}  # fmt: skip
    model, path = Exporter(tensors(0), "float", False).model(), folder(tmp_path / "hf", given)
    for source in (path, path / "model.safetensors"):
        with pytest.raises(DataError, match="contains an adapter that is not merged"):
            surgery.load_weights(model, source, strict=strict)


def test_an_adapter_beside_a_model_is_refused_until_one_is_chosen(tmp_path: Path) -> None:
    path, model = folder(tmp_path / "hf", tensors(1)), Exporter(tensors(0), "float", False).model()
    adapter = {f"base_model.model.{UP}.lora_A.weight": np.ones((2, 16), np.float32)}
    safetensors.numpy.save_file(adapter, path / "adapter_model.safetensors")
    with pytest.raises(DataError, match="contains weights of a model and an adapter"):
        surgery.load_weights(model, path)
    with pytest.raises(DataError, match="contains an adapter that is not merged"):
        surgery.load_weights(model, path / "adapter_model.safetensors")
    found = surgery.load_weights(model, path / "model.safetensors")
    np.testing.assert_array_equal(run(found), run(Exporter(tensors(1), "float", False).model()))


def test_one_file_is_read_rather_than_an_index_of_others(tmp_path: Path) -> None:
    """As by transformers."""
    path = folder(tmp_path / "hf", tensors(2), 2)
    safetensors.numpy.save_file(tensors(1), path / "model.safetensors")
    found = surgery.load_weights(Exporter(tensors(0), "float", False).model(), path)
    np.testing.assert_array_equal(run(found), run(Exporter(tensors(1), "float", False).model()))


@pytest.mark.parametrize("form", ["float", "int4"])
def test_tensors_that_differ_though_the_configuration_ties_them_are_refused(form: str, tmp_path: Path) -> None:
    """Versions of transformers do not agree on which of them counts."""
    model, given = Exporter(tensors(0), form, False).model(), tensors(1)
    with pytest.raises(DataError, match=f"'{TABLE}' and '{HEAD}' of .* differ, but config.json says"):
        surgery.load_weights(model, folder(tmp_path / "differ", given, tie_word_embeddings=True))
    given |= {HEAD: given[TABLE]}
    found = surgery.load_weights(model, folder(tmp_path / "equal", given, tie_word_embeddings=True))
    other = surgery.load_weights(model, folder(tmp_path / "untied", given, tie_word_embeddings=False))
    np.testing.assert_array_equal(run(found), run(other))


@pytest.mark.parametrize("strict", [True, False])
def test_a_weight_that_the_decoder_with_a_cache_has_alone_is_not_left_behind(strict: bool) -> None:
    model = merged_decoder.model()
    (stored,) = (t for t in model.graph.initializer if t.name == merged_decoder.LAYER)
    (branch,) = (a.g for a in model.graph.node[0].attribute if a.name == "then_branch")
    own = branch.initializer.add()
    own.CopyFrom(stored)
    own.name = "model.layers.0.attn.q_proj.second.weight"
    for one in branch.node:
        one.input[:] = [own.name if name == stored.name else name for name in one.input]
    rng = np.random.default_rng(1)
    new = {name.replace(".MatMul", "").replace("attn", "self_attn"): rng.normal(size=sizes).astype(np.float32)
           for name, sizes in ((merged_decoder.LAYER, (8, 8)), (merged_decoder.HEAD, (98, 8)))}  # fmt: skip
    (table,) = (numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "E")
    new |= {merged_decoder.GAIN: np.ones(8, np.float32), "E.weight": table}
    with pytest.raises(BuildError, match="the two decoders of the model do not share all weights"):
        surgery.load_weights(model, new, strict=strict)


SETTINGS = {"model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}


@pytest.mark.parametrize("name", ["model.safetensors", ""])
def test_settings_are_compared_with_those_beside_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    onnx.save(Exporter(tensors(0), "float", False).model(), tmp_path / "llm" / "model.onnx")
    (tmp_path / "llm" / "config.json").write_text(json.dumps(SETTINGS))
    path = folder(tmp_path / "hf", tensors(1), **SETTINGS | {"hidden_act": "relu"})
    with pytest.raises(DataError, match=r"has hidden_act relu in config\.json, but the model has silu"):
        surgery.load_weights(tmp_path / "llm" / "model.onnx", path / name)


def test_settings_are_compared_with_those_of_the_export(tmp_path: Path) -> None:
    """A file alone has no configuration."""
    old = folder(tmp_path / "old", tensors(0), **SETTINGS)
    model = Exporter(tensors(0), "float", False).model()
    with pytest.raises(DataError, match=r"has hidden_act relu in config\.json, but the model has silu"):
        surgery.load_weights(model, folder(tmp_path / "hf", tensors(1), hidden_act="relu"), exported_from=old)
    found = surgery.load_weights(model, folder(tmp_path / "new", tensors(1), **SETTINGS), exported_from=old)
    np.testing.assert_array_equal(run(found), run(Exporter(tensors(1), "float", False).model()))


def test_a_head_may_have_a_tensor_now_and_be_tied_before(tmp_path: Path) -> None:
    table = tensors(1)[TABLE]
    old, new = folder(tmp_path / "old", tensors(0, tied=True)), tensors(1) | {HEAD: table}
    model = Exporter(tensors(0, tied=True), "float", True).model()
    found = surgery.load_weights(model, folder(tmp_path / "new", new), exported_from=old)
    wanted = Exporter(tensors(1, tied=True) | {TABLE: table}, "float", True).model()
    np.testing.assert_array_equal(run(found), run(wanted))


@pytest.mark.parametrize("strict", [True, False])
def test_products_of_integers_are_not_left_as_they_were(strict: bool, tmp_path: Path) -> None:
    stored = {"net.fc.weight": np.eye(4, dtype=np.float32)}
    onnx.save(made([node("MatMul", ["x", *stored], ["y"])], stored, ["rows", 4]), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=QuantType.QInt8)
    with pytest.raises(BuildError, match=r"the model computes with integers .* is a MatMulInteger.*quantise it again"):
        surgery.load_weights(tmp_path / "int8.onnx", folder(tmp_path / "hf", {"fc.weight": np.eye(4)}), strict=strict)


@pytest.mark.parametrize("strict", [True, False])
def test_tensors_of_other_names_than_in_the_export_are_named(strict: bool, tmp_path: Path) -> None:
    old = {n.replace("model.", "net."): a for n, a in tensors(0).items()}
    model, paths = Exporter(tensors(0), "float", False).model(), [tmp_path / "old", tmp_path / "new"]
    with pytest.raises(DataError, match=r"is 'model\.[\w.]+' in .*, but 'net\.[\w.]+' in .*; pass both with the same"):
        surgery.load_weights(model, folder(paths[1], tensors(1)), exported_from=folder(paths[0], old), strict=strict)
