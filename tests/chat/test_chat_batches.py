"""Tokens and labels are right, and rows filled up or packed train as each text alone does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.chat import ChatBatches, Encoder, Tokens, read
from gradgraph.chat.chat_batches import packed_rows
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.prompts import Prompts
from gradgraph.errors import BuildError, DataError
from gradgraph.surgery import language_model

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder

PREFIXES = small_folder.TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}] * 2
ROWS: list[tuple[dict[str, Any], str | None, list[tuple[str, bool]]]] = [
    ({"messages": TALK}, None, [("<s>[u] Hi ", False), ("Ho</s>", True), ("[u] Hi ", False), ("Ho</s>", True)]),
    ({"prompt": "Hi", "completion": "Ho"}, None, [("<s>[u] Hi ", False), ("Ho</s>", True)]),
    ({"prompt": TALK[:3], "completion": TALK[3:]}, None, [("<s>[u] Hi Ho</s>[u] Hi ", False), ("Ho</s>", True)]),
    ({"prompt": "Hi ", "completion": "Ho"}, "none", [("Hi ", False), ("Ho</s>", True)]),
    (
        {"messages": [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]},
        None,
        [("<s>[u] Hi Ho</s>[u] Hi ", False), ("Ho</s>", True)],
    ),
    (
        {"messages": [{**TALK[0], "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, TALK[1]]},
        None,
        [("<s>[u] Hi ", False), ("Ho</s>", True)],
    ),
    (
        {"prompt": "Hi", "completion": "Ho", "chat_template_kwargs": {"bos_token": "</s>"}},
        None,
        [("</s>[u] Hi ", False), ("Ho</s>", True)],
    ),
    ({"text": "Hi"}, None, [("Hi</s>", True)]),
    ({"text": "Hi</s>"}, None, [("Hi</s>", True)]),
]


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("row, template, pieces", ROWS)
def test_answers_are_learnt(
    row: dict[str, Any], template: str | None, pieces: Any, marks: bool, tmp_path: Path
) -> None:
    folder = small_folder.write(tmp_path, small_folder.TEMPLATE if marks else PREFIXES)
    encoder = Encoder(folder, template)
    (tokens,) = encoder(read([row]))
    assert encoder.pieces(tokens) == pieces


READS_ALL = (
    "{% for m in messages %}{{ m.name }}{{ m.images | length }}{{ m.reasoning_content }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{% generation %}x{% endgeneration %}{% endif %}{% endfor %}{{ tools }}{{ speed }}"
)
WITH_KEYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("name", {"name": "Ann"}, {}),
    ("images", {"images": ["a.png"]}, {}),
    ("reasoning_content", {"reasoning_content": "so"}, {}),
    ("thinking", {"thinking": "so"}, {}),
    ("tools", {}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("speed", {}, {"chat_template_kwargs": {"speed": 2}}),
]


@pytest.mark.parametrize("kind", ["messages", "prompt"])
@pytest.mark.parametrize("key, message, row", WITH_KEYS, ids=[key for key, _, _ in WITH_KEYS])
def test_no_key_is_left_out_unheard(
    key: str, message: Any, row: Any, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk = [{**m, **message} for m in TALK]
    said = {"messages": talk} if kind == "messages" else {"prompt": talk[:3], "completion": talk[3:]}
    rows = read([{**said, **row}])
    Encoder(small_folder.write(tmp_path))(rows)
    assert f"does not use '{key}' of the data" in caplog.text
    caplog.clear()
    Encoder(small_folder.write(tmp_path, READS_ALL))(rows)
    assert not caplog.text
    if kind == "prompt" and row:
        Encoder(small_folder.write(tmp_path), "none")(read([{"prompt": "Hi", "completion": "Ho", **row}]))
        assert f"without a chat template, '{key}' of the data" in caplog.text


@pytest.mark.parametrize("text", ["Hi", "<s>Hi", "Hi</s>", "<s>Hi</s>"])
def test_what_a_tokenizer_adds_stands_once(text: str, tmp_path: Path) -> None:
    from tokenizers import processors

    folder, own = small_folder.write(tmp_path), small_folder.tokenizer()
    around = [("<s>", 1), ("</s>", 2)]
    own.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    own.save(str(folder / "tokenizer.json"))
    encoder = Encoder(folder, "none")
    assert encoder.tokenizer.decode(encoder(read([{"text": text}]))[0].ids) == "<s>Hi</s>"
    assert encoder.tokenizer.decode(Prompts(ModelFolder.of(folder), "none").tokens_of(text)) == "<s>Hi"


def texts(count: int, seed: int = 0) -> list[Tokens]:
    random = np.random.default_rng(seed)
    sizes = random.integers(3, 30, count)
    return [Tokens(random.integers(3, 98, n), random.random(n) < 0.5 if i else np.ones(n, bool))
            for i, n in enumerate(sizes)]  # fmt: skip


def trainer(packed: bool) -> gg.Trainer:
    adapted = gg.lora(small_folder.MODEL, ["*attn*", "*mlp*"], rank=4)
    step = gg.build(
        language_model(adapted, packed=packed), gg.losses.cross_entropy(axis=-1, z_loss=1e-3), gg.optim.sgd(0.1)
    )
    return gg.Trainer(step, device="cpu")


def loss_of_each_alone(samples: list[Tokens]) -> float:
    alone, total, counted = trainer(packed=False), 0.0, 0
    for tokens in samples:
        labels = np.where(tokens.learnt[1:], tokens.ids[1:], -100)
        if (n := int((labels >= 0).sum())) > 0:
            batch = {"input_ids": tokens.ids[None, :-1], "target": labels[None]}
            total, counted = total + n * alone.evaluate(batch)["loss"], counted + n
    return total / counted


def test_filled_up_and_packed_rows_have_the_losses_of_texts_alone() -> None:
    samples = texts(12)
    expected = loss_of_each_alone(samples)
    for packed in (False, True):
        data = ChatBatches(samples, 48, packed)
        assert trainer(packed).evaluate(data, batch_size=3)["loss"] == pytest.approx(expected, rel=2e-6), packed
    assert len(ChatBatches(samples, 48, packed=True)) < len(samples) / 2


def test_packed_rows_train_as_the_same_texts_do_apart() -> None:
    """One step on all texts of one batch: the same gradients, so the same weights."""
    samples, after = texts(8, seed=1), []
    for packed in (False, True):
        made = trainer(packed)
        data = ChatBatches(samples, 64, packed)
        made.fit(data, epochs=2, batch_size=len(data), progress=False)
        after.append(made.state_dict())
    moved = [name for name, array in after[0].items() if np.abs(array).max() > 0]
    assert len(moved) > 8
    for name in after[0]:
        np.testing.assert_allclose(after[1][name], after[0][name], rtol=2e-4, atol=2e-7, err_msg=name)


def test_a_text_sees_no_other_of_its_row() -> None:
    """Another neighbour changes nothing; were segments not read, it would."""
    made, (a, b, c) = trainer(packed=True), texts(3, seed=2)
    losses = []
    for other in (b, Tokens(np.flip(b.ids).copy(), b.learnt), c):
        n, m = len(a), len(other)
        ids = np.concatenate([other.ids, a.ids])[None]
        segments, labels = np.repeat([1, 2], [m, n])[None], np.full((1, m + n), -100)
        labels[0, m:-1] = a.ids[1:]
        batch = {"input_ids": ids, "segments": segments, "target": labels}
        losses.append(float(made.evaluate(batch)["loss"]))
        mixed = float(made.evaluate(batch | {"segments": np.ones_like(segments)})["loss"])
        assert abs(mixed - losses[-1]) > 1e-4
    assert losses[1] == pytest.approx(losses[0], rel=2e-6) and losses[2] == pytest.approx(losses[0], rel=2e-6)


def test_batches_hold_rows_of_similar_lengths_and_their_labels() -> None:
    samples = texts(200)
    data, step = ChatBatches(samples, 64), trainer(packed=False)
    specs = {spec.name: spec for spec in step.manifest.batch}
    order = data.order(0, 0, 8)
    assert sorted(order) == list(range(200)) and list(order) != list(data.order(0, 1, 8))
    widths = []
    for batch in data.load(iter([order[i : i + 8] for i in range(0, 200, 8)]), specs, (0,)):
        ids, target = batch["input_ids"], batch["target"]
        widths.append(ids.shape[1])
        shown = target >= 0
        np.testing.assert_array_equal(target[:, :-1][shown[:, :-1]], ids[:, 1:][shown[:, :-1]])
    assert min(widths) == 16 and sum(widths) < 0.9 * 32 * len(widths)  # of a random order, nearly all would be 32


def test_rows_have_the_length_that_a_model_was_exported_for() -> None:
    data, found = ChatBatches(texts(6), 64), []
    for length in (None, 41, 8):
        model = language_model(gg.lora(small_folder.MODEL, "*mlp*", rank=2))
        if length is not None:
            model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = length
        made = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu")
        if length == 8:
            with pytest.raises(DataError, match=r"but the model was exported for texts of 8; lower the length, or"):
                made.evaluate(data, batch_size=2)
        else:
            found.append(made.evaluate(data, batch_size=2)["loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("length", [30, 47, 64])
def test_packed_rows_hold_each_text_once(length: int) -> None:
    sizes = [len(tokens) for tokens in texts(300, seed=3)]
    rows = packed_rows(sizes, length)
    assert sorted(i for row in rows for i in row) == list(range(300))
    used = [sum(sizes[i] for i in row) for row in rows]
    assert max(used) <= length and (length == 30 or sum(used) > 0.9 * length * len(rows))


def test_what_does_not_fit() -> None:
    with pytest.raises(DataError, match="tokens, more than the row length 8"):
        ChatBatches(texts(9), 8)
    with pytest.raises(DataError, match="packed=True"):
        trainer(packed=False).evaluate(ChatBatches(texts(3), 64, packed=True))
    with pytest.raises(DataError, match="provide tokens, but the step expects"):
        trainer(packed=True).evaluate(ChatBatches(texts(3), 64))
    with pytest.raises(BuildError, match="omit packed, or do not keep the mask"):
        language_model(small_folder.MODEL, keep="attention_mask", packed=True)
