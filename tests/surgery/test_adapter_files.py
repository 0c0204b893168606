"""Adapters in PEFT's files: names, shapes, settings; what comes back computes the same."""

from __future__ import annotations

import json
import re
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
    options: dict[str, Any] = {} if kind == "ia3" else {"rank": 3, "alpha": 5, "dropout": 0.1}
    model = gg.lora(base, "w", kind=kind, **options)
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", ["b"]),
        ("target_modules", r"model\..*"),
        ("exclude_modules", ["a"]),
        ("modules_to_save", ["a"]),
    ],
)
def test_tensors_that_peft_would_ignore_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    settings = {"target_modules": ["a"], field: value}
    with pytest.raises(DataError, match=f"has tensors of 'a', which PEFT ignores because of {field} in adapter_config"):
        surgery.load_adapter(squares()[0], folder_with(tmp_path, {}, **settings))


def squares() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Two square layers and one that is not, all read by MatMul."""
    rng = np.random.default_rng(0)
    numbers = {f"{name}.weight": rng.normal(size=(4, 6 if name == "z.b" else 4)).astype(np.float32)
               for name in ("a", "x.b", "z.b")}  # fmt: skip
    nodes = [node("MatMul", ["x", "a.weight"], ["h"]), node("MatMul", ["h", "x.b.weight"], ["i"]),
             node("MatMul", ["i", "z.b.weight"], ["y"])]  # fmt: skip
    return made(nodes, numbers, ["rows", 4], y=["rows", 6]), numbers


@pytest.mark.parametrize("conv1d", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_a_square_weight_that_was_trained_whole(conv1d: bool, flag: bool | None, tmp_path: Path) -> None:
    """The old weight shows whether it is transposed; PEFT's flag is that of the layers with adapters."""
    model, numbers = squares()
    new = {"x.b.weight": numbers["x.b.weight"] + np.float32(0.1)}
    settings = {} if flag is None else {"fan_in_fan_out": flag}
    of_file = {n: a if conv1d else a.T for n, a in new.items()}
    loaded = weights(surgery.load_adapter(model, folder_with(tmp_path, of_file, modules_to_save=["b"], **settings)))
    np.testing.assert_array_equal(loaded["x.b.weight"], new["x.b.weight"])


@pytest.mark.parametrize("conv1d", [True, False])
def test_a_square_weight_unlike_the_old_one_lies_as_others_or_is_refused(conv1d: bool, tmp_path: Path) -> None:
    model, numbers = squares()
    rng = np.random.default_rng(5)
    new = {n: rng.normal(size=numbers[n].shape).astype(np.float32) * 9 for n in ("x.b.weight", "z.b.weight")}
    of_file = {n: a if conv1d else a.T for n, a in new.items()}
    loaded = weights(surgery.load_adapter(model, folder_with(tmp_path, of_file)))
    for name in new:
        np.testing.assert_array_equal(loaded[name], new[name])
    with pytest.raises(
        DataError, match=r"'base_model.model.x.b.weight' is square, .* unknown whether it is transposed"
    ):
        surgery.load_adapter(model, folder_with(tmp_path, {"x.b.weight": of_file["x.b.weight"]}))


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


ENDINGS = ("fc", "block.fc", "block.1.fc", "other.block.1.fc")  # each name is the end, or matches the end, of the next


def ending_alike() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    numbers = {f"{name}.weight": rng.normal(size=(4, 4)).astype(np.float32) for name in ENDINGS}
    ends = ["x", "h0", "h1", "h2", "y"]
    nodes = [node("Gemm", [ends[i], f"{name}.weight"], [ends[i + 1]], transB=1) for i, name in enumerate(ENDINGS)]
    return made(nodes, numbers, ["rows", 4], y=["rows", 4]), numbers


@pytest.mark.parametrize("odd", ENDINGS)
@pytest.mark.parametrize("what", ["rank", "alpha"])
def test_ranks_and_alphas_apply_to_their_own_layer_only(what: str, odd: str, tmp_path: Path) -> None:
    """A pattern of PEFT matches the ends of names, as a regular expression; the layers here have such names."""
    model, numbers = ending_alike()
    ranks = {name: 3 if what == "rank" and name == odd else 2 for name in ENDINGS}
    alphas = {name: 20.0 if what == "alpha" and name == odd else 5.0 for name in ENDINGS}
    rng = np.random.default_rng(1)
    pairs = {name: (rng.normal(size=(ranks[name], 4)), rng.normal(size=(4, ranks[name]))) for name in ENDINGS}
    tensors = {f"{name}.lora_{letter}.weight": array for name, pair in pairs.items()
               for letter, array in zip("AB", pair, strict=True)}  # fmt: skip
    wanted = {f"{name}.weight": numbers[f"{name}.weight"] + alphas[name] / ranks[name] * b @ a
              for name, (a, b) in pairs.items()}  # fmt: skip
    patterns = {f"{what}_pattern": {f"^{odd}": 3 if what == "rank" else 20.0}, "target_modules": [*ENDINGS]}
    loaded = surgery.load_adapter(
        model,
        written(tmp_path / "peft", tensors, {"r": 2, "lora_alpha": 5.0, **patterns, "target_modules": [*ENDINGS]}),
    )
    surgery.save_adapter(loaded, tmp_path / "ours")
    again = surgery.load_adapter(model, tmp_path / "ours")
    renamed = surgery.load_adapter(model, tmp_path / "ours", names={name: name for name in ENDINGS})
    for found in (loaded, again, renamed):
        merged = weights(surgery.merge_adapters(found))
        for name, array in wanted.items():
            np.testing.assert_allclose(merged[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def written(folder: Path, tensors: dict[str, np.ndarray], settings: dict[str, Any]) -> Path:
    folder.mkdir()
    stored = {f"base_model.model.{n}": np.ascontiguousarray(a, np.float32) for n, a in tensors.items()}
    safetensors.numpy.save_file(stored, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", **settings}))
    return folder


def test_a_module_called_twice_has_one_rank_and_alpha(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 4), (3, 4), (4, 3)))
    nodes = [node("Gemm", ["x", "fc.weight"], ["h"], transB=1), node("Gemm", ["h", "fc.weight"], ["y"], transB=1)]
    model = made(nodes, {"fc.weight": weight}, ["rows", 4], y=["rows", 4])
    tensors = {"fc.lora_A.weight": a, "fc.lora_B.weight": b}
    settings = {"r": 2, "lora_alpha": 1.0, "rank_pattern": {"fc": 3}, "alpha_pattern": {"^fc": 12.0}}
    found = surgery.load_adapter(model, written(tmp_path / "peft", tensors, settings))
    whole = weight + 4 * b @ a
    x = rng.normal(size=(2, 4)).astype(np.float32)
    np.testing.assert_allclose(run(found, x), x @ whole.T @ whole.T, rtol=1e-4, atol=1e-4)


def test_a_module_called_twice_that_was_trained_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, old = (rng.normal(size=(4, 4)).astype(np.float32) for _ in range(2))
    nodes = [node("Gemm", ["x", "a.weight"], ["h"], transB=1), node("Gemm", ["h", "fc.weight"], ["i"], transB=1),
             node("Gemm", ["i", "fc.weight"], ["y"], transB=1)]  # fmt: skip
    model, new = made(nodes, {"a.weight": first, "fc.weight": old}, ["rows", 4], y=["rows", 4]), old + np.float32(0.1)
    found = surgery.load_adapter(model, folder_with(tmp_path, {"fc.weight": new}))
    zero = {n: np.zeros_like(a) for n, a in weights(found).items() if n.endswith(("lora_A", "lora_B"))}
    x = rng.normal(size=(2, 4)).astype(np.float32)
    silent = surgery.load_weights(found, zero, strict=False)
    np.testing.assert_allclose(run(silent, x), x @ first.T @ new.T @ new.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adapted", [["fc"], ["block.fc"], ["fc", "block.fc"], ["block.1.fc"], [*ENDINGS]])
def test_peft_adapts_the_layers_that_have_an_adapter(adapted: list[str], tmp_path: Path) -> None:
    """By the rule of PEFT: an expression for whole names, or a list of names and ends of names."""
    model, _ = ending_alike()
    surgery.save_adapter(gg.lora(model, adapted, rank=2), tmp_path)
    target = json.loads((tmp_path / CONFIG).read_text())["target_modules"]
    modules = [*ENDINGS, "block", "block.1", "other", "other.block", "other.block.1"]
    if isinstance(target, str):
        found = {name for name in modules if re.fullmatch(target, name)}
    else:
        found = {name for name in modules if name in target or name.endswith(tuple(f".{one}" for one in target))}
    assert found == {*adapted}


def test_dora_of_an_embedding_is_refused(tmp_path: Path) -> None:
    tensors = {"w.lora_embedding_A": np.zeros((2, 7)), "w.lora_embedding_B": np.zeros((5, 2)),
               "w.lora_magnitude_vector": np.ones(5)}  # fmt: skip
    path = written(tmp_path / "peft", tensors, {"r": 2, "lora_alpha": 2, "use_dora": True})
    with pytest.raises(DataError, match="an adapter of kind dora on an embedding, which is not supported; merge"):
        surgery.load_adapter(LAYERS["embedding"], path)
