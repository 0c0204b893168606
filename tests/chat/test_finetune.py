"""Fine-tuning from a folder to a folder: it learns, its results say the same, and it goes on to the bit."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.chat import Recipe, tuned_folder
from gradgraph.chat.finetuning import prepare
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.task_request import Request
from gradgraph.chat.training_samples import TrainingSamples
from gradgraph.chat.tuned_folder import Told, of_data, perplexity_of
from gradgraph.errors import ArgumentError, BuildError, DataError, GradgraphError, OutputError
from gradgraph.files.models import load_model
from gradgraph.surgery.operation import numbers_of

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder
from tests.surgery import merged_decoder

SHORT = {"target": ("*attn*", "*mlp*", "lm_head"), "rank": 4, "learning_rate": 1e-2}
IDS = np.array([[1, 20, 21, 22, 30, 31]])


def scores(model: Path, adapter: Path | None = None) -> np.ndarray:
    """Of a model that generates, for the same few tokens."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    feeds |= {v.name: np.zeros((1, v.shape[1], 0, 16), np.float32) for v in session.get_inputs() if "past" in v.name}
    options = ort.RunOptions()
    if adapter is not None:
        given = ort.LoraAdapter()
        given.Load(str(adapter))
        options.add_active_adapter(given)
    return np.asarray(session.run(["logits"], feeds, options)[0])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder.write(tmp_path_factory.mktemp("llm"))


def test_a_folder_becomes_a_folder_that_has_learnt(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    found = gg.finetune(base, small_folder.chats(60), out, epochs=6, progress=False, **SHORT)
    assert found.figures["perplexity"] < 0.5 * found.figures["perplexity_before"]
    assert found.figures["perplexity_float"] == pytest.approx(found.figures["perplexity"], rel=1e-3)
    assert len(found.history["val_loss"]) == 6
    for name in ("genai_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    card = (out / "README.md").read_text()
    assert "| training rows | 54 |" in card and "| rank | `4` |" in card
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["r"] >= 4

    merged = scores(out / "model.onnx")
    assert np.abs(merged - scores(base / "model.onnx")).max() > 0.1
    loaded = gg.surgery.load_adapter(base / "model.onnx", out / "adapter")
    gg.surgery.forget_sizes(gg.surgery.merge_adapters(loaded), out=tmp_path / "again.onnx")
    np.testing.assert_allclose(scores(tmp_path / "again.onnx"), merged, atol=1e-4)
    gg.surgery.forget_sizes(loaded, out=tmp_path / "apart.onnx")
    adapted = gg.lora(base / "model.onnx", list(SHORT["target"]), rank=4)
    gg.surgery.forget_sizes(gg.surgery.switchable(adapted), out=tmp_path / "base.onnx")
    by_switch = scores(tmp_path / "base.onnx", out / "adapter.onnx_adapter")
    np.testing.assert_allclose(by_switch, scores(tmp_path / "apart.onnx"), atol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "fp16"])
def test_a_tuned_folder_is_one_to_begin_with(kind: str, tmp_path: Path) -> None:
    base = small_folder.write(tmp_path / "llm", model=small_folder.ROOT / "examples" / f"tiny_llama_{kind}.onnx")
    options: dict[str, Any] = {**SHORT, "epochs": 1, "progress": False}
    first = gg.finetune(base, small_folder.chats(30), tmp_path / "a", **options)
    again = gg.finetune(tmp_path / "a", small_folder.chats(30), tmp_path / "b", **options)
    assert again.figures["perplexity_before"] == pytest.approx(first.figures["perplexity_float"], rel=1e-6)
    assert first.figures["perplexity_float"] == pytest.approx(first.figures["perplexity"], rel=2e-3)
    assert again.figures["perplexity"] < first.figures["perplexity"]


def of_optimum(folder: Path, apart: bool) -> Path:
    """As optimum writes it: no genai_config.json, and two decoders in one file."""
    small_folder.write(folder)
    for name in ("genai_config.json", "model.onnx"):
        (folder / name).unlink()
    onnx.save(merged_decoder.model(apart), folder / "decoder_model_merged.onnx")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 120, "vocab_size": 98}))
    return folder


@pytest.mark.parametrize("apart", [False, True], ids=["one weight for both", "a weight for each"])
def test_both_decoders_of_one_file_learn(apart: bool, tmp_path: Path, caplog: Any) -> None:
    base = of_optimum(tmp_path / "llm", apart)
    assert ModelFolder.of(base).context == 120
    options: dict[str, Any] = {**SHORT, "target": "*", "epochs": 4, "progress": False}
    found = gg.finetune(base, small_folder.chats(40), tmp_path / "tuned", **options)
    assert found.figures["perplexity"] < 0.8 * found.figures["perplexity_before"]
    assert found.figures["perplexity_float"] == pytest.approx(found.figures["perplexity"], rel=1e-4)
    with_adapter = gg.chat.generate(base, "Say ab.", adapter=tmp_path / "tuned" / "adapter", max_tokens=12)
    assert gg.chat.generate(tmp_path / "tuned", "Say ab.", max_tokens=12) == with_adapter
    assert gg.chat.generate(base, "Say ab.", max_tokens=12) != with_adapter
    assert ("has no cache, and generates more slowly" in caplog.text) == apart
    written = "decoder_model.onnx" if apart else "decoder_model_merged.onnx"
    assert [file.name for file in (tmp_path / "tuned").glob("*.onnx")] == [written]
    assert f"- `{written}`: the merged model" in (tmp_path / "tuned" / "README.md").read_text()


@pytest.mark.parametrize("form", ["float", "requantised"])
def test_a_quantised_file_of_both_decoders_is_written_as_it_was_measured(form: str, tmp_path: Path) -> None:
    base = of_optimum(tmp_path / "llm", False)
    onnx.save(merged_decoder.quantised(merged_decoder.model()), base / "decoder_model_merged.onnx")
    recipe: dict[str, Any] = {**SHORT, "target": "*", "learning_rate": 5e-2, "epochs": 2, "progress": False}
    found = gg.finetune(base, small_folder.chats(30), tmp_path / "tuned", merge=form, **recipe)
    written = ModelFolder.of(tmp_path / "tuned")
    assert written.model.name == ("decoder_model.onnx" if form == "float" else "decoder_model_merged.onnx")
    given = found.trainer.predict(IDS)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it moves what both branches read
    session = ort.InferenceSession(written.model, options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {"input_ids": IDS}
    if form == "requantised":
        feeds |= {merged_decoder.PAST: np.zeros((1, 1, 0, 8), np.float32), merged_decoder.BRANCH: np.array([False])}
    np.testing.assert_allclose(session.run(["logits"], feeds)[0], given, atol=1e-3 if form == "float" else 0.3)


def test_only_a_model_that_is_written_requantised_is_requantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ takes time, and some weights cannot be quantised again."""
    merge = tuned_folder.merge_to_folder

    def merged(*args: Any, requantise: bool = False, **more: Any) -> Any:
        if requantise:
            raise BuildError("this weight cannot be quantised again; merge it as floats")
        return merge(*args, requantise=requantise, **more)

    monkeypatch.setattr(tuned_folder, "merge_to_folder", merged)
    base = small_folder.write(tmp_path / "llm")
    options: dict[str, Any] = {**SHORT, "epochs": 1, "max_steps": 1, "progress": False}
    found = gg.finetune(base, small_folder.chats(20), tmp_path / "tuned", **options)
    assert (tmp_path / "tuned/tokenizer.json").exists() and (tmp_path / "tuned/README.md").exists()
    assert "perplexity_float" in found.figures and "perplexity_requantised" not in found.figures
    with pytest.raises(BuildError, match="merge it as floats"):
        gg.finetune(base, small_folder.chats(20), tmp_path / "again", **options, merge="requantised")


def test_a_run_that_stopped_goes_on_to_the_bit(base: Path, tmp_path: Path) -> None:
    data = small_folder.chats(40)
    options: dict[str, Any] = {**SHORT, "epochs": 3, "dropout": 0.1, "progress": False}
    whole = gg.finetune(base, data, tmp_path / "whole", **options)
    gg.finetune(base, data, tmp_path / "parts", **options, max_steps=7)
    with pytest.raises(OutputError, match="not an empty folder"):
        gg.finetune(base, data, tmp_path / "parts", **options)
    with pytest.raises(DataError, match="other values of rank"):
        gg.finetune(base, data, tmp_path / "parts", **{**options, "rank": 8}, resume=True)
    with pytest.raises(DataError, match="other values of data"):
        gg.finetune(base, data[:-1], tmp_path / "parts", **options, resume=True)
    shutil.copytree(base, tmp_path / "other")
    with_more_scores(tmp_path / "other" / "model.onnx")
    with pytest.raises(DataError, match="other values of model;"):
        gg.finetune(tmp_path / "other", data, tmp_path / "parts", **options, resume=True)
    parts = gg.finetune(base, data, tmp_path / "parts", **options, resume=True)
    assert parts.figures["steps"] == whole.figures["steps"] == 15
    for name, array in whole.trainer.state_dict().items():
        np.testing.assert_array_equal(parts.trainer.state_dict()[name], array, err_msg=name)
    assert (tmp_path / "parts/model.onnx").read_bytes() == (tmp_path / "whole/model.onnx").read_bytes()
    assert parts.history["loss"] == whole.history["loss"]


def test_rows_that_are_held_out_instead_of_learnt_are_other_data(base: Path) -> None:
    data, folder = small_folder.chats(12), ModelFolder.of(base)
    parts = [prepare(Request(folder, data[:n], base, Recipe(), data[n:]), Recipe()) for n in (8, 7, 9, 8)]
    assert len({p.digest for p in parts}) == 3 and parts[0].digest == parts[3].digest


class Later(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2099, 1, 1, tzinfo=tz)


def test_a_run_goes_on_from_every_moment_and_on_another_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed before it saved, in an epoch, or when it had stopped by itself; with texts that say the date."""
    caplog.set_level("INFO", "gradgraph.chat")
    template = small_folder.TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ strftime_now('%Y') }}")
    base, data = small_folder.write(tmp_path / "llm"), tmp_path / "rows.jsonl"
    (tmp_path / "own.jinja").write_text(template)
    data.write_text("".join(json.dumps(chat) + "\n" for chat in small_folder.chats(12)))
    options: dict[str, Any] = {
        "target": "lm_head",
        "rank": 2,
        "learning_rate": 0.3,
        "epochs": 20,
        "batch_size": 4,
        "held_out": 0.3,
        "patience": 1,
        "sample": "Say ab.",
        "sample_every": 1,
        "sample_tokens": 2,
        "progress": False,
        "merge": "none",
        "template": tmp_path / "own.jinja",
    }
    whole, out = gg.finetune(base, data, tmp_path / "whole", **options), tmp_path / "parts"
    assert whole.figures["steps"] < 40 and whole.history.restored is not None
    assert (tmp_path / "whole/chat_template.jinja").read_text() == template
    card = (tmp_path / "whole/README.md").read_text()
    assert "- trained on `rows.jsonl`" in card and "by `chat_template.jinja`, which was `own.jinja`" in card
    assert json.loads((tmp_path / "whole/training/recipe.json").read_text())["data"] in card

    def same(found: Any) -> None:
        for name in ("adapter/adapter_model.safetensors", "training/recipe.json"):
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes().replace(
                f'"began": "{began(tmp_path / "whole")}"'.encode(), f'"began": "{began(out)}"'.encode()
            )
        assert found.history["loss"] == whole.history["loss"] and found.samples == whole.samples
        logs = [
            [
                {k: v for k, v in json.loads(line).items() if k != "seconds"}
                for line in (folder / "training/log.jsonl").read_text().splitlines()
            ]
            for folder in (tmp_path / "whole", out)
        ]
        assert logs[0] == logs[1]

    def began(folder: Path) -> str:
        return str(json.loads((folder / "training/recipe.json").read_text())["began"])

    def stop(*_: Any) -> None:
        raise KeyError("killed")

    with monkeypatch.context() as killed:
        killed.setattr(TrainingSamples, "on_step", stop)
        with pytest.raises(KeyError):
            gg.finetune(base, data, out, **options)
    assert not list(out.glob("training/*.ckpt"))
    for module in ("template", "finetuning"):
        monkeypatch.setattr(f"gradgraph.chat.{module}.datetime", Later)
    gg.finetune(base, data, out, **options, resume=True, max_steps=3, checkpoint_every=2)
    assert "stopped before its first checkpoint and starts again" in caplog.text
    same(gg.finetune(base, data, out, **options, resume=True))
    same(gg.finetune(base, data, out, **options, resume=True))
    with pytest.raises(DataError, match="cannot be read"):
        (out / "training/recipe.json").unlink()
        gg.finetune(base, data, out, **options, resume=True)


def test_a_card_tells_how_to_ask() -> None:
    told = Told("`a.jsonl`", "`b.jsonl`", "none", "1234")
    assert "- validation: `b.jsonl`" in of_data(told)
    assert "- prompts: verbatim: `gradgraph generate --template none`" in of_data(told)


def test_options_do_what_they_say(base: Path, tmp_path: Path) -> None:
    """Packed, smoothed, stopped early, measured on given data, and stored as it was quantised."""
    data = small_folder.chats(50)
    found = gg.finetune(
        base, data[:40], tmp_path / "a", **SHORT, validation=data[40:], epochs=20, pack=True, label_smoothing=0.1,
        z_loss=1e-4, accumulate=2, batch_size=2, eval_every=2, patience=1, merge="requantised", progress=False,
    )  # fmt: skip
    assert found.figures["held_out_rows"] == 10 and found.figures["rows"] == 40
    assert found.figures["steps"] < 20 * 5 and found.history.restored is not None
    assert found.figures["perplexity"] == pytest.approx(
        found.history["val_perplexity"][found.history.restored], rel=1e-5
    )
    assert found.figures["perplexity"] < np.exp(min(found.history["val_loss"]))  # which is smoothed
    assert 0 < found.figures["largest_rounding"] < 0.5
    assert 0 < found.figures["update_kept"] <= 1
    forms = [found.figures[f"perplexity_{form}"] for form in ("float", "requantised")]  # both, whichever is written
    assert forms[0] == pytest.approx(found.figures["perplexity"], rel=1e-3) and forms[0] != forms[1]
    held = gg.chat.ChatBatches(gg.chat.Encoder(base)(gg.chat.read(data[40:])), 128)
    assert perplexity_of(tmp_path / "a" / "model.onnx", held) == pytest.approx(forms[1], rel=1e-5)
    assert found.figures["tokens_a_second"] > 0 and found.figures["peak_memory_mib"] > 50
    operators = [node.op_type for node in load_model(tmp_path / "a" / "model.onnx").graph]
    assert operators.count("MatMulNBits") == [n.op_type for n in load_model(base / "model.onnx").graph].count(
        "MatMulNBits"
    )
    bare = gg.finetune(base, data, tmp_path / "b", **SHORT, epochs=1, merge="none", held_out=0.0, progress=False)
    assert not (tmp_path / "b" / "model.onnx").exists() and "perplexity" not in bare.figures


def test_the_perplexity_of_a_file_is_that_of_the_trainer(base: Path, tmp_path: Path) -> None:
    found = gg.finetune(base, small_folder.chats(12), tmp_path / "a", max_steps=1, held_out=0.5, progress=False)
    held = gg.chat.ChatBatches(gg.chat.Encoder(base)(gg.chat.read(small_folder.chats(12))), 128)
    step = gg.build(gg.surgery.language_model(base / "model.onnx"), gg.losses.cross_entropy(axis=-1), train="*norm*")
    expected = np.exp(gg.Trainer(step).evaluate(held)["loss"])
    assert perplexity_of(base / "model.onnx", held) == pytest.approx(expected, rel=1e-4)
    assert found.figures["perplexity_before"] == pytest.approx(expected, rel=0.05)  # of half of the rows


@pytest.mark.parametrize("long, rows", [("drop", 7), ("cut", 8)])
def test_long_texts_are_told(long: str, rows: int, base: Path, tmp_path: Path, caplog: Any) -> None:
    answer = {"prompt": "Count", "completion": "1 2 3 4 5 6 7 8 9 10 11 12"}
    late = {"prompt": "a" * 30, "completion": "never seen"}
    data = [{"prompt": "Hi", "completion": "Ho"}] * 7 + [answer] + [late] * (long == "cut")
    found = gg.finetune(base, data, tmp_path / "a", length=24, long=long, epochs=1, held_out=0.0, progress=False)
    assert found.figures["rows"] == rows
    assert (
        "have more than 24 tokens, the longest" in caplog.text and "the row at index 7 of the data" in caplog.text
    ) or long == "cut"
    assert ("1 are dropped, since no part of the answer remains" in caplog.text) == (long == "cut")


REFUSED: list[tuple[dict[str, Any], type[GradgraphError], str]] = [
    ({"ranc": 4}, ArgumentError, "no option 'ranc'; did you mean 'rank'?"),
    ({"rank": 0}, ArgumentError, "rank is 0; it should be a whole number of at least 1"),
    ({"learning_rate": float("nan")}, ArgumentError, "learning_rate is nan"),
    ({"long": "clip"}, ArgumentError, "one of error, drop, cut"),
    ({"held_out": 1.5}, ArgumentError, "at most 0.9"),
    ({"length": 8}, DataError, "20 of 20 rows have more than 8 tokens, the longest"),
    ({"patience": 3, "held_out": 0}, ArgumentError, "no rows are held out, but patience requires some"),
    ({"eval_every": 3, "held_out": 0}, ArgumentError, "but evaluation during training requires some"),
    ({"sample_every": 3}, ArgumentError, "and none is given; omit sample_every, or add sample="),
    ({"sample_tokens": 3}, ArgumentError, "and none is given; omit sample_tokens, or add sample="),
    ({"kind": "ia3", "rank": 3}, ArgumentError, "adapters of kind ia3 have no rank; omit rank"),
    ({"kind": "prefix", "alpha": 3}, BuildError, "adapters of kind prefix have no alpha; remove alpha"),
    ({"kind": "bitfit", "dropout": 0.3}, BuildError, "adapters of kind bitfit have no dropout; remove dropout"),
    ({"columns": {"mesages": "messages"}}, ArgumentError, "no column 'mesages'; did you mean 'messages'?"),
    ({"resume": True}, OutputError, "has no run to resume"),
]


@pytest.mark.parametrize("options, kind, words", REFUSED, ids=[next(iter(row[0])) for row in REFUSED])
def test_wrong_options(
    options: dict[str, Any], kind: type[GradgraphError], words: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        gg.finetune(base, small_folder.chats(20), tmp_path / "a", **options)
    assert words in str(caught.value) and not (tmp_path / "a").exists()


def test_a_recipe_can_be_kept(base: Path) -> None:
    recipe = Recipe(rank=2, target=("lm_head",))
    assert recipe.changed({"target": "*attn*"}) == Recipe(rank=2, target=("*attn*",))


# --- while it trains ----------------------------------------------------------------------------------------------


ASKED = ["Say ab0.", "Say b."]
WATCHED: dict[str, Any] = {**SHORT, "epochs": 3, "dropout": 0.1, "progress": False}
BRIEF: dict[str, Any] = {"sample_tokens": 6}


@pytest.fixture(scope="module")
def sampled(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with samples."""
    out = tmp_path_factory.mktemp("sampled") / "tuned"
    return gg.finetune(base, small_folder.chats(40), out, **WATCHED, **BRIEF, sample=ASKED, sample_every=4)


def test_samples_change_no_bit(base: Path, sampled: Any, tmp_path: Path) -> None:
    without = gg.finetune(base, small_folder.chats(40), tmp_path / "without", **WATCHED, merge="none")
    assert sampled.history["loss"] == without.history["loss"]
    for name, array in without.trainer.state_dict().items():
        np.testing.assert_array_equal(sampled.trainer.state_dict()[name], array, err_msg=name)
    records = [json.loads(line) for line in (sampled.folder / "training/log.jsonl").read_text().splitlines()]
    samples = [record for record in records if record["event"] == "sample"]
    assert [(r["step"], r["prompt"]) for r in samples] == [(step, text) for step in (4, 8, 12, 15) for text in ASKED]
    assert len({r["answer"] for r in samples}) > 1  # it learns
    assert [r["epoch"] for r in samples[::2]] == [1, 2, 3, 3]
    answers = gg.chat.generate(sampled.folder, ASKED, max_tokens=6)  # by the merged model, with its cache
    assert sampled.samples == dict(zip(ASKED, answers, strict=True))
    assert f"> {answers[0]}" in (sampled.folder / "README.md").read_text()


def test_packed_rows_have_samples_too(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gradgraph.chat")
    options: dict[str, Any] = {**WATCHED, **BRIEF, "epochs": 1, "sample": ASKED[0], "sample_every": 1, "held_out": 0.0}
    found = gg.finetune(base, small_folder.chats(8), tmp_path / "a", pack=True, max_steps=1, **options)
    assert found.samples == {ASKED[0]: gg.chat.generate(tmp_path / "a", ASKED[0], max_tokens=6)}
    assert caplog.text.count(f"step 1, {ASKED[0]}\n  {found.samples[ASKED[0]]}") == 1


def test_rows_go_by_their_lengths_where_attention_would_mix_texts(tmp_path: Path, caplog: Any) -> None:
    """The file has MultiHeadAttention: a run that began without packing goes on with it, as it is the same."""
    base = small_folder.write(tmp_path / "llm", model=small_folder.ROOT / "examples" / "tiny_llama_fp16.onnx")
    options: dict[str, Any] = {**SHORT, "epochs": 1, "batch_size": 3, "held_out": 0.0, "progress": False}
    data, out = small_folder.chats(6), tmp_path / "tuned"
    gg.finetune(base, data, out, max_steps=1, **options, merge="none")
    assert "not packed" not in caplog.text
    found = gg.finetune(base, data, out, pack=True, resume=True, **options, merge="none")
    assert found.figures["steps"] == 2 and "| pack | `False` |" in (out / "README.md").read_text()
    assert "rows are not packed" in caplog.text and "the model has 'MultiHeadAttention'" in caplog.text


# --- a teacher ----------------------------------------------------------------------------------------------------


def with_more_scores(model: Path) -> None:
    """Filled up, as larger models of a family are."""
    proto = onnx.load(model)
    last = next(n for n in proto.graph.node if "logits" in n.output)
    last.output[0] = "fewer"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 6]), "pads"))
    proto.graph.node.append(onnx.helper.make_node("Pad", ["fewer", "pads"], ["logits"], name="filled"))
    scores = next(v for v in proto.graph.output if v.name == "logits")
    scores.type.tensor_type.shape.dim[2].dim_value = 104
    del proto.graph.value_info[:]
    onnx.save(proto, model)


def test_a_teacher_that_cannot_teach_is_named(base: Path, tmp_path: Path) -> None:
    teacher = of_optimum(tmp_path / "large", True)
    one = gg.surgery.fix_inputs(merged_decoder.model(), {merged_decoder.BRANCH: False})
    bare = gg.surgery.cut(one, outputs=merged_decoder.PRESENT)
    gg.surgery.forget_sizes(gg.surgery.fix_inputs(bare, {}), out=teacher / "decoder_model_merged.onnx")
    with pytest.raises(BuildError, match=r"the teacher '.*large' cannot be used: .*; choose another teacher"):
        gg.finetune(base, small_folder.chats(8), tmp_path / "out", teacher=teacher)
    assert not (tmp_path / "out").exists()


def test_rows_are_not_packed_where_the_teacher_would_mix_texts(base: Path, tmp_path: Path, caplog: Any) -> None:
    teacher = of_optimum(tmp_path / "large", True)
    options: dict[str, Any] = {**SHORT, "max_steps": 1, "progress": False, "merge": "none", "teacher": teacher}
    found = [gg.finetune(base, small_folder.chats(8), tmp_path / str(pack), pack=pack, **options).history["loss"]
             for pack in (False, True)]  # fmt: skip
    assert found[0] == found[1]
    assert f"the teacher '{teacher}' has none" in caplog.text


def test_a_teacher_is_imitated(base: Path, sampled: Any, tmp_path: Path) -> None:
    shutil.copytree(sampled.folder, tmp_path / "teacher")
    with_more_scores(tmp_path / "teacher" / "model.onnx")
    options: dict[str, Any] = {**SHORT, "progress": False, "teacher_share": 1.0, "temperature": 1.0}
    data = small_folder.chats(40)
    pupil = gg.finetune(base, data, tmp_path / "pupil", epochs=3, teacher=tmp_path / "teacher", **options)
    before, taught = (sampled.figures[name] for name in ("perplexity_before", "perplexity"))
    assert pupil.figures["perplexity_before"] == pytest.approx(
        before, rel=1e-6
    )  # with a teacher, another graph adds up
    assert pupil.figures["perplexity"] < taught + 0.3 * (before - taught)
    assert pupil.figures["perplexity_float"] == pytest.approx(pupil.figures["perplexity"], rel=1e-3)
    assert pupil.history["loss"] == pytest.approx(pupil.history["distillation_loss"], rel=1e-6)
    kept = json.loads((tmp_path / "pupil" / "training" / "recipe.json").read_text())
    digests = [ModelFolder.of(folder).digest for folder in (base, tmp_path / "teacher")]
    assert [kept["model"], kept["teacher_model"]] == digests
    itself = gg.finetune(base, data, tmp_path / "itself", teacher=base, max_steps=1, merge="none", **options)
    assert itself.history["loss"][0] < 1e-6 < pupil.history["loss"][0]
    assert not any("teacher" in name for name in load_model(tmp_path / "pupil" / "model.onnx").graph.initializers)


# --- without loss -------------------------------------------------------------------------------------------------


def test_adapters_of_blocks_leave_a_folder_of_4_bits(tmp_path: Path) -> None:
    exact, target = onnx.load(small_folder.MODEL), ["*attn*", "*mlp*", "lm_head"]
    for node in exact.graph.node:  # by which onnxruntime would round the inputs of products of integer zero points
        kept = [a for a in node.attribute if a.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    onnx.save(exact, tmp_path / "exact.onnx")
    base, out = small_folder.write(tmp_path / "llm", model=tmp_path / "exact.onnx"), tmp_path / "tuned"
    options: dict[str, Any] = {"kind": "qalora", "target": target, "rank": 4, "learning_rate": 1e-2, "progress": False}
    found = gg.finetune(base, small_folder.chats(40), out, **options)
    assert found.figures["perplexity"] < 0.9 * found.figures["perplexity_before"]
    assert found.figures["perplexity_merged"] == pytest.approx(found.figures["perplexity"], rel=1e-5)
    stored, held = (load_model(folder / "model.onnx").graph.initializers for folder in (out, base))
    packed = [n for n, v in held.items() if v.dtype == ir.DataType.UINT8 and "zero" not in n]
    assert packed and all(np.array_equal(numbers_of(stored[n]).numpy(), numbers_of(held[n]).numpy()) for n in packed)
    assert (out / "model.onnx").stat().st_size < 1.2 * (base / "model.onnx").stat().st_size

    adapted = gg.lora(base / "model.onnx", target, rank=4, kind="qalora")
    gg.surgery.forget_sizes(gg.surgery.switchable(adapted), out=tmp_path / "base.onnx")
    beside = scores(tmp_path / "base.onnx", out / "adapter.onnx_adapter")
    assert np.abs(beside - scores(base / "model.onnx")).max() > 0.1
    np.testing.assert_allclose(scores(out / "model.onnx"), beside, atol=1e-5)
    answers = [gg.chat.generate(folder, "Say ab.", adapter=adapter, max_tokens=12)
               for folder, adapter in ((out, None), (base, out / "adapter"))]  # fmt: skip
    assert answers[0] == answers[1]
    card = (out / "README.md").read_text()
    assert "PEFT has no format for adapters of type qalora" in card and "float zero points are slow" in card

    gg.finetune(base, small_folder.chats(40), tmp_path / "parts", **options, max_steps=7)
    gg.finetune(base, small_folder.chats(40), tmp_path / "parts", **options, resume=True)
    assert (tmp_path / "parts" / "model.onnx").read_bytes() == (out / "model.onnx").read_bytes()
