"""SpecAugment of samples against its formula, and by name in datasets, the shell and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.data.augment.silences import mel
from gradgraph.data.sounds import Sounds
from gradgraph.errors import ArgumentError, BuildError
from tests.kit import wav_writing

RATE, SIZE = 8000, 4000
SAMPLES = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)


def changed(seed: int = 0, **arguments: Any) -> np.ndarray:
    made: np.ndarray = gg.augment.spec_augment(**arguments).function(SAMPLES, np.random.default_rng(seed), RATE)
    assert made.dtype == np.float32 and made.shape == SAMPLES.shape
    return made


def drawn(rng: np.random.Generator, most: float, whole: float) -> tuple[float, float]:
    """As the paper has it: f from [0, F), and f₀ from [0, ν − f)."""
    f = rng.uniform(0, most * whole)
    first = rng.uniform(0, whole - f)
    return first, first + f


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("masks", [1, 3])
def test_stretches_of_time_are_silent_and_the_rest_is_as_it_was(seed: int, masks: int) -> None:
    rng, expected = np.random.default_rng(seed), SAMPLES.copy()
    for _ in range(masks):
        first, last = drawn(rng, 0.3, SIZE)
        expected[round(first) : round(last)] = 0
    assert np.array_equal(changed(seed, freq_masks=0, time_masks=masks, time_share=0.3), expected)


@pytest.mark.parametrize("seed", range(4))
def test_bands_of_frequencies_are_silent_and_the_others_are_as_they_were(seed: int) -> None:
    rng, top = np.random.default_rng(seed), 2595 * np.log10(1 + RATE / 2 / 700)
    bands = [drawn(rng, 0.25, top) for _ in range(2)]
    mels = 2595 * np.log10(1 + np.fft.rfftfreq(SIZE, 1 / RATE) / 700)
    silent = np.any([(mels >= low) & (mels < high) for low, high in bands], axis=0)
    before, after = np.fft.rfft(SAMPLES), np.fft.rfft(changed(seed, freq_masks=2, freq_share=0.25, time_masks=0))
    assert silent.any() and not silent.all()
    np.testing.assert_allclose(after[silent], 0, atol=1e-3)
    np.testing.assert_allclose(after[~silent], before[~silent], atol=1e-3)
    assert mel(np.array([0.0, RATE / 2])) == pytest.approx([0, top])


def test_a_spectrogram_of_any_kind_has_silence_there() -> None:
    """Short frames, as in front of a model: those of a band lose their power."""
    rng = np.random.default_rng(0)
    low, high = drawn(rng, 0.5, 2595 * np.log10(1 + RATE / 2 / 700))
    window, frames = np.hanning(400), range(0, SIZE - 400, 160)
    powers = [np.mean([np.abs(np.fft.rfft(x[i : i + 400] * window)) ** 2 for i in frames], axis=0)
              for x in (SAMPLES, changed(0, freq_masks=1, freq_share=0.5, time_masks=0))]  # fmt: skip
    mels = 2595 * np.log10(1 + np.fft.rfftfreq(400, 1 / RATE) / 700)
    inside = (mels > low + 100) & (mels < high - 100)
    assert inside.sum() > 3
    assert (powers[1][inside] < 1e-3 * powers[0][inside]).all()


def test_without_masks_nothing_changes() -> None:
    assert np.array_equal(changed(freq_masks=0, time_masks=0), SAMPLES)
    np.testing.assert_allclose(changed(freq_share=0.0, time_share=0.0), SAMPLES, atol=1e-6)


def test_by_name_in_a_dataset(tmp_path: Path) -> None:
    folder = wav_writing.sounds(tmp_path / "train", 2)
    plain, masked = gg.sound.folder(folder), gg.sound.folder(folder, augment="spec_augment(freq_masks=0)")
    assert isinstance(masked, Sounds)
    assert repr(gg.augment.spec_augment(2)) == "gradgraph.augment.spec_augment(freq_masks=2)"
    steps = [gg.augment.spec_augment(), lambda x, rng: x / 2]
    assert gg.sound.folder(folder, augment=steps) is not plain
    with pytest.raises(ArgumentError, match="changes images, but these are sounds"):
        gg.sound.folder(folder, augment=["flip"])
    with pytest.raises(BuildError, match="spec_augment"):
        gg.sound.folder(folder, augment="spec_augmentation")
    with pytest.raises(ArgumentError, match="changes sounds, but these are images"):
        gg.augment.Augmentations(["spec_augment"])
    with pytest.raises(ArgumentError, match="from 0 to 1"):
        gg.augment.spec_augment(time_share=2)


def test_a_resumed_run_repeats_it(tmp_path: Path) -> None:
    from gradgraph.frontend import export, nn

    data = gg.sound.folder(wav_writing.sounds(tmp_path / "train", 6), seconds=0.5, augment="spec_augment")
    model = export(nn.Linear(SIZE, 3), {"samples": ("batch", SIZE)})
    step = gg.build(model, "cross_entropy", gg.optim.sgd(1e-3))

    def trained(**more: Any) -> gg.Trainer:
        trainer = gg.Trainer(step, seed=3, device="cpu")
        trainer.fit(data, 3, 4, progress=False, **more)
        return trainer

    whole, part = trained(), trained(max_steps=4)
    part.save(tmp_path / "run.ckpt")
    resumed = gg.Trainer.resume(step, tmp_path / "run.ckpt", device="cpu")
    resumed.fit(data, 3, 4, progress=False)
    for name, value in whole.parameters.items():
        assert np.array_equal(value, resumed.parameters[name])
