"""Preferences from rows: their tokens, batches, and a fine-tuning that learns which answer is better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.chat.preferences import PairBatches, pairs_of
from gradgraph.chat.row_lengths import Limit, fitted_pairs
from gradgraph.errors import DataError, GradgraphError

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder

PAIRS = [{"prompt": f"Say {i}.", "chosen": f"{i}!", "rejected": f"No, not {i % 3}."} for i in range(24)]
JUDGED = [{"prompt": f"Say {i}.", "completion": f"{i}!" if i % 2 else "No.", "label": bool(i % 2)} for i in range(24)]
SHORT = {"target": ("*attn*", "*mlp*"), "rank": 4, "learning_rate": 5e-3, "epochs": 3, "held_out": 0.25}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder.write(tmp_path_factory.mktemp("llm"))


def test_a_row_becomes_its_prompt_with_each_answer(base: Path) -> None:
    encoder = gg.chat.Encoder(base)
    (pair,) = pairs_of(gg.chat.read(PAIRS[:1]), encoder, "dpo")
    before = "<s>[u] Say 0. "
    assert encoder.pieces(pair.first) == [(before, False), ("0!</s>", True)]
    assert encoder.pieces(pair.second) == [(before, False), ("No, not 0.</s>", True)]
    asked = [{"role": "user", "content": "Say 0."}]
    whole = {name: [*asked, {"role": "assistant", "content": PAIRS[0][name]}] for name in ("chosen", "rejected")}
    (same,) = pairs_of(gg.chat.read([whole]), encoder, "dpo")
    np.testing.assert_array_equal(same.second.ids, pair.second.ids)
    np.testing.assert_array_equal(same.second.learnt, pair.second.learnt)


def test_a_judged_answer_stands_beside_one_to_another_prompt(base: Path) -> None:
    encoder = gg.chat.Encoder(base)
    pairs = pairs_of(gg.chat.read(JUDGED[:3]), encoder, "kto")
    assert [pair.good for pair in pairs] == [False, True, False]
    assert encoder.pieces(pairs[2].first)[1] == ("No.</s>", True)
    assert encoder.pieces(pairs[0].second) == [("<s>[u] Say 0. ", False), ("1!</s>", True)]


def test_batches_are_those_of_answer_pairs(base: Path) -> None:
    encoder = gg.chat.Encoder(base)
    pairs = pairs_of(gg.chat.read(PAIRS), encoder, "dpo")
    adapted = gg.lora(base / "model.onnx", "*attn*", rank=2)
    model = gg.surgery.pair_model(gg.surgery.language_model(adapted))
    trainer = gg.Trainer(gg.build(model, "dpo"), device="cpu")
    parts = [(t.ids[: (n := int(np.flatnonzero(t.learnt)[0]))], t.ids[n:]) for p in pairs for t in (p.first, p.second)]
    prompts, answers = zip(*parts, strict=True)
    arrays = gg.surgery.answer_pairs(prompts[::2], answers[::2], answers[1::2])
    wanted = trainer.predict(arrays)
    found = trainer.predict(PairBatches(pairs), 5)
    np.testing.assert_allclose(found["log_probability"], wanted["log_probability"], rtol=1e-5)
    np.testing.assert_array_equal(found["tokens"], wanted["tokens"])
    with pytest.raises(DataError, match=r"set reference= to the result of surgery\.reference"):
        trainer.evaluate(PairBatches(pairs))


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "simpo", "kto"])
def test_a_folder_learns_preferences(base: Path, tmp_path: Path, loss: str) -> None:
    rows = JUDGED if loss == "kto" else PAIRS
    asked = {"sample": ["Say 3.", "Say 11."], "sample_every": 4, "sample_tokens": 6}
    found = gg.finetune(base, rows, tmp_path / "out", loss=loss, progress=False, **SHORT, **asked)
    figures = found.figures
    assert figures["held_out_loss"] < figures["held_out_loss_before"]
    assert (figures.get("reward_accuracy", 1) > 0.8) and ("reward_accuracy" in figures) == (loss != "kto")
    assert figures["reward_margin"] > 0
    if loss == "dpo":
        assert figures["held_out_loss_before"] == pytest.approx(np.log(2), rel=1e-5)
    assert figures["perplexity_before"] != figures["perplexity"] == pytest.approx(figures["perplexity_float"], rel=1e-4)
    assert figures["tokens_a_second"] > 0 and figures["peak_memory_mib"] > 50
    assert "| loss of held-out rows after training |" in (tmp_path / "out" / "README.md").read_text()

    log = [json.loads(line) for line in (tmp_path / "out/training/log.jsonl").read_text().splitlines()]
    told_at_ends = [row for row in log if row["event"] == "preferences"]
    assert [row["step"] for row in told_at_ends] == found.history["step"]
    assert told_at_ends[-1]["reward_margin"] == figures["reward_margin"]
    if loss in ("dpo", "ipo"):  # the metric of the graph
        assert [row["reward_accuracy"] for row in told_at_ends] == pytest.approx(found.history["val_reward_accuracy"])
    if loss == "dpo":
        assert np.log1p(np.exp(-figures["reward_margin"])) < figures["held_out_loss"]  # by the inequality of Jensen
    told = [(row["step"], row["prompt"]) for row in log if row["event"] == "sample"]
    assert told[:4] == [(step, text) for step in (4, 8) for text in asked["sample"]]
    for folder, adapter in ((base, tmp_path / "out" / "adapter"), (tmp_path / "out", None)):
        answers = gg.chat.generate(folder, asked["sample"], max_tokens=6, adapter=adapter)
        assert found.samples == dict(zip(asked["sample"], answers, strict=True))


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_run_on_preferences_goes_on_to_the_bit(base: Path, tmp_path: Path, loss: str) -> None:
    """Also where it writes samples, and the other does not."""
    rows = JUDGED if loss == "kto" else PAIRS
    options = {**SHORT, "epochs": 1, "loss": loss, "beta": 0.3, "merge": "none", "progress": False}
    whole = gg.finetune(base, rows, tmp_path / "whole", **options)
    asked = {"sample": "Say 3.", "sample_every": 1, "sample_tokens": 2}
    gg.finetune(base, rows, tmp_path / "stopped", max_steps=2, **asked, **options)
    again = gg.finetune(base, rows, tmp_path / "stopped", resume=True, **options)
    assert again.history["loss"] == whole.history["loss"]
    for name, array in whole.trainer.state_dict().items():
        np.testing.assert_array_equal(again.trainer.state_dict()[name], array)


def test_it_stops_early_with_the_best_state(base: Path, tmp_path: Path) -> None:
    options = {**SHORT, "learning_rate": 0.3, "epochs": 20, "merge": "none", "progress": False}
    found = gg.finetune(base, PAIRS, tmp_path / "out", loss="orpo", patience=1, eval_every=1, **options)
    assert found.history.restored is not None and found.figures["steps"] < 20 * 3
    assert found.figures["held_out_loss"] == pytest.approx(min(found.history["val_loss"]), rel=1e-5)
    assert found.figures["held_out_loss"] < max(found.history["val_loss"])


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "messages": ([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
                 {"loss": "dpo"}, "the loss dpo requires chosen and rejected"),
    "judged": (JUDGED, {"loss": "orpo"}, "the loss orpo requires chosen and rejected"),
    "pairs": (PAIRS, {"loss": "kto"}, "the loss kto requires prompt, completion and label"),
    "pairs without a loss": (PAIRS, {}, "contains preferences, but this loss requires answers"),
    "alike": ([{"prompt": "a", "chosen": "b", "rejected": "b"}], {"loss": "dpo"}, "are equal"),
    "no prompt": ([{"chosen": "b", "rejected": "c"}], {"loss": "dpo"}, "no 'prompt'"),
    "one prompt": ([{**row, "prompt": "Say."} for row in JUDGED], {"loss": "kto"}, "have the same prompt"),
    "too long": (PAIRS, {"loss": "dpo", "length": 20}, "truncated answers cannot be compared"),
    "packed": (PAIRS, {"loss": "dpo", "pack": True}, "does not support packing"),
    "no such loss": (PAIRS, {"loss": "dpoo"}, "did you mean 'dpo'"),
    "beta": (PAIRS, {"beta": 0.1}, "beta requires a preference loss"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_said(base: Path, tmp_path: Path, name: str) -> None:
    rows, options, words = WRONG[name]
    with pytest.raises(GradgraphError, match=words):
        gg.finetune(base, rows, tmp_path / "out", progress=False, **{**SHORT, **options})


def test_longer_pairs_are_left_out_if_asked(base: Path) -> None:
    rows = gg.chat.read(PAIRS)
    pairs = pairs_of(rows, gg.chat.Encoder(base), "dpo")
    most = max(map(len, pairs))
    kept = fitted_pairs(pairs, Limit(most - 1, most - 1), "drop", rows)
    assert 0 < len(kept) < len(pairs) == len(fitted_pairs(pairs, Limit(most, most), "error", rows))
