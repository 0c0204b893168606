"""Adapters on the experts of a mixture, PEFT's ``target_parameters``: read, trained, merged and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import BuildError, DataError
from tests.surgery.test_adapters import node

EXPERTS, WIDTH, HIDDEN, CHOSEN = 3, 6, 4, 2
RNG = np.random.default_rng(0)
MODULE = "model.layers.0.mlp.experts"
X = RNG.normal(size=(5, WIDTH)).astype(np.float32)
ROUTER = RNG.normal(size=(WIDTH, EXPERTS)).astype(np.float32)
GATE_UP = RNG.normal(size=(EXPERTS, 2 * HIDDEN, WIDTH)).astype(np.float32)  # as in Hugging Face: gate, then up
DOWN = RNG.normal(size=(EXPERTS, WIDTH, HIDDEN)).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def integers(bits: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random integers, and scales: one for two numbers, or with 8 bits one for each row."""
    rng = np.random.default_rng(bits)
    return rng.integers(0, 2**bits, shape), rng.random((*shape[:2], shape[2] // 2 if bits == 4 else 1)) * 2 / 2**bits


def as_floats(bits: int, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    scales = scales.astype(np.float32).repeat(numbers.shape[2] // scales.shape[2], 2)
    return (numbers - 2 ** (bits - 1)) * scales


def mixed(gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """The mixture in NumPy: SwiGLU experts, the two best of each token by a softmax."""
    scores = X @ ROUTER
    odds = np.exp(scores - scores.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    odds[np.arange(len(X)), odds.argmin(1)] = 0
    gate, up = np.split(np.einsum("ti,eoi->eto", X, gate_up), 2, axis=2)
    return np.einsum("et...,te->t...", np.einsum("eth,eoh->eto", gate * sigmoid(gate) * up, down), odds)


def model_of(nodes: list[onnx.NodeProto], stored: dict[str, np.ndarray]) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", WIDTH]) for n in ("x", "y")]
    initializers = [numpy_helper.from_array(array, name) for name, array in {"router": ROUTER, **stored}.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def by_operator() -> onnx.ModelProto:
    """As onnxruntime-genai's builder writes it: rows of gate and up alternate."""
    alternating = np.stack(np.split(GATE_UP, 2, axis=1), 2).reshape(GATE_UP.shape)
    name = "model.layers.0.moe.experts"
    moe = node("MoE", ["x", "s", f"{name}.gate_up_proj.weight", "", f"{name}.down_proj.weight"], ["y"], k=CHOSEN,
               domain="com.microsoft", activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0,
               activation_beta=0.0, normalize_routing_weights=0)  # fmt: skip
    return model_of([node("MatMul", ["x", "router"], ["s"]), moe],
                    {f"{name}.gate_up_proj.weight": alternating, f"{name}.down_proj.weight": DOWN})  # fmt: skip


def in_integers(bits: int) -> onnx.ModelProto:
    """QMoE, with the numbers of ``BASES``."""
    name, stored = "model.layers.0.moe.experts", {}
    for projection, shape in (("gate_up_proj", GATE_UP.shape), ("down_proj", DOWN.shape)):
        numbers, scales = integers(bits, *shape)
        if projection == "gate_up_proj":
            numbers, scales = (np.stack(np.split(a, 2, axis=1), 2).reshape(a.shape) for a in (numbers, scales))
        packed = numbers[..., ::2] + 16 * numbers[..., 1::2] if bits == 4 else numbers
        stored[f"{name}.{projection}.qweight"] = packed.astype(np.uint8)
        stored[f"{name}.{projection}.scales"] = (scales if bits == 4 else scales[..., 0]).astype(np.float32)
    weights = [f"{name}.gate_up_proj.qweight", f"{name}.gate_up_proj.scales", "",
               f"{name}.down_proj.qweight", f"{name}.down_proj.scales"]  # fmt: skip
    blocks = {"block_size": 2} if bits == 4 else {}
    moe = node("QMoE", ["x", "s", *weights], ["y"], k=CHOSEN, domain="com.microsoft", activation_type="swiglu",
               swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0, normalize_routing_weights=0,
               expert_weight_bits=bits, **blocks)  # fmt: skip
    return model_of([node("MatMul", ["x", "router"], ["s"]), moe], stored)


def by_gathers(turned: bool = False) -> onnx.ModelProto:
    """As PyTorch's exporter writes it: the matrices of the chosen experts are gathered; or (inputs, outputs) each."""
    name = f"network.{MODULE}"

    def product(x: str, weight: str, out: str) -> list[onnx.NodeProto]:
        column = [node("Unsqueeze", [x, "last" if not turned else "first"], [f"{out}_x"])]
        factors = [f"{out}_x", f"{out}_w"] if turned else [f"{out}_w", f"{out}_x"]
        return [node("Gather", [weight, "e"], [f"{out}_w"]), *column, node("MatMul", factors, [f"{out}_y"]),
                node("Squeeze", [f"{out}_y", "last" if not turned else "first"], [out])]  # fmt: skip

    nodes = [
        node("MatMul", ["x", "router"], ["s"]), node("Softmax", ["s"], ["p"], axis=-1),
        node("TopK", ["p", "k"], ["odds", "best"], axis=-1), node("Reshape", ["best", "flat"], ["e"]),
        node("Unsqueeze", ["x", "middle"], ["x3"]), node("Expand", ["x3", "repeats"], ["xr"]),
        node("Reshape", ["xr", "rows"], ["xs"]), *product("xs", f"{name}.gate_up_proj", "h"),
        node("Split", ["h"], ["gate", "up"], axis=1, num_outputs=2), node("Sigmoid", ["gate"], ["sg"]),
        node("Mul", ["gate", "sg"], ["silu"]), node("Mul", ["silu", "up"], ["inner"]),
        *product("inner", f"{name}.down_proj", "o"), node("Reshape", ["o", "groups"], ["o3"]),
        node("Unsqueeze", ["odds", "last"], ["odds3"]), node("Mul", ["o3", "odds3"], ["parts"]),
        node("ReduceSum", ["parts", "middle"], ["y"], keepdims=0),
    ]  # fmt: skip
    numbers = {"k": [CHOSEN], "flat": [-1], "middle": [1], "repeats": [1, CHOSEN, 1], "rows": [-1, WIDTH],
               "groups": [-1, CHOSEN, WIDTH], "last": [-1], "first": [1]}  # fmt: skip
    return model_of(nodes, {f"{name}.gate_up_proj": GATE_UP.swapaxes(1, 2).copy() if turned else GATE_UP,
                            f"{name}.down_proj": DOWN.swapaxes(1, 2).copy() if turned else DOWN,
                            **{n: np.array(v, np.int64) for n, v in numbers.items()}})  # fmt: skip


MODELS = {"operator": by_operator, "gathers": by_gathers, "turned": lambda: by_gathers(turned=True),
          "4 bits": lambda: in_integers(4), "8 bits": lambda: in_integers(8)}  # fmt: skip
BASES = {f"{bits} bits": tuple(as_floats(bits, *integers(bits, *w.shape)) for w in (GATE_UP, DOWN)) for bits in (4, 8)}
RANKS = {"gate_up_proj": 2, "down_proj": 3}
SIZES = {"gate_up_proj": (WIDTH, 2 * HIDDEN), "down_proj": (HIDDEN, WIDTH)}
SCALES = {"gate_up_proj": 5 / 2, "down_proj": 7 / 3}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 5, "target_modules": [], "peft_version": "0.21.2",
    "rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {".*down_proj": 7},
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip


def written(folder: Path, exchanged: bool = False, **changes: Any) -> dict[str, np.ndarray]:
    """A folder of PEFT; before its version 0.19, A multiplies outputs. Returns the updates of both parameters."""
    rng, arrays, updates = np.random.default_rng(1), {}, {}
    for name, begin in (("gate_up_proj", f"{MODULE}.base_layer"), ("down_proj", MODULE)):  # the first is the innermost
        inputs, outputs = SIZES[name][:: -1 if exchanged else 1]
        a = rng.normal(size=(RANKS[name] * EXPERTS, inputs)).astype(np.float32)
        b = rng.normal(size=(outputs, RANKS[name] * EXPERTS)).astype(np.float32) / 5
        arrays[f"base_model.model.{begin}.lora_A.weight"], arrays[f"base_model.model.{begin}.lora_B.weight"] = a, b
        # as get_delta_weight of PEFT's ParamWrapper computes it
        parts = b.reshape(len(b), -1, EXPERTS), a.reshape(EXPERTS, -1, a.shape[-1])
        updates[name] = SCALES[name] * np.einsum("ore,eri->eio" if exchanged else "ore,eri->eoi", *parts)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(safetensors.numpy.save(arrays))
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return updates


def predicted(model: Any) -> np.ndarray:
    if not any(p.key == "gradgraph.adapters" for p in model.metadata_props):
        model = gg.lora(model, "router", rank=1)
    return gg.Trainer(gg.build(model, "mse"), device="cpu").predict(X)


@pytest.mark.parametrize("exchanged", [False, True], ids=["", "before 0.19"])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_peft_is_its_formula(name: str, exchanged: bool, tmp_path: Path) -> None:
    base, (gate_up, down) = MODELS[name](), BASES.get(name, (GATE_UP, DOWN))
    np.testing.assert_allclose(predicted(base), mixed(gate_up, down), rtol=1e-4, atol=1e-5)
    updates = written(tmp_path, exchanged)
    wanted = mixed(gate_up + updates["gate_up_proj"], down + updates["down_proj"])
    assert np.abs(wanted - mixed(gate_up, down)).max() > 0.5
    model = surgery.load_adapter(base, tmp_path)
    np.testing.assert_allclose(predicted(model), wanted, rtol=1e-4, atol=1e-5)
    merged = surgery.merge_adapters(model)
    assert not merged.metadata_props and len(merged.graph.node) == len(base.graph.node)
    np.testing.assert_allclose(predicted(merged), wanted, rtol=1e-4, atol=1e-5)
    half = surgery.use_adapters(model, {"default": 0.5})
    wanted = mixed(gate_up + updates["gate_up_proj"] / 2, down + updates["down_proj"] / 2)
    np.testing.assert_allclose(predicted(half), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_become_integers_again(bits: int, tmp_path: Path) -> None:
    base, updates, errors = in_integers(bits), written(tmp_path), dict[str, float]()
    model = surgery.load_adapter(base, tmp_path)
    merged = surgery.merge_adapters(model, requantise=True, errors=errors)
    assert [n.op_type for n in merged.graph.node] == ["MatMul", "QMoE"]
    described = [{a.name: helper.get_attribute_value(a) for a in m.graph.node[-1].attribute} for m in (base, merged)]
    assert described[0] == described[1]
    tensors = [{t.name: (t.data_type, *t.dims) for t in m.graph.initializer} for m in (base, merged)]
    assert tensors[0] == tensors[1]
    assert len(errors) == 2 and 0 < max(errors.values()) < (0.15 if bits == 4 else 0.02)
    wanted = mixed(*(w + u for w, u in zip(BASES[f"{bits} bits"], updates.values(), strict=True)))
    assert np.abs(predicted(merged) - wanted).max() < (0.6 if bits == 4 else 0.05) * np.abs(wanted).max()
    resting = surgery.merge_adapters(surgery.use_adapters(model, {"default": 0}), requantise=True)
    assert [t.raw_data for t in resting.graph.initializer] == [t.raw_data for t in base.graph.initializer]


def test_integers_with_zero_points_are_refused(tmp_path: Path) -> None:
    base = in_integers(8)
    base.graph.node[-1].input.extend([""] * 6 + ["points"])
    base.graph.initializer.append(numpy_helper.from_array(np.zeros(GATE_UP.shape[:2], np.uint8), "points"))
    written(tmp_path)
    with pytest.raises(DataError, match="belongs to a QMoE whose experts have zero points"):
        surgery.load_adapter(base, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_written(name: str, tmp_path: Path) -> None:
    written(tmp_path / "theirs")
    model = surgery.load_adapter(MODELS[name](), tmp_path / "theirs")
    names = {"names": {"network.*": "*"}} if name in ("gathers", "turned") else {"family": "llama"}
    surgery.save_adapter(model, tmp_path / "ours", **names)
    files = [
        safetensors.numpy.load((tmp_path / n / "adapter_model.safetensors").read_bytes()) for n in ("theirs", "ours")
    ]
    assert files[0].keys() == files[1].keys()
    for key in files[0]:
        np.testing.assert_array_equal(files[0][key], files[1][key], err_msg=key)
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["target_modules"] == [] and config["peft_version"] == "0.19.0"
    assert config["target_parameters"] == [f"{MODULE}.down_proj", f"{MODULE}.gate_up_proj"]
    again = surgery.load_adapter(MODELS[name](), tmp_path / "ours")
    np.testing.assert_array_equal(predicted(again), predicted(model))


@pytest.mark.parametrize("name", MODELS)
def test_new_adapters_change_nothing_and_learn(name: str) -> None:
    base = BASES.get(name, (GATE_UP, DOWN))
    model = gg.lora(MODELS[name](), "*experts*", kind="lora_experts", rank=2, alpha=4)
    np.testing.assert_allclose(predicted(model), mixed(*base), rtol=1e-4, atol=1e-5)
    step = gg.build(model, "mse", gg.optim.adam(0.02))
    assert len(step.manifest.trainable) == 4 and all(".lora_" in weight for weight in step.manifest.trainable)
    trainer = gg.Trainer(step, device="cpu")
    history = trainer.fit({"x": X, "target": mixed(*base)[::-1].copy()}, epochs=40, progress=False)
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    np.testing.assert_allclose(predicted(surgery.merge_adapters(model, trainer.state_dict())), trainer.predict(X),
                               rtol=1e-4, atol=1e-4)  # fmt: skip


def test_experts_and_layers_share_a_folder(tmp_path: Path) -> None:
    model = gg.lora(by_operator(), "*experts*", kind="lora_experts", rank=2, name="experts")
    model = gg.lora(model, "router", rank=1, name="router")
    with pytest.raises(BuildError, match="several sets of adapters"):
        surgery.save_adapter(model, tmp_path)
    written(tmp_path)
    weights = safetensors.numpy.load((tmp_path / "adapter_model.safetensors").read_bytes())
    weights |= {"base_model.model.router.lora_A.weight": RNG.normal(size=(2, WIDTH)).astype(np.float32),
                "base_model.model.router.lora_B.weight": RNG.normal(size=(EXPERTS, 2)).astype(np.float32)}  # fmt: skip
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors.numpy.save(weights))
    model = surgery.load_adapter(by_operator(), tmp_path)
    surgery.save_adapter(model, tmp_path / "again")
    again = surgery.load_adapter(by_operator(), tmp_path / "again")
    np.testing.assert_array_equal(predicted(again), predicted(model))
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["router"] and len(config["target_parameters"]) == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"rank_pattern": {}}, "down_proj' has rank 3, but adapter_config.json has 2"),
    "DoRA": ({"use_dora": True}, "target_parameters with DoRA, dropout or another type"),
    "dropout": ({"lora_dropout": 0.1}, "target_parameters with DoRA, dropout or another type"),
    "a parameter that is no experts": ({"target_parameters": [*CONFIG["target_parameters"], "router.weight"]},
                                       "'router.weight', but the model has no such tensor of experts"),
    "no list": ({"target_parameters": "mlp.experts.gate_up_proj"}, "cannot read an adapter"),
    "no text": ({"target_parameters": [3]}, "cannot read an adapter"), "a number": ({"peft_version": 3}, "cannot read"),
    "another model": ({"target_parameters": ["mlp.experts.w1"]}, "no such tensor of experts"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    changes, says = REFUSED[what]
    written(tmp_path, **changes)
    with pytest.raises(DataError, match=says):
        surgery.load_adapter(by_operator(), tmp_path)


def test_square_experts_of_an_unknown_version_are_refused(tmp_path: Path) -> None:
    base = by_operator()
    for tensor in base.graph.initializer:
        if "gate_up" in tensor.name:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros((EXPERTS, WIDTH, WIDTH), np.float32), tensor.name))
    arrays = {"lora_A.weight": np.ones((EXPERTS, WIDTH)), "lora_B.weight": np.ones((WIDTH, EXPERTS))}
    named = {f"base_model.model.{MODULE}.{name}": array.astype(np.float32) for name, array in arrays.items()}
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors.numpy.save(named))
    for version, refused in (("0.18.1", True), (None, True), ("0.19.0", False), ("1.0", False)):
        config = CONFIG | {"r": 1, "target_parameters": ["experts.gate_up_proj"], "peft_version": version}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        if refused:
            with pytest.raises(DataError, match=r"are square, and PEFT before 0\.19"):
                surgery.load_adapter(base, tmp_path)
        else:
            surgery.load_adapter(base, tmp_path)
