"""Settings that no weight shows are read from constants and attributes of a model, and compared with config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gradgraph import surgery
from gradgraph.errors import DataError

WIDTH, HEADS, LENGTH = 16, 2, 8
HALF = WIDTH // HEADS // 2
PLAIN = 1e4 ** -(np.arange(HALF) / HALF)
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
USUAL = {"rope_theta": 1e4, "rms_norm_eps": 1e-5}


def of_transformers(config: dict[str, Any]) -> np.ndarray:
    """The formula of llama3 as in transformers' modeling_rope_utils.py, with its conditions."""
    low, high = (config["original_max_position_embeddings"] / config[f"{name}_freq_factor"] for name in ("low", "high"))
    lengths = 2 * np.pi / PLAIN
    found = np.where(lengths > low, PLAIN / config["factor"], PLAIN)
    smooth = (config["original_max_position_embeddings"] / lengths - config["low_freq_factor"]) / (
        config["high_freq_factor"] - config["low_freq_factor"]
    )
    between = ~(lengths < high) & ~(lengths > low)
    return np.where(between, (1 - smooth) * found / config["factor"] + smooth * found, found)


def model(frequencies: np.ndarray = PLAIN, dtype: Any = np.float32, window: int = -1, scale: float = 1.0) -> Any:
    """An attention with packed projections and a norm, as onnxruntime-genai's builder writes them."""
    angles = np.arange(LENGTH)[:, None] * frequencies
    rng = np.random.default_rng(0)
    stored = {
        "model.layers.0.input_layernorm.weight": np.ones(WIDTH, np.float32),
        "model.layers.0.attn.qkv_proj.MatMul.weight": rng.normal(size=(WIDTH, 3 * WIDTH)).astype(np.float32),
        "cos_cache": (scale * np.cos(angles)).astype(dtype), "sin_cache": (scale * np.sin(angles)).astype(dtype),
        "past": np.zeros((1, HEADS, 0, 2 * HALF), np.float32), "lengths": np.array([[2]], np.int32),
        "total": np.array(3, np.int32),
    }  # fmt: skip
    names = ["x", "model.layers.0.input_layernorm.weight"]
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", names, ["y"], "/model/layers.0/input_layernorm/N", axis=-1,
                         epsilon=1e-5),
        helper.make_node("MatMul", ["y", "model.layers.0.attn.qkv_proj.MatMul.weight"], ["qkv"],
                         "/model/layers.0/attn/qkv_proj/MatMul"),
        helper.make_node("GroupQueryAttention", ["qkv", "", "", "past", "past", "lengths", "total", "cos_cache",
                                                 "sin_cache"], ["out", "keys", "values"], domain="com.microsoft",
                         num_heads=HEADS, kv_num_heads=HEADS, do_rotary=1, local_window_size=window),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, WIDTH])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 3, WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )  # fmt: skip
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10, producer_name="onnxruntime-genai")


def folder(path: Path, **config: Any) -> Path:
    from tests.surgery.test_pretrained_weights import folder as saved

    rng = np.random.default_rng(1)
    given = {f"model.layers.0.self_attn.{n}_proj.weight": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)
             for n in "qkv"}  # fmt: skip
    return saved(path, given | {"model.layers.0.input_layernorm.weight": np.full(WIDTH, 2, np.float32)}, **config)


def is_loaded(given: onnx.ModelProto, path: Path, **config: Any) -> bool:
    try:
        found = surgery.load_weights(given, folder(path, **config))
    except DataError as error:
        assert "which weights cannot change; export the new weights instead" in str(error)
        return False
    stored = {t.name: numpy_helper.to_array(t) for t in found.graph.initializer}
    return bool((stored["model.layers.0.input_layernorm.weight"] == 2).all())


FITTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, USUAL),
    "transformers 5": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "float16": ({"dtype": np.float16}, USUAL),
    "magnified": ({"scale": 1.2}, USUAL),
    "linear": ({"frequencies": PLAIN / 4}, {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}}),
    "llama 3.1": ({"frequencies": of_transformers(LLAMA_3)}, {"rope_theta": 1e4, "rope_scaling": LLAMA_3}),
    "kinds of layers": ({}, {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                                                 "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}}),
    "local": ({}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    "unknown": ({}, {"rope_theta": 1e6, "rope_scaling": {"type": "longrope", "short_factor": [2.0] * HALF}}),
    "odd": ({}, {"rope_theta": "1", "rope_parameters": None, "rms_norm_eps": [1], "sliding_window": [1]}),
    "window": ({"window": 4}, {"sliding_window": 4}),
    "no configuration": ({}, {}),
}  # fmt: skip
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": ({}, USUAL | {"rope_theta": 5e5}),
    "theta of transformers 5": ({"dtype": np.float16}, {"rope_parameters": {"rope_theta": 1.5e4}}),
    "llama 3 and 3.1": ({}, USUAL | {"rope_scaling": LLAMA_3}),
    "llama 3.1 and 3": ({"frequencies": of_transformers(LLAMA_3)}, USUAL),
    "linear": ({}, USUAL | {"rope_scaling": {"type": "linear", "factor": 1.5}}),
    "yarn": ({}, USUAL | {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "epsilon": ({}, USUAL | {"rms_norm_eps": 1e-6}),
    "window": ({"window": 4}, {"sliding_window": 6}),
    "no window": ({"window": 4}, {"sliding_window": None}),
}


@pytest.mark.parametrize("name", FITTING)
def test_weights_of_the_same_settings_are_loaded(name: str, tmp_path: Path) -> None:
    options, config = FITTING[name]
    assert is_loaded(model(**options), tmp_path / "hf", **config)


@pytest.mark.parametrize("name", DIFFERENT)
def test_weights_of_other_settings_are_refused(name: str, tmp_path: Path) -> None:
    options, config = DIFFERENT[name]
    assert not is_loaded(model(**options), tmp_path / "hf", **config)
