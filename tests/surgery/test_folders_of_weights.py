"""Folders of weights that are incomplete, contradictory or out of range: the right numbers, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import numpy_helper

from gradgraph import surgery
from gradgraph.errors import DataError
from gradgraph.surgery.pretrained_files import Pretrained, check_family
from gradgraph.surgery.weight_names import TensorNames
from tests.surgery.test_adapters import made, node
from tests.surgery.test_pretrained_weights import LAYERS, Exporter, Tensors, folder, run, tensors, without

BIAS = "model.layers.{}.self_attn.{}_proj.bias"
HEAD = "lm_head.weight"


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "model.safetensors.index.json").read_text())


def write_index(path: Path, places: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("name", [HEAD, BIAS.format(0, "k"), "model.layers.1.mlp.up_proj.weight"])
def test_tensors_that_the_index_does_not_list_are_read(name: str, tmp_path: Path) -> None:
    """As transformers does: without them, the head would be that of the embedding, and the bias zero."""
    path = folder(tmp_path / "hf", tensors(1), 2)
    write_index(path, {n: shard for n, shard in index_of(path)["weight_map"].items() if n != name})
    found = surgery.load_weights(Exporter(tensors(0), "float", False).model(), path)
    np.testing.assert_array_equal(run(found), run(Exporter(tensors(1), "float", False).model()))


@pytest.mark.parametrize("differs", [True, False])
def test_a_tensor_in_two_shards(differs: bool, tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", tensors(1), 2)
    places = index_of(path)["weight_map"]
    other = next(shard for shard in places.values() if shard != places[HEAD])
    more = safetensors.numpy.load_file(path / other) | {HEAD: tensors(1)[HEAD] + np.float32(differs)}
    safetensors.numpy.save_file(more, path / other)
    model = Exporter(tensors(0), "float", False).model()
    if differs:
        with pytest.raises(DataError, match=f"'{HEAD}' is in several shards, and in {other} it has other numbers"):
            surgery.load_weights(model, path)
    else:
        np.testing.assert_array_equal(run(surgery.load_weights(model, path)),
                                      run(Exporter(tensors(1), "float", False).model()))  # fmt: skip


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*nowhere': there is no such file; use a \.safetensors"):
        surgery.load_weights(Exporter(tensors(0), "float", False).model(), tmp_path / "nowhere")


@pytest.mark.parametrize("form", ["float", "float16", "int4", "int8", "QDQ"])
@pytest.mark.parametrize("piece", ["q", "k", "v"])
def test_a_bias_that_is_missing_is_no_zero(piece: str, form: str, tmp_path: Path) -> None:
    name = BIAS.format(LAYERS - 1, piece)
    path = folder(tmp_path / "hf", without(tensors(1), name))
    with pytest.raises(DataError, match=rf"1 weight of the model has no tensor \(\S*.{LAYERS - 1}.*qkv_proj.bias\)"):
        surgery.load_weights(Exporter(tensors(0), form, False).model(), path)


def test_a_bias_that_neither_has_is_zero(tmp_path: Path) -> None:
    """As of the keys of Whisper."""
    every = [tensors(seed) for seed in (0, 1)]
    zero = [{n: a * (not n.endswith("k_proj.bias")) for n, a in given.items()} for given in every]
    path = folder(tmp_path / "hf", without(zero[1], "k_proj.bias"))
    found = surgery.load_weights(Exporter(zero[0], "float", False).model(), path)
    np.testing.assert_array_equal(run(found), run(Exporter(zero[1], "float", False).model()))


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("said", [None, True, False])
def test_a_last_layer_without_a_tensor_is_tied_on_evidence(said: bool | None, form: str, tmp_path: Path) -> None:
    """By the configuration or, if that does not say it, by the old weights."""
    config = {} if said is None else {"tie_word_embeddings": said}
    table = tensors(0)["model.embed_tokens.weight"]
    apart, near_by, alike = (Exporter(tensors(0) | more, form, False).model()
                             for more in ({}, {HEAD: table * 1.03}, {HEAD: table}))  # fmt: skip
    path, embedded = folder(tmp_path / "hf", without(tensors(1), HEAD), **config), tensors(1, tied=True)
    wanted = run(Exporter(embedded | {HEAD: embedded["model.embed_tokens.weight"]}, "float", False).model())
    for model, is_tied in ((apart, said is True), (near_by, said is True), (alike, said is not False)):
        if is_tied:
            near = 1e-6 if form == "float" else 0.3
            assert np.abs(run(surgery.load_weights(model, path)) - wanted).max() < near * np.abs(wanted).max()
        else:
            with pytest.raises(DataError, match=r"1 weight of the model has no tensor \(lm_head.weight\)"):
                surgery.load_weights(model, path)


def with_number(given: Tensors, name: str, number: float) -> Tensors:
    array = given[name].astype(np.float64)
    array.flat[0] = number
    return given | {name: array}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("form", "name", "number", "says"),
    [
        ("float", HEAD, 1e39, "beyond float32"),
        ("float", "model.norm.weight", -1e39, "beyond float32"),
        ("float16", "model.layers.0.mlp.up_proj.weight", 7e4, "beyond float16"),
        ("int4", HEAD, 1e39, "beyond float32"),
        ("int4 asymmetric", HEAD, 1e39, "beyond float32"),
        ("QDQ", HEAD, 1e39, "beyond float32"),
    ],
)
def test_numbers_beyond_the_type_are_refused(form: str, name: str, number: float, says: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", with_number(tensors(1), name, number))
    with pytest.raises(DataError, match=says):
        surgery.load_weights(Exporter(tensors(0), form, False).model(), path, out=tmp_path / "new.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


def test_scales_in_float16_have_its_range(tmp_path: Path) -> None:
    """Of blocks of four bits, with eight steps to each side."""
    attributes = {"domain": "com.microsoft", "K": 16, "N": 5, "bits": 4, "block_size": 16}
    nodes = [node("MatMulNBits", ["x", "fc.MatMul.weight_Q4", "fc.MatMul.weight_scales"], ["y"], **attributes)]
    stored = {"fc.MatMul.weight_Q4": np.zeros((5, 1, 8), np.uint8), "fc.MatMul.weight_scales": np.ones(5, np.float16)}
    path = folder(tmp_path / "hf", {"net.fc.weight": np.full((5, 16), 1e6, np.float32)})
    with pytest.raises(DataError, match="too large for its scales"):
        surgery.load_weights(made(nodes, stored, ["rows", 16]), path)


def test_pieces_of_a_packed_layer_in_different_types(tmp_path: Path) -> None:
    given = {n: a.astype(ml_dtypes.bfloat16 if "k_proj" in n else np.float16) for n, a in tensors(1).items()}
    found = surgery.load_weights(Exporter(tensors(0), "float", False).model(), folder(tmp_path / "hf", given))
    wanted = {n: a.astype(np.float32) for n, a in given.items()}
    np.testing.assert_array_equal(run(found), run(Exporter(wanted, "float", False).model()))


def test_a_weight_stored_in_float16_and_read_as_float32_has_the_range_of_float16() -> None:
    nodes = [node("Cast", ["fc.weight"], ["wide"], to=1), node("MatMul", ["x", "wide"], ["y"])]
    model = made(nodes, {"fc.weight": np.ones((4, 5), np.float16)}, ["rows", 4])
    with pytest.raises(DataError, match="beyond float16"):
        surgery.load_weights(model, {"net.fc.weight": np.full((5, 4), 7e4, np.float32)})


@pytest.mark.parametrize("variance", [-1.0, float("nan")])
def test_statistics_that_make_no_weight_are_refused(variance: float) -> None:
    factor = np.float32(1 / np.sqrt(1 + 1e-5))  # of a norm of ones
    stored = {"conv.weight": np.full((5, 3, 1, 1), factor), "conv.bias": np.ones(5, np.float32)}
    model = made([node("Conv", ["x", *stored], ["y"])], stored, ["rows", 3, 4, 4], y=["rows", 5, 4, 4])
    ones = dict.fromkeys(("weight", "bias", "running_var"), np.ones(5, np.float32))
    norm = ones | {"running_mean": np.zeros(5, np.float32)}
    old = {"net.conv.weight": np.ones((5, 3, 1, 1), np.float32)} | {f"net.bn.{n}": a for n, a in norm.items()}
    new = old | {"net.bn.running_var": np.full(5, variance, np.float32)}
    with np.errstate(invalid="ignore"), pytest.raises(DataError, match="contains NaN or infinity"):
        surgery.load_weights(model, new, epsilon=1e-5, exported_from=old)


# --- names ---------------------------------------------------------------------------------------------------------


def stack(path: str, layers: int) -> list[str]:
    return [f"{path}.{i}.fc{n}.weight" for i in range(layers) for n in (1, 2)]


ENCODERS: dict[str, tuple[Callable[[], list[str]], str, str]] = {
    "of the same names": (lambda: stack("encoder.block", 4), "encoder.block", "decoder.block"),
    "of a longer path": (lambda: [*stack("encoder.layers", 4), "embed.weight"], "text_model.encoder.layers",
                         "vision_model.encoder.layers"),
}  # fmt: skip


@pytest.mark.parametrize("what", ENCODERS)
@pytest.mark.parametrize("lost", [1, 3, 6])
def test_what_a_stack_lacks_is_not_taken_from_another_one(what: str, lost: int) -> None:
    wanted, own, other = ENCODERS[what]
    held = stack(own, 4)
    keys = [*held[:lost], *held[lost + 1 :], *stack(other, 3), "text_model.embed.weight"]
    names = TensorNames(keys, wanted())
    found = [names.find(name) for name in stack(wanted()[0].rpartition(".0.")[0], 4)]
    assert found == [None if i == lost else key for i, key in enumerate(held)]


# --- layouts -------------------------------------------------------------------------------------------------------

SIZES = {"fc1.weight": (16, 8), "fc2.weight": (16, 16), "head.weight": (5, 16)}  # (outputs, inputs)


@pytest.mark.parametrize("begins", ["", "net."])
@pytest.mark.parametrize("is_turned", [True, False])
@pytest.mark.parametrize("operator", ["MatMul", "Gemm"])
def test_a_square_matrix_lies_as_the_others_do(operator: str, is_turned: bool, begins: str) -> None:
    """In a file with the model's names, whose matrices may be the transposes of the model's."""
    rng = np.random.default_rng(0)
    old, new = ({n: rng.normal(size=s).astype(np.float32) for n, s in SIZES.items()} for _ in range(2))

    def model(given: Tensors) -> onnx.ModelProto:
        ends, attributes = ["x", "a", "b", "y"], {} if operator == "MatMul" else {"transB": 1}
        nodes = [node(operator, [ends[i], name], [ends[i + 1]], **attributes) for i, name in enumerate(SIZES)]
        return made(nodes, {n: a.T if operator == "MatMul" else a for n, a in given.items()}, ["rows", 8])

    stored = {f"{begins}{n}": np.ascontiguousarray(a.T if is_turned else a) for n, a in new.items()}
    found = surgery.load_weights(model(old), stored)
    for one, other in zip(found.graph.initializer, model(new).graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(one), numpy_helper.to_array(other))


# --- settings ------------------------------------------------------------------------------------------------------

SCALED = {"rope_type": "llama3", "factor": 8.0}


@pytest.mark.parametrize(
    ("own", "theirs", "is_same"),
    [
        ({"rope_scaling": None}, {"rope_scaling": SCALED}, False),
        ({"rope_scaling": SCALED}, {"rope_scaling": None}, False),
        ({"rope_scaling": {"type": "default"}}, {"rope_scaling": SCALED}, False),
        ({"rope_scaling": {"rope_type": "default"}}, {"rope_scaling": None}, True),
        ({"rope_scaling": SCALED}, {}, True),  # newer files have rope_parameters
        ({"final_logit_softcapping": None}, {"final_logit_softcapping": 30.0}, False),
        ({"head_dim": None}, {"head_dim": 64}, True),  # null: hidden size / heads
        ({"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, True),
        ({"rope_theta": 1e4, "rope_scaling": SCALED}, {"rope_parameters": SCALED | {"rope_theta": 1e4}}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"rope_theta": 5e5}, False),
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_scaling": SCALED, "rope_theta": 1e4}, False),
        ({"rope_local_base_freq": 1e4}, {"rope_local_base_freq": 1e5}, False),
        ({"n_head": 4}, {"n_head": 2}, False),
        ({"activation_function": "gelu_new"}, {"activation_function": "relu"}, False),
        ({"activation_function": "gelu_new"}, {"activation_function": "gelu_pytorch_tanh"}, True),
        ({"sliding_window": None}, {"sliding_window": 4096}, False),
        ({"sliding_window": None}, {"sliding_window": 4096, "use_sliding_window": False}, True),
        ({"model_type": "t5"}, {"tie_word_embeddings": False, "model_type": "t5"}, False),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),  # weights show it
    ],
)
def test_a_setting_that_is_null_is_compared_if_null_says_something(
    own: dict[str, Any], theirs: dict[str, Any], is_same: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | own))
    source = Pretrained({}, "hf", {"model_type": "llama"} | theirs)
    if is_same:
        check_family(tmp_path, source)
    else:
        with pytest.raises(DataError, match=f"has {next(iter(theirs))} .* which weights cannot change"):
            check_family(tmp_path, source)
