"""Language models that keep a convolution's or a recurrence's state train from their tokens, as if every text began."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat import Recipe
from gradgraph.chat.adapted_layers import adapted_layers, reached
from gradgraph.errors import BuildError
from gradgraph.files.models import load_model
from tests.surgery import hybrid_models
from tests.surgery.hybrid_models import CHANNELS, VOCABULARY

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
    assert reached(decoder, Recipe()) == "8 of 9 linear layers get adapters, all but 'lm_head'"
    assert adapted_layers(decoder, Recipe(target="*_proj_q")) == ["*_proj_q"]


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


def test_buffers_of_fixed_length_are_refused() -> None:
    model = hybrid_models.standard_convolution("past.0.key")
    model.graph.input[1].type.tensor_type.shape.dim.add().dim_value = CHANNELS
    del model.graph.node[1:6], model.graph.output[1]
    model.graph.node.insert(1, helper.make_node("Concat", ["past.0.key", "past.0.key", "past.0.key"], ["m"], axis=3))
    model.graph.node.insert(2, helper.make_node("ReduceSum", ["m", "axis 2"], ["mixed"], keepdims=0))
    with pytest.raises(BuildError, match=r"'past\.0\.key' is a key-value buffer of fixed length"):
        surgery.language_model(model)


@pytest.mark.parametrize("kind", ["standard_convolution", "fused_convolution", "fused_recurrence"])
def test_rows_of_several_texts_are_refused(kind: str) -> None:
    """A state would carry one text into the next."""
    with pytest.raises(BuildError, match="separated by the attention bias"):
        surgery.language_model(hybrid_models.MODELS[kind](), packed=True)
