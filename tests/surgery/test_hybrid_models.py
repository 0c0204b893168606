"""Language models that keep a convolution's or a recurrence's state train from their tokens, as if every text began."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat import Recipe, Sampling
from gradgraph.chat.adapted_layers import adapted_layers, reached
from gradgraph.chat.decoder import Decoder
from gradgraph.errors import BuildError, DataError
from gradgraph.files.models import load_model
from gradgraph.surgery.layer_kinds import layers_and_kinds
from tests.surgery import hybrid_models
from tests.surgery.hybrid_models import CHANNELS, VOCABULARY
from tests.surgery.test_adapter_kinds import STACKED

IDS = np.random.default_rng(1).integers(0, VOCABULARY, (2, 6))


def scores(model: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["logits"], feeds)[0]


@pytest.mark.sweep(0.22)
@pytest.mark.parametrize("kind", hybrid_models.MODELS)
def test_states_begin_at_zero(kind: str) -> None:
    model = hybrid_models.MODELS[kind]()
    zeros = {v.name: [d.dim_value or 2 for d in v.type.tensor_type.shape.dim] for v in model.graph.input[1:]}
    wanted = scores(model, input_ids=IDS, **{name: np.zeros(s, np.float32) for name, s in zeros.items()})
    found = surgery.language_model(model)
    assert isinstance(found, onnx.ModelProto)
    assert [v.name for v in (*found.graph.input, *found.graph.output)] == ["input_ids", "logits"]
    np.testing.assert_allclose(scores(found, input_ids=IDS), wanted, atol=1e-6)
    trainer = gg.Trainer(gg.build(found, gg.losses.cross_entropy(axis=-1), gg.optim.adamw(1e-2)))
    batch = {"input_ids": IDS, "target": np.roll(IDS, -1, 1)}
    losses = [float(trainer.step(batch)["loss"]) for _ in range(4)]
    assert losses == sorted(losses, reverse=True), "each step brings the loss down"
    assert all(tensor.ok for tensor in gg.check_gradients(found, output="logits").tensors)


def test_adapters_reach_the_mixers_of_hybrid_models() -> None:
    """Whatever they are called: a default of names would reach no layer here but the MLP's, or none at all."""
    decoder = load_model(hybrid_models.fused_recurrence())
    mixer = [f"layers.0.linear_attn.in_proj_{name}" for name in "qkvabz"] + ["layers.0.linear_attn.out_proj"]
    assert adapted_layers(decoder, Recipe()) == [*mixer, "layers.0.feed_forward.w1"]
    told = "8 of 9 linear layers get adapters (7 recurrent mixer, 1 MLP); not adapted: 1 head ('lm_head')"
    assert reached(decoder, Recipe()) == told
    assert adapted_layers(decoder, Recipe(target="*_proj_q")) == ["*_proj_q"]
    few = reached(decoder, Recipe(target="*_proj_q"))
    assert few.startswith("1 of 9 linear layers get adapters (1 recurrent mixer); not adapted: 6 recurrent mixer (")
    assert few.endswith("1 MLP ('layers.0.feed_forward.w1'), 1 head ('lm_head')")


def test_a_kind_that_is_not_of_layers_has_parts_of_its_own() -> None:
    decoder = load_model(STACKED)
    assert adapted_layers(decoder, Recipe(kind="bitfit")) == ["*"]
    assert reached(decoder, Recipe(kind="bitfit")) == "2 of 2 biases get adapters"
    assert reached(decoder, Recipe(kind="bitfit", target="first")) == "1 of 2 biases get adapters"


def test_a_recurrence_of_single_steps_is_a_mixer() -> None:
    decoder = load_model(hybrid_models.unrolled_recurrence())
    told = "4 of 5 linear layers get adapters (3 recurrent mixer, 1 MLP); not adapted: 1 head ('lm_head')"
    assert reached(decoder, Recipe()) == told


def test_an_exponential_that_is_summed_is_a_softmax() -> None:
    decoder = load_model(hybrid_models.unrolled_recurrence())
    exp = next(node for node in decoder.graph if node.op_type == "Exp")
    decoder.graph.append(ir.node("ReduceSum", [exp.outputs[0]]))
    assert reached(decoder, Recipe()).startswith("4 of 5 linear layers get adapters (4 MLP)")


def test_routers_of_experts_get_no_adapters_by_default() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "up.weight"], ["h"]),
        helper.make_node("MatMul", ["h", "gate.weight"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("TopK", ["p", "k"], ["values", "indices"]),
        helper.make_node("ReduceSum", ["values"], ["weight"], keepdims=1),
        helper.make_node("Mul", ["h", "weight"], ["m"]),
        helper.make_node("MatMul", ["m", "head.weight"], ["logits"]),
    ]
    shapes = {"up.weight": (4, 4), "gate.weight": (4, 3), "head.weight": (4, 5)}
    weights = [hybrid_models.tensor(name, *shape) for name, shape in shapes.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5])
    graph = helper.make_graph(nodes, "g", [x], [y], [*weights, hybrid_models.whole("k", 1)])
    decoder = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    assert adapted_layers(decoder, Recipe()) == ["up"]


def kinds_of(nodes: list[onnx.NodeProto], shapes: dict[str, list[int]], *more: onnx.TensorProto) -> dict[str, str]:
    """The kinds of the layers of a decoder from "e", the embedded tokens, to "h", behind which a head follows."""
    nodes = [
        helper.make_node("Gather", ["embed", "input_ids"], ["e"]),
        *nodes,
        helper.make_node("MatMul", ["h", "head.weight"], ["logits"]),
    ]
    every = {"embed": [VOCABULARY, CHANNELS], "head.weight": [CHANNELS, VOCABULARY], **shapes}
    weights = [hybrid_models.tensor(name, *shape) for name, shape in every.items()]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY])
    graph = helper.make_graph(nodes, "g", [ids], [logits], [*weights, *more])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    layers, kinds = layers_and_kinds(load_model(helper.make_model(graph, opset_imports=opsets, ir_version=9)))
    return {layer.name: kinds[layer.node] for layer in layers}


def test_kinds_follow_from_nodes_whatever_layers_are_called() -> None:
    """A convolution's mixer with its gate, a mask that an attention adds, a norm that feeds several layers, an MLP."""
    node, square = helper.make_node, [CHANNELS, CHANNELS]
    nodes = [
        node("LayerNormalization", ["e", "gain"], ["n0"]), node("MatMul", ["n0", "a.weight"], ["x"]),
        node("MatMul", ["n0", "b.weight"], ["gate"]), node("Transpose", ["x"], ["xt"], perm=[0, 2, 1]),
        node("CausalConvWithState", ["xt", "taps"], ["ct", "present"], domain="com.microsoft"),
        node("Transpose", ["ct"], ["c"], perm=[0, 2, 1]), node("Mul", ["c", "gate"], ["mixed"]),
        node("MatMul", ["mixed", "c.weight"], ["o0"]), node("Add", ["e", "o0"], ["r0"]),
        node("LayerNormalization", ["r0", "gain"], ["n1"]), node("MatMul", ["n1", "d.weight"], ["q"]),
        node("MatMul", ["n1", "e.weight"], ["low"]), node("LayerNormalization", ["low", "gain"], ["normed"]),
        node("MatMul", ["normed", "f.weight"], ["k"]), node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["scores"]), node("Add", ["scores", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["p"]), node("MatMul", ["p", "k"], ["seen"]),
        node("MatMul", ["seen", "g.weight"], ["o1"]), node("Add", ["o1", "r0"], ["r1"]),
        node("LayerNormalization", ["r1", "gain"], ["n2"]), node("MatMul", ["n2", "i.weight"], ["up"]),
        node("Relu", ["up"], ["act"]), node("MatMul", ["act", "j.weight"], ["o2"]), node("Add", ["o2", "r1"], ["h"]),
    ]  # fmt: skip
    shapes = {f"{name}.weight": square for name in "abcdefgij"}
    found = kinds_of(nodes, {**shapes, "gain": [CHANNELS], "taps": [CHANNELS, 1, 3], "mask": [1, 1]})
    wanted = dict.fromkeys("abc", "convolution mixer") | dict.fromkeys("defg", "attention")
    assert found == wanted | {"i": "MLP", "j": "MLP", "head": "head"}


def test_experts_of_selected_tokens_are_told_from_other_layers() -> None:
    node = helper.make_node
    nodes = [
        node("MatMul", ["e", "router.weight"], ["s"]), node("TopK", ["s", "k"], ["best", "which"]),
        node("Equal", ["which", "zero"], ["mine"]), node("NonZero", ["mine"], ["places"]),
        node("Transpose", ["places"], ["rows"]), node("Slice", ["rows", "first", "second", "axis"], ["at"]),
        node("GatherND", ["e", "at"], ["some"]), node("MatMul", ["some", "up.weight"], ["u"]),
        node("Relu", ["u"], ["act"]), node("MatMul", ["act", "down.weight"], ["d"]),
        node("ScatterND", ["e", "at", "d"], ["h"], reduction="add"),
    ]  # fmt: skip
    shapes = {"router.weight": [CHANNELS, 3], "up.weight": [CHANNELS, 12], "down.weight": [12, CHANNELS]}
    numbers = {"k": [1], "zero": [0], "first": [0], "second": [2], "axis": [1]}
    more = [hybrid_models.whole(name, *values) for name, values in numbers.items()]
    found = kinds_of(nodes, shapes, *more)
    assert found == {"router": "router", "up": "expert", "down": "expert", "head": "head"}


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with names of states that say nothing."""
    names = {"past.0": "memory", "present.0": "kept"}

    def new(name: str) -> str:
        return next((name.replace(old, new) for old, new in names.items() if name.startswith(old)), name)

    for node in model.graph.node:
        node.input[:], node.output[:] = map(new, node.input), map(new, node.output)
    for value in (*model.graph.input, *model.graph.output):
        value.name = new(value.name)
    return model


@pytest.mark.parametrize("kind", hybrid_models.MODELS)
def test_states_are_known_without_their_names(kind: str) -> None:
    model = hybrid_models.MODELS[kind]()
    wanted = surgery.language_model(model)
    found = surgery.language_model(renamed(model))
    assert isinstance(found, onnx.ModelProto)
    assert [v.name for v in (*found.graph.input, *found.graph.output)] == ["input_ids", "logits"]
    assert isinstance(wanted, onnx.ModelProto)
    np.testing.assert_array_equal(scores(found, input_ids=IDS), scores(wanted, input_ids=IDS))


@pytest.mark.parametrize("kind", ["standard_convolution", "fused_convolution", "fused_recurrence"])
def test_generation_with_states_equals_generation_without(kind: str, tmp_path: Path) -> None:
    """Also of prompts of several lengths, which padding would disturb."""
    model, file = renamed(hybrid_models.MODELS[kind]()), tmp_path / "model.onnx"
    onnx.save(model, file)
    decoder, whole = Decoder(file, threads=1), surgery.language_model(model)
    assert isinstance(whole, onnx.ModelProto)
    assert not decoder.pads
    prompts = [[3, 1, 4, 1], [5], [9, 2, 6, 5]]
    found = decoder.generated(prompts, (), Sampling(max_tokens=8))
    for prompt, tokens in zip(prompts, found, strict=True):
        known = list(prompt)
        for token in tokens:
            assert scores(whole, input_ids=np.array([known]))[0, -1].argmax() == token
            known.append(token)
    with pytest.raises(DataError, match="the state of a convolution or recurrence"):
        next(decoder.steps(prompts))


def with_state(*nodes: onnx.NodeProto, past: str = "past.0.state", whole: bool = False) -> onnx.ModelProto:
    """A model of which ``nodes`` make "mixed" and "present.0.state" from the past and "e"."""
    weights = [hybrid_models.whole("axis 2", 2), hybrid_models.whole("slot", 0, 1), hybrid_models.whole("two", 2)]
    pasts = {past: ["batch", "sequence" if whole else 6, CHANNELS]}
    return hybrid_models.decoder(list(nodes), weights, pasts, ["present.0.state"])


def test_states_of_unknown_meaning_are_refused() -> None:
    """A maximum does not begin at zero; nor is it known how something without a successor goes on."""
    node = helper.make_node
    largest = [
        node("Max", ["past.0.state", "e"], ["present.0.state"]),
        node("Identity", ["present.0.state"], ["mixed"]),
    ]
    alone = [node("Mul", ["past.0.state", "e"], ["mixed"]), node("Exp", ["mixed"], ["present.0.state"])]
    for nodes in (largest, alone):
        with pytest.raises(BuildError, match=r"'past\.0\.state' is a state of unknown meaning: neither keys"):
            surgery.language_model(with_state(*nodes))


def test_buffers_of_fixed_length_are_refused() -> None:
    """Where new keys are written into their slots."""
    node = helper.make_node
    model = with_state(
        node("ReduceSum", ["e", "two"], ["said"], keepdims=0),
        node("Unsqueeze", ["said", "two"], ["new"]),
        node("Expand", ["new", "one slot"], ["filled"]),
        node("ScatterElements", ["past.0.state", "places", "filled"], ["present.0.state"], axis=1),
        node("Identity", ["e"], ["mixed"]),
    )
    model.graph.initializer.extend([hybrid_models.whole("one slot", 1, 1, CHANNELS)])
    model.graph.initializer.extend([onnx.numpy_helper.from_array(np.zeros((2, 6, CHANNELS), np.int64), "places")])
    with pytest.raises(BuildError, match=r"'past\.0\.state' is a key-value buffer of fixed length"):
        surgery.language_model(model)


@pytest.mark.parametrize("kind", ["fused_convolution", "fused_recurrence"])
def test_a_mask_is_not_kept_where_states_would_read_padding(kind: str) -> None:
    model = hybrid_models.MODELS[kind]()
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "sequence"])
    model.graph.input.append(mask)
    with pytest.raises(BuildError, match="which would read padding that 'attention_mask' marks"):
        surgery.language_model(model, keep="attention_mask")


def test_positions_of_several_axes_are_counted() -> None:
    """As in Qwen3.5's files: time, height and width, which are equal for texts."""
    model = hybrid_models.fused_convolution()
    bare = surgery.language_model(model)
    assert isinstance(bare, onnx.ModelProto)
    positions = helper.make_tensor_value_info("position_ids", TensorProto.INT64, [3, "batch", "sequence"])
    model.graph.input.append(positions)
    nodes = [
        helper.make_node("Cast", ["position_ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["floats"], ["last"], perm=[1, 2, 0]),
        helper.make_node("MatMul", ["last", "of positions"], ["placed"]),
        helper.make_node("Add", ["logits", "placed"], ["all logits"]),
    ]
    model.graph.initializer.append(hybrid_models.tensor("of positions", 3, VOCABULARY))
    model.graph.node.extend(nodes)
    model.graph.output[0].name = "all logits"
    found = surgery.language_model(model, outputs="all logits")
    assert isinstance(found, onnx.ModelProto)
    assert [v.name for v in found.graph.input] == ["input_ids"]
    weight = next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "of positions")
    wanted = scores(bare, input_ids=IDS) + np.arange(6)[:, None] * weight.sum(0)
    session = ort.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"input_ids": IDS})[0], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["standard_convolution", "fused_convolution", "fused_recurrence"])
def test_rows_of_several_texts_are_refused(kind: str) -> None:
    """A state would carry one text into the next."""
    with pytest.raises(BuildError, match="separated by the attention bias"):
        surgery.language_model(hybrid_models.MODELS[kind](), packed=True)


@pytest.mark.parametrize("kind", ["Identity", "Mul", "Transpose"])
@pytest.mark.parametrize("size", [4, "patches"])
def test_features_that_are_also_an_output_are_no_state(kind: str, size: int | str) -> None:
    """Of an image or an encoder: no token changes them, and they are not zero at first."""
    model = hybrid_models.standard_convolution()
    nodes = {"Identity": [helper.make_node("Identity", ["features"], ["seen"])],
             "Mul": [helper.make_node("Mul", ["features", "half"], ["seen"])],
             "Transpose": [helper.make_node("Transpose", ["features"], ["turned"], perm=[0, 2, 1]),
                           helper.make_node("Transpose", ["turned"], ["seen"], perm=[0, 2, 1])]}[kind]  # fmt: skip
    for one in model.graph.node:
        one.output[:] = ["own" if name == "logits" else name for name in one.output]
    model.graph.node.extend([*nodes, helper.make_node("ReduceMean", ["seen"], ["bias"], axes=[1, 2]),
                             helper.make_node("Add", ["own", "bias"], ["logits"])])  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "half"))
    shape = ["batch", size, CHANNELS]
    model.graph.input.append(helper.make_tensor_value_info("features", TensorProto.FLOAT, shape))
    model.graph.output.append(helper.make_tensor_value_info("seen", TensorProto.FLOAT, shape))
    found = surgery.language_model(model, outputs="logits")
    assert [value.name for value in found.graph.input] == ["input_ids", "features"]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.BOOL])
def test_a_mask_of_queries_and_keys_is_refused(dtype: int) -> None:
    """Ones in its place would show each token the following ones."""
    model = hybrid_models.standard_convolution()
    shape = ["batch", 1, "sequence", "total"]
    model.graph.input.append(helper.make_tensor_value_info("attention_mask", dtype, shape))
    with pytest.raises(BuildError, match="'attention_mask' has 4 axes, so it says which tokens each token attends to"):
        surgery.language_model(model)
