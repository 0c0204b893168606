"""Sounds in folders and tables: which samples of which file a model gets, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import gradgraph as gg
from gradgraph.data.record.specs import TensorSpec
from gradgraph.errors import DataError, UnmatchedError
from gradgraph.frontend import Input, export, functional, manual_seed, nn
from tests.kit import wav_writing

KINDS = ["chirp", "noise", "tone"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, mel: Any) -> Any:
        flat = mel.squeeze(1)
        return self.head(functional.cat([flat.mean(dim=2), flat.amax(dim=2)], dim=1))


def model(rate: int = 8000) -> onnx.ModelProto:
    manual_seed(0)
    net = export(Net(), {"mel": Input(("rows", 1, 24, "frames"))}, outputs=["logits"])
    return gg.sound.log_mel(net, "whisper", sample_rate=rate, n_fft=256, hop=128, mels=24)


@pytest.fixture(scope="module")
def step() -> gg.Step:
    return gg.build(model(), "cross_entropy", gg.optim.adamw(1e-2), metrics=["accuracy"])


def specs_of(step: gg.Step) -> dict[str, Any]:
    return {spec.name: spec for spec in step.manifest.batch}


def samples_of(data: gg.sound.Sounds, seed: tuple[int, ...] = (), rate: int = 8000, length: int = 6) -> np.ndarray:
    """All sounds, for a model of so many samples."""
    spec = TensorSpec("x", "float32", ("rows", length))
    known = gg.DataNames(sounds={"x": {"rate": rate}})
    return next(data.load(iter([range(len(data))]), {"x": spec}, seed, known))["x"]


def test_middles_are_evaluated_and_random_places_trained_on(tmp_path: Path) -> None:
    ramp = np.arange(1, 21) / 100
    wav_writing.write_wav(tmp_path / "long.wav", ramp)
    wav_writing.write_wav(tmp_path / "same.wav", ramp[:6])
    wav_writing.write_wav(tmp_path / "short.wav", ramp[:3])
    data = gg.sound.folder(tmp_path)
    exact = np.round(ramp * 32767) / np.float32(32768)
    long, same, short = samples_of(data)
    assert np.array_equal(long, exact[7:13].astype(np.float32)) and np.array_equal(same, exact[:6].astype(np.float32))
    assert np.array_equal(short, np.array([0, *exact[:3], 0, 0], np.float32))
    drawn = [samples_of(data, (0, epoch)) for epoch in range(40)]
    begins = {int(np.argmin(np.abs(exact - one[0][0]))) for one in drawn}
    assert begins <= set(range(15)) and len(begins) > 8
    assert all(np.allclose(one[0], exact[(i := int(np.argmin(np.abs(exact - one[0][0])))) : i + 6]) for one in drawn)
    places = {int(np.flatnonzero(one[2])[0]) for one in drawn}
    assert places == {0, 1, 2, 3} and all(np.count_nonzero(one[2]) == 3 for one in drawn)
    assert np.array_equal(samples_of(data, (5, 1)), samples_of(gg.sound.folder(tmp_path, threads=1), (5, 1)))


def test_channels_are_averaged(tmp_path: Path) -> None:
    wav_writing.write_wav(tmp_path / "a.wav", np.array([[0.5] * 6, [-0.25] * 6]))
    assert np.allclose(samples_of(gg.sound.folder(tmp_path)), 0.125, atol=1e-4)


def test_other_rates_are_resampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    t = np.arange(44_100) / 44_100
    wav_writing.write_wav(tmp_path / "a.wav", np.sin(2 * np.pi * 440 * t) / 2, rate=44_100)
    found = samples_of(gg.sound.folder(tmp_path), length=8000)[0]
    expected = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000) / 2
    assert np.abs(found - expected)[200:-200].max() < 1e-3
    monkeypatch.setitem(__import__("sys").modules, "scipy.signal", None)
    with pytest.raises(
        DataError, match=r"has 44,100 samples per second, but the model expects 8,000; pip install scipy"
    ):
        samples_of(gg.sound.folder(tmp_path), length=8000)


@pytest.mark.parametrize("rate", [4000, 8000, 11025, 16000, 44100])
@pytest.mark.parametrize("frames", [1, 333, 4000])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_alone_is_as_long_as_it_sounds(rate: int, frames: int, channels: int, tmp_path: Path) -> None:
    """Resampled by scipy.signal.resample_poly, of channels that are averaged; cut or filled up only where asked for."""
    signal = pytest.importorskip("scipy.signal")
    stereo = np.random.default_rng(0).uniform(-0.5, 0.5, (channels, frames))
    wav_writing.write_wav(tmp_path / "a.wav", stereo)
    exact = (np.round(stereo * 32767) / 32768).mean(axis=0)
    common = np.gcd(rate, 8000)
    expected = exact if rate == 8000 else signal.resample_poly(exact, rate // common, 8000 // common)
    np.testing.assert_allclose(gg.sound.folder(tmp_path, rate=rate)[0], expected, atol=1e-5)
    for seconds in (0.02, 1.0):
        found, length = gg.sound.folder(tmp_path, rate=rate, seconds=seconds)[0], round(seconds * rate)
        rest = len(expected) - length
        middle = expected[rest // 2 :][:length] if rest > 0 else np.pad(expected, (-rest // 2, -rest - -rest // 2))
        np.testing.assert_allclose(found, middle, atol=1e-5)
        in_batch = samples_of(gg.sound.folder(tmp_path, rate=rate), rate=rate, length=length)[0]
        np.testing.assert_allclose(in_batch, middle, atol=1e-5)


def test_augment_changes_what_is_trained_on_alone(tmp_path: Path) -> None:
    wav_writing.write_wav(tmp_path / "a.wav", np.full(6, 0.5))

    def louder(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return samples * rng.uniform(1, 2)

    data = gg.sound.folder(tmp_path, augment=louder)
    assert np.allclose(samples_of(data), 0.5, atol=1e-4)
    first, second = samples_of(data, (0, 0)), samples_of(data, (0, 1))
    assert (first > 0.5).all() and (first != second).all() and np.array_equal(first, samples_of(data, (0, 0)))
    with pytest.raises(DataError, match=r"augment returned float32 of shape \[5\]"):
        samples_of(gg.sound.folder(tmp_path, augment=lambda x, rng: x[1:]), (0, 0))


@pytest.mark.sweep(0)
def test_a_model_learns_to_tell_sounds_apart_and_a_resumed_run_repeats_it(tmp_path: Path, step: gg.Step) -> None:
    data = gg.sound.folder(wav_writing.sounds(tmp_path / "train", 12), seconds=0.5)
    held_out = gg.sound.folder(wav_writing.sounds(tmp_path / "test", 8, seed=1), seconds=0.5)
    whole = gg.Trainer(step, seed=1)
    whole.fit(data, 25, 12, progress=False)
    assert whole.evaluate(held_out)["accuracy"] > 0.8
    assert whole.names.classes == {"target": tuple(KINDS)}
    assert whole.names.sounds == {"samples": {"rate": 8000, "length": 4000}}
    first = gg.Trainer(step, seed=1)
    first.fit(data, 25, 12, progress=False, max_steps=31)
    first.save(tmp_path / "run.ckpt")
    second = gg.Trainer.resume(step, tmp_path / "run.ckpt")
    second.fit(data, 25, 12, progress=False)
    states = whole.state_dict(), second.state_dict()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


def test_classes_are_matched_by_name(tmp_path: Path, step: gg.Step) -> None:
    root = wav_writing.sounds(tmp_path / "train", 2)
    specs = specs_of(step)
    names = gg.sound.folder(root, seconds=0.5).names_for(specs, gg.DataNames())
    some = tmp_path / "some"
    (some).mkdir()
    (root / "tone").rename(some / "tone")
    assert next(gg.sound.folder(some).load(iter([[0]]), specs, (), names))["target"].tolist() == [2]
    (some / "tone").rename(some / "whistle")
    with pytest.raises(UnmatchedError, match="new class 'whistle'"):
        gg.sound.folder(some).names_for(specs, names)


@pytest.mark.parametrize("labels", [["b", "a", "b"], [1, 0, 1]])
def test_tables_name_files_and_labels(labels: list[Any], tmp_path: Path, step: gg.Step) -> None:
    pandas = pytest.importorskip("pandas")
    for i in range(3):
        wav_writing.write_wav(tmp_path / "wavs" / f"{i}.wav", np.full(9, (i + 1) / 10))
    frame = pandas.DataFrame({"file": [f"wavs/{i}.wav" for i in (2, 0, 1)], "kind": labels})
    frame.to_csv(tmp_path / "t.csv", index=False)
    for data in (gg.sound.table(tmp_path / "t.csv"), gg.sound.table(frame, "file", "kind", root=tmp_path)):
        specs = specs_of(step)
        names = data.names_for(specs, gg.DataNames(sounds={"samples": {"rate": 8000, "length": 6}}))
        batch = next(data.load(iter([[0, 1, 2]]), specs, (), names))
        assert batch["target"].tolist() == [1, 0, 1] and names.columns == {"target": ("kind",)}
        assert np.allclose(batch["samples"][:, 0], [0.3, 0.1, 0.2], atol=1e-4)


def wrong(tmp_path: Path, what: str) -> gg.sound.Sounds:
    wav_writing.write_wav(tmp_path / "a" / "a.wav", np.zeros(8))
    if what == "no class":
        return gg.sound.folder(tmp_path / "a")
    if what == "an empty class":
        (tmp_path / "b").mkdir()
    if what == "no sound":
        (tmp_path / "a" / "a.wav").unlink()
        (tmp_path / "a").rmdir()
    if what == "damaged":
        (tmp_path / "a" / "a.wav").write_bytes(b"RIFF")
    if what == "silent":
        wav_writing.write_wav(tmp_path / "a" / "a.wav", np.zeros(0))
    return gg.sound.folder(tmp_path / "none" if what == "no folder" else tmp_path)


WRONG = {
    "no folder": "cannot be read",
    "no class": "has no subfolders of classes, so its sounds have no 'target'",
    "an empty class": "the folders 'b' of .* contain no sounds",
    "no sound": "contains no sounds",
    "damaged": "a.wav' cannot be read",
    "silent": "a.wav' contains no samples",
    "no length": "accepts sounds of any length, but a batch needs one length; pass it: seconds=1.0",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_said(what: str, tmp_path: Path, step: gg.Step) -> None:
    known = gg.DataNames() if what == "no length" else gg.DataNames(sounds={"samples": {"length": 8}})
    with pytest.raises(DataError, match=WRONG[what]):
        wrong(tmp_path, what).names_for(specs_of(step), known)


def test_a_model_of_spectrograms_is_told_of_log_mel(tmp_path: Path) -> None:
    wav_writing.write_wav(tmp_path / "a.wav", np.zeros(8))
    spec = TensorSpec("mel", "float32", ("rows", 80, 100))
    with pytest.raises(DataError, match=r"gg.sound.log_mel\(model\) puts a spectrogram in front"):
        gg.sound.folder(tmp_path).names_for({"mel": spec}, gg.DataNames())
    fixed = TensorSpec("x", "float32", ("rows", 1, 6))
    data = gg.sound.folder(tmp_path)
    assert next(data.load(iter([[0]]), {"x": fixed}, ()))["x"].shape == (1, 1, 6)
    with pytest.raises(DataError, match=r"sounds have 8,000 samples \('x' expects 6\)"):
        gg.sound.folder(tmp_path, seconds=1.0).names_for({"x": fixed}, gg.DataNames())


def test_the_exported_model_takes_raw_samples(tmp_path: Path, step: gg.Step) -> None:
    assert model().graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    names = gg.sound.folder(wav_writing.sounds(tmp_path / "t", 1), seconds=0.5).names_for(
        specs_of(step), gg.DataNames()
    )
    trainer = gg.Trainer(step)
    trainer.names = names
    trainer.export(tmp_path / "trained.onnx")
    loaded = gg.Trainer(gg.build(tmp_path / "trained.onnx", "cross_entropy"))
    assert loaded.names.sounds == {"samples": {"rate": 8000, "length": 4000}}  # who goes on with it need not say more
