"""Folders of optimum for tasks other than text generation are fine-tuned from the shell, with the losses of PyTorch.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch", reason="optimum exports modules of PyTorch")
transformers = pytest.importorskip("transformers", reason="in no extra; `make shipped-models` runs these tests")

import gradgraph as gg  # noqa: E402
from benchmarks import torchvision_operators  # noqa: E402
from tests.chat import questions, small_folder  # noqa: E402
from tests.networks.exporters import by_optimum  # noqa: E402

torchvision_operators.declare()  # its wheels have operators for one build of PyTorch; the networks here need none
pytest.importorskip("optimum.exporters.onnx", reason="in no extra; `make shipped-models` runs these tests with it")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

WORDS, EPOCHS, RATE = len(small_folder.WORDS), 6, 5e-3
ROWS = [{"prompt": f"say ab{i}", "completion": f"ab{i} {'!' * (i % 3)}", "label": f"L{i % 3}"} for i in range(12)]
BERT = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.2}  # fmt: skip
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
      "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
BART = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
        "max_position_embeddings": 64, "decoder_start_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "forced_eos_token_id": None, "init_std": 0.2}  # fmt: skip
NETWORKS = {"bert": ("BertForSequenceClassification", "BertConfig", BERT | {"num_labels": 3}),
            "marker": ("BertForQuestionAnswering", "BertConfig", BERT),
            "t5": ("T5ForConditionalGeneration", "T5Config", T5),
            "bart": ("BartForConditionalGeneration", "BartConfig", BART)}  # fmt: skip


def exported(name: str, task: str, folder: Path) -> tuple[Any, Path]:
    model, config, sizes = NETWORKS[name]
    torch.manual_seed(0)
    network = getattr(transformers, model)(getattr(transformers, config)(**sizes)).float().eval()
    for parameter in network.parameters():
        if parameter.ndim == 1:  # the exporter would store norms and biases of equal numbers once
            parameter.data += 0.1 * torch.randn_like(parameter)
    out = by_optimum(network, task, folder).parent
    small_folder.tokenizer().save(str(out / "tokenizer.json"))
    return network, out


def ids_of(texts: list[str]) -> list[list[int]]:
    return [[small_folder.WORDS[letter] for letter in text] for text in texts]


def padded(rows: list[list[int]], pad: int) -> Any:
    width = -(-max(map(len, rows)) // 16) * 16
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])


def trained(parameters: list[Any], loss_of: Callable[[], Any]) -> list[float]:
    """Losses of AdamW with warm-up, cosine decay and clipping, all rows in one batch."""
    optimizer, found = torch.optim.AdamW(parameters, weight_decay=0.0), []
    rising = min(round(0.03 * EPOCHS), EPOCHS - 1)
    for step in range(EPOCHS):
        at = step - rising
        share = step / rising if at < 0 else 0.5 * (1 + math.cos(math.pi * at / (EPOCHS - rising)))
        optimizer.param_groups[0]["lr"] = RATE * share
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_a_classifier_has_the_losses_of_torch(tmp_path: Path) -> None:
    network, folder = exported("bert", "text-classification", tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = gg.finetune(folder, tmp_path / "data.jsonl", tmp_path / "tuned", task="text-classification",
                        columns={"text": "prompt", "label": "label"}, batch_size=len(ROWS), epochs=EPOCHS,
                        learning_rate=RATE, progress=False)  # fmt: skip
    rows = ids_of([row["prompt"] for row in ROWS])
    ids, mask = padded(rows, 0), padded([[1] * len(row) for row in rows], 0)
    labels = torch.tensor([int(row["label"][1]) for row in ROWS])
    wanted = trained([*network.parameters()], lambda: network(ids, mask, labels=labels).loss)
    assert wanted[-1] < 0.9 * wanted[0]
    np.testing.assert_allclose(found.history["loss"], wanted, rtol=1e-4)
    session = ort.InferenceSession(tmp_path / "tuned" / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": np.zeros_like(ids.numpy())}
    (logits,) = session.run(None, {v.name: feeds[v.name] for v in session.get_inputs()})
    np.testing.assert_allclose(logits, network(ids, mask).logits.detach().numpy(), atol=1e-3)


def test_question_answering_has_the_losses_and_answers_of_transformers(tmp_path: Path) -> None:
    network, folder = exported("marker", "question-answering", tmp_path)
    network.get_input_embeddings().padding_idx = None  # a file does not say which row PyTorch would not train
    questions.tokenizer().save(str(folder / "tokenizer.json"))
    data = questions.rows(24)
    windows = questions.as_in_run_qa(data)
    found = gg.finetune(folder, data, tmp_path / "tuned", task="question-answering", validation=data, epochs=EPOCHS,
                        batch_size=len(windows), length=questions.LENGTH, stride=questions.STRIDE, learning_rate=RATE,
                        progress=False)  # fmt: skip
    ids, types = (torch.tensor(questions.padded([w[name] for w in windows], 0)) for name in ("ids", "types"))
    feeds = {"input_ids": ids, "token_type_ids": types,
             "attention_mask": torch.tensor(questions.padded([[1] * len(w["ids"]) for w in windows], 0))}  # fmt: skip
    labels = {name: torch.tensor([w["label"][i] for w in windows])
              for i, name in enumerate(("start_positions", "end_positions"))}  # fmt: skip
    wanted = trained([*network.parameters()], lambda: network(**feeds, **labels).loss)
    assert wanted[-1] < 0.9 * wanted[0]
    np.testing.assert_allclose(found.history["loss"], wanted, rtol=1e-4)
    scores = network(**feeds)
    starts, ends = scores.start_logits.detach().numpy(), scores.end_logits.detach().numpy()
    answers = json.loads((tmp_path / "tuned" / "predictions.json").read_text())
    assert answers == {row["id"]: questions.best_answer(row, windows, starts, ends) for row in data}


def with_factors(network: Any, state: dict[str, np.ndarray], scale: float) -> list[Any]:
    """Put adapters on the linear layers that ``state`` names, and return their factors."""
    factors, modules = [], {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear):
            modules[name.removeprefix("model.")] = module
    pairs = {name.removesuffix(".lora_A") for name in state if name.endswith(".lora_A")}
    for pair in sorted(pairs):
        ending = pair.removeprefix("decoder.")
        part = "decoder." if pair.startswith("decoder.") else "encoder."
        fitting = [m for n, m in modules.items() if n.startswith(part) and n.endswith(ending.split("coder.")[-1])]
        assert len(fitting) == 1, (pair, len(fitting))
        a, b = (torch.nn.Parameter(torch.tensor(state[f"{pair}.lora_{which}"])) for which in "AB")
        factors += [a, b]
        fitting[0].register_forward_hook(lambda m, x, y, a=a, b=b: y + scale * (x[0] @ a @ b))
    assert len(pairs) == sum("lm_head" not in name for name in modules)
    return factors


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("task", ["text2text-generation", "text2text-generation-with-past"])
def test_an_encoder_with_a_decoder_has_the_losses_of_torch(name: str, task: str, tmp_path: Path) -> None:
    network, folder = exported(name, task, tmp_path)
    options: dict[str, Any] = {"task": "text2text-generation", "batch_size": len(ROWS), "epochs": EPOCHS, "rank": 4,
                               "learning_rate": RATE, "held_out": 0.0, "progress": False}  # fmt: skip
    begun = gg.finetune(folder, ROWS, tmp_path / "begun", **options | {"learning_rate": 1e-12})
    found = gg.finetune(folder, ROWS, tmp_path / "tuned", **options)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    factors = with_factors(network, begun.trainer.state_dict(), 2.0)
    texts, answers = (ids_of([row[column] for row in ROWS]) for column in ("prompt", "completion"))
    start = network.config.decoder_start_token_id
    feeds = {"input_ids": padded(texts, 0), "attention_mask": padded([[1] * len(row) for row in texts], 0),
             "decoder_input_ids": padded([[start, *row[:-1]] for row in answers], 0)}  # fmt: skip
    labels = padded(answers, -100).flatten()

    def loss_of() -> Any:
        return torch.nn.functional.cross_entropy(network(**feeds).logits.flatten(0, 1), labels)

    wanted = trained(factors, loss_of)
    assert wanted[-1] < 0.97 * wanted[0]
    np.testing.assert_allclose(found.history["loss"], wanted, rtol=1e-4)
    expected = network(**feeds).logits.detach().numpy()
    np.testing.assert_allclose(by_files(tmp_path / "tuned", feeds), expected, atol=2e-3)
    assert {p.name for p in folder.glob("*.onnx")} == {p.name for p in (tmp_path / "tuned").glob("*.onnx")}


def by_files(folder: Path, feeds: dict[str, Any]) -> np.ndarray:
    """Scores of the encoder's and the decoder's file, one after the other."""
    session = ort.InferenceSession(folder / "encoder_model.onnx", providers=["CPUExecutionProvider"])
    given = {n: feeds[n].numpy() for n in ("input_ids", "attention_mask")}
    states = session.run(None, {v.name: given[v.name] for v in session.get_inputs()})[0]
    session = ort.InferenceSession(folder / "decoder_model.onnx", providers=["CPUExecutionProvider"])
    given = {"input_ids": feeds["decoder_input_ids"].numpy(), "encoder_hidden_states": states,
             "encoder_attention_mask": feeds["attention_mask"].numpy()}  # fmt: skip
    return np.asarray(session.run(["logits"], {v.name: given[v.name] for v in session.get_inputs()})[0])


# --- weights of another training ---------------------------------------------------------------------------------

WHISPER = {"vocab_size": 98, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_target_positions": 32,
           "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
           "begin_suppress_tokens": None, "suppress_tokens": None}  # fmt: skip
WAV2VEC2 = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4}  # fmt: skip
ELSEWHERE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "t5": (*NETWORKS["t5"], "text2text-generation-with-past"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, "automatic-speech-recognition-with-past"),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2, "automatic-speech-recognition"),
}


def fed(session: Any, uses_cache: bool) -> dict[str, np.ndarray]:
    """Random inputs of a file: tokens and caches of 16 positions, sounds of 800 samples, spectrograms of Whisper."""
    rng, found = np.random.default_rng(0), {}
    for x in session.get_inputs():
        sizes = [n if isinstance(n, int) else 16 if "sequence" in n or "length" in n else 2 for n in x.shape]
        sizes = {"input_values": [2, 800], "input_features": [2, 8, 3000]}.get(x.name, sizes)
        if x.type == "tensor(float)":
            found[x.name] = rng.normal(size=sizes).astype(np.float32)
        elif x.type == "tensor(bool)":
            found[x.name] = np.full(sizes, uses_cache)
        else:
            found[x.name] = np.ones(sizes, np.int64) if "mask" in x.name else rng.integers(3, 20, sizes)
    return found


@pytest.mark.parametrize("name", ELSEWHERE)
def test_weights_of_another_training_give_the_files_of_optimum(name: str, tmp_path: Path) -> None:
    """Of each file: encoders, decoders with and without a cache, and both decoders in one file."""
    model, config, sizes, task = ELSEWHERE[name]
    torch.manual_seed(0)
    network = getattr(transformers, model)(getattr(transformers, config)(**sizes)).float().eval()
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        for parameter in network.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        if name == "whisper":
            transformers.WhisperFeatureExtractor(feature_size=8).save_pretrained(folder / "theirs")
        by_optimum(network, task, folder)
    files = sorted((folders[0] / "out").glob("*.onnx"))
    assert len(files) == (1 if name == "wav2vec2" else 4)
    for file in files:
        weights, before = (folder / "theirs" for folder in folders[::-1])
        is_whole = not network.config.is_encoder_decoder  # otherwise each file has a part of the weights
        gg.surgery.load_weights(file, weights, exported_from=before, strict=is_whole, out=tmp_path / "loaded.onnx")
        paths = (tmp_path / "loaded.onnx", folders[1] / "out" / file.name, file)
        sessions = [ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in paths]
        for uses_cache in (False, True)[: 2 if "merged" in file.name else 1]:
            feeds = fed(sessions[0], uses_cache)
            found, wanted, old = (session.run(None, feeds)[0] for session in sessions)
            assert np.abs(old - wanted).max() > 0.1, file.name
            np.testing.assert_allclose(found, wanted, atol=3e-6, err_msg=file.name)
