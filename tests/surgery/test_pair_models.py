"""Language models that learn preferences: log-probabilities of answers, the reference, gradients and refusals."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import BuildError, DataError
from gradgraph.verify.reference import Oracle

TINY = Path(__file__).parents[2] / "examples" / "tiny_llama_fp16.onnx"
RNG = np.random.default_rng(0)


def texts(*lengths: int) -> list[list[int]]:
    return [RNG.integers(3, 98, n).tolist() for n in lengths]


PROMPTS, CHOSEN, REJECTED = texts(3, 5, 1, 4, 2), texts(4, 2, 6, 3, 1), texts(2, 5, 3, 4, 7)
PAIRS = surgery.answer_pairs(PROMPTS, CHOSEN, REJECTED)
BETA = 0.3


def adapted(kind: str = "lora", **options: Any) -> Any:
    return gg.lora(TINY, ["*attn*", "*mlp*"], rank=4, kind=kind, **options)


def paired(model: Any) -> Any:
    return surgery.pair_model(surgery.language_model(model))


def trainer_of(model: Any, loss: Any = "dpo", **options: Any) -> gg.Trainer:
    return gg.Trainer(gg.build(paired(model), loss, gg.optim.adam(5e-3), **options), device="cpu")


def one_by_one(model: Any, state: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """[pairs, 2], by the model of texts, a prompt with an answer at a time, summed in float64."""
    trainer = gg.Trainer(gg.build(surgery.language_model(model), gg.losses.cross_entropy(axis=-1)), device="cpu")
    if state is not None:
        trainer.load_state_dict(state, strict=False)
    found = []
    for prompt, *answers in zip(PROMPTS, CHOSEN, REJECTED, strict=True):
        for answer in answers:
            scores = trainer.predict(np.array([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :].astype(np.float64)
            log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
            found.append(log_p[np.arange(len(answer)), answer].sum())
    return np.reshape(found, (-1, 2))


@functools.cache
def of_the_base() -> np.ndarray:
    return one_by_one(gg.lora(TINY, "*lm_head*", rank=1))


@pytest.mark.sweep(0)
def test_an_answer_has_the_probability_that_the_model_gives_its_tokens() -> None:
    found = trainer_of(adapted()).predict(PAIRS, 2)
    np.testing.assert_allclose(found["log_probability"], of_the_base(), rtol=1e-5)
    np.testing.assert_array_equal(found["tokens"], [[len(a), len(b)] for a, b in zip(CHOSEN, REJECTED, strict=True)])


@pytest.mark.sweep(0)
def test_padding_on_the_left_changes_nothing_behind_a_mask() -> None:
    rows = {name: np.pad(a, ((0, 0), (0, 0), (3, 0)), constant_values=c)
            for (name, a), c in zip(PAIRS.items(), (9, -100), strict=True)}  # fmt: skip
    mask = np.pad(np.ones_like(PAIRS["labels"]), ((0, 0), (0, 0), (3, 0)))
    model = surgery.pair_model(surgery.language_model(adapted(), keep="attention_mask"))
    found = gg.Trainer(gg.build(model, "orpo"), device="cpu").predict({**rows, "attention_mask": mask})
    np.testing.assert_allclose(found["log_probability"], of_the_base(), rtol=1e-5)


@pytest.mark.sweep(0)
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_the_reference_is_the_base_without_its_adapters(kind: str) -> None:
    """Also when they have learnt something; and the trainer goes on as if nothing had been."""
    model, wanted = gg.lora(TINY, "*attn*", rank=2, kind=kind), of_the_base()
    trainer, other = trainer_of(model), trainer_of(model)
    np.testing.assert_allclose(surgery.reference(model, trainer, PAIRS, 2), wanted, rtol=1e-5)
    data = {**PAIRS, "target": wanted.astype(np.float32)}
    losses = [float(trainer.step(data)["loss"]) for _ in range(6)]
    assert losses[-1] < losses[0] == pytest.approx(np.log(2), abs=1e-4)
    np.testing.assert_allclose(surgery.reference(model, trainer, PAIRS), wanted, rtol=1e-5)
    assert np.abs(trainer.predict(PAIRS)["log_probability"] - wanted).max() > 0.01
    for _ in range(6):
        other.step(data)
    for name, array in other.state_dict().items():
        np.testing.assert_array_equal(trainer.state_dict()[name], array)


@pytest.mark.sweep(0)
def test_adapters_that_are_not_trained_are_part_of_the_reference() -> None:
    trainer = trainer_of(adapted(), "simpo")
    trainer.fit(PAIRS, epochs=5, batch_size=5, progress=False)
    first = surgery.load_weights(adapted(), trainer.parameters, strict=False)
    second = gg.lora(first, "*attn*", rank=2, name="second")
    found = surgery.reference(second, trainer_of(second), PAIRS)
    np.testing.assert_allclose(found, trainer.predict(PAIRS)["log_probability"], rtol=1e-5)
    assert np.abs(found - of_the_base()).max() > 0.1


LOSSES = {"dpo": gg.losses.dpo(BETA), "ipo": gg.losses.ipo(BETA), "orpo": gg.losses.orpo(BETA),
          "simpo": gg.losses.simpo(BETA), "kto": gg.losses.kto(BETA)}  # fmt: skip


def in_float64() -> onnx.ModelProto:
    """Scores of the next token by the last one: ``tanh(E[token])·W``."""
    weights = {"E": RNG.normal(size=(98, 6)), "W": RNG.normal(size=(6, 98))}
    graph = helper.make_graph(
        [helper.make_node("Gather", ["E", "input_ids"], ["e"]), helper.make_node("Tanh", ["e"], ["h"]),
         helper.make_node("MatMul", ["h", "W"], ["logits"])], "bigrams",
        [helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.DOUBLE, ["batch", "length", 98])],
        [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_differences_of_losses(name: str) -> None:
    """From the loss through the model to its weights, each operator in float64."""
    step = gg.build(surgery.pair_model(in_float64()), LOSSES[name], gg.optim.sgd(1.0), backend="portable")
    feeds: dict[str, Any] = {**PAIRS, "target": RNG.normal(-20, 3, (5, 2)), "desirable": np.array([1.0, 0, 1, 1, 0])}
    feeds = {n: a for n, a in feeds.items() if n in {t.name for t in step.manifest.batch}}
    state = {n: a.astype(np.float64) for n, a in gg.Trainer(step, device="cpu").parameters.items()}
    assert set(state) == {"E", "W"}
    found = Oracle(step.train)({**feeds, **state, "learning_rate": np.array(1.0, np.float32)})
    directions = {n: RNG.normal(size=a.shape) for n, a in state.items()}
    slope = sum(((state[n] - found[f"{n}.next"]) * d).sum() for n, d in directions.items())

    def loss_at(t: float) -> float:
        return float(Oracle(step.eval)({**feeds, **{n: a + t * directions[n] for n, a in state.items()}})["loss"])

    near = 1e-5
    assert slope == pytest.approx((loss_at(near) - loss_at(-near)) / (2 * near), rel=1e-6)


@pytest.mark.sweep(0)
def test_scores_of_all_tokens_have_no_gradient_of_their_own() -> None:
    """The step has the operators of one that learns the next token: a gradient of scores is written once."""
    step = gg.build(paired(adapted()), "dpo", gg.optim.adam(1e-3))
    plain = gg.build(surgery.language_model(adapted()), gg.losses.cross_entropy(axis=-1), gg.optim.adam(1e-3))
    kinds = ("LogSoftmax", "Softmax", "ScatterElements", "CrossEntropyGrad")
    found, wanted = (sum(node.op_type in kinds for node in s.train.graph.node) for s in (step, plain))
    assert found == wanted


ANSWERS = {
    "equally many": (PROMPTS, CHOSEN[1:], REJECTED),
    "prompt at index 0 has no token": ([[]], [[3]], [[4]]),
    "answer at index 1 has no token": ([[3], [3]], [[3], [4]], [[4], []]),
}


@pytest.mark.parametrize("words", ANSWERS)
def test_answers_that_cannot_be_compared_are_refused(words: str) -> None:
    with pytest.raises(DataError, match=words):
        surgery.answer_pairs(*ANSWERS[words])


def test_nothing_is_cut() -> None:
    with pytest.raises(DataError, match="has 9 tokens, but length is 8"):
        surgery.answer_pairs(PROMPTS, CHOSEN, REJECTED, 8)
    rows = surgery.answer_pairs(PROMPTS, CHOSEN, REJECTED, 12, pad=1)
    assert rows["input_ids"].shape == (5, 2, 12)
    assert (rows["labels"][..., 9:] == -100).all()
    assert (rows["input_ids"][..., 9:] == 1).all()


def test_a_model_that_generates_is_refused() -> None:
    with pytest.raises(BuildError, match="convert it with language_model first"):
        surgery.pair_model(adapted())


def test_losses_refuse_what_is_no_pair() -> None:
    model = surgery.language_model(adapted())
    with pytest.raises(Exception, match="expected \\[pairs, 2\\]"):
        gg.build(model, "dpo")


def test_a_reference_comes_before_the_first_step() -> None:
    """Of weights that are no adapters."""
    model = surgery.pair_model(in_float64())
    trainer = gg.Trainer(gg.build(model, "orpo", gg.optim.sgd(0.1)), device="cpu")
    wanted = trainer.predict(PAIRS)["log_probability"]
    np.testing.assert_array_equal(surgery.reference(in_float64(), trainer, PAIRS), wanted)
    trainer.step(PAIRS)
    with pytest.raises(BuildError, match="compute the reference before the first step"):
        surgery.reference(in_float64(), trainer, PAIRS)


@pytest.mark.sweep(0)
def test_a_prefix_has_no_reference() -> None:
    model = gg.lora(TINY, "*attn*", rank=2, kind="prefix")
    with pytest.raises(BuildError, match="of kind prefix cannot be neutral"):
        surgery.reference(model, trainer_of(model), PAIRS)


@pytest.mark.parametrize(
    ("loss", "words"),
    [("dpo(beta=0)", "beta must be"), ("dpo(label_smoothing=0.5)", "swap chosen"), ("simpo(gamma=-1)", "gamma must")],
)
def test_options_that_make_no_sense_are_refused(loss: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        gg.losses.LOSSES.typed(loss)
