"""Adapters on the experts of a mixture, PEFT's ``target_parameters``: read, trained, merged and written."""

from __future__ import annotations

import functools
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
from gradgraph.chat import Recipe
from gradgraph.chat.adapted_layers import MERGING, adapted_layers, merging_memory, reached
from gradgraph.errors import BuildError, DataError
from gradgraph.files.models import load_model
from gradgraph.surgery.layer_kinds import other_layers
from tests.kit.small_models import run
from tests.passes.normal.test_contrib_attention import fused
from tests.passes.normal.test_mixture_of_experts import GPT_OSS, packed
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


# integers of QMoE: bits, numbers of a block (0: a row), and whether there are zero points
FORMATS = {"4 bits": (4, 2, False), "8 bits": (8, 0, False), "4 bits, zero points": (4, 2, True),
           "4 bits, zero points of rows": (4, 0, True), "8 bits, zero points": (8, 2, True)}  # fmt: skip


def integers(form: str, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random integers, scales and zero points."""
    bits, block, has_points = FORMATS[form]
    rng = np.random.default_rng(bits)
    blocks = (*shape[:2], shape[2] // block if block else 1)
    numbers, scales = rng.integers(0, 2**bits, shape), rng.random(blocks) * 2 / 2**bits
    middle = 2 ** (bits - 1)
    return numbers, scales, rng.integers(0, 2**bits, blocks) if has_points else np.full(blocks, middle)


def as_floats(numbers: np.ndarray, scales: np.ndarray, points: np.ndarray) -> np.ndarray:
    width = numbers.shape[2] // scales.shape[2]
    return (numbers - points.repeat(width, 2)) * scales.astype(np.float32).repeat(width, 2)


def in_bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis, low bits first."""
    if bits == 4:
        numbers = np.concatenate([numbers, numbers[..., :1] * 0], -1) if numbers.shape[-1] % 2 else numbers
        numbers = numbers[..., ::2] + 16 * numbers[..., 1::2]
    return numbers.astype(np.uint8)


def mixed(gate_up: np.ndarray, down: np.ndarray, form: str = "") -> np.ndarray:
    """The mixture in NumPy: SwiGLU experts, the two best of each token by a softmax, of these two for integers."""
    scores = X @ ROUTER
    odds = np.exp(scores - scores.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    odds[np.arange(len(X)), odds.argmin(1)] = 0
    odds = odds / odds.sum(1, keepdims=True) if form in FORMATS else odds
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


def in_integers(form: str) -> onnx.ModelProto:
    """QMoE, with the numbers of ``BASES``."""
    (bits, block, has_points), name, stored = FORMATS[form], "model.layers.0.moe.experts", {}
    for projection, shape in (("gate_up_proj", GATE_UP.shape), ("down_proj", DOWN.shape)):
        arrays = integers(form, *shape)
        if projection == "gate_up_proj":
            arrays = tuple(np.stack(np.split(a, 2, axis=1), 2).reshape(a.shape) for a in arrays)
        numbers, scales, points = arrays
        stored[f"{name}.{projection}.qweight"] = in_bytes(numbers, bits)
        stored[f"{name}.{projection}.scales"] = (scales if block else scales[..., 0]).astype(np.float32)
        if has_points:
            stored[f"{name}.{projection}.zero_points"] = in_bytes(points if block else points[..., 0], bits)
    first, second = ([f"{name}.{n}.{part}" for part in ("qweight", "scales")] for n in ("gate_up_proj", "down_proj"))
    points = ["", "", "", ""] + [f"{name}.{n}.zero_points" for n in ("gate_up_proj", "down_proj")]
    blocks = {"block_size": block} if block else {}
    moe = node("QMoE", ["x", "s", *first, "", *second, *(points if has_points else [])], ["y"], k=CHOSEN,
               domain="com.microsoft", activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0,
               activation_beta=0.0, normalize_routing_weights=1, expert_weight_bits=bits, **blocks)  # fmt: skip
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


def by_products() -> onnx.ModelProto:
    """Every expert processes every token in a batched product; the matrices are (inputs, outputs)."""
    name = f"network.{MODULE}"
    nodes = [
        node("MatMul", ["x", "router"], ["s"]), node("Softmax", ["s"], ["p"], axis=-1),
        node("TopK", ["p", "k"], ["odds", "best"], axis=-1), node("Mul", ["p", "zero"], ["none"]),
        node("ScatterElements", ["none", "best", "odds"], ["gates"], axis=1), node("Transpose", ["gates"], ["turned"]),
        node("Unsqueeze", ["turned", "last"], ["gates3"]), node("MatMul", ["x", f"{name}.gate_up_proj"], ["h"]),
        node("Split", ["h"], ["gate", "up"], axis=2, num_outputs=2), node("Sigmoid", ["gate"], ["sg"]),
        node("Mul", ["gate", "sg"], ["silu"]), node("Mul", ["silu", "up"], ["inner"]),
        node("MatMul", ["inner", f"{name}.down_proj"], ["o"]), node("Mul", ["o", "gates3"], ["parts"]),
        node("ReduceSum", ["parts", "first"], ["y"], keepdims=0),
    ]  # fmt: skip
    numbers = {"k": np.array([CHOSEN]), "last": np.array([2]), "first": np.array([0]), "zero": np.float32(0)}
    weights = {"gate_up_proj": GATE_UP, "down_proj": DOWN}
    return model_of(nodes, {f"{name}.{n}": w.swapaxes(1, 2).copy() for n, w in weights.items()}
                    | {n: np.asarray(v) for n, v in numbers.items()})  # fmt: skip


MODELS = {"operator": by_operator, "gathers": by_gathers, "turned": lambda: by_gathers(turned=True),
          "products": by_products,
          **{form: functools.partial(in_integers, form) for form in FORMATS}}  # fmt: skip
BASES = {form: tuple(as_floats(*integers(form, *w.shape)) for w in (GATE_UP, DOWN)) for form in FORMATS}
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
    np.testing.assert_allclose(predicted(base), mixed(gate_up, down, name), rtol=1e-4, atol=1e-5)
    updates = written(tmp_path, exchanged)
    wanted = mixed(gate_up + updates["gate_up_proj"], down + updates["down_proj"], name)
    assert np.abs(wanted - mixed(gate_up, down, name)).max() > 0.5
    model = surgery.load_adapter(base, tmp_path)
    np.testing.assert_allclose(predicted(model), wanted, rtol=1e-4, atol=1e-5)
    merged = surgery.merge_adapters(model)
    assert not merged.metadata_props and len(merged.graph.node) == len(base.graph.node)
    np.testing.assert_allclose(predicted(merged), wanted, rtol=1e-4, atol=1e-5)
    half = surgery.use_adapters(model, {"default": 0.5})
    wanted = mixed(gate_up + updates["gate_up_proj"] / 2, down + updates["down_proj"] / 2, name)
    np.testing.assert_allclose(predicted(half), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_integers_become_integers_again(form: str, tmp_path: Path) -> None:
    base, updates, errors = in_integers(form), written(tmp_path), dict[str, float]()
    model = surgery.load_adapter(base, tmp_path)
    merged = surgery.merge_adapters(model, requantise=True, errors=errors)
    assert [n.op_type for n in merged.graph.node] == ["MatMul", "QMoE"]
    assert [[*n.input] for n in merged.graph.node] == [[*n.input] for n in base.graph.node]
    described = [{a.name: helper.get_attribute_value(a) for a in m.graph.node[-1].attribute} for m in (base, merged)]
    assert described[0] == described[1]
    tensors = [{t.name: (t.data_type, *t.dims) for t in m.graph.initializer} for m in (base, merged)]
    assert tensors[0] == tensors[1]
    few = form.startswith("4")
    assert len(errors) == 2 and 0 < max(errors.values()) < (0.15 if few else 0.02)
    wanted = mixed(*(w + u for w, u in zip(BASES[form], updates.values(), strict=True)), form)
    assert np.abs(predicted(merged) - wanted).max() < (0.6 if few else 0.05) * np.abs(wanted).max()
    resting = surgery.merge_adapters(surgery.use_adapters(model, {"default": 0}), requantise=True)
    stored = [{t.name: t.raw_data for t in m.graph.initializer} for m in (resting, base)]
    assert stored[0] == stored[1]


@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_merged_integers_are_those_that_the_kernel_reads(bits: int, block: int) -> None:
    """With zero points: onnxruntime's QMoE computes what training does."""
    feeds = packed(bits, block, points=True)
    feeds |= {name: feeds[name] * np.float32(2 / 2 ** (bits // 2)) for name in ("s1", "s2")}  # weights of one size
    attributes = GPT_OSS | {"expert_weight_bits": bits} | ({"block_size": block} if block else {})
    base, given = fused("QMoE", feeds, attributes)
    names = ["q1", "s1", "b1", "q2", "s2", "b2", "z1", "z2"]
    base = with_stored(base, {name: given.pop(name) for name in names})
    model = gg.lora(base, ["q1", "q2"], kind="lora_experts", rank=2)
    rng = np.random.default_rng(0)
    weights = {t.name: rng.normal(size=t.dims).astype(np.float32) / 4 for t in model.graph.initializer
               if ".lora_" in t.name}  # fmt: skip
    floats, integral = (surgery.merge_adapters(model, weights, requantise=whole) for whole in (False, True))
    assert [n.op_type for n in integral.graph.node] == ["QMoE"]
    before, wanted, found = (run(m, given)[0] for m in (base, floats, integral))
    assert np.abs(found - wanted).max() < (0.2 if bits == 4 else 0.02) * np.abs(wanted - before).max()
    read = surgery.merge_adapters(gg.lora(integral, ["q1", "q2"], kind="lora_experts", rank=2))
    close = 1e-2 if (bits, block) == (8, 32) else 1e-5  # the kernel rounds data, too, for blocks of 8 bits
    np.testing.assert_allclose(run(read, given)[0], found, atol=close * np.abs(found).max(), rtol=1e-4)


def with_stored(model: onnx.ModelProto, stored: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model at opset 21, with inputs replaced by initializers."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.input[:]
    changed.graph.input.extend(value for value in model.graph.input if value.name not in stored)
    changed.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    changed.opset_import[0].version, changed.ir_version = 21, 10
    return changed


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_written(name: str, tmp_path: Path) -> None:
    written(tmp_path / "theirs")
    model = surgery.load_adapter(MODELS[name](), tmp_path / "theirs")
    names = {"names": {"network.*": "*"}} if name in ("gathers", "turned", "products") else {"family": "llama"}
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
    np.testing.assert_allclose(predicted(model), mixed(*base, name), rtol=1e-4, atol=1e-5)
    step = gg.build(model, "mse", gg.optim.adam(0.02))
    assert len(step.manifest.trainable) == 4 and all(".lora_" in weight for weight in step.manifest.trainable)
    trainer = gg.Trainer(step, device="cpu")
    history = trainer.fit({"x": X, "target": mixed(*base, name)[::-1].copy()}, epochs=40, progress=False)
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    np.testing.assert_allclose(predicted(surgery.merge_adapters(model, trainer.state_dict())), trainer.predict(X),
                               rtol=1e-4, atol=1e-4)  # fmt: skip


OTHERS = {"operator": {"MoE operator with its experts": 1}, "4 bits": {"MoE operator with its experts": 1},
          "gathers": {"tensor of experts": 2}, "products": {"tensor of experts": 2}}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_fine_tuning_adapts_all_experts_by_default(name: str) -> None:
    decoder, recipe = load_model(MODELS[name]()), Recipe(kind="lora_experts", merge="float")
    assert adapted_layers(decoder, recipe) == ["*"]
    assert reached(decoder, recipe) == "2 of 2 tensors of experts get adapters"
    few = recipe.changed({"target": "*down_proj*"})
    assert reached(decoder, few) == "1 of 2 tensors of experts get adapters"
    assert [merging_memory(decoder, one) for one in (recipe, few)] == [MERGING * GATE_UP.size, MERGING * DOWN.size]
    assert merging_memory(decoder, recipe.changed({"merge": "none"})) == 0
    assert other_layers(decoder) == OTHERS[name]


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
