"""Speech models that read samples: an encoder and a decoder like Moonshine's are trained on padded batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import ArgumentError, DataError, GradgraphError
from gradgraph.frontend import nn

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")

from tests.chat import small_folder
from tests.cli.test_cli_finetune_recordings import rewritten, samples, texts, write
from tests.kit.wav_writing import write_wav

WIDTH, RATE, WINDOW = 8, 16000, 100
WORDS = small_folder.WORDS
START, END = WORDS["<s>"], WORDS["</s>"]
CONFIG = {"vocab_size": len(WORDS), "decoder_start_token_id": START, "eos_token_id": END, "max_position_embeddings": 24}
EXTRACTOR = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False, "feature_size": 1,
             "padding_value": 0.0, "return_attention_mask": True, "sampling_rate": RATE}  # fmt: skip
OPTIONS: dict[str, Any] = {"task": "automatic-speech-recognition", "rank": 2, "learning_rate": 0.1, "progress": False}


class Encoder(nn.Module):
    """The mean state of each window over the length of a recording, which padding with silence does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, WIDTH, WINDOW, stride=WINDOW, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, input_values: Any, attention_mask: Any) -> Any:
        states = self.project(self.conv(input_values.unsqueeze(1)).transpose(1, 2)).tanh()
        return states * (1000.0 / attention_mask.sum(1).to("float32").reshape(-1, 1, 1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, len(WORDS))

    def forward(self, input_ids: Any, encoder_hidden_states: Any) -> Any:
        return self.head(self.mix(self.words(input_ids) + encoder_hidden_states.sum(1, keepdim=True)).tanh())


@pytest.fixture
def moonshine(folder: Path) -> Path:
    frontend.manual_seed(0)
    made = folder / "moonshine"
    made.mkdir()
    sounds = {"input_values": frontend.Input(("rows", "samples")),
              "attention_mask": frontend.Input(("rows", "samples"), "int64")}  # fmt: skip
    onnx.save(frontend.export(Encoder(), sounds, outputs=["last_hidden_state"]), made / "encoder_model.onnx")
    read = {"input_ids": frontend.Input(("rows", "tokens"), "int64"),
            "encoder_hidden_states": frontend.Input(("rows", "frames", WIDTH))}  # fmt: skip
    onnx.save(frontend.export(Decoder(), read, outputs=["logits"]), made / "decoder_model.onnx")
    small_folder.tokenizer().save(str(made / "tokenizer.json"))
    for name, content in {"preprocessor_config": EXTRACTOR, "config": CONFIG}.items():
        (made / f"{name}.json").write_text(json.dumps(content))
    rng = np.random.default_rng(0)
    for i in range(8):
        write_wav(folder / f"clips/{i}.wav", rng.normal(size=6000 + 1000 * i) / 8, RATE)
    write(folder / "data.csv", {"audio": [f"clips/{i}.wav" for i in range(8)], "text": [*texts()]})
    return made


def loss_of(folder: Path, normalises: bool) -> float:
    """The mean of −log p over all tokens after the first, of each recording alone."""
    encoder, decoder = (ort.InferenceSession(folder / f"{name}_model.onnx", providers=["CPUExecutionProvider"])
                        for name in ("encoder", "decoder"))  # fmt: skip
    found = []
    for i, text in enumerate(texts()):
        sound = samples(folder.parent / f"clips/{i}.wav")
        sound = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7) if normalises else sound
        feeds = {"input_values": sound[None], "attention_mask": np.ones((1, len(sound)), np.int64)}
        labels = [*(WORDS[letter] for letter in text), END]
        read = {"input_ids": np.array([[START, *labels[:-1]]]), "encoder_hidden_states": encoder.run(None, feeds)[0]}
        x = decoder.run(None, read)[0][0].astype(np.float64)
        found += list(np.log(np.exp(x).sum(-1)) - x[np.arange(len(labels)), labels])
    return float(np.mean(found))


@pytest.mark.parametrize("normalises", [False, True])
def test_the_loss_of_a_batch_is_that_of_each_recording(normalises: bool, moonshine: Path) -> None:
    rewritten("preprocessor_config.json", do_normalize=normalises)(moonshine)
    found = gg.finetune(moonshine, "data.csv", "tuned", validation="data.csv", epochs=6, **OPTIONS)
    np.testing.assert_allclose(found.history["loss"][0], loss_of(moonshine, normalises), rtol=1e-5)
    np.testing.assert_allclose(found.history["val_loss"][-1], loss_of(Path("tuned").resolve(), normalises), rtol=1e-4)
    assert found.history["val_loss"][-1] < 0.95 * found.history["loss"][0]


REFUSED: dict[str, tuple[dict[str, Any], Any, type[GradgraphError], str]] = {
    "a language": ({"language": "en"}, None, ArgumentError, "transcribes one language only"),
    "no end": ({}, rewritten("config.json", eos_token_id=None), DataError, "has no eos_token_id"),
    "left padding": ({}, rewritten("preprocessor_config.json", padding_side="left"), DataError, "'padding_side'"),
    "a recording below one window": ({}, lambda folder: write_wav(folder.parent / "clips/1.wav", np.zeros(99), RATE),
                                     DataError, "row 2 of 'data.csv' has a recording of 0.0062 s, but the model reads"),
    "adapters of attentions": ({"kind": "prefix"}, None, ArgumentError, "kind prefix are of attentions; choose"),
    "a target that matches nothing": ({"target": ["*mix*", "*q_porj*"]}, None, GradgraphError,
                                      r"'\*q_porj\*' matches no linear layer of encoder or decoder"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_of_samples(what: str, moonshine: Path) -> None:
    options, change, error, says = REFUSED[what]
    if change is not None:
        change(moonshine)
    with pytest.raises(error, match=says):
        gg.finetune(moonshine, "data.csv", "tuned", **OPTIONS | options)
    assert not Path("tuned").exists()
