"""PEFT's folders fit models whose layers have other names, or are packed otherwise; NumPy says what they compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import ArgumentError, BuildError, DataError, UnknownNameError

INPUTS = 6
SIZES = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "gate_proj": 5, "up_proj": 5, "o_proj": 3}
PACKS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MODULES = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
           "gate_proj": "mlp", "up_proj": "mlp", "qkv_proj": "self_attn", "gate_up_proj": "mlp"}  # fmt: skip
RNG = np.random.default_rng(0)
BASE = {piece: RNG.normal(size=(size, INPUTS)).astype(np.float32) for piece, size in SIZES.items()}  # outputs first
X = RNG.normal(size=(7, INPUTS)).astype(np.float32)


def sizes_of(name: str) -> list[int]:
    return [SIZES[piece] for piece in PACKS.get(name, (name,))]


def network(*packed: str) -> onnx.ModelProto:
    """Projections of ``x`` under the builder's names, joined in ``y``; ``packed`` says which are one product."""
    nodes, weights, parts = [], [], []
    apart = [piece for piece in SIZES if not any(piece in PACKS[pack] for pack in packed)]
    for name in (*packed, *apart):
        module = f"model.layers.0.{'attn' if MODULES[name] == 'self_attn' else 'mlp'}.{name}"
        weight = np.concatenate([BASE[piece] for piece in PACKS.get(name, (name,))]).T
        weights.append(numpy_helper.from_array(weight, f"{module}.MatMul.weight"))
        node = f"/{module.replace('.', '/')}/MatMul"
        nodes.append(helper.make_node("MatMul", ["x", f"{module}.MatMul.weight"], [f"{name}.out"], name=node))
        pieces = PACKS.get(name, (name,))
        if len(pieces) > 1:
            weights.append(numpy_helper.from_array(np.array(sizes_of(name)), f"{name}.sizes"))
            nodes.append(
                helper.make_node("Split", [f"{name}.out", f"{name}.sizes"], [f"{p}.out" for p in pieces], axis=1)
            )
    parts = [f"{piece}.out" for piece in SIZES]
    nodes.append(helper.make_node("Concat", parts, ["y"], axis=1))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", sum(SIZES.values())])], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


MODELS = {"apart": (), "packed": tuple(PACKS), "attention packed": ("qkv_proj",)}
WRITTEN = {
    "apart": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj"),
    "queries and values alone": ("q_proj", "v_proj"),
    "keys alone": ("k_proj",),
    "packed": ("qkv_proj", "gate_up_proj"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "ranks and alphas of their own": {
        "rank_pattern": {"q_proj": 3, "qkv_proj": 1}, "alpha_pattern": {"v_proj": 7, "k_proj": 2},
    },
}  # fmt: skip


def write_folder(folder: Path, modules: tuple[str, ...], settings: Mapping[str, Any]) -> np.ndarray:
    """A folder as PEFT writes it, and what its adapters add to the outputs of the whole network."""
    rng = np.random.default_rng(1)
    tensors, added = {}, {piece: np.zeros((len(X), size)) for piece, size in SIZES.items()}
    for name in modules:
        rank = settings.get("rank_pattern", {}).get(name, 2)
        alpha = settings.get("alpha_pattern", {}).get(name, 3)
        scale = alpha / (np.sqrt(rank) if settings.get("use_rslora") else rank)
        a, b = rng.normal(size=(rank, INPUTS)), rng.normal(size=(sum(sizes_of(name)), rank))
        module = f"base_model.model.model.layers.0.{MODULES[name]}.{name}"
        tensors[f"{module}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = b.astype(np.float32)
        if settings.get("use_dora"):
            tensors[f"{module}.lora_magnitude_vector"] = np.linalg.norm(BASE[name], axis=1).astype(np.float32)
        ends = np.cumsum(sizes_of(name))[:-1]
        for piece, part in zip(PACKS.get(name, (name,)), np.split(scale * X @ a.T @ b.T, ends, axis=1), strict=True):
            added[piece] += part
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": list(modules), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return np.concatenate(list(added.values()), 1)


def predicted(model: Any) -> np.ndarray:
    return gg.Trainer(gg.build(model, "mse"), device="cpu").predict(X)


PLAIN = np.concatenate([X @ weight.T for weight in BASE.values()], 1)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("model", MODELS)
def test_a_folder_of_peft_fits_a_model_of_the_builder(model: str, written: str, settings: str, tmp_path: Path) -> None:
    added = write_folder(tmp_path / "peft", WRITTEN[written], SETTINGS[settings])
    found = predicted(surgery.load_adapter(network(*MODELS[model]), tmp_path / "peft"))
    np.testing.assert_allclose(found - PLAIN, added, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("model", MODELS)
def test_adapters_go_to_the_names_of_a_family_and_come_back(model: str, family: str, kind: str, tmp_path: Path) -> None:
    adapted = gg.lora(network(*MODELS[model]), "*", rank=2, kind=kind)
    rng = np.random.default_rng(2)
    numbers = {
        name: (value * 1.1 if "magnitude" in name else rng.normal(size=value.shape)).astype(np.float32)
        for name, value in gg.Trainer(gg.build(adapted, "mse"), device="cpu").state_dict().items()
        if "lora" in name
    }
    surgery.save_adapter(adapted, tmp_path, numbers, family=family)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    names = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert names == ({"qkv_proj", "gate_up_proj", "o_proj"} if family == "phi3" else set(SIZES))
    assert all(".self_attn." in name or ".mlp." in name for name in config["target_modules"])
    trained = predicted(surgery.load_weights(adapted, numbers, strict=False))
    assert np.abs(trained - PLAIN).max() > 0.1
    for other in MODELS.values():
        found = predicted(surgery.load_adapter(network(*other), tmp_path))
        np.testing.assert_allclose(found, trained, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(0)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_packed_layer_trains_as_its_pieces_do(kind: str, tmp_path: Path) -> None:
    """Ten steps on three adapters of a packed layer are those on the layers apart, and so are averages of the weights:
    their zeros stay zero.
    """
    write_folder(tmp_path / "peft", WRITTEN["apart"], {"use_dora": kind == "dora"})
    losses, folders, averaged = [], [], []
    target = np.random.default_rng(3).normal(size=(len(X), sum(SIZES.values()))).astype(np.float32)
    for model in MODELS:
        adapted = surgery.load_adapter(network(*MODELS[model]), tmp_path / "peft")
        chain = gg.optim.chain(gg.optim.clip_by_global_norm(0.5), gg.optim.adamw(3e-2, weight_decay=0.1))
        trainer = gg.Trainer(gg.build(adapted, "mse", gg.optim.ema(chain, 0.9)), device="cpu")
        losses.append([float(trainer.step({"x": X, "target": target})["loss"]) for _ in range(10)])
        averaged.append(trainer.predict(X))
        assert np.abs(averaged[-1] - trainer.predict(X, averaged=False)).max() > 1e-2
        surgery.save_adapter(adapted, tmp_path / model, trainer.state_dict(), family="llama")
        folders.append(safetensors.numpy.load_file(tmp_path / model / "adapter_model.safetensors"))
    assert losses[0][-1] < 0.9 * losses[0][0]
    for found in averaged[1:]:
        np.testing.assert_allclose(found, averaged[0], rtol=1e-4, atol=1e-4)
    for found, folder in zip(losses[1:], folders[1:], strict=True):
        np.testing.assert_allclose(found, losses[0], rtol=1e-5)
        assert folder.keys() == folders[0].keys()  # each piece has its own factors again, of its own rank
        for name, array in folder.items():
            np.testing.assert_allclose(array, folders[0][name], rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("settings", ["lora", "ranks and alphas of their own"])
def test_ten_steps_on_a_packed_layer_are_those_of_torch(settings: str, tmp_path: Path) -> None:
    """PEFT's formula written in PyTorch: three layers with adapters of their own, whose file has one packed layer.

    The same for the folder that is saved under the model's own names.
    """
    torch = pytest.importorskip("torch", reason="in no extra; the test above holds the same against layers apart")
    own = SETTINGS[settings]
    write_folder(tmp_path, WRITTEN["queries and values alone"], own)
    stored = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    weights = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in stored.items()}
    target = np.random.default_rng(3).normal(size=(len(X), sum(SIZES.values()))).astype(np.float32)
    optimizer, theirs = torch.optim.AdamW(weights.values(), lr=3e-2, weight_decay=0.1), []
    for _ in range(10):
        parts = []
        for piece, base in BASE.items():
            part = torch.tensor(X) @ torch.tensor(base).T
            pair = [w for name, w in weights.items() if f".{piece}." in name]
            scale = own.get("alpha_pattern", {}).get(piece, 3) / own.get("rank_pattern", {}).get(piece, 2)
            parts.append(part + scale * torch.tensor(X) @ pair[0].T @ pair[1].T if pair else part)
        loss = torch.nn.functional.mse_loss(torch.cat(parts, 1), torch.tensor(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(float(loss.detach()))
    assert theirs[-1] < 0.95 * theirs[0]
    first = surgery.load_adapter(network("qkv_proj", "gate_up_proj"), tmp_path)
    surgery.save_adapter(first, tmp_path / "own")
    names = safetensors.numpy.load_file(tmp_path / "own" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == {"q_proj", "v_proj"}
    for adapted in (first, surgery.load_adapter(network("qkv_proj", "gate_up_proj"), tmp_path / "own")):
        trainer = gg.Trainer(gg.build(adapted, "mse", gg.optim.adamw(3e-2, weight_decay=0.1)), device="cpu")
        ours = [float(trainer.step({"x": X, "target": target})["loss"]) for _ in range(10)]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for name in ("llama", "phi3"):  # separate in PyTorch, or packed there, too
        surgery.save_adapter(adapted, tmp_path / name, trainer.state_dict(), family=name)
        again = surgery.load_adapter(network("qkv_proj", "gate_up_proj"), tmp_path / name)
        np.testing.assert_allclose(predicted(again), trainer.predict(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", ["lora", "ranks and alphas of their own"])
def test_joined_adapters_are_switched_and_merged(settings: str, tmp_path: Path) -> None:
    added = write_folder(tmp_path / "peft", WRITTEN["queries and values alone"], SETTINGS[settings])
    adapted = surgery.load_adapter(network("qkv_proj"), tmp_path / "peft")
    np.testing.assert_allclose(predicted(surgery.merge_adapters(adapted)) - PLAIN, added, rtol=1e-4, atol=1e-4)
    surgery.switchable(adapted, out=tmp_path / "base.onnx")
    surgery.save_adapter(adapted, tmp_path / "one.onnx_adapter")
    session = ort.InferenceSession(tmp_path / "base.onnx", providers=["CPUExecutionProvider"])
    one, options = ort.LoraAdapter(), ort.RunOptions()
    one.Load(str(tmp_path / "one.onnx_adapter"))
    np.testing.assert_allclose(session.run(None, {"x": X})[0], PLAIN, rtol=1e-4, atol=1e-4)
    options.add_active_adapter(one)
    np.testing.assert_allclose(session.run(None, {"x": X}, options)[0] - PLAIN, added, rtol=1e-4, atol=1e-4)


def test_names_that_a_model_has_stay(tmp_path: Path) -> None:
    adapted = gg.lora(network("qkv_proj"), "*", rank=2)
    surgery.save_adapter(adapted, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "model.layers.0.attn.qkv_proj" in config["target_modules"] and not config["rank_pattern"]
    surgery.load_adapter(network("qkv_proj"), tmp_path)


def test_a_module_of_another_wrapper_is_found_by_the_number_of_its_layer(tmp_path: Path) -> None:
    added = write_folder(tmp_path, ("q_proj", "o_proj"), {})
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    moved = {name.replace(".model.layers.", ".language_model.layers."): a for name, a in tensors.items()}
    safetensors.numpy.save_file(moved, tmp_path / "adapter_model.safetensors")
    found = predicted(surgery.load_adapter(network("qkv_proj"), tmp_path))
    np.testing.assert_allclose(found - PLAIN, added, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrapper", ["", "network.", "outer.network."])
def test_names_that_a_wrapper_begins_are_found(wrapper: str, tmp_path: Path) -> None:
    """Also if an encoder and a decoder have layers of the same number."""
    rng = np.random.default_rng(4)
    modules = ("model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1")
    weights = [rng.normal(size=(INPUTS, INPUTS)).astype(np.float32) for _ in modules]
    stored = [numpy_helper.from_array(w, f"{wrapper}{m}.weight") for m, w in zip(modules, weights, strict=True)]
    nodes = [helper.make_node("MatMul", ["x", stored[0].name], ["h"]),
             helper.make_node("MatMul", ["h", stored[1].name], ["y"])]  # fmt: skip
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", INPUTS]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    tensors, wanted = {}, X
    for module, weight in zip(modules, weights, strict=True):
        a, b = rng.normal(size=(2, INPUTS)).astype(np.float32), rng.normal(size=(INPUTS, 2)).astype(np.float32)
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        wanted = wanted @ weight + 1.5 * wanted @ a.T @ b.T
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": list(modules)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(predicted(surgery.load_adapter(model, tmp_path)), wanted, rtol=1e-4, atol=1e-3)


def test_what_was_trained_whole_becomes_the_weight(tmp_path: Path) -> None:
    added = write_folder(tmp_path, ("q_proj",), {"modules_to_save": ["o_proj"]})
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    whole = np.random.default_rng(3).normal(size=BASE["o_proj"].shape).astype(np.float32)
    name = "base_model.model.model.layers.0.self_attn.o_proj.weight"
    safetensors.numpy.save_file({**tensors, name: whole}, tmp_path / "adapter_model.safetensors")
    found = predicted(surgery.load_adapter(network("qkv_proj"), tmp_path))
    wanted = PLAIN + added
    wanted[:, -SIZES["o_proj"] :] = X @ whole.T
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    safetensors.numpy.save_file({**tensors, name: whole[:, 1:]}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(DataError, match="was fully fine-tuned, but the model has no weight with this name and shape"):
        surgery.load_adapter(network(), tmp_path)


OTHERS = {"model.layers.*.attn.q_proj": "h.*.asks", "model.layers.0.mlp.up_proj": "ups",
          "model.layers.*.attn.o_proj": "h.*.gives"}  # fmt: skip


@pytest.mark.parametrize("family", [None, "llama"])
def test_a_name_that_ends_another_one_targets_its_layer_only(family: str | None, tmp_path: Path) -> None:
    """PEFT adapts all modules whose names end with one of a list."""
    adapted = gg.lora(network(), "*o_proj", rank=2)
    surgery.save_adapter(adapted, tmp_path, family=family, names={"model.layers.0.attn.o_proj": "q_proj"})
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == "q_proj"


@pytest.mark.parametrize("family", [None, "llama"])
def test_names_that_nobody_can_derive_are_given(family: str | None, tmp_path: Path) -> None:
    """Both ways, with ranks, alphas and a whole weight under names of the folder."""
    adapted = gg.lora(network(), "*", rank=2)
    rng = np.random.default_rng(2)
    numbers = {
        t.name: rng.normal(size=t.dims).astype(np.float32) for t in adapted.graph.initializer if "lora_" in t.name
    }
    surgery.save_adapter(adapted, tmp_path, numbers, family=family, names=OTHERS)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    attention = "attn" if family is None else "self_attn"
    rest = {f"model.layers.0.{attention}.{p}" for p in ("k_proj", "v_proj")} | {"model.layers.0.mlp.gate_proj"}
    assert set(config["target_modules"]) == {"h.0.asks", "h.0.gives", "ups", *rest}
    trained = predicted(surgery.load_weights(adapted, numbers, strict=False))
    assert np.abs(trained - PLAIN).max() > 0.1
    found = predicted(surgery.load_adapter(network(), tmp_path, names=OTHERS))
    np.testing.assert_allclose(found, trained, rtol=1e-4, atol=1e-4)

    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    for part in ("A", "B"):  # the product counts twice as much again: 3 times the rank, and an alpha of its own
        key = f"base_model.model.h.0.asks.lora_{part}.weight"
        tensors[key] = np.concatenate([tensors[key]] * 3, axis="AB".index(part))
    whole = tensors["base_model.model.h.0.gives.weight"] = rng.normal(size=BASE["o_proj"].shape).astype(np.float32)
    kept = {name: array for name, array in tensors.items() if "gives.lora" not in name}
    safetensors.numpy.save_file(kept, tmp_path / "adapter_model.safetensors")
    own = {"rank_pattern": {"asks": 6}, "alpha_pattern": {"asks": 8}, "modules_to_save": ["gives"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | own))
    found = predicted(surgery.load_adapter(network(), tmp_path, names=OTHERS))
    wanted = trained.copy()
    wanted[:, : SIZES["q_proj"]] += (trained - PLAIN)[:, : SIZES["q_proj"]]
    wanted[:, -SIZES["o_proj"] :] = X @ whole.T
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


WRONG_NAMES: dict[str, tuple[dict[str, str], type[Exception], str]] = {
    "no layer": ({"model.layers.*.attn.query": "h.*.q"}, UnknownNameError, "matches no layer with an adapter"),
    "no module": ({"model.layers.*.attn.q_proj": "h.*.q"}, UnknownNameError, "matches no module of the folder"),
    "a * on one side": ({"model.layers.*.attn.q_proj": "h.0.q"}, ArgumentError, "do not have one \\* each"),
    "one name twice": ({"model.layers.0.attn.q_proj": "q", "model.layers.0.attn.k_proj": "q"}, ArgumentError,
                       "2 layers would have the name 'q'"),
    "a name that is there": ({"model.layers.0.attn.q_proj": "model.layers.0.attn.k_proj"}, ArgumentError,
                             "2 layers would have the name"),
    "a name of the family": ({"model.layers.0.attn.o_proj": "model.layers.0.self_attn.q_proj"}, ArgumentError,
                             "is also the family's name of another layer"),
    "numbers": ({"model.layers.0.attn.q_proj": 3}, ArgumentError, "a dict of names in the folder by layer"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_NAMES)
def test_names_that_make_no_sense_are_refused(what: str, tmp_path: Path) -> None:
    names, error, says = WRONG_NAMES[what]
    adapted = gg.lora(network(), "*", rank=2)
    surgery.save_adapter(adapted, tmp_path / "plain")
    with pytest.raises(error, match=says):
        if what == "no module":
            surgery.load_adapter(network(), tmp_path / "plain", names=names)
        else:
            family = "llama" if what == "a name of the family" else None
            surgery.save_adapter(adapted, tmp_path / "named", names=names, family=family)
    with pytest.raises(BuildError, match="uses the model's names; remove the argument names"):
        surgery.save_adapter(adapted, tmp_path / "a.onnx_adapter", names=OTHERS)


def without(folder: Path, part: str) -> None:
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    kept = {name: array for name, array in tensors.items() if part not in name}
    safetensors.numpy.save_file(kept, folder / "adapter_model.safetensors")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    surgery.save_adapter(gg.lora(network(), "*", rank=2, kind="dora"), tmp_path, family="llama")
    without(tmp_path, ".k_proj.")
    with pytest.raises(
        DataError, match="packs several modules of PEFT, but the folder has DoRA adapters for only some of them"
    ):
        surgery.load_adapter(network("qkv_proj"), tmp_path)
    surgery.save_adapter(gg.lora(network(), "*", rank=2), tmp_path, family="llama")
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    key = next(name for name in tensors if ".k_proj.lora_B" in name)
    cut = {**tensors, key: tensors[key][1:]}
    safetensors.numpy.save_file(cut, tmp_path / "adapter_model.safetensors")
    with pytest.raises(DataError, match="has 16 outputs, which do not match pieces of"):
        surgery.load_adapter(network("qkv_proj"), tmp_path)
    with pytest.raises(BuildError, match="has an adapter of kind ia3 on a MatMul"):
        surgery.save_adapter(gg.lora(network(), "*", kind="ia3"), tmp_path, family="llama")
    with pytest.raises(BuildError, match="uses the model's names; remove the argument family"):
        surgery.save_adapter(gg.lora(network(), "*"), tmp_path / "a.onnx_adapter", family="llama")


def test_weights_that_two_decoders_share_have_the_names_of_their_modules() -> None:
    """As optimum merges OPT: behind names stands a mark, and nodes lack what stands in front."""
    node, shapes = helper.make_node, {"onnx::MatMul_5_merged_0": (4, 4), "model.decoder.fc1.bias_merged_0": (4,),
                                      "lm_head.weight_merged_1": (4, 4)}  # fmt: skip
    nodes = [
        node("MatMul", ["x", "onnx::MatMul_5_merged_0"], ["p"], name="/decoder/fc1/MatMul_1"),
        node("Add", ["model.decoder.fc1.bias_merged_0", "p"], ["h"], name="/decoder/fc1/Add_1"),
        node("MatMul", ["h", "lm_head.weight_merged_1"], ["y"], name="/lm_head/MatMul_1"),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in "xy")
    tensors = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    adapted = gg.lora(model, "*", rank=1)
    named = {t.name.partition(".lora")[0] for t in adapted.graph.initializer if ".lora" in t.name}
    assert named == {"model.decoder.fc1", "lm_head"}
