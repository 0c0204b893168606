"""Augmentations of sounds: SpecAugment."""

from __future__ import annotations

import numpy as np

from gradgraph.arguments import WHOLE, Kind
from gradgraph.data.augment.augmentation import PROBABILITY, Array, Augmentation, Generator, augmentation

NOT_NEGATIVE = Kind("a whole number that is not negative", lambda value: WHOLE.fits(value) and value >= 0)


@augmentation(freq_masks=NOT_NEGATIVE, freq_share=PROBABILITY, time_masks=NOT_NEGATIVE, time_share=PROBABILITY)
def spec_augment(
    freq_masks: int = 2, freq_share: float = 0.3375, time_masks: int = 2, time_share: float = 0.2
) -> Augmentation:
    """Mask some frequency bands and time intervals of a sound (SpecAugment, Park et al. 2019).

    See also ``torchaudio.transforms.FrequencyMasking`` and ``TimeMasking``.

    On the mel scale from 0 to ν (half the rate), a band has a width f, drawn from [0, F), and begins at f₀, drawn from
    [0, ν − f). Time intervals are drawn in the same way. Masks are applied to the samples, so masked parts look like
    silence in their spectrogram. There is no time warping, which has little effect in the paper.

    Args:
        freq_masks, time_masks: number of masks.
        freq_share, time_share: the widest band and the longest interval (F and T), as fractions; 27 of 80 mel
            bands in the paper, and 0.2 of the time.
    """

    def masked(samples: Array, rng: Generator, rate: int) -> Array:
        made = np.array(samples)
        if freq_masks:
            mels = mel(np.fft.rfftfreq(len(made), 1 / rate))
            spectrum = np.fft.rfft(made)
            for _ in range(freq_masks):
                low, high = _drawn(rng, freq_share)
                spectrum[(mels >= low * mels[-1]) & (mels < high * mels[-1])] = 0
            made = np.fft.irfft(spectrum, len(made)).astype(samples.dtype)
        for _ in range(time_masks):
            low, high = _drawn(rng, time_share)
            made[round(low * len(made)) : round(high * len(made))] = 0
        return made

    return Augmentation("sound", masked)


def mel(frequency: Array) -> Array:
    """Convert frequencies f in Hz to the mel scale of HTK: ``2595·log₁₀(1 + f/700)``."""
    scaled: Array = 2595.0 * np.log10(1.0 + frequency / 700.0)
    return scaled


def _drawn(rng: Generator, most: float) -> tuple[float, float]:
    """Return the ends of a random interval of length up to ``most`` within [0, 1]."""
    width = rng.uniform(0, most)
    low = rng.uniform(0, 1 - width)
    return low, low + width
