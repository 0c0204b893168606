"""Bottlenecks, prefixes and biases; several adapters on one base; base models that onnxruntime switches adapters of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import BuildError, UnknownNameError
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from tests.surgery.test_adapters import LAYERS, feed, floats, made, node, run, trained, weights

EXAMPLES = Path(__file__).parents[2] / "examples"


def fitted(model: onnx.ModelProto, x: np.ndarray, target: np.ndarray) -> tuple[gg.Trainer, list[float]]:
    trainer = gg.Trainer(gg.build(model, "mse", gg.optim.adam(0.02)), device="cpu")
    name = model.graph.input[0].name
    history = trainer.fit({name: x, "target": target}, epochs=30, batch_size=len(x), progress=False)
    return trainer, history["loss"]


# --- bottlenecks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_a_bottleneck_is_its_formula(name: str) -> None:
    base, x = LAYERS[name], feed(LAYERS[name], 8)
    model = gg.lora(base, "w", rank=3, kind="bottleneck")
    before = run(base, x)
    np.testing.assert_allclose(run(model, x), before, rtol=1e-5, atol=1e-5)
    parts = [n for n in weights(model) if "bottleneck" in n]
    assert parts == [f"w.bottleneck_{p}" for p in ("down.weight", "down.bias", "up.weight", "up.bias")]
    numbers = {n: floats(*weights(model)[n].shape) / 3 for n in parts}
    down, d, up, u = numbers.values()
    if down.ndim > 2:
        inner = np.maximum(np.einsum("nchw,rc->nrhw", before, down[..., 0, 0]) + d.reshape(-1, 1, 1), 0)
        wanted = before + np.einsum("nrhw,cr->nchw", inner, up[..., 0, 0]) + u.reshape(-1, 1, 1)
    else:
        wanted = before + np.maximum(before @ down + d, 0) @ up + u
    after = run(surgery.load_weights(model, numbers, strict=False), x)
    np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-4)
    if name == "Gemm":
        assert list(gg.build(model, "mse").manifest.trainable) == parts
    merged = surgery.merge_adapters(model, numbers)  # it stays beside the weight, as a part of the model like others
    assert not merged.metadata_props and set(parts) <= set(weights(merged))
    np.testing.assert_allclose(run(merged, x), after, rtol=1e-5, atol=1e-5)


# --- prefixes ---------------------------------------------------------------------------------------------------

BATCH, LENGTH, HEADS, SIZE = 2, 5, 2, 4


def attention_model(
    nodes: list[onnx.NodeProto], inputs: dict[str, list[Any]], opset: int = 21,
    stored: dict[str, np.ndarray] | None = None, out: list[Any] | None = None,
) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out or ["b", "t", HEADS * SIZE])],
        [numpy_helper.from_array(a, n) for n, a in (stored or {}).items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


FLAT = {n: ["b", "t", HEADS * SIZE] for n in "qkv"}
IN_HEADS = {n: ["b", HEADS, "t", SIZE] for n in "qkv"}
CAUSAL = np.triu(np.full((LENGTH, LENGTH), -np.inf, np.float32), 1)
KT = node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2])
MIX = [node("Softmax", ["s"], ["p"], axis=-1, name="attn/Softmax"), node("MatMul", ["p", "v"], ["y"])]
STEP = {"last": np.full((BATCH,), LENGTH - 1, np.int32), "total": np.array(LENGTH, np.int32)}
ATTENTIONS = {
    "MultiHeadAttention": (
        attention_model([node("MultiHeadAttention", ["q", "k", "v", "", "", "bias"], ["y"], name="attn/mha",
                              domain="com.microsoft", num_heads=HEADS)], FLAT,
                        stored={"bias": CAUSAL[None, None]}), True),
    "GroupQueryAttention": (
        attention_model([node("GroupQueryAttention", ["q", "k", "v", "", "", "last", "total"], ["y", "", ""],
                              name="attn/gqa", domain="com.microsoft", num_heads=HEADS, kv_num_heads=HEADS)], FLAT,
                        stored=STEP), True),
    "Attention": (
        attention_model([node("Attention", ["q", "k", "v"], ["y"], name="attn/a", q_num_heads=HEADS,
                              kv_num_heads=HEADS)], FLAT, opset=23), False),
    "written out": (
        attention_model([KT, node("MatMul", ["q", "kt"], ["raw"]), node("Div", ["raw", "root"], ["scaled"]),
                         node("Add", ["scaled", "mask"], ["s"]), *MIX], IN_HEADS,
                        stored={"root": np.array(2, np.float32), "mask": CAUSAL}, out=["b", HEADS, "t", SIZE]), True),
    "written out, each side scaled": (  # as PyTorch's exporter does
        attention_model([node("Mul", ["q", "root"], ["qs"]), KT, node("Mul", ["kt", "root"], ["ks"]),
                         node("MatMul", ["qs", "ks"], ["raw"]), node("Add", ["raw", "mask"], ["s"]), *MIX], IN_HEADS,
                        stored={"root": np.array(np.sqrt(0.5), np.float32), "mask": CAUSAL},
                        out=["b", HEADS, "t", SIZE]), True),
    "written out, masked by Where": (
        attention_model([node("Mul", ["q", "half"], ["qs"]), KT, node("MatMul", ["qs", "kt"], ["raw"]),
                         node("Where", ["seen", "raw", "hidden"], ["s"]), *MIX], IN_HEADS,
                        stored={"half": np.array(0.5, np.float32), "hidden": np.array(-1e9, np.float32),
                                "seen": CAUSAL == 0}, out=["b", HEADS, "t", SIZE]), True),
}  # fmt: skip


def with_prefix(q: np.ndarray, k: np.ndarray, v: np.ndarray, keys: np.ndarray, values: np.ndarray, causal: bool):
    """In heads: each query sees the prefix and, if it is causal, the text up to its own place."""
    every = np.concatenate([np.broadcast_to(keys, (BATCH, *keys.shape)), k], 2)
    mixed = np.concatenate([np.broadcast_to(values, (BATCH, *values.shape)), v], 2)
    scores = q @ every.swapaxes(2, 3) / np.sqrt(SIZE)
    if causal:
        scores[..., keys.shape[1] :] += CAUSAL
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True) @ mixed


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_prefix_is_its_formula_and_trains(name: str) -> None:
    base, causal = ATTENTIONS[name]
    model = gg.lora(base, "attn", kind="prefix", rank=3)
    made_of = weights(model)
    assert [n for n in made_of if "prefix" in n] == ["attn.prefix_key", "attn.prefix_value"]
    flat = base.graph.input[0].type.tensor_type.shape.dim[1].dim_param == "t"
    data = {n: floats(BATCH, HEADS, LENGTH, SIZE) for n in "qkv"}
    numbers = {n: floats(HEADS, 3, SIZE) for n in ("attn.prefix_key", "attn.prefix_value")}
    wanted = with_prefix(*data.values(), *numbers.values(), causal)
    if flat:
        data = {n: a.swapaxes(1, 2).reshape(BATCH, LENGTH, -1) for n, a in data.items()}
        wanted = wanted.swapaxes(1, 2).reshape(BATCH, LENGTH, -1)
    filled = surgery.load_weights(model, numbers, strict=False)
    # onnxruntime takes a past for one sample at a time in GroupQueryAttention; a step has standard nodes in its place
    step = gg.build(filled, "mse", gg.optim.adam(0.05))
    assert sorted(step.manifest.trainable) == sorted(numbers)
    trainer = gg.Trainer(step, device="cpu")
    np.testing.assert_allclose(trainer.predict(data), wanted, rtol=1e-4, atol=1e-5)
    if name not in ("GroupQueryAttention", "Attention"):
        session = ort.InferenceSession(filled.SerializeToString(), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, data)[0], wanted, rtol=1e-4, atol=1e-5)
    target = wanted + 0.1
    losses = [float(trainer.step({**data, "target": target})["loss"]) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    merged = surgery.merge_adapters(model, trainer.state_dict())
    assert not merged.metadata_props and [v.name for v in merged.graph.input] == list("qkv")
    found = gg.Trainer(gg.build(merged, "mse"), device="cpu").predict(data)
    np.testing.assert_allclose(found, trainer.predict(data), rtol=1e-5, atol=1e-6)


def test_heads_that_queries_share_have_one_prefix() -> None:
    whole = np.array([BATCH, 1, HEADS, LENGTH, SIZE])
    stored = {"root": np.array(2, np.float32), "mask": CAUSAL, "wide": whole, "flat": whole[[0, 2, 3, 4]],
              "one": np.array([2])}  # fmt: skip
    repeat = [
        made_node
        for v, to in (("k", "keys"), ("v", "values"))
        for made_node in (node("Unsqueeze", [v, "one"], [f"{v}1"]), node("Expand", [f"{v}1", "wide"], [f"{v}2"]),
                          node("Reshape", [f"{v}2", "flat"], [to]))
    ]  # fmt: skip
    base = attention_model(
        [*repeat, node("Transpose", ["keys"], ["kt"], perm=[0, 1, 3, 2]), node("MatMul", ["q", "kt"], ["raw"]),
         node("Div", ["raw", "root"], ["scaled"]), node("Add", ["scaled", "mask"], ["s"]),
         node("Softmax", ["s"], ["p"], axis=-1, name="attn/Softmax"), node("MatMul", ["p", "values"], ["y"])],
        {"q": [BATCH, HEADS, LENGTH, SIZE], **{n: [BATCH, 1, LENGTH, SIZE] for n in "kv"}}, stored=stored,
        out=[BATCH, HEADS, LENGTH, SIZE],
    )  # fmt: skip
    data = {"q": floats(BATCH, HEADS, LENGTH, SIZE), **{n: floats(BATCH, 1, LENGTH, SIZE) for n in "kv"}}
    numbers = {n: floats(1, 3, SIZE) for n in ("attn.prefix_key", "attn.prefix_value")}
    model = gg.lora(base, "attn", kind="prefix", rank=3)
    assert {weights(model)[n].shape for n in numbers} == {(1, 3, SIZE)}
    filled = surgery.load_weights(model, numbers, strict=False)
    session = ort.InferenceSession(filled.SerializeToString(), providers=["CPUExecutionProvider"])
    shared = [np.repeat(a, HEADS, 1) for a in (data["k"], data["v"])]
    wanted = with_prefix(data["q"], *shared, *(np.repeat(a, HEADS, 0) for a in numbers.values()), True)
    np.testing.assert_allclose(session.run(None, data)[0], wanted, rtol=1e-4, atol=1e-5)


def test_which_attentions_have_no_prefix() -> None:
    flat = attention_model([node("Softmax", ["q"], ["y"], name="attn/Softmax")], {"q": ["b", "t", 8]})
    with pytest.raises(UnknownNameError, match="no part that can have an adapter matches"):
        gg.lora(flat, "*", kind="prefix")
    with pytest.raises(UnknownNameError, match="already has a cache; feed the prefix as an initial cache"):
        gg.lora(EXAMPLES / "tiny_llama_int4.onnx", "*", kind="prefix")
    batched = attention_model(
        [node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]), node("MatMul", ["q", "kt"], ["s"]), *MIX],
        {n: ["b", "t", SIZE] for n in "qkv"}, out=["b", "t", SIZE],
    )  # fmt: skip
    with pytest.raises(UnknownNameError, match="where they cannot be separated"):
        gg.lora(batched, "*", kind="prefix")


@pytest.mark.sweep(0)
def test_a_language_model_learns_by_a_prefix() -> None:
    model = gg.lora(surgery.language_model(EXAMPLES / "tiny_llama_int4.onnx"), "*", kind="prefix", rank=4)
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.adam(0.1))
    assert len(step.manifest.trainable) == 4  # two layers
    trainer = gg.Trainer(step, device="cpu")
    data = surgery.next_tokens([[1, 30, 40, 50, 2], [1, 60, 2]])
    losses = [float(trainer.step(data)["loss"]) for _ in range(15)]
    assert losses[-1] < losses[0] - 0.1


# --- biases -----------------------------------------------------------------------------------------------------


def test_biases_are_found_wherever_something_adds_them() -> None:
    nodes = [
        node("Conv", ["x", "c.weight", "c.bias"], ["h1"]),
        node("BatchNormalization", ["h1", "n.weight", "n.bias", "n.mean", "n.var"], ["h2"]),
        node("Flatten", ["h2"], ["h3"]),
        node("MatMul", ["h3", "m.weight"], ["h4"]), node("Add", ["m.bias", "h4"], ["h5"]),
        node("LayerNormalization", ["h5", "l.weight", "l.bias"], ["h6"]),
        node("Add", ["h6", "position"], ["h7"]),  # no bias of a product
        node("Gemm", ["h7", "g.weight", "g.bias"], ["y"]),
    ]  # fmt: skip
    sizes = {"c.weight": (2, 3, 6, 6), "c.bias": (2,), **{f"n.{p}": (2,) for p in ("weight", "bias", "mean", "var")},
             "m.weight": (2, 4), "m.bias": (4,), "l.weight": (4,), "l.bias": (4,), "position": (4,),
             "g.weight": (4, 5), "g.bias": (5,)}  # fmt: skip
    base = made(nodes, {n: np.abs(floats(*s)) for n, s in sizes.items()}, ["rows", 3, 6, 6])
    model, x = gg.lora(base, "*", kind="bitfit"), floats(8, 3, 6, 6)
    found = ["c.bias", "n.bias", "m.bias", "l.bias", "g.bias"]
    assert list(gg.build(model, "mse").manifest.trainable) == found
    np.testing.assert_array_equal(run(model, x), run(base, x))
    trainer, losses = fitted(model, x, run(base, x) + 1)
    assert losses[-1] < 0.5 * losses[0]
    merged = surgery.merge_adapters(model, trainer.state_dict())
    np.testing.assert_allclose(run(merged, x), trainer.predict(x), rtol=1e-4, atol=1e-4)
    assert not merged.metadata_props
    assert list(gg.build(gg.lora(base, ["g", "c"], kind="bitfit"), "mse").manifest.trainable) == ["c.bias", "g.bias"]


# --- several names ----------------------------------------------------------------------------------------------


def two() -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, np.ndarray]]:
    base = LAYERS["Gemm"]
    model = gg.lora(gg.lora(base, "w", rank=2, name="fr"), "w", rank=3, alpha=1, kind="rslora", name="de")
    return base, model, trained(model)


def test_adapters_of_two_names_add_up_and_are_weighed() -> None:
    base, model, numbers = two()
    x = feed(base)
    assert sorted(numbers) == ["w.lora_A.de", "w.lora_A.fr", "w.lora_B.de", "w.lora_B.fr"]
    filled = surgery.load_weights(model, numbers, strict=False)
    fr = 2 * x @ numbers["w.lora_A.fr"] @ numbers["w.lora_B.fr"]
    de = x @ numbers["w.lora_A.de"] @ numbers["w.lora_B.de"] / np.sqrt(3)
    for used, wanted in ((None, fr + de), ({"fr": 1}, fr), ({"de": 0.5, "fr": -1}, 0.5 * de - fr), ({}, 0 * fr)):
        found = surgery.use_adapters(filled, used)
        np.testing.assert_allclose(run(found, x), run(base, x) + wanted, rtol=1e-3, atol=1e-4)
        merged = surgery.merge_adapters(found)
        np.testing.assert_allclose(run(merged, x), run(found, x), rtol=1e-3, atol=1e-4)
    for first, second in (("fr", "de"), ("de", "fr")):
        left = surgery.merge_adapters(filled, names=first)
        np.testing.assert_allclose(run(left, x), run(filled, x), rtol=1e-3, atol=1e-4)
        assert sorted(trained(left)) == [f"w.lora_{p}.{second}" for p in "AB"]


def test_the_newest_is_trained_unless_another_is_chosen() -> None:
    _, model, _ = two()
    assert list(gg.build(model, "mse").manifest.trainable) == ["w.lora_A.de", "w.lora_B.de"]
    for names, count in (("fr", 2), (["fr", "de"], 4)):
        step = gg.build(surgery.use_adapters(model, train=names), "mse")
        assert len(step.manifest.trainable) == count and "w.lora_A.fr" in step.manifest.trainable


def test_each_is_saved_and_loaded_by_itself(tmp_path: Path) -> None:
    base, model, numbers = two()
    x = feed(base)
    with pytest.raises(BuildError, match="several sets of adapters"):
        surgery.save_adapter(model, tmp_path / "both")
    again = base
    for name in ("fr", "de"):
        surgery.save_adapter(model, tmp_path / name, numbers, name=name)
        again = surgery.load_adapter(again, tmp_path / name, name=name)
    wanted = run(surgery.load_weights(model, numbers, strict=False), x)
    np.testing.assert_allclose(run(again, x), wanted, rtol=1e-4, atol=1e-5)


STACKED = made(
    [node("Gemm", ["x", "first.weight", "first.bias"], ["h"]), node("Relu", ["h"], ["r"]),
     node("Gemm", ["r", "last.weight", "last.bias"], ["y"])],
    {"first.weight": floats(8, 16), "first.bias": floats(16), "last.weight": floats(16, 5), "last.bias": floats(5)},
    ["rows", 8],
)  # fmt: skip
IN_4_BITS = made(
    [node("MatMulNBits", ["x", "first.weight", "s"], ["h"], domain="com.microsoft", K=32, N=32, bits=4, block_size=16),
     node("MatMulNBits", ["h", "last.weight", "s"], ["y"], domain="com.microsoft", K=32, N=32, bits=4, block_size=16)],
    {"s": np.abs(floats(64)) / 50,
     **{f"{name}.weight": np.random.default_rng(len(name)).integers(0, 256, (32, 2, 8), np.uint8)
        for name in ("first", "last")}}, ["rows", 32], y=["rows", 32],
)  # fmt: skip


OF_EXPERTS = made(  # one of two experts, for all rows
    [node("Gather", ["first.weight", "chosen"], ["u"]), node("MatMul", ["x", "u"], ["h"]), node("Relu", ["h"], ["r"]),
     node("Gather", ["last.weight", "chosen"], ["v"]), node("MatMul", ["r", "v"], ["y"])],
    {"first.weight": floats(2, 8, 16), "last.weight": floats(2, 16, 5), "chosen": np.array([1])}, ["rows", 8],
    y=[1, "rows", 5],
)  # fmt: skip
BASES = {"qalora": IN_4_BITS, "lora_experts": OF_EXPERTS}  # for other kinds: STACKED


@pytest.mark.sweep(0.16)
@pytest.mark.parametrize("kind", KINDS)
def test_two_names_of_each_kind_are_saved_loaded_and_merged_by_themselves(kind: str, tmp_path: Path) -> None:
    prefix = kind == "prefix"
    stacked = BASES.get(kind, STACKED)
    base = surgery.language_model(EXAMPLES / "tiny_llama_int4.onnx") if prefix else stacked
    parts = {"fr": "*layers.0*", "de": "*layers.1*"} if prefix else {"fr": "first", "de": "last"}
    width = stacked.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    x = np.array([[1, 30, 40, 50]]) if prefix else floats(4, width)
    model = base
    for name, target in parts.items():
        model = gg.lora(model, target, kind=kind, rank=2, name=name)
    numbers = of_adapters(model)
    wanted = run(surgery.load_weights(model, numbers, strict=False), x)
    for order in (list(parts), list(parts)[::-1]):
        again = base
        for name in order:
            surgery.save_adapter(model, tmp_path / name, numbers, name=name)
            again = surgery.load_adapter(again, tmp_path / name, name=name)
        np.testing.assert_allclose(run(again, x), wanted, rtol=1e-4, atol=1e-4)
        for left, taken in (order, order[::-1]):
            merged = surgery.merge_adapters(again, names=taken)
            np.testing.assert_allclose(run(merged, x), wanted, rtol=1e-4, atol=1e-4)
            assert set(of_adapters(merged)) == _of(again, left)


def _of(model: onnx.ModelProto, name: str) -> set[str]:
    described = next(p.value for p in model.metadata_props if p.key == "gradgraph.adapters")
    return {weight for one in json.loads(described) if one["name"] == name for weight in one["weights"]}


@pytest.mark.sweep(0.73)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "prefix"])  # of attentions alone
def test_training_goes_on_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    base, x = LAYERS["MatMulNBits" if kind == "qalora" else "Gemm"], floats(8, 32)
    if kind == "lora_experts":
        base, x = OF_EXPERTS, floats(8, 8)
    data = {"x": x, "target": run(base, x) + 1}
    model = gg.lora(base, {"bitfit": "b", "lora_experts": "*"}.get(kind, "w"), kind=kind, rank=2)

    def steps(of: onnx.ModelProto, count: int) -> gg.Trainer:
        trainer = gg.Trainer(gg.build(of, "mse", gg.optim.sgd(0.05)), device="cpu")
        for _ in range(count):
            trainer.step(data)
        return trainer

    whole = steps(model, 4).state_dict()
    surgery.save_adapter(model, tmp_path, steps(model, 2).state_dict())
    parts = steps(surgery.load_adapter(base, tmp_path), 2).state_dict()
    assert whole.keys() == parts.keys() and len(whole) > 0
    for name, array in whole.items():
        np.testing.assert_array_equal(array, parts[name])


def test_lora_plus_is_a_group_of_the_optimizer() -> None:
    """LoRA+ (Hayou et al. 2024): the second factor learns faster by a ratio."""
    base, x = LAYERS["Gemm"], floats(8, 32)
    model = surgery.load_weights(gg.lora(base, "w", rank=2), {"w.lora_B": floats(2, 5)}, strict=False)
    before = weights(model)
    moved = {}
    for groups in (None, {"*.lora_B": {"lr_factor": 16}}):
        trainer = gg.Trainer(gg.build(model, "mse", gg.optim.sgd(1e-4, groups=groups)), device="cpu")
        trainer.step({"x": x, "target": np.zeros((8, 5), np.float32)})
        moved[bool(groups)] = {n: a - before[n] for n, a in trainer.state_dict().items()}
    np.testing.assert_allclose(moved[True]["w.lora_A"], moved[False]["w.lora_A"], atol=1e-7)
    np.testing.assert_allclose(moved[True]["w.lora_B"], 16 * moved[False]["w.lora_B"], rtol=0.02, atol=1e-6)


# --- onnxruntime's format ---------------------------------------------------------------------------------------


def switched(base: onnx.ModelProto, kind: str, target: str, feeds: dict[str, np.ndarray], folder: Path) -> None:
    """A session gives what each of two models of adapters gives, and without any what the base does."""

    def outputs(model: onnx.ModelProto) -> np.ndarray:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # as `run` has it
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)[0]

    surgery.switchable(gg.lora(base, target, rank=2, kind=kind), out=folder / "base.onnx")
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        session = ort.InferenceSession(folder / "base.onnx", options, providers=["CPUExecutionProvider"])
        found = {}
        for called, rank, alpha in (("fr", 2, 5), ("de", 3, 1)):
            scaling = {"alpha": alpha} if KINDS[kind].has_alpha else {}
            model = gg.lora(base, target, rank=rank, name=called, kind=kind, **scaling)
            numbers = of_adapters(model)
            surgery.save_adapter(model, folder / f"{called}.onnx_adapter", numbers)
            adapter, chosen = ort.LoraAdapter(), ort.RunOptions()
            adapter.Load(str(folder / f"{called}.onnx_adapter"))
            chosen.add_active_adapter(adapter)
            (found[called], *_) = session.run(None, feeds, chosen)
            wanted = outputs(surgery.load_weights(model, numbers, strict=False))
            np.testing.assert_allclose(found[called], wanted, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(session.run(None, feeds)[0], outputs(base), rtol=1e-3, atol=1e-3)
        assert np.abs(found["fr"] - found["de"]).max() > 0.02
    plain = surgery.switchable(gg.lora(base, target, rank=2, kind=kind), required=True)
    names = [value.name for value in plain.graph.input]
    assert {*names} == {v.name for v in onnx.load(folder / "base.onnx").graph.input}
    assert not {*names} & {tensor.name for tensor in plain.graph.initializer}
    session = ort.InferenceSession(plain.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [x.name for x in session.get_inputs()] == names  # optional ones are no inputs there
    numbers = surgery.switchable(gg.lora(base, target, rank=2, kind=kind))
    rest = {t.name: onnx.numpy_helper.to_array(t) for t in numbers.graph.initializer if t.name in {*names} - {*feeds}}
    np.testing.assert_allclose(session.run(None, {**feeds, **rest})[0], outputs(base), rtol=1e-3, atol=1e-3)


def of_adapters(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Other numbers for what is trained, as a run would leave them."""
    described = next(p.value for p in model.metadata_props if p.key == "gradgraph.adapters")
    names = [name for one in json.loads(described) for name in one["weights"]]
    return {n: np.abs(floats(*weights(model)[n].shape)) / 2 for n in names}


LAYERS_OF = {
    "lora": ["MatMul", "Gemm of PyTorch", "Conv", "embedding", "MatMulNBits"],
    "rslora": ["MatMul"],
    "dora": ["MatMul", "Gemm of PyTorch", "Conv", "MatMulNBits", "int8 by channel"],
    "ia3": ["MatMul", "Conv"],
    "qalora": ["MatMulNBits"],
    "bottleneck": ["MatMul", "Gemm of PyTorch", "Conv", "embedding", "MatMulNBits"],
    "bitfit": ["Gemm", "Conv"],
}


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in LAYERS_OF.items() for name in names])
def test_a_session_switches_between_two_adapters(kind: str, name: str, tmp_path: Path) -> None:
    base = LAYERS[name]
    target = "*" if kind == "bitfit" else "w"
    switched(base, kind, target, {base.graph.input[0].name: feed(base)}, tmp_path)


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "GroupQueryAttention"])
def test_a_session_switches_between_two_prefixes(name: str, tmp_path: Path) -> None:
    """Of their own lengths; without one there is none."""
    base, _ = ATTENTIONS[name]
    flat = base.graph.input[0].type.tensor_type.shape.dim[1].dim_param == "t"
    data = {n: floats(BATCH, HEADS, LENGTH, SIZE) for n in "qkv"}
    if flat:
        data = {n: a.swapaxes(1, 2).reshape(BATCH, LENGTH, -1) for n, a in data.items()}
    switched(base, "prefix", "attn", data, tmp_path)


def test_a_session_switches_between_two_prefixes_of_a_group(tmp_path: Path) -> None:
    """GroupQueryAttention, whose kernel takes heads of 8 and more, and a past for one sample at a time."""
    stored = {"last": np.full((1,), LENGTH - 1, np.int32), "total": np.array(LENGTH, np.int32)}
    names = ["q", "k", "v", "", "", *stored]
    base = attention_model(
        [node("GroupQueryAttention", names, ["y", "", ""], name="attn/gqa", domain="com.microsoft", num_heads=HEADS,
              kv_num_heads=HEADS)], {n: ["b", "t", HEADS * 8] for n in "qkv"}, stored=stored, out=["b", "t", HEADS * 8],
    )  # fmt: skip
    switched(base, "prefix", "attn", {n: floats(1, LENGTH, HEADS * 8) for n in "qkv"}, tmp_path)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: surgery.use_adapters(two()[1], {"es": 1}), UnknownNameError, "no adapters 'es'; choose from"),
        (lambda: surgery.use_adapters(gg.lora(LAYERS["Gemm"], "w", kind="ia3"), {}), BuildError, "have no scale"),
        (lambda: gg.lora(two()[1], "w", name="fr"), BuildError, "already has adapters 'fr'"),
        (lambda: gg.lora(two()[1], "w", name="x", kind="dora"), BuildError, "cannot share a layer"),
        (lambda: surgery.merge_adapters(two()[1], names="es"), UnknownNameError, "no adapters 'es'"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert says in str(raised.value)
