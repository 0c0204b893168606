"""Kept features of each token: texts that are padded to the longest of their batch, and trunks of language models."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import ArgumentError, BuildError, DataError
from gradgraph.frontend import nn
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.features import kept_rows
from tests.kit import tiny_bert
from tests.kit.small_models import parsed
from tests.runtime.test_keep_features import fitted

RNG = np.random.default_rng(7)


def tags(count: int, seed: int = 0) -> dict[str, Any]:
    words = [text.split() for text in tiny_bert.sentences(count, seed)[0]]
    return {"words": words, "ner_tags": [["BO"[word in tiny_bert.GOOD] for word in each] for each in words]}


def check_close(
    step: gg.Step, data: Any, validation: Any = None, keep: Any = True, bits: bool = False, **options: Any
) -> Any:
    """Check losses and state against a fit without kept features, up to rounding or to the bit; return the trainer."""
    one, state, trainer = fitted(step, data, keep, validation=validation, **options)
    other, expected, without = fitted(step, data, False, validation=validation, **options)
    assert one.keys() == other.keys()
    for name, column in one.items():
        assert column == pytest.approx(other[name], rel=0 if bits else 1e-5, abs=0), name
    for name, value in state.items():
        rounding = {"rtol": 0, "atol": 0} if bits else {"rtol": 1e-4, "atol": 1e-6}
        np.testing.assert_allclose(value, expected[name], **rounding, err_msg=name)
    assert trainer.progress.sizes == without.progress.sizes
    return trainer


def check_same_bits(*given: Any, **options: Any) -> None:
    check_close(*given, bits=True, **options)


@pytest.mark.parametrize("left", [False, True])
def test_labels_of_tokens(left: bool, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    read = tiny_bert.tokenizer(tmp_path / "tokenizer.json", left)
    step = gg.build(tiny_bert.classifier(2, of_tokens=True), gg.losses.cross_entropy(axis=-1), "sgd", train="head.*")
    data, held = (gg.text.table(tags(n, s), read, classes=["O", "B"]) for n, s in ((37, 0), (11, 1)))
    if left:  # this model counts positions from the beginning of a row, so that padding moves them
        with pytest.raises(DataError, match="padding changes"):
            fitted(step, data, True)
        return
    check_close(step, data, held)
    check_close(step, data, held, shuffle=False, drop_last=True)


def test_files_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(kept_rows, "free_memory", lambda: 100)
    read, path = tiny_bert.tokenizer(tmp_path / "tokenizer.json"), tmp_path / "run.ckpt"
    step = gg.build(tiny_bert.classifier(2, of_tokens=True), gg.losses.cross_entropy(axis=-1), "sgd", train="head.*")
    data = gg.text.table(tags(30), read, classes=["O", "B"])
    _, expected, _ = fitted(step, data, True)
    fitted(step, data, True, checkpoint=path, max_steps=5)
    trainer = gg.Trainer.resume(step, path, device="cpu", options=RuntimeOptions(threads=1))
    trainer.fit(data, 3, 8, learning_rate=0.05, progress=False, keep_features=True, resume=True, checkpoint=path)
    assert all(np.array_equal(value, expected[n]) for n, value in trainer.state_dict().items())
    assert not (tmp_path / "run.features").exists()


POOLED = """(int64[n, t] input_ids, float[n, t] mask) => (float[n, 2] y) <int64[1] axis = {1}, int64[1] last = {2}> {
    e = Gather(table, input_ids)  h = MatMul(e, k)  s = Tanh(h)  q = MatMul(s, w)  u = Unsqueeze(mask, last)
    m = Mul(q, u)  y = ReduceSum <keepdims = 0> (m, axis)
}"""


class Rows:
    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(3)
        self.ids = [rng.integers(1, 64, rng.integers(2, 14)) for _ in range(count)]
        self.labels = rng.integers(0, 2, count)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.ids[i], "mask": np.ones(len(self.ids[i]), np.float32), "target": self.labels[i]}


def padded_rows(count: int, multiple: int = 1) -> gg.Padded:
    return gg.Padded(Rows(count), {"input_ids": 0, "mask": 0}, multiple=multiple)


def pooled_step() -> gg.Step:
    """Return a step whose trained head reads the mask and the features of each token."""
    rng = np.random.default_rng(5)
    weights = {
        "table": rng.standard_normal((64, 4)),
        "k": rng.standard_normal((4, 4)),
        "w": rng.standard_normal((4, 2)),
    }
    return gg.build(parsed(POOLED, **weights), loss="cross_entropy", optimizer="sgd", train="w")


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_padded_dataset(multiple: int) -> None:
    check_same_bits(pooled_step(), padded_rows(29, multiple), padded_rows(9, multiple))


def test_a_padded_dataset_of_one_length() -> None:
    one = padded_rows(20)
    one.dataset.ids = [np.resize(ids, 6) for ids in one.dataset.ids]
    check_same_bits(pooled_step(), one, padded_rows(9), keep="auto")


def left_padded(folder: Path) -> tuple[gg.Step, Path]:
    """Return a step whose features do not depend on positions, and a tokenizer that pads at the beginning."""
    pytest.importorskip("tokenizers")
    rng = np.random.default_rng(5)
    weights = {
        "table": rng.standard_normal((64, 4)),
        "k": rng.standard_normal((4, 4)),
        "w": rng.standard_normal((4, 2)),
    }
    model = parsed("""(int64[n, t] input_ids, int64[n, t] attention_mask) => (float[n, 2] y)
        <int64[1] axis = {1}, int64[1] last = {2}> {
        e = Gather(table, input_ids)  h = MatMul(e, k)  s = Tanh(h)  q = MatMul(s, w)
        f = Cast <to = 1> (attention_mask)  u = Unsqueeze(f, last)
        m = Mul(q, u)  y = ReduceSum <keepdims = 0> (m, axis)
    }""", **weights)  # fmt: skip
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train="w")
    return step, tiny_bert.tokenizer(folder / "tokenizer.json", left=True)


def test_left_padding(tmp_path: Path) -> None:
    step, read = left_padded(tmp_path)
    texts, labels = tiny_bert.sentences(29)
    check_same_bits(step, gg.text.table({"text": texts, "label": labels}, read))


def test_left_padding_of_few_samples(tmp_path: Path) -> None:
    """The side of the padding is that of the shortest sample, even if no sample of the spaced ones is padded."""
    step, read = left_padded(tmp_path)
    texts = ["the kind, calm, brave fox"] * 34
    texts[2] = texts[3] = "the calm owl"
    frame = {"text": texts, "label": ["good", "bad"] * 17}
    check_same_bits(step, gg.text.table(frame, read), batch_size=2, shuffle=False)


def test_samples_that_are_merged_with_choices() -> None:
    step = gg.build(tiny_bert.chooser(), "cross_entropy", "sgd", train="head.*")
    ids = RNG.integers(4, 16, (8, 3, 5))
    data = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": 0 * ids,
        "target": np.zeros(8, int),
    }
    with pytest.raises(BuildError, match="merges samples with another axis"):
        fitted(step, data, True)


def test_features_that_depend_on_the_width_are_refused() -> None:
    model = parsed("""(int64[n, t] input_ids, float[n, t] mask) => (float[n, 2] y)
        <int64[1] axis = {1}, int64[1] two = {2}> {
        e = Gather(table, input_ids)  h = MatMul(e, k)  m = ReduceMean(h, axis)  g = Sub(h, m)  q = MatMul(g, w)
        u = Unsqueeze(mask, two)  v = Mul(q, u)  y = ReduceSum <keepdims = 0> (v, axis)
    }""", table=RNG.standard_normal((64, 4)), k=RNG.standard_normal((4, 4)), w=RNG.standard_normal((4, 2)))  # fmt: skip
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train="w")
    with pytest.raises(DataError, match="padding changes"):
        fitted(step, gg.Padded(Rows(20), {"input_ids": 0, "mask": 0}), True)


# --- language models --------------------------------------------------------------------------------------


def chat_batches(folder: Path, count: int, packed: bool = False) -> Any:
    from gradgraph.chat import ChatBatches, Encoder, read
    from tests.chat import small_folder

    encoder = Encoder(folder)
    return ChatBatches(encoder(read(small_folder.chats(count))), 128, packed)


@pytest.fixture(params=["int4", "fp16"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
    pytest.importorskip("jinja2", reason="the extra [llm] is not installed")
    from tests.chat import small_folder

    return small_folder.write(
        tmp_path / request.param, model=small_folder.ROOT / "examples" / f"tiny_llama_{request.param}.onnx"
    )


def test_the_last_layers_of_a_language_model(llm: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gradgraph")
    adapted = gg.lora(str(llm / "model.onnx"), ["*layers.1*mlp*", "lm_head*"], rank=4)
    model = gg.surgery.language_model(adapted)
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), "sgd")
    check_same_bits(step, chat_batches(llm, 13), chat_batches(llm, 5), batch_size=4, epochs=2)
    assert "float32[sequence_length, 32]" in caplog.text and "layers.1" in caplog.text  # what is kept


def test_packed_rows(llm: Path) -> None:
    if "int4" not in str(llm):
        pytest.skip("packed rows require GroupQueryAttention")
    adapted = gg.lora(str(llm / "model.onnx"), ["lm_head*"], rank=4)
    step = gg.build(gg.surgery.language_model(adapted, packed=True), gg.losses.cross_entropy(axis=-1), "sgd")
    check_same_bits(step, chat_batches(llm, 13, packed=True), batch_size=2, epochs=2)


class Judge(nn.Module):
    """A classifier of texts on the last hidden state of a language model."""

    def __init__(self, model: onnx.ModelProto, hidden: str) -> None:
        super().__init__()
        self.trunk = frontend.from_onnx(model, outputs=hidden)
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        hidden = self.trunk(input_ids, attention_mask)
        weights = attention_mask.to("float32").unsqueeze(-1)
        return self.head((hidden * weights).sum(1) / weights.sum(1))


def test_a_classifier_on_the_last_hidden_state(llm: Path) -> None:
    model = gg.surgery.language_model(str(llm / "model.onnx"), keep="attention_mask")
    node = next(n for n in onnx.load(llm / "model.onnx").graph.node if "lm_head" in n.name)
    made = frontend.export(Judge(model, node.input[0]), {n: frontend.Input(("rows", "tokens"), "int64")
                                                         for n in ("input_ids", "attention_mask")})  # fmt: skip
    step = gg.build(made, "cross_entropy", "sgd", freeze="trunk.*")
    rows = Rows(21)
    rows.ids = [ids + 3 for ids in rows.ids]

    class Texts(Rows):
        def __getitem__(self, i: int) -> dict[str, Any]:
            ids = rows.ids[i]
            return {"input_ids": ids, "attention_mask": np.ones(len(ids), np.int64), "target": rows.labels[i]}

    data = gg.Padded(Texts(21), {"input_ids": 0, "attention_mask": 0})
    trainer = check_close(step, data, data, epochs=2)
    assert trainer.evaluate(data)["loss"] > 0


def test_finetuning(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
    pytest.importorskip("jinja2", reason="the extra [llm] is not installed")
    from tests.chat import small_folder

    llm = small_folder.write(tmp_path / "llm")
    options: dict[str, Any] = {"target": ["lm_head"], "rank": 4, "epochs": 2, "batch_size": 4, "progress": False}
    losses = [
        gg.finetune(llm, small_folder.chats(10), tmp_path / str(keep), keep_features=keep, **options).history[
            "val_loss"
        ]
        for keep in (False, True)
    ]
    assert list(losses[0]) == list(losses[1])
    with pytest.raises(ArgumentError, match="the loss dpo compares two answers, whose features cannot be kept"):
        gg.finetune(llm, [], tmp_path / "out", loss="dpo", keep_features=True)
