"""A tiny Whisper and Moonshine of optimum: features, labels, losses, transcripts as of transformers and PEFT.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="optimum exports modules of PyTorch")

import gradgraph as gg  # noqa: E402
from benchmarks import torchvision_operators  # noqa: E402
from gradgraph.chat import Recipe  # noqa: E402
from gradgraph.chat.model_folder import ModelFolder  # noqa: E402
from gradgraph.chat.recordings import Recordings, read_recordings  # noqa: E402
from gradgraph.chat.task_request import Request  # noqa: E402
from tests.chat import small_folder  # noqa: E402 (without PyTorch there is nothing to import)
from tests.kit.wav_writing import write_wav  # noqa: E402
from tests.networks.test_optimum_tasks import EPOCHS, RATE, trained  # noqa: E402

torchvision_operators.declare()  # its wheels have operators for one build of PyTorch; the networks here need none
exporters = pytest.importorskip("optimum.exporters.onnx", reason="in no extra; `make shipped-models` runs these tests")
ort = pytest.importorskip("optimum.onnxruntime", reason="in no extra; `make shipped-models` runs these tests with it")
peft = pytest.importorskip("peft", reason="PEFT is in no extra; `make shipped-models` runs these tests with it")
transformers = pytest.importorskip("transformers", reason="`make shipped-models` runs these tests with it")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

TASK, HERTZ, SECONDS, MELS, COUNT = "automatic-speech-recognition", 16000, 2, 16, 12
LANGUAGES = ("<|en|>", "<|zh|>", "<|de|>")
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", *LANGUAGES, "<|translate|>", "<|transcribe|>", "<|notimestamps|>")
IDS = {token: len(small_folder.WORDS) + i for i, token in enumerate(SPECIAL)}
START, END = IDS["<|startoftranscript|>"], IDS["<|endoftext|>"]
WHISPER = {"vocab_size": len(small_folder.WORDS) + len(IDS), "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
           "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
           "max_source_positions": 50 * SECONDS, "max_target_positions": 40, "num_mel_bins": MELS, "init_std": 0.1,
           "pad_token_id": END, "bos_token_id": END, "eos_token_id": END, "decoder_start_token_id": START,
           "begin_suppress_tokens": None, "suppress_tokens": None}  # fmt: skip
GENERATION = {"is_multilingual": True, "lang_to_id": {token: IDS[token] for token in LANGUAGES},
              "task_to_id": {name: IDS[f"<|{name}|>"] for name in ("transcribe", "translate")},
              "no_timestamps_token_id": IDS["<|notimestamps|>"], "decoder_start_token_id": START, "pad_token_id": END,
              "bos_token_id": END, "eos_token_id": END, "max_length": 30, "return_timestamps": False,
              "prev_sot_token_id": None}  # fmt: skip
MOONSHINE = {"vocab_size": len(small_folder.WORDS), "hidden_size": 32, "intermediate_size": 48,
             "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2,
             "decoder_num_attention_heads": 2, "max_position_embeddings": 40, "initializer_range": 0.2,
             "pad_token_id": 2}  # fmt: skip
OPTIONS: dict[str, Any] = {"task": TASK, "language": "en", "batch_size": COUNT, "epochs": EPOCHS, "rank": 4,
                           "learning_rate": RATE, "held_out": 0.0, "progress": False}  # fmt: skip
TEXTS = [f"say {'ab' * (i % 4)}{i}" for i in range(COUNT)]


def exported(folder: Path, task: str) -> tuple[Any, Path]:
    """A network, and the folder that optimum writes with its tokenizer and feature extractor."""
    from tokenizers import AddedToken

    torch.manual_seed(0)
    network = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)).float().eval()
    for parameter in network.parameters():
        if parameter.ndim == 1:  # the exporter would store norms and biases of equal numbers once
            parameter.data += 0.1 * torch.randn_like(parameter)
    network.generation_config = transformers.GenerationConfig(**GENERATION)
    network.save_pretrained(folder / "theirs")
    transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS).save_pretrained(folder / "theirs")
    tokenizer = small_folder.tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    transformers.WhisperTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).save_pretrained(folder / "theirs")
    exporters.main_export(str(folder / "theirs"), folder / "out", task=task, nb_max_frames=100 * SECONDS)
    return network, folder / "out"


def moonshine(folder: Path, task: str) -> tuple[Any, Path]:
    """A network that reads samples, and the folder that optimum writes with its tokenizer and feature extractor."""
    torch.manual_seed(0)
    network = transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig(**MOONSHINE)).float().eval()
    for parameter in network.parameters():
        if parameter.ndim == 1:  # as above
            parameter.data += 0.1 * torch.randn_like(parameter)
    network.save_pretrained(folder / "theirs")
    transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True).save_pretrained(
        folder / "theirs"
    )
    exporters.main_export(str(folder / "theirs"), folder / "out", task=task)
    small_folder.tokenizer().save(str(folder / "out" / "tokenizer.json"))
    return network, folder / "out"


def recordings(folder: Path) -> list[np.ndarray]:
    """Tones with noise, of up to two seconds, as files that data.csv lists."""
    rng, found = np.random.default_rng(0), []
    for i in range(COUNT):
        t = np.arange(int(rng.uniform(0.5, SECONDS) * HERTZ)) / HERTZ
        sound = 0.4 * np.sin(2 * np.pi * (200 + 100 * (i % 4)) * t) + 0.05 * rng.normal(size=len(t))
        write_wav(folder / f"{i}.wav", sound, HERTZ)
        found.append((np.round(sound * 32767) / 32768).astype(np.float32))
    rows = [f"{i}.wav,{text}" for i, text in enumerate(TEXTS)]
    (folder / "data.csv").write_text("\n".join(["file_name,transcription", *rows]) + "\n")
    return found


def with_adapters(network: Any, state: dict[str, np.ndarray]) -> Any:
    """The network with adapters of PEFT on all linear layers but the head, with the first factors in ``state``."""
    names = [name for name, module in network.named_modules()
             if isinstance(module, torch.nn.Linear) and name != "proj_out"]  # fmt: skip
    found = peft.get_peft_model(network, peft.LoraConfig(r=4, lora_alpha=8, target_modules=names)).eval()
    factors = dict(found.named_parameters())
    own = {name.removesuffix(".lora_A") for name in state if name.endswith(".lora_A")}
    assert len(own) == len(names)
    for name in names:
        _, part, layer = name.split(".", 2)
        (fitting,) = (n for n in own if n.endswith(layer) and n.startswith("decoder.") == (part == "decoder"))
        factor = torch.tensor(state[f"{fitting}.lora_A"]).T.clone()  # the other one is 0 at first
        factors[f"base_model.model.{name}.lora_A.default.weight"].data = factor
    return found


@pytest.mark.parametrize("task", [TASK, f"{TASK}-with-past"])
def test_whisper_is_trained_as_by_transformers_and_peft(task: str, tmp_path: Path) -> None:
    network, folder = exported(tmp_path, task)
    sounds, data = recordings(tmp_path), tmp_path / "data.csv"
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    features = extractor(sounds, sampling_rate=HERTZ, return_tensors="pt").input_features
    tokenizer = transformers.WhisperTokenizerFast.from_pretrained(folder)
    tokenizer.set_prefix_tokens(language="english", task="transcribe")
    labels = [tokenizer(text).input_ids[1:] for text in TEXTS]  # without the start token, as in its example

    request = Request(ModelFolder.of(folder), data, tmp_path, Recipe(task=TASK, language="en"))
    rows = read_recordings(request, data)
    assert isinstance(rows, Recordings) and [list(answer) for answer in rows.answers] == labels
    np.testing.assert_allclose(np.stack([rows[i] for i in range(COUNT)]), features.numpy(), atol=1e-4)

    begun = gg.finetune(folder, data, tmp_path / "begun", **OPTIONS | {"learning_rate": 1e-12})
    found = gg.finetune(folder, data, tmp_path / "tuned", **OPTIONS)
    theirs = with_adapters(network, begun.trainer.state_dict())
    width = max(map(len, labels))
    targets = torch.tensor([[*row, *[-100] * (width - len(row))] for row in labels])
    factors = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    wanted = trained(factors, lambda: theirs(input_features=features, labels=targets).loss)
    assert wanted[-1] < 0.97 * wanted[0]
    np.testing.assert_allclose(found.history["loss"], wanted, atol=1e-5)

    merged = theirs.merge_and_unload()
    expected = merged.generate(features, max_new_tokens=20, language="en", task="transcribe")
    for cached in (False, True)[: 1 + task.endswith("past")]:
        tuned = ort.ORTModelForSpeechSeq2Seq.from_pretrained(tmp_path / "tuned", use_cache=cached)
        assert torch.equal(tuned.generate(features, max_new_tokens=20), expected)
    assert {p.name for p in folder.glob("*.onnx")} == {p.name for p in (tmp_path / "tuned").glob("*.onnx")}


@pytest.mark.parametrize("task", [TASK, f"{TASK}-with-past"])
def test_moonshine_is_trained_as_by_transformers_and_peft(task: str, tmp_path: Path) -> None:
    """The loss is written here, since that of transformers 4.57 shifts the labels twice."""
    network, folder = moonshine(tmp_path, task)
    sounds, data, options = recordings(tmp_path), tmp_path / "data.csv", OPTIONS | {"language": None}
    extractor = transformers.Wav2Vec2FeatureExtractor.from_pretrained(folder)
    read = extractor(sounds, sampling_rate=HERTZ, padding=True, return_tensors="pt")
    labels = [[*(small_folder.WORDS[letter] for letter in text), 2] for text in TEXTS]
    width = max(map(len, labels))
    targets = torch.tensor([[*row, *[-100] * (width - len(row))] for row in labels])
    before = torch.tensor([[1, *row[:-1], *[2] * (width - len(row))] for row in labels])

    begun = gg.finetune(folder, data, tmp_path / "begun", **options | {"learning_rate": 1e-12})
    found = gg.finetune(folder, data, tmp_path / "tuned", **options)
    theirs = with_adapters(network, begun.trainer.state_dict())

    def loss() -> Any:
        scores = theirs(**read, decoder_input_ids=before).logits
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    wanted = trained([parameter for parameter in theirs.parameters() if parameter.requires_grad], loss)
    assert wanted[-1] < 0.97 * wanted[0]
    np.testing.assert_allclose(found.history["loss"], wanted, atol=1e-5)
    expected = theirs.merge_and_unload().generate(**read, max_new_tokens=20)
    for cached in (False, True)[: 1 + task.endswith("past")]:
        tuned = ort.ORTModelForSpeechSeq2Seq.from_pretrained(tmp_path / "tuned", use_cache=cached)
        assert torch.equal(tuned.generate(**read, max_new_tokens=20), expected)
