"""Speech recognition from the shell: a folder like Whisper's and recordings in, a tuned folder out."""

from __future__ import annotations

import json
import wave
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
from tests.kit.command_line import Cli
from tests.kit.wav_writing import chunk, format_chunk, riff, write_wav

WIDTH, MELS, RATE = 8, 16, 16000
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
           "<|notimestamps|>", "<|0.00|>", "<|0.50|>")  # fmt: skip
IDS = small_folder.WORDS | {token: len(small_folder.WORDS) + i for i, token in enumerate(SPECIAL)}
START, END = IDS["<|startoftranscript|>"], IDS["<|endoftext|>"]
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 1, "feature_size": MELS,
             "hop_length": 160, "n_fft": 400, "sampling_rate": RATE}  # fmt: skip
CONFIG = {"vocab_size": len(IDS), "decoder_start_token_id": START, "max_target_positions": 24}
GENERATION = {"is_multilingual": True, "forced_decoder_ids": [[1, None], [2, IDS["<|transcribe|>"]]], "max_length": 24}
TABLES = {"lang_to_id": {token: IDS[token] for token in ("<|en|>", "<|de|>")},
          "task_to_id": {task: IDS[f"<|{task}|>"] for task in ("transcribe", "translate")}}  # fmt: skip
TASK = "automatic-speech-recognition"
OPTIONS: dict[str, Any] = {"task": TASK, "language": "en", "rank": 2, "learning_rate": 0.02, "progress": False}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(MELS, WIDTH)

    def forward(self, input_features: Any) -> Any:
        return self.project(input_features.transpose(1, 2)).tanh()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(IDS), WIDTH), nn.Embedding(24, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, len(IDS))

    def forward(self, input_ids: Any, encoder_hidden_states: Any) -> Any:
        places = self.places((input_ids * 0 + 1).cumsum(1) - 1)
        return self.head(self.mix(self.words(input_ids) + places + encoder_hidden_states.mean(1, keepdim=True)).tanh())


def tokenizer() -> Any:
    from tokenizers import AddedToken

    made = small_folder.tokenizer()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return made


@pytest.fixture
def whisper(folder: Path) -> Path:
    """``whisper/`` as optimum writes it, and recordings of half a second in ``data.csv``, in the current folder."""
    frontend.manual_seed(0)
    made = folder / "whisper"
    made.mkdir()
    sounds = {"input_features": frontend.Input(("rows", MELS, 100))}
    onnx.save(frontend.export(Encoder(), sounds, outputs=["last_hidden_state"]), made / "encoder_model.onnx")
    read = {"input_ids": frontend.Input(("rows", "tokens"), "int64"),
            "encoder_hidden_states": frontend.Input(("rows", "frames", WIDTH))}  # fmt: skip
    onnx.save(frontend.export(Decoder(), read, outputs=["logits"]), made / "decoder_model.onnx")
    tokenizer().save(str(made / "tokenizer.json"))
    files = {"preprocessor_config": EXTRACTOR, "config": CONFIG, "generation_config": GENERATION}
    for name, content in files.items():
        (made / f"{name}.json").write_text(json.dumps(content))
    rng = np.random.default_rng(0)
    for i in range(8):
        t = np.arange(6000 + 1000 * i) / RATE
        write_wav(folder / f"clips/{i}.wav", 0.4 * np.sin(2 * np.pi * 300 * (i + 1) * t) + rng.normal(size=len(t)) / 50,
                  RATE)  # fmt: skip
    write(folder / "data.csv", {"file_name": [f"clips/{i}.wav" for i in range(8)], "sentence": list(texts())})
    return made


def texts() -> list[str]:
    return [f"say {'ab' * (i % 3)}{i}" for i in range(8)]


def write(path: Path, columns: dict[str, list[str]]) -> None:
    lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")


def samples(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def states(folder: Path, clips: int = 8) -> np.ndarray:
    """The encoder's states of the recordings, with the spectrograms of ``gradgraph.sound.log_mel``."""
    model = gg.sound.log_mel(folder / "encoder_model.onnx", mels=MELS, time_first=False)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    sounds = [samples(folder.parent / f"clips/{i}.wav") for i in range(clips)]
    padded = np.stack([np.pad(sound, (0, RATE - len(sound))) for sound in sounds])
    return session.run(None, {"samples": padded})[0]


def loss_of(folder: Path, prompt: tuple[str, ...]) -> float:
    """The mean of −log p over all tokens after the first, by onnxruntime and NumPy."""
    session = ort.InferenceSession(folder / "decoder_model.onnx", providers=["CPUExecutionProvider"])
    found, seen = [], states(folder)
    for i, text in enumerate(texts()):
        labels = [*(IDS[token] for token in prompt), *(IDS[letter] for letter in text), END]
        feeds = {"input_ids": np.array([[START, *labels[:-1]]]), "encoder_hidden_states": seen[i : i + 1]}
        x = session.run(None, feeds)[0][0].astype(np.float64)
        found += list(np.log(np.exp(x).sum(-1)) - x[np.arange(len(labels)), labels])
    return float(np.mean(found))


PROMPTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "a language": ({"language": "de"}, {}, ("<|de|>", "<|transcribe|>", "<|notimestamps|>")),
    "a translation": ({"language": "de", "translate": True}, {}, ("<|de|>", "<|translate|>", "<|notimestamps|>")),
    "a name": ({"language": "German"}, {"lang_to_id": {"<|de|>": IDS["<|de|>"]}, "task_to_id": {}},
               ("<|de|>", "<|transcribe|>", "<|notimestamps|>")),
    "that of the folder": ({"language": None}, {"language": "<|de|>"},
                           ("<|de|>", "<|transcribe|>", "<|notimestamps|>")),
    "the name in the folder": ({"language": None}, {"language": "german"},
                               ("<|de|>", "<|transcribe|>", "<|notimestamps|>")),
    "that of older folders": ({"language": None}, {"forced_decoder_ids": [[1, IDS["<|de|>"]]]},
                              ("<|de|>", "<|transcribe|>", "<|notimestamps|>")),
    "English only": ({"language": None}, {"is_multilingual": False}, ("<|notimestamps|>",)),
    "a small vocabulary": ({"language": None}, {"is_multilingual": None}, ("<|notimestamps|>",)),
}  # fmt: skip


@pytest.mark.parametrize("what", PROMPTS)
def test_the_loss_is_that_of_all_tokens_after_the_first(what: str, whisper: Path) -> None:
    options, generation, prompt = PROMPTS[what]
    (whisper / "generation_config.json").write_text(json.dumps(GENERATION | generation))
    found = gg.finetune(whisper, "data.csv", "tuned", epochs=1, held_out=0.0, **OPTIONS | options)
    np.testing.assert_allclose(found.history["loss"][0], loss_of(whisper, prompt), rtol=1e-5)
    written = json.loads(Path("tuned/generation_config.json").read_text())
    if len(prompt) == 1:
        assert written == GENERATION | generation
    else:
        task = prompt[1].strip("<|>")
        kept = {name: value for name, value in (GENERATION | generation).items() if name != "forced_decoder_ids"}
        assert written == TABLES | kept | {"language": "de", "task": task}


def test_transcripts_with_timestamps_are_trained_as_such(whisper: Path, cli: Cli) -> None:
    write(Path("data.csv"), {"audio": CLIPS, "text": ["<|0.00|>a<|0.50|>", *WORDS[1:]]})
    ran = cli("finetune", "whisper", "--task", TASK, "--data", "data.csv", "--language", "English", "--show", "2")
    assert "⟦<|en|><|transcribe|><|0.00|>a<|0.50|><|endoftext|>⟧" in ran.out
    assert "⟦<|en|><|transcribe|><|notimestamps|>say ab1<|endoftext|>⟧" in ran.out


def test_a_file_that_is_damaged_after_it_was_checked_leaves_nothing(
    whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradgraph.chat.recordings.check_sounds", lambda files, rate: not_finite(whisper))
    with pytest.raises(DataError, match="not finite"):
        gg.finetune(whisper, "data.csv", "tuned", **OPTIONS)
    assert not Path("tuned").exists()


def test_a_run_from_the_shell_learns_and_goes_on_to_the_bit(whisper: Path, cli: Cli) -> None:
    words = ("finetune", "whisper", "--task", TASK, "--data", "data.csv", "--language", "en", "--rank", "2", "--lr",
             "0.05", "--epochs", "6", "--batch-size", "4", "--validation", "data.csv")  # fmt: skip
    assert cli(*words, "-o", "whole").code == 0
    assert cli(*words, "-o", "half", "--max-steps", "5", "--checkpoint-every", "2").code == 0
    ran = cli(*words, "-o", "half", "--resume")
    assert ran.code == 0 and "12 steps" in ran.err
    names = {path.relative_to("whole") for path in Path("whole").rglob("*") if path.is_file()}
    assert {Path("encoder_model.onnx"), Path("decoder_model.onnx"), Path("preprocessor_config.json")} <= names
    for name in ("encoder_model.onnx", "decoder_model.onnx", "adapter/encoder/adapter_model.safetensors"):
        assert Path("half", name).read_bytes() == Path("whole", name).read_bytes()
    losses = [line.split(",") for line in Path("whole/training/history.csv").read_text().splitlines()]
    last = dict(zip(losses[0], losses[-1], strict=True))
    prompt = ("<|en|>", "<|transcribe|>", "<|notimestamps|>")
    np.testing.assert_allclose(float(last["val_loss"]), loss_of(Path("whole").resolve(), prompt), rtol=1e-4)
    assert float(last["val_loss"]) < 0.95 * loss_of(whisper, prompt)
    write_wav(Path("clips/7.wav"), np.zeros(9000), RATE)
    ran = cli(*words, "-o", "half", "--resume")
    assert ran.code == 1 and "began with other values of data" in ran.err


def test_the_first_rows_are_shown(whisper: Path, cli: Cli) -> None:
    ran = cli("finetune", "whisper", "--task", TASK, "--data", "data.csv", "--language", "en", "--show", "1")
    assert ran.code == 0 and not Path("tuned").exists()
    assert "clips/0.wav, 0.4 s" in ran.out
    assert "<|startoftranscript|>⟦<|en|><|transcribe|><|notimestamps|>say 0<|endoftext|>⟧" in ran.out
    assert "1 of 1 linear layers of the encoder get adapters" in ran.err
    assert "1 of 2 linear layers of the decoder get adapters" in ran.err


def test_data_of_each_form_are_the_same_rows(whisper: Path) -> None:
    """A table with any names, a folder of Hugging Face, and rows in memory; also at other sampling rates."""
    losses = [gg.finetune(whisper, "data.csv", "tuned", epochs=1, **OPTIONS).history["loss"]]
    rows = [{"clip": str(whisper.parent / f"clips/{i}.wav"), "words": text} for i, text in enumerate(texts())]
    columns = {"audio": "clip", "text": "words"}
    (whisper / "processor_config.json").write_text(json.dumps({"feature_extractor": EXTRACTOR}))  # by transformers 5
    (whisper / "preprocessor_config.json").unlink()
    losses.append(gg.finetune(whisper, rows, "rows", epochs=1, columns=columns, **OPTIONS).history["loss"])
    lines = [json.dumps({"file_name": f"{i}.wav", "transcription": text}) for i, text in enumerate(texts())]
    Path("clips/metadata.jsonl").write_text("\n".join(lines))
    losses.append(gg.finetune(whisper, "clips", "folder", epochs=1, **OPTIONS).history["loss"])
    assert losses[0] == losses[1] == losses[2]
    pytest.importorskip("scipy", reason="an extra: onnx-gradgraph[sounds] resamples")
    for i in range(8):
        write_wav(Path(f"clips/{i}.wav"), np.repeat(samples(Path(f"clips/{i}.wav")), 3), 3 * RATE)
    found = gg.finetune(whisper, "data.csv", "resampled", epochs=1, **OPTIONS).history["loss"]
    np.testing.assert_allclose(found, losses[0], rtol=0.01)


def test_long_rows_are_dropped_on_request(whisper: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_wav(Path("clips/2.wav"), np.zeros(RATE + 1), RATE)
    write(Path("data.csv"), {"audio": [f"clips/{i}.wav" for i in range(8)], "text": ["a" * 21, *texts()[1:]]})
    caplog.set_level("INFO")
    found = gg.finetune(whisper, "data.csv", "tuned", epochs=1, held_out=0.0, long="drop", **OPTIONS)
    assert found.figures["rows"] == 6 and "2 rows of 'data.csv' are too long; they are dropped" in caplog.text


def rewritten(name: str, **changes: Any) -> Any:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return change


def clip(name: str, content: bytes | None) -> Any:
    def change(folder: Path) -> None:
        (folder.parent / name).unlink()
        if content is not None:
            (folder.parent / name).write_bytes(content)

    return change


def table(**columns: list[str]) -> Any:
    return lambda folder: write(folder.parent / "data.csv", columns)


def longer(folder: Path) -> None:
    write_wav(folder.parent / "clips/1.wav", np.zeros(RATE + 1), RATE)


def not_finite(folder: Path) -> None:
    numbers = np.array([0.0, np.nan] * 999, "<f4").tobytes()
    content = riff(format_chunk(kind=3, rate=RATE, bits=32), chunk(b"data", numbers))
    (folder.parent / "clips/3.wav").write_bytes(content)


def removed(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


CLIPS, WORDS = [f"clips/{i}.wav" for i in range(8)], texts()
REFUSED: dict[str, tuple[dict[str, Any], Any, type[GradgraphError], str]] = {
    "no language": ({"language": None}, None, ArgumentError, "multilingual, and no language is given; pass the lang"),
    "an unknown language": ({"language": "Germann"}, None, ArgumentError,
                            "no language 'Germann'; did you mean 'german'.*; pass a code such as 'en', or a name"),
    "a language that the model lacks": ({"language": "Hindi"}, None, ArgumentError, "has no language 'Hindi'"),
    "a language that the options lack": ({}, rewritten("generation_config.json", lang_to_id={"<|de|>": 1}),
                                         ArgumentError, "the model has no language 'en'"),
    "a language of an English model": ({}, rewritten("generation_config.json", is_multilingual=False), ArgumentError,
                                       "transcribes one language only"),
    "a cut": ({"long": "cut"}, None, ArgumentError, "does not cut recordings, .*; pass long='drop'"),
    "packing": ({"pack": True}, None, ArgumentError, "does not use 'pack'; omit it"),
    "another task": ({"task": "text2text-generation", "language": None}, None, DataError,
                     f"exported for {TASK}, not for text2text-generation; pass the task {TASK}"),
    "a column that the data lack": ({"columns": {"text": "words"}}, None, DataError, "has no column 'words'"),
    "a column that the task lacks": ({"columns": {"prompt": "sentence"}}, None, ArgumentError,
                                     "has no column 'prompt'; name audio, text"),
    "two columns of texts": ({}, table(audio=CLIPS, text=WORDS, sentence=WORDS), DataError,
                             "has both 'text', 'sentence'; name the column of transcripts; pass columns="),
    "no column of recordings": ({}, table(clip=CLIPS, text=WORDS), DataError, "none of 'audio', 'file_name', 'file'"),
    "an empty transcript": ({}, table(audio=CLIPS, text=["", *WORDS[1:]]), DataError,
                            "row 1 of 'data.csv': 'text' is '', but should be text"),
    "no file": ({}, clip("clips/3.wav", None), DataError, r"'clips/3.wav' cannot be read \(No such file"),
    "samples that are not numbers": ({}, not_finite, DataError, r"'clips/3.wav' cannot be read \(it contains numbers"),
    "a timestamp that is no token": ({}, table(audio=CLIPS, text=["<|0.03|>a", *WORDS[1:]]), DataError,
                                     "row 1 of 'data.csv' has a timestamp that is no token"),
    "no WAV": ({}, clip("clips/3.wav", b"ID3 is of an MP3"), DataError, r"'clips/3.wav' .* \(it is not a WAV file\)"),
    "a long recording": ({}, longer, DataError, "row 2 of 'data.csv' has more than 1 s, which the model does not read"),
    "a long transcript": ({"length": 8}, None, DataError, "row 1 of 'data.csv' has a transcript of more than 8 tokens"),
    "more tokens than positions": ({"length": 25}, None, DataError, "length is 25, but the model has 24 positions"),
    "another feature extractor": ({}, rewritten("preprocessor_config.json", feature_extractor_type="Wav2Vec2Feature"),
                                  DataError, "has the feature extractor Wav2Vec2Feature, but .* requires WhisperF"),
    "no feature extractor": ({}, removed("preprocessor_config.json"), DataError, "has no preprocessor_config.json"),
    "other mel bands": ({}, rewritten("preprocessor_config.json", feature_size=80), DataError,
                        "reads spectrograms of 16 × 100, but '.*' describes 80 × 100"),
    "dither": ({}, rewritten("preprocessor_config.json", dither=0.1), DataError, "'dither' in '.*' is 0.1, which is"),
    "a size that is no number": ({}, rewritten("preprocessor_config.json", n_fft="400"), DataError,
                                 "'n_fft' in '.*' is '400', but should be a whole number"),
    "another tokenizer": ({}, lambda folder: small_folder.tokenizer().save(str(folder / "tokenizer.json")), DataError,
                          "has no token '<|notimestamps|>'; use the tokenizer.json of Whisper".replace("|", r"\|")),
    "no encoder": ({}, removed("encoder_model.onnx"), GradgraphError, "the encoder, 'encoder_model.onnx' in .* cannot"),
    "no decoder": ({}, removed("decoder_model.onnx"), DataError, "'.*encoder_model.onnx' is not a decoder that reads"),
    "a folder without a table": ({"data": "clips"}, None, DataError, "the folder 'clips' has no metadata.csv"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, whisper: Path) -> None:
    options, change, error, says = REFUSED[what]
    if change is not None:
        change(whisper)
    with pytest.raises(error, match=says):
        gg.finetune(whisper, options.get("data", "data.csv"), "tuned",
                    **{name: value for name, value in (OPTIONS | options).items() if name != "data"})  # fmt: skip
    assert not Path("tuned").exists()
