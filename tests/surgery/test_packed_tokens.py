"""Models of packed texts become models of rows: the scores are those of the same model with plain attention."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat import Recipe
from gradgraph.chat.adapted_layers import adapted_layers
from gradgraph.chat.decoder import Decoder
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.errors import BuildError, ModelError
from gradgraph.files.models import load_model
from gradgraph.surgery.linear_layers import linear_layers
from gradgraph.surgery.peft_names import known_pieces
from tests.kit.small_models import model_of, real

HEADS, GROUPS, SIZE, WORDS, CHANNELS = 4, 2, 8, 20, 32
WIDTH = (HEADS + 2 * GROUPS) * SIZE
WEIGHTS = {"words": real(WORDS, CHANNELS), "taps": real(CHANNELS, 1, 3, seed=1),
           "qkv": real(CHANNELS, WIDTH, seed=2) / 6,
           "o": real(HEADS * SIZE, CHANNELS, seed=3) / 6, "head": real(CHANNELS, WORDS, seed=4) / 6,
           "cos": np.cos(np.arange(40)[:, None] / np.arange(1, 5)).astype(np.float32),
           "sin": np.sin(np.arange(40)[:, None] / np.arange(1, 5)).astype(np.float32)}  # fmt: skip
PLACES = {"places": real(40, CHANNELS, seed=5)}
HEADED = {"num_heads": HEADS, "kv_num_heads": GROUPS, "do_rotary": 1}
PAGED = ["projected", "", "", "k", "v", "ends", "before", "table", "cos", "sin", "slots", *[""] * 5, "bounds"]
CACHE = ["pages", "page", GROUPS, SIZE]


def fused(kind, inputs, outputs, **attrs):
    return helper.make_node(kind, inputs, outputs, domain="com.microsoft", **attrs)


def packed(*more: onnx.NodeProto, positions=("tokens",)) -> onnx.ModelProto:
    """Tokens of all texts one after another, a convolution with a state, attention with pages, selected scores."""
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["e"]),
        helper.make_node("Gather", ["places", "where"], ["p"]),
        *([helper.make_node("ReduceMean", ["p"], ["at"], axes=[0], keepdims=0)] if len(positions) > 1 else []),
        helper.make_node("Add", ["e", "at" if len(positions) > 1 else "p"], ["x"]),
        fused("VarlenCausalConvWithState", ["x", "taps", "ends", "", "past.0.conv"], ["c", "present.0.conv"]),
        helper.make_node("MatMul", ["c", "qkv"], ["projected"]),
        fused("PagedAttention", PAGED, ["a", "k_out", "v_out"], **HEADED),
        helper.make_node("MatMul", ["a", "o"], ["mixed"]),
        helper.make_node("Gather", ["mixed", "asked"], ["chosen"], axis=0),
        helper.make_node("MatMul", ["chosen", "head"], ["logits"]),
        *more,
    ]  # fmt: skip
    whole = {"input_ids": (np.int64, ["tokens"]), "where": (np.int64, list(positions))}
    described = {"ends": ["texts + 1"], "before": ["texts"], "table": ["texts", "most"], "slots": ["tokens"],
                 "bounds": [3], "asked": ["scored"]}  # fmt: skip
    kept = {"past.0.conv": ["texts", CHANNELS, 2], "k": CACHE, "v": CACHE}
    inputs = whole | {n: (np.int32, s) for n, s in described.items()} | {n: (np.float32, s) for n, s in kept.items()}
    outputs = ["logits", "present.0.conv", "k_out", "v_out", *(output for node in more for output in node.output)]
    return model_of(nodes, inputs, outputs, 17, weights=WEIGHTS | PLACES, domains={"com.microsoft": 1})


def plain() -> onnx.ModelProto:
    """The same of rows, with GroupQueryAttention and a convolution without states."""
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["batch"], start=0, end=1),
        helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
        helper.make_node("Cast", ["length"], ["total"], to=onnx.TensorProto.INT32),
        helper.make_node("Sub", ["total", "one"], ["before"]),
        helper.make_node("Expand", ["before", "batch"], ["last"]),
        helper.make_node("Gather", ["words", "input_ids"], ["e"]),
        helper.make_node("Gather", ["places", "where"], ["p"]),
        helper.make_node("Add", ["e", "p"], ["x"]),
        helper.make_node("Transpose", ["x"], ["xt"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["xt", "taps"], ["ct"], pads=[2, 0], group=CHANNELS),
        helper.make_node("Transpose", ["ct"], ["c"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["c", "qkv"], ["projected"]),
        fused("GroupQueryAttention", ["projected", "", "", "", "", "last", "total", "cos", "sin"], ["a"], **HEADED),
        helper.make_node("MatMul", ["a", "o"], ["mixed"]),
        helper.make_node("MatMul", ["mixed", "head"], ["logits"]),
    ]
    inputs = {name: (np.int64, ["batch", "length"]) for name in ("input_ids", "where")}
    weights = WEIGHTS | PLACES | {"one": np.array([1], np.int32)}
    return model_of(nodes, inputs, ["logits"], 17, weights=weights, domains={"com.microsoft": 1})


def predicted(model, feeds):
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.sgd(0.1))
    return gg.Trainer(step, device="cpu").predict(feeds)


@pytest.mark.parametrize("positions", [("tokens",), (3, "tokens")], ids=["one axis", "time, height and width"])
@pytest.mark.parametrize("shape", [(3, 7), (1, 1), (2, 12)])
def test_scores_and_losses_are_those_of_rows(shape, positions):
    ids = np.random.default_rng(0).integers(0, WORDS, shape)
    model = surgery.language_model(packed(positions=positions))
    assert [v.name for v in model.graph.input] == ["input_ids"]
    assert [v.name for v in model.graph.output] == ["logits"]
    rows = {"input_ids": ids, "where": np.tile(np.arange(shape[1]), (shape[0], 1))}
    np.testing.assert_allclose(predicted(model, ids), predicted(plain(), rows), atol=1e-5)
    losses = []
    for own, fed in ((model, {"input_ids": ids}), (plain(), rows)):
        trainer = gg.Trainer(
            gg.build(own, gg.losses.cross_entropy(axis=-1), gg.optim.sgd(0.1), train="*q*"), device="cpu"
        )
        losses.append([float(trainer.step(fed | {"target": ids})["loss"]) for _ in range(4)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_trained_weights_adapted_layers_and_their_pieces_are_those_of_rows():
    steps = [gg.build(surgery.language_model(own), gg.losses.cross_entropy(axis=-1), gg.optim.sgd(0.1))
             for own in (packed(), plain())]  # fmt: skip
    assert steps[0].manifest.trainable == steps[1].manifest.trainable, "tables of cosines and sines stay"
    layers = [adapted_layers(load_model(own), Recipe()) for own in (packed(), plain())]
    assert layers == [["qkv", "o"]] * 2
    for own in (packed(), plain()):
        renamed(own, "qkv", "model.layers.0.attn.qkv_proj.MatMul.weight")
        ((layer,), _) = linear_layers(load_model(own), "*qkv_proj")
        assert known_pieces(layer) == (HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)


def test_the_rotary_table_gives_the_longest_text(tmp_path):
    onnx.save(packed(), tmp_path / "model.onnx")
    assert ModelFolder.of(tmp_path).context == len(WEIGHTS["cos"])


def renamed(model: onnx.ModelProto, old: str, new: str) -> None:
    """Rename a weight, in place."""
    (tensor,) = (t for t in model.graph.initializer if t.name == old)
    tensor.name = new
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def test_a_model_of_packed_texts_is_refused_for_generation(tmp_path):
    onnx.save(packed(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"takes packed texts.*onnxruntime-genai on one$"):
        Decoder(tmp_path / "model.onnx")


def test_what_else_reads_the_description_of_packed_texts_is_named():
    reader = helper.make_node("Shape", ["table"], ["most_pages"])
    with pytest.raises(BuildError, match="'table' describes packed texts, but a Shape reads it, too"):
        surgery.language_model(packed(reader))


def test_an_unnamed_number_of_tokens_is_refused():
    model = packed()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5
    with pytest.raises(BuildError, match="no input has a named number of tokens"):
        surgery.language_model(model)


@pytest.mark.parametrize("kind", ["Transpose", "RotaryEmbedding"])
def test_nodes_for_rows_that_read_packed_tokens_are_named(kind):
    """As the builder of onnxruntime-genai 0.18.0 writes LFM2 and HunYuan; no runtime opens these files."""
    reader = helper.make_node("Transpose", ["e"], ["turned"], "mixer", perm=[0, 2, 1])
    if kind == "RotaryEmbedding":
        reader = fused(kind, ["e", "where", "cos", "sin"], ["turned"], name="mixer")
    with pytest.raises(BuildError, match=rf"'mixer', a {kind} of rows .*, reads packed tokens .*model without it"):
        surgery.language_model(packed(reader))
