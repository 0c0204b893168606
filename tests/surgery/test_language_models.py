"""Models that onnxruntime-genai's builder (0.18.0) has written, of random weights, become models that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import ArgumentError, BuildError, DataError, ModelError, UnknownNameError
from tests.surgery import merged_decoder

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {kind: EXAMPLES / f"tiny_llama_{kind}.onnx" for kind in ("int4", "fp16")}
RNG = np.random.default_rng(1)
IDS = np.random.default_rng(0).integers(3, 98, (2, 11))


def outputs(model: onnx.ModelProto | Path, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_outputs()]
    taken = {v.name: feeds[v.name] for v in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))


def as_generated(kind: str, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """The scores of the model as it came, fed with an empty past."""
    floats = np.float16 if kind == "fp16" else np.float32
    empty = {
        f"past_key_values.{i}.{w}": np.zeros((len(ids), 1, 0, 16), floats) for i in (0, 1) for w in ("key", "value")
    }
    mask = np.ones_like(ids) if mask is None else mask
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return outputs(MODELS[kind], input_ids=ids, attention_mask=mask, position_ids=positions, **empty)["logits"]


@pytest.mark.parametrize("kind", MODELS)
def test_the_scores_are_those_of_the_model_that_generates(kind: str) -> None:
    model = surgery.language_model(MODELS[kind])
    assert isinstance(model, onnx.ModelProto)
    assert [v.name for v in (*model.graph.input, *model.graph.output)] == ["input_ids", "logits"]
    found = outputs(model, input_ids=IDS)["logits"]
    assert found.dtype == np.float32
    # onnxruntime rounds the data of MatMulNBits to 8 bits here (accuracy level 4), and float16 to half
    np.testing.assert_allclose(found, as_generated(kind, IDS), atol=0.02 if kind == "int4" else 2e-3)
    padded, mask = IDS.copy(), np.ones_like(IDS)
    padded[1, 6:], mask[1, 6:] = 0, 0
    now, then = outputs(model, input_ids=padded)["logits"], as_generated(kind, padded, mask)
    np.testing.assert_allclose(now[1, :6], then[1, :6], atol=0.02 if kind == "int4" else 2e-3)


@pytest.mark.sweep(0.55)
@pytest.mark.parametrize("kind", MODELS)
def test_what_was_stored_stays_as_it_was(kind: str, tmp_path: Path) -> None:
    """In a step, too, the base is 4 bits or float16, and only adapters are state."""
    before = {t.name: t for t in onnx.load(MODELS[kind]).graph.initializer}
    step = gg.build(surgery.language_model(gg.lora(MODELS[kind], "*attn*", rank=2)), gg.losses.cross_entropy(axis=-1))
    step.save(tmp_path / "step")
    for file in ("train.onnx", "eval.onnx"):
        stored = {t.name: t for t in onnx.load(tmp_path / "step" / file).graph.initializer}
        kept = [n for n, t in before.items() if len(t.dims) > 1 and "cache" not in n and "scales" not in n]
        assert len(kept) >= 12
        for name in kept:
            kinds = {TensorProto.UINT8: TensorProto.UINT4}  # the same bytes, as ONNX calls them
            assert stored[name].data_type == kinds.get(before[name].data_type, before[name].data_type)
            assert stored[name].raw_data == before[name].raw_data
    assert all(".lora_" in s.name for s in step.manifest.state if s.kind == "parameter")
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "step").iterdir()}
    assert sizes["init.onnx"] < 40_000  # the adapters' numbers alone


def test_inputs_are_kept_where_asked_for() -> None:
    model = surgery.language_model(MODELS["int4"], keep="attention_mask", outputs="logits")
    assert [v.name for v in model.graph.input] == ["input_ids", "attention_mask"]
    found = outputs(model, input_ids=IDS, attention_mask=np.ones_like(IDS))["logits"]
    np.testing.assert_allclose(found, as_generated("int4", IDS), atol=0.02)


PADDED = {"left": (4, 0), "right": (0, 4), "both": (2, 3)}


@pytest.mark.sweep(0.26)
@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("kind", MODELS)
def test_a_mask_that_is_kept_hides_padding_on_every_side(kind: str, side: str) -> None:
    """(GroupQueryAttention reads of a mask only how many tokens it has.)"""
    left, right = PADDED[side]
    ids = np.pad(IDS, ((0, 0), (left, right)), constant_values=5)
    mask = np.pad(np.ones_like(IDS), ((0, 0), (left, right)))
    model = surgery.language_model(gg.lora(MODELS[kind], "*attn*", rank=2), keep="attention_mask")
    padded = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu")
    found = padded.predict({"input_ids": ids, "attention_mask": mask})[:, left : left + IDS.shape[1]]
    model = surgery.language_model(gg.lora(MODELS[kind], "*attn*", rank=2))
    wanted = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu").predict(IDS)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def counting(begin: int = 0) -> onnx.ModelProto:
    """Scores (E[token] + P[0, 1, …])·W, for tokens that the mask shows, as GPT-2 has them without ``position_ids``."""
    node, rng = helper.make_node, np.random.default_rng(1)
    numbers = {"begin": begin, "first": 0, "one": 1, "along": [2]}
    stored = {"E": (98, 8), "P": (32, 8), "W": (8, 98)}
    tensors = [onnx.numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in stored.items()]
    tensors += [onnx.numpy_helper.from_array(np.array(n), name) for name, n in numbers.items()]
    nodes = [
        node("Gather", ["E", "input_ids"], ["said"]), node("Shape", ["input_ids"], ["sizes"]),
        node("Gather", ["sizes", "one"], ["length"]), node("Add", ["length", "begin"], ["end"]),
        node("Range", ["begin", "end", "one"], ["count"]), node("Unsqueeze", ["count", "first"], ["positions"]),
        node("Gather", ["P", "positions"], ["placed"]), node("Add", ["said", "placed"], ["h"]),
        node("Cast", ["attention_mask"], ["shown"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["shown", "along"], ["each"]), node("Mul", ["h", "each"], ["seen"]),
        node("MatMul", ["seen", "W"], ["logits"]),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["b", "s"]) for n in ("input_ids", "attention_mask")]
    scores = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", 98])
    graph = helper.make_graph(nodes, "g", inputs, [scores], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("adapted", [False, True])
def test_positions_that_a_model_counts_itself_begin_behind_padding(adapted: bool) -> None:
    model = gg.lora(counting(), "*", rank=2) if adapted else counting()
    padded = np.pad(IDS, ((0, 0), (3, 0)))
    mask = np.pad(np.ones_like(IDS), ((0, 0), (3, 0)))
    alone = outputs(surgery.language_model(model), input_ids=IDS)["logits"]
    found = outputs(surgery.language_model(model, keep="attention_mask"), input_ids=padded, attention_mask=mask)
    np.testing.assert_allclose(found["logits"][:, 3:], alone, atol=1e-5)


def in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float16 model as the builder writes it in bfloat16."""
    import ml_dtypes

    narrow, kind = ml_dtypes.bfloat16, TensorProto.BFLOAT16
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            numbers = onnx.numpy_helper.to_array(tensor).astype(narrow)
            tensor.CopyFrom(helper.make_tensor(tensor.name, kind, tensor.dims, numbers.tobytes(), raw=True))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = kind
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = kind
    return model


@pytest.mark.sweep(0)
def test_bfloat16_is_computed_in_float32_and_stays_stored(tmp_path: Path) -> None:
    narrow = in_bfloat16(onnx.load(MODELS["fp16"]))
    step = gg.build(surgery.language_model(gg.lora(narrow, "*attn*", rank=2)), gg.losses.cross_entropy(axis=-1))
    found = gg.Trainer(step, device="cpu").predict(IDS)
    np.testing.assert_allclose(found, as_generated("fp16", IDS), atol=0.02)  # of 8 bits
    step.save(tmp_path / "step")
    stored = onnx.load(tmp_path / "step" / "train.onnx").graph.initializer
    assert sum(t.data_type == TensorProto.BFLOAT16 for t in stored) >= 12


def test_scores_stand_before_hidden_states() -> None:
    model = onnx.load(MODELS["fp16"])
    last = next(n for n in model.graph.node if n.output[0] == "logits").input[0]
    model.graph.node.append(helper.make_node("Identity", [last], ["hidden_states"]))
    model.graph.output.insert(0, helper.make_tensor_value_info("hidden_states", TensorProto.FLOAT16, None))
    assert [v.name for v in surgery.language_model(model).graph.output] == ["logits"]
    both = surgery.language_model(model, outputs=["hidden_states", "logits"])
    assert [v.name for v in both.graph.output] == ["hidden_states", "logits"]


@pytest.mark.sweep(0)
def test_a_step_trains_on_padded_rows() -> None:
    data = surgery.next_tokens([[1, 7, 8, 9, 2], [1, 50, 2]])
    assert data["input_ids"].tolist() == [[1, 7, 8, 9], [1, 50, 0, 0]]
    assert data["target"].tolist() == [[7, 8, 9, 2], [50, 2, -100, -100]]
    step = gg.build(surgery.language_model(gg.lora(MODELS["fp16"], "*proj*")), gg.losses.cross_entropy(axis=-1))
    trainer = gg.Trainer(step, device="cpu")
    scores = as_generated("fp16", data["input_ids"]).astype(float)
    odds = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    seen = data["target"] != -100
    wanted = -np.take_along_axis(odds, np.where(seen, data["target"], 0)[..., None], -1)[..., 0][seen].mean()
    assert trainer.step(data)["loss"] == pytest.approx(wanted, abs=1e-3)


def test_long_texts_become_rows() -> None:
    data = surgery.next_tokens([list(range(1, 8))], 3, name="tokens")
    assert data["tokens"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert data["target"].tolist() == [[2, 3, 4], [5, 6, 7]]


def tiny(inputs: dict[str, tuple[int, list[Any]]]) -> onnx.ModelProto:
    """Scores of ``input_ids``; other inputs are states that stay as they are."""
    states = {n: [f"next_{n}", *given] for n, given in inputs.items() if n != "input_ids"}
    scores = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*inputs["input_ids"][1], 4])
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "input_ids"], ["logits"]),
         helper.make_node("Size", ["input_ids"], ["count"]),
         helper.make_node("Cast", ["count"], ["is_any"], to=TensorProto.BOOL),
         *(helper.make_node("Where", ["is_any", name, name], [then]) for name, (then, _, _) in states.items())], "g",
        [helper.make_tensor_value_info(n, kind, shape) for n, (kind, shape) in inputs.items()],
        [scores, *(helper.make_tensor_value_info(*given) for given in states.values())],
        [onnx.numpy_helper.from_array(np.ones((9, 4), np.float32), "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# --- two decoders in one file ------------------------------------------------------------------------------------


def test_of_a_merged_decoder_the_one_without_a_past_trains() -> None:
    model = merged_decoder.model()
    found = surgery.language_model(model)
    assert [v.name for v in (*found.graph.input, *found.graph.output)] == ["input_ids", "logits"]
    empty = {merged_decoder.PAST: np.zeros((2, 1, 0, 8), np.float32), merged_decoder.BRANCH: np.array([False])}
    wanted = outputs(model, input_ids=IDS, **empty)["logits"]  # NumPy adds up in another order
    formula = merged_decoder.scores(model, IDS)
    np.testing.assert_allclose(wanted, formula, atol=2e-6 * np.abs(formula).max())  # 17 units of its last place
    np.testing.assert_allclose(outputs(found, input_ids=IDS)["logits"], wanted, atol=1e-6)
    alone = surgery.fix_inputs(model, {merged_decoder.BRANCH: False})
    adapted = gg.lora(alone, "*attn*", rank=2)
    trainer = gg.Trainer(gg.build(surgery.language_model(adapted), gg.losses.cross_entropy(axis=-1)), device="cpu")
    np.testing.assert_allclose(trainer.predict(IDS), wanted, atol=1e-6)


@pytest.mark.parametrize("branch", [False, True])
def test_an_input_that_is_fixed_chooses_its_branch(branch: bool) -> None:
    model = merged_decoder.model()
    fixed = surgery.fix_inputs(model, {merged_decoder.BRANCH: branch})
    assert not any(node.op_type == "If" for node in fixed.graph.node)
    onnx.checker.check_model(fixed, full_check=True)
    feeds = {"input_ids": IDS, merged_decoder.PAST: RNG.normal(size=(2, 1, 3, 8)).astype(np.float32)}
    wanted = outputs(model, **feeds, **{merged_decoder.BRANCH: np.array([branch])})
    for name, array in outputs(fixed, **feeds).items():
        np.testing.assert_allclose(array, wanted[name], atol=1e-6)


IN = {"input_ids": (TensorProto.INT64, ["b", "s"])}


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: surgery.language_model(tiny({"input_ids": (TensorProto.INT64, ["b"])})),
            BuildError,
            "neither tokens nor inputs for a cache, a mask or positions",
        ),
        (
            lambda: surgery.language_model(tiny({**IN, "past_conv.0": (TensorProto.INT64, ["b", 4, 3])})),
            BuildError,
            "'past_conv.0' is a state of INT64, but only floating-point states are known to start at zero",
        ),
        (lambda: gg.lora(merged_decoder.model(), "*"), UnknownNameError, "select one of its branches first"),
        (lambda: surgery.fix_inputs(tiny(IN), {"use_cache": 1}), UnknownNameError, "no input 'use_cache'"),
        (lambda: surgery.fix_inputs(tiny(IN), {"input_ids": 1}), ModelError, "the sizes of the input"),
        (
            lambda: surgery.fix_inputs(merged_decoder.model(), {merged_decoder.BRANCH: 2}),
            ModelError,
            "represent 2",
        ),
        (lambda: surgery.language_model(MODELS["int4"], keep="mask"), UnknownNameError, "no input 'mask'"),
        (lambda: surgery.language_model(counting(1), keep="attention_mask"), BuildError, "pad rows at their ends"),
        (lambda: surgery.language_model(MODELS["int4"], outputs="y"), UnknownNameError, "no output 'y'"),
        (
            lambda: surgery.language_model(MODELS["int4"], outputs=["present.*"]),
            BuildError,
            "are only the key-value cache",
        ),
        (lambda: surgery.next_tokens([[1]]), DataError, "at least two token ids"),
        (lambda: surgery.next_tokens(7), ArgumentError, "a sequence of sequences"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert says in str(raised.value)


def test_declared_sizes_are_forgotten(tmp_path: Path) -> None:
    assert len(onnx.load(MODELS["fp16"]).graph.value_info) > 50
    surgery.forget_sizes(MODELS["fp16"], out=tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    weights = {t.name for t in model.graph.initializer}
    inner = [v.type.tensor_type for v in model.graph.value_info if v.name not in weights]
    assert len(inner) > 50 and all(kind.elem_type and not kind.HasField("shape") for kind in inner)
