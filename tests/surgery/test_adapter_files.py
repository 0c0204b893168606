"""Adapters in PEFT's files: names, shapes, settings; what comes back computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import BuildError, DataError, UnknownNameError
from tests.surgery.test_adapters import LAYERS, feed, made, node, run, trained, weights

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.mark.parametrize("kind", ["lora", "rslora", "ia3"])
@pytest.mark.parametrize("name", ["MatMul", "Gemm of PyTorch", "Conv", "embedding", "int8 by channel"])
def test_an_adapter_goes_to_a_folder_and_comes_back(name: str, kind: str, tmp_path: Path) -> None:
    base, x = LAYERS[name], feed(LAYERS[name])
    model = gg.lora(base, "w", rank=3, alpha=5, dropout=0.1, kind=kind)
    numbers = trained(model)
    surgery.save_adapter(model, tmp_path / "adapter", numbers)
    again = surgery.load_adapter(base, tmp_path / "adapter")
    wanted = run(surgery.load_weights(model, numbers, strict=False), x)
    np.testing.assert_allclose(run(again, x), wanted, rtol=1e-5, atol=1e-5)


def test_names_shapes_and_settings_are_those_of_peft(tmp_path: Path) -> None:
    for name, shapes in {
        "MatMul": {"lora_A.weight": (3, 32), "lora_B.weight": (5, 3)},
        "Conv": {"lora_A.weight": (3, 3, 3, 3), "lora_B.weight": (5, 3, 1, 1)},
        "embedding": {"lora_embedding_A": (3, 7), "lora_embedding_B": (5, 3)},
    }.items():
        surgery.save_adapter(gg.lora(LAYERS[name], "w", rank=3, alpha=6, dropout=0.25), tmp_path)
        stored = safetensors.numpy.load_file(tmp_path / WEIGHTS)
        assert {n: a.shape for n, a in stored.items()} == {f"base_model.model.w.{n}": s for n, s in shapes.items()}
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["lora_dropout"]) == ("LORA", 3, 6, 0.25)
    assert config["target_modules"] == ["w"] and config["use_rslora"] is False


def test_a_delta_of_peft_is_ours(tmp_path: Path) -> None:
    """PEFT: W + (alpha/r)·B·A, with W as nn.Linear has it."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 32)).astype(np.float32), rng.normal(size=(5, 2)).astype(np.float32)
    tensors = {"base_model.model.w.lora_A.weight": a, "base_model.model.w.lora_B.weight": b}
    safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["w"]}
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    for name in ("Gemm of PyTorch", "MatMul"):
        merged = surgery.merge_adapters(surgery.load_adapter(LAYERS[name], tmp_path))
        change = weights(merged)["w.weight"] - weights(LAYERS[name])["w.weight"]
        np.testing.assert_allclose(change if name != "MatMul" else change.T, 4 * b @ a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_dora": True}, DataError, "lora_magnitude_vector"),
        (
            {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_dora": True, "use_rslora": True},
            DataError,
            "has use_dora and use_rslora",
        ),
        ({"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "all"}, DataError, "has 'bias'"),
        ({"peft_type": "LORA", "r": 2, "lora_alpha": 8, "lora_bias": True}, DataError, "has 'lora_bias'"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa_niter_4"}, DataError, "init_lora_weights 'pissa_niter_4'"),
        ({"peft_type": "LORA", "init_lora_weights": "loftq"}, DataError, "init_lora_weights 'loftq'"),
        ({"peft_type": "LORA", "of_a_later_version": 1}, DataError, "has 'of_a_later_version'"),
        ({"peft_type": "P_TUNING"}, DataError, "the type P_TUNING"),
        (
            {"peft_type": "LORA", "r": 3, "lora_alpha": 8, "lora_dropout": 0},
            DataError,
            "has rank 2, but adapter_config.json has 3",
        ),
        ([], DataError, "a list, not a table"),
    ],
)
def test_what_cannot_be_loaded(config: Any, error: type[Exception], says: str, tmp_path: Path) -> None:
    surgery.save_adapter(gg.lora(LAYERS["MatMul"], "w", rank=2), tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(error) as raised:
        surgery.load_adapter(LAYERS["MatMul"], tmp_path)
    assert says in str(raised.value)


def test_no_folder_no_adapter_no_layer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read an adapter"):
        surgery.load_adapter(LAYERS["MatMul"], tmp_path / "none")
    with pytest.raises(BuildError, match="no adapters to save"):
        surgery.save_adapter(LAYERS["MatMul"], tmp_path)
    surgery.save_adapter(gg.lora(LAYERS["MatMul"], "w"), tmp_path)
    network = gg.frontend.export(gg.frontend.nn.Linear(4, 4), {"x": ("rows", 4)})
    with pytest.raises(UnknownNameError, match="no layer that can have an adapter matches 'w'"):
        surgery.load_adapter(network, tmp_path)


# --- prefixes ---------------------------------------------------------------------------------------------------

LAYERS_OF_LLAMA, LENGTH = 2, 4


@pytest.fixture(scope="module")
def llama() -> Any:
    return surgery.language_model(EXAMPLES / "tiny_llama_int4.onnx")


def scores(model: Any) -> np.ndarray:
    trainer = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu")
    return trainer.predict(np.array([[1, 30, 40, 50], [1, 60, 2, 0]]))


@pytest.mark.sweep(0)
def test_a_prefix_is_stored_as_peft_has_it(llama: Any, tmp_path: Path) -> None:
    model = gg.lora(llama, "*", kind="prefix", rank=LENGTH)
    numbers = trained(model)
    surgery.save_adapter(model, tmp_path, numbers)
    (first, key), (second, value) = [item for item in numbers.items() if ".1." in item[0]]
    assert first.endswith("prefix_key") and second.endswith("prefix_value")
    heads, _, size = key.shape
    stored = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    table = stored.pop("prompt_embeddings")
    assert not stored and table.shape == (LENGTH, LAYERS_OF_LLAMA * 2 * heads * size)
    rows = table.reshape(LENGTH, LAYERS_OF_LLAMA, 2, heads, size)  # as PEFT takes it apart
    np.testing.assert_array_equal(rows[:, 1, 0].swapaxes(0, 1), key)
    np.testing.assert_array_equal(rows[:, 1, 1].swapaxes(0, 1), value)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["peft_type"] == "PREFIX_TUNING" and config["prefix_projection"] is False
    assert [config[k] for k in ("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim")] == [
        LENGTH, LAYERS_OF_LLAMA, heads, heads * size,
    ]  # fmt: skip
    again = surgery.load_adapter(llama, tmp_path)
    np.testing.assert_array_equal(scores(again), scores(surgery.load_weights(model, numbers, strict=False)))
    assert np.abs(scores(again) - scores(llama)).max() > 0.01


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_layers": 3}, "has num_layers 3, but the model's attentions have 2"),
        ({"num_attention_heads": 3}, "has num_attention_heads 3"),
        ({"token_dim": 4}, "has token_dim 4"),
        ({"num_transformer_submodules": 2}, "for an encoder-decoder model"),
        ({"lora_bias": True}, "has 'lora_bias'"),
    ],
)
def test_a_prefix_that_does_not_fit(llama: Any, changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    surgery.save_adapter(gg.lora(llama, "*", kind="prefix", rank=LENGTH), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, **changed}))
    with pytest.raises(DataError) as raised:
        surgery.load_adapter(llama, tmp_path)
    assert says in str(raised.value)


def test_positions_that_are_fed_count_on_from_a_prefix(tmp_path: Path) -> None:
    """So PEFT has it; where a model counts them itself they stay, and the file is ours alone."""
    from tests.surgery.test_adapter_kinds import ATTENTIONS, HEADS, SIZE

    unaware, _ = ATTENTIONS["written out"]
    surgery.save_adapter(gg.lora(unaware, "*", kind="prefix", rank=3), tmp_path / "own")
    assert json.loads((tmp_path / "own" / CONFIG).read_text())["peft_type"] == "PREFIX"
    surgery.load_adapter(unaware, tmp_path / "own")
    fed = onnx.ModelProto.FromString(unaware.SerializeToString())
    fed.graph.input.append(onnx.helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["b", "t"]))
    fed.graph.node.append(onnx.helper.make_node("Identity", ["position_ids"], ["seen"]))
    fed.graph.output.append(onnx.helper.make_tensor_value_info("seen", onnx.TensorProto.INT64, ["b", "t"]))
    model = gg.lora(fed, "*", kind="prefix", rank=3)
    feeds = {n: np.ones((2, HEADS, 5, SIZE), np.float32) for n in "qkv"}
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    positions = np.tile(np.arange(5), (2, 1))
    np.testing.assert_array_equal(session.run(["seen"], {**feeds, "position_ids": positions})[0], positions + 3)
    surgery.save_adapter(model, tmp_path / "peft")
    assert json.loads((tmp_path / "peft" / CONFIG).read_text())["peft_type"] == "PREFIX_TUNING"
    with pytest.raises(DataError, match="neither an input 'position_ids' nor"):
        surgery.load_adapter(unaware, tmp_path / "peft")
    safetensors.numpy.save_file({"prompt_embeddings": np.zeros((3, 16), np.float32), "more": np.zeros(1)},
                                tmp_path / "peft" / WEIGHTS)  # fmt: skip
    with pytest.raises(DataError, match="a single matrix 'prompt_embeddings', but the file has 'more'"):
        surgery.load_adapter(fed, tmp_path / "peft")


def folder_with(tmp_path: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """A folder of PEFT with an adapter of ``a``, further tensors and settings."""
    rng = np.random.default_rng(1)
    factors = {"a.lora_A.weight": rng.normal(size=(2, 4)), "a.lora_B.weight": rng.normal(size=(4, 2))}
    stored = {f"base_model.model.{n}": np.ascontiguousarray(a, np.float32) for n, a in (factors | tensors).items()}
    safetensors.numpy.save_file(stored, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, **settings}))
    return tmp_path


def squares() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Two square layers and one that is not, all read by MatMul."""
    rng = np.random.default_rng(0)
    numbers = {f"{name}.weight": rng.normal(size=(4, 6 if name == "z.b" else 4)).astype(np.float32)
               for name in ("a", "x.b", "z.b")}  # fmt: skip
    nodes = [node("MatMul", ["x", "a.weight"], ["h"]), node("MatMul", ["h", "x.b.weight"], ["i"]),
             node("MatMul", ["i", "z.b.weight"], ["y"])]  # fmt: skip
    return made(nodes, numbers, ["rows", 4], y=["rows", 6]), numbers


@pytest.mark.parametrize("conv1d", [True, False])
@pytest.mark.parametrize("said_by", ["fan_in_fan_out", "another layer of the name"])
def test_a_square_weight_that_was_trained_whole(conv1d: bool, said_by: str, tmp_path: Path) -> None:
    model, numbers = squares()
    new = {n: a + np.float32(0.1) for n, a in numbers.items() if n in ("x.b.weight", "z.b.weight")}
    of_file = {n: a if conv1d else a.T for n, a in new.items() if said_by != "fan_in_fan_out" or n == "x.b.weight"}
    settings = {"fan_in_fan_out": conv1d} if said_by == "fan_in_fan_out" else {}
    loaded = weights(surgery.load_adapter(model, folder_with(tmp_path, of_file, modules_to_save=["b"], **settings)))
    for name in of_file:
        np.testing.assert_array_equal(loaded[name], new[name])


def test_a_setting_that_the_numbers_contradict_is_refused(tmp_path: Path) -> None:
    model, numbers = squares()
    with pytest.raises(DataError, match="closer to the model's weight, contrary to fan_in_fan_out"):
        surgery.load_adapter(model, folder_with(tmp_path, {"x.b.weight": numbers["x.b.weight"]}))


def test_the_base_beside_an_adapter_is_taken_where_it_has_changed(tmp_path: Path) -> None:
    """PEFT stores the weights of embeddings and heads beside their adapters."""
    model, numbers = squares()
    plain = weights(surgery.load_adapter(model, folder_with(tmp_path, {})))
    same = {"a.base_layer.weight": numbers["a.weight"].T}
    assert all(np.array_equal(a, plain[n]) for n, a in
               weights(surgery.load_adapter(model, folder_with(tmp_path, same))).items())  # fmt: skip
    moved = {"a.base_layer.weight": numbers["a.weight"].T + 1}
    found = weights(surgery.load_adapter(model, folder_with(tmp_path, moved)))
    np.testing.assert_array_equal(found["a.weight"], numbers["a.weight"] + 1)
    with pytest.raises(DataError, match="no weight with this name and shape"):
        surgery.load_adapter(model, folder_with(tmp_path, {"a.base_layer.weight": np.ones((5, 4))}))
