"""Answers of language models: with a cache as without, in batches as alone, drawn by the formula, and their ends."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat.decoder import Decoder
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.picking import picked, probabilities
from gradgraph.chat.prompts import Prompts
from gradgraph.chat.sampling import Sampling
from gradgraph.cli.app import cli
from gradgraph.errors import ArgumentError, DataError, GradgraphError, ModelError

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder
from tests.surgery import merged_decoder

MODELS = {kind: small_folder.ROOT / "examples" / f"tiny_llama_{kind}.onnx" for kind in ("int4", "fp16")}
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 98, n).tolist() for n in (5, 2, 9, 5, 1)]
SHORT = Sampling(max_tokens=10)
DRAWN = Sampling(max_tokens=10, temperature=1.3, top_k=40, top_p=0.95, seed=3)


def decoder(model: Path) -> Decoder:
    return Decoder(model, head_size=16, threads=1)


def without_cache(model: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens, each by the whole text so far with no past."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    inputs = {v.name: v for v in session.get_inputs()}
    known = list(prompt)
    for _ in range(count):
        ids = np.array([known])
        feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        feeds["position_ids"] = np.arange(len(known))[None]
        floats = np.float16 if "float16" in inputs["past_key_values.0.key"].type else np.float32
        feeds |= {n: np.zeros((1, v.shape[1], 0, 16), floats) for n, v in inputs.items() if "past" in n}
        (scores,) = session.run(["logits"], {n: a for n, a in feeds.items() if n in inputs})
        known.append(int(np.asarray(scores)[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.mark.parametrize("kind", MODELS)
def test_the_likeliest_tokens_are_those_of_a_run_without_a_cache(kind: str) -> None:
    found = [decoder(MODELS[kind]).generated([p], (), SHORT)[0] for p in PROMPTS]
    assert found == [without_cache(MODELS[kind], p, 10) for p in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) > 1


@pytest.mark.parametrize("sampling", [SHORT, DRAWN], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("kind", MODELS)
def test_prompts_together_are_prompts_alone(kind: str, sampling: Sampling) -> None:
    """Padding in front of rows (fp16: MultiHeadAttention) and behind them (int4: GroupQueryAttention)."""
    model = decoder(MODELS[kind])
    assert model.pads and model.pads_behind == (kind == "int4")
    stop = {model.generated([PROMPTS[0]], (), sampling)[0][4]}  # so that a row ends before the others
    alone = [[t for (t,) in model.steps([p], stop, sampling, rows=[i])] for i, p in enumerate(PROMPTS)]
    assert len({len(row) for row in alone}) > 1
    assert model.generated(PROMPTS, stop, sampling) == alone


@pytest.mark.skipif(os.name == "nt", reason="Windows does not hold external data open")
def test_no_token_follows_from_an_overwritten_file(tmp_path: Path) -> None:
    """A session of onnxruntime follows changes of a file with external data."""
    path, data = tmp_path / "m.onnx", tmp_path / "m.data"
    onnx.save(onnx.load(MODELS["fp16"]), path, save_as_external_data=True, location=data.name)
    model = decoder(path)
    wanted = decoder(MODELS["fp16"]).generated(PROMPTS[:1], (), SHORT)
    assert model.generated(PROMPTS[:1], (), SHORT) == wanted
    shutil.copy(data, tmp_path / "copy")
    (tmp_path / "copy").replace(data)
    assert model.generated(PROMPTS[:1], (), SHORT) == wanted
    model, before = decoder(path), data.stat().st_mtime_ns
    tokens = model.steps(PROMPTS[:1], (), SHORT)
    assert next(tokens) == wanted[0][:1]
    data.write_bytes(bytes(data.stat().st_size))
    os.utime(data, ns=(1, before + 10**7))
    with pytest.raises(ModelError, match=r"m\.data', .* was overwritten or truncated since it was opened"):
        next(tokens)


def test_what_cannot_go_together_goes_by_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(MODELS["int4"])
    wanted = model.generated(PROMPTS, (), DRAWN)
    monkeypatch.setattr(Decoder, "pads", False)
    assert model.generated(PROMPTS, (), DRAWN) == wanted
    with pytest.raises(DataError, match="generate for prompts of equal length"):
        next(model.steps(PROMPTS))


# --- drawing -----------------------------------------------------------------------------------------------------


def by_hand(scores: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The probabilities, token by token."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    order = order[:top_k] if top_k else order
    weights = {i: np.exp(scores[i] / temperature) for i in order}
    total, reached, kept = sum(weights.values()), 0.0, []
    for i in order:
        kept.append(i)
        reached += weights[i] / total
        if reached >= top_p:
            break
    found = np.zeros(len(scores))
    found[kept] = [weights[i] for i in kept]
    return found / found.sum()


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1, 0, 1), (0.5, 0, 0.8), (2, 3, 1), (1.5, 5, 0.6)])
def test_tokens_are_drawn_by_their_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    scores = RNG.normal(size=9) * 2
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    wanted = by_hand(scores, temperature, top_k, top_p)
    np.testing.assert_allclose(probabilities(scores, sampling), wanted, atol=1e-12)
    rng = np.random.default_rng(1)
    counts = np.bincount([picked(scores, sampling, rng) for _ in range(20_000)], minlength=9)
    np.testing.assert_allclose(counts / counts.sum(), wanted, atol=0.015)
    assert not counts[wanted == 0].any()


def test_a_penalty_makes_what_is_there_less_likely() -> None:
    scores, rng = np.array([2.0, 1.5, -1.0]), np.random.default_rng(0)
    assert picked(scores, Sampling(), rng, [0, 0]) == 0
    assert picked(scores, Sampling(repetition_penalty=1.5), rng, [0, 0]) == 1
    assert picked(-scores, Sampling(repetition_penalty=1.5), rng, [2]) == 2
    assert picked(np.array([-1.0, -1.2]), Sampling(repetition_penalty=1.5), rng, [0]) == 1


@pytest.mark.parametrize("option", ["max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed"])
def test_an_option_that_makes_no_sense_is_refused(option: str) -> None:
    with pytest.raises(ArgumentError, match=f"{option} is -1; it should be"):
        Sampling(**{option: -1})
    with pytest.raises(ArgumentError, match="generation has no option 'max_token'; did you mean 'max_tokens'"):
        Sampling().changed({"max_token": 3})


@pytest.mark.parametrize("sampling", [SHORT, DRAWN], ids=["likeliest", "drawn"])
def test_a_merged_decoder_and_one_without_a_past_say_the_same(sampling: Sampling, tmp_path: Path) -> None:
    """By a cache, of which the first run has none; and by the whole text for each token."""
    onnx.save(merged_decoder.model(), tmp_path / "merged.onnx")
    surgery.fix_inputs(merged_decoder.model(), {merged_decoder.BRANCH: False}, out=tmp_path / "alone.onnx")
    found = [decoder(tmp_path / name).generated(PROMPTS, (), sampling) for name in ("merged.onnx", "alone.onnx")]
    assert found[0] == found[1] and len({tuple(tokens) for tokens in found[0]}) > 1
    if sampling is SHORT:
        for prompt, tokens in zip(PROMPTS, found[0], strict=True):
            whole = np.array([[*prompt, *tokens]])
            likeliest = merged_decoder.scores(merged_decoder.model(), whole)[0].argmax(-1)
            assert tokens == likeliest[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize("kind", MODELS)
def test_without_a_past_prompts_together_are_prompts_alone(kind: str, tmp_path: Path) -> None:
    """A mask and positions follow the whole text; behind the padding of GroupQueryAttention no token comes."""
    keep = ["attention_mask"] if kind == "int4" else ["attention_mask", "position_ids"]
    surgery.language_model(MODELS[kind], keep=keep, out=tmp_path / "m.onnx")
    model = decoder(tmp_path / "m.onnx")
    assert model.pads == (kind == "fp16")
    found = model.generated(PROMPTS, (), SHORT)
    assert found == [model.generated([prompt], (), SHORT)[0] for prompt in PROMPTS]
    if kind == "fp16":
        assert found == [without_cache(MODELS[kind], p, 10) for p in PROMPTS]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_for_texts_of_one_length_answers_up_to_it(kind: str, tmp_path: Path) -> None:
    keep = ["attention_mask", "position_ids"] if kind == "fp16" else ()
    model = surgery.language_model(onnx.load(MODELS[kind]), keep=keep)
    onnx.save(model, tmp_path / "any.onnx")
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 12
    onnx.save(model, tmp_path / "twelve.onnx")
    found, wanted = (decoder(tmp_path / name).generated(PROMPTS, (), SHORT) for name in ("twelve.onnx", "any.onnx"))
    together = max(map(len, PROMPTS))  # with padding, all rows end with the longest
    most = [13 - (together if kind == "fp16" else len(prompt)) for prompt in PROMPTS]
    assert found == [tokens[:count] for tokens, count in zip(wanted, most, strict=True)]
    with pytest.raises(DataError, match="13 tokens, but the model was exported for texts of 12; shorten the prompt"):
        decoder(tmp_path / "twelve.onnx").generated([[5] * 13])


# --- folders -----------------------------------------------------------------------------------------------------

CHATS = [{"role": "user", "content": "Who?"}]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose model answers, beside it the adapter (PEFT's, onnxruntime's) and the base of each."""
    place = tmp_path_factory.mktemp("generate")
    base = small_folder.write(place / "base")
    encoder = gg.chat.Encoder(base)
    samples = encoder(gg.chat.read([{"messages": [*CHATS, {"role": "assistant", "content": "A tiny Llama."}]}]))
    adapted = gg.lora(base / "model.onnx", ["*attn*", "*mlp*", "lm_head"], rank=8)
    step = gg.build(surgery.language_model(adapted), gg.losses.cross_entropy(axis=-1), gg.optim.adam(1e-2))
    trainer = gg.Trainer(step, device="cpu")
    trainer.fit(gg.chat.ChatBatches(samples, 128), epochs=80, batch_size=1, progress=False)
    state = trainer.state_dict()
    small_folder.write(place / "tuned")
    surgery.forget_sizes(surgery.merge_adapters(adapted, state), out=place / "tuned" / "model.onnx")
    surgery.save_adapter(adapted, place / "adapter", state)
    small_folder.write(place / "switchable")
    surgery.switchable(adapted, out=place / "switchable" / "model.onnx")
    surgery.save_adapter(adapted, place / "one.onnx_adapter", state)
    return place


def test_a_folder_answers(tuned: Path) -> None:
    assert gg.chat.generate(tuned / "tuned", "Who?") == "A tiny Llama."
    assert gg.chat.generate(tuned / "tuned", CHATS) == "A tiny Llama."
    assert gg.chat.generate(tuned / "tuned", ["Who?", "Who?"], max_tokens=6) == ["A tiny"] * 2
    assert gg.chat.generate(tuned / "base", "Who?", max_tokens=6) != "A tiny"


def test_adapters_answer_as_the_merged_model(tuned: Path) -> None:
    assert gg.chat.generate(tuned / "base", "Who?", adapter=tuned / "adapter") == "A tiny Llama."
    with_one = gg.chat.Generator(tuned / "switchable", adapter=tuned / "one.onnx_adapter")
    assert with_one(["Who?"]) == ["A tiny Llama."]
    assert gg.chat.generate(tuned / "switchable", "Who?", max_tokens=6) != "A tiny"


def test_pieces_are_the_answer(tuned: Path) -> None:
    model = gg.chat.Generator(tuned / "tuned")
    pieces = list(model.stream("Who?"))
    assert len(pieces) > 5
    assert "".join(pieces) == "A tiny Llama."


def test_a_character_of_several_tokens_comes_whole(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = gg.chat.Generator(tuned / "tuned"), ["a", "a\ufffd", "a\ufffd", "a😀", "a😀b"]
    monkeypatch.setattr(model, "text_of", lambda ids: texts[len(ids) - 1] if ids else "")
    assert list(model.stream("Who?", Sampling(max_tokens=5))) == ["a", "😀", "b"]


def test_an_answer_ends_where_the_folder_says(tuned: Path, tmp_path: Path) -> None:
    folder = small_folder.write(tmp_path / "llm", model=tuned / "tuned" / "model.onnx")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, small_folder.WORDS["y"]]}))
    assert gg.chat.generate(folder, "Who?") == "A tin"
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["context_length"] = 14
    (folder / "genai_config.json").write_text(json.dumps(config))
    assert gg.chat.generate(folder, "Who?") == "A ti"  # behind <s>[u] Who? and a space, 10 tokens
    with pytest.raises(DataError, match="has 18 tokens, but the context length is 14"):
        gg.chat.generate(folder, "Who are you?")


def test_a_text_without_a_template_stands_as_it_is(tuned: Path) -> None:
    model = gg.chat.Generator(tuned / "tuned", template="none")
    assert model.tokens_of("ab") == [small_folder.WORDS["a"], small_folder.WORDS["b"]]
    with pytest.raises(DataError, match="messages need a chat template"):
        model.tokens_of(CHATS)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"runtime": "llama.cpp"}, "there is no runtime 'llama.cpp'"), ({"adapter": "nowhere"}, "nowhere"),
     ({"runtime": "genai", "adapter": "folder"}, "use onnxruntime for PEFT folders"),
     ({"template": "nowhere.jinja"}, "nowhere.jinja")],
)  # fmt: skip
def test_what_is_not_there_is_said(tuned: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(GradgraphError, match=words):
        gg.chat.generate(tuned / "tuned", "Who?", **options)


def test_from_the_shell(tuned: Path) -> None:
    found = CliRunner().invoke(cli, ["generate", str(tuned / "tuned"), "--prompt", "Who?", "--prompt", "Who?"])
    assert found.stdout == "A tiny Llama.\n" * 2, found.output
    words = ["generate", tuned / "base", "--adapter", tuned / "adapter", "--prompt", "Who?", "--json"]
    found = CliRunner().invoke(cli, list(map(str, words)))
    assert json.loads(found.stdout) == [{"prompt": "Who?", "answer": "A tiny Llama."}]


GEMMA = {"hidden_size": 64, "num_attention_heads": 4}
SIZES: list[tuple[dict[str, Any], int | None]] = [
    ({"model": {"decoder": GEMMA | {"head_size": 32}}}, 32),
    ({"model": {"decoder": GEMMA}}, 16),
    (GEMMA | {"head_dim": 32}, 32),
    ({"text_config": GEMMA | {"head_dim": 32}, "vision_config": {"head_dim": 8}, "hidden_size": 8}, 32),
    (GEMMA | {"head_dim": None}, 16),
    ({"n_embd": 96, "n_head": 2}, 48),
    ({"hidden_size": 64}, None),
]


@pytest.mark.parametrize("described, size", SIZES)
def test_the_size_of_heads_is_what_a_description_says(
    described: dict[str, Any], size: int | None, tmp_path: Path
) -> None:
    """It may be another one than the width over the number of heads, as in Gemma and Qwen 3."""
    folder = small_folder.write(tmp_path)
    (folder / "genai_config.json").unlink()
    name = "genai_config.json" if "model" in described else "config.json"
    (folder / name).write_text(json.dumps(described))
    assert ModelFolder.of(folder).head_size == size


def test_a_model_of_pictures_describes_that_of_texts(tmp_path: Path) -> None:
    """As Gemma 3 has it: the tokens that end an answer stand outside."""
    folder = small_folder.write(tmp_path)
    (folder / "genai_config.json").unlink()
    inner = {"max_position_embeddings": 99, "vocab_size": 98, "eos_token_id": 1}
    described = {"model_type": "gemma3", "eos_token_id": [2, 5], "text_config": inner}
    (folder / "config.json").write_text(json.dumps(described))
    found = Prompts(ModelFolder.of(folder))
    assert (found.base.context, found.base.vocabulary, found.stop) == (99, 98, {2, 5})
