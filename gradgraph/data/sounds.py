"""Sounds as training data: WAV files in class folders or listed in a table, as samples of equal length."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import ABOVE_ZERO, FINITE, PATH, TEXT, Kind, checked
from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.augmentation import Augmentation, SoundAugmentations
from gradgraph.data.dataset import Loadable
from gradgraph.data.labelled_files import FileKind, LabelledFiles, labelled_folder, labelled_table
from gradgraph.data.prefetch import prefetched_samples
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, TensorSpec, numpy_dtype
from gradgraph.data.shuffling import generator
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.regular import readable
from gradgraph.files.untrusted.wav_files import FLOAT, WavFile, wav_file

SOUNDS = FileKind("sound", (".wav", ".wave"))
MOST_SAMPLES = 1 << 28  # maximum number of samples of a file to resample, and of a sound in a batch

Augment = Any  # an augmentation, its name, a function of samples and a generator, or a list of these


@dataclass(frozen=True)
class SoundForm:
    """Sampling rate and duration of sounds; None for values that are not decided yet.

    Attributes:
        rate: samples per second.
        seconds: duration of a sound.
        length: number of samples of a sound.
    """

    rate: int | None = None
    seconds: float | None = None
    length: int | None = None

    def length_at(self, rate: int) -> int | None:
        """Return the number of samples of a sound at this rate; None if undecided."""
        return self.length or (None if self.seconds is None else max(1, round(self.seconds * rate)))

    def of(self, spec: TensorSpec, known: Mapping[str, Any], first: int) -> SoundForm:
        """Return the form with all values decided, by its own values, the model's input or the trained model.

        Args:
            spec: the input: [batch, samples], or [batch, 1, samples].
            known: rate and length stored with the trained model, if any.
            first: the rate of the first file, used if no rate is known.

        Raises:
            DataError: the input is not a sound, or the number of samples is undecided.
        """
        is_one = len(spec.shape) == 2 or (len(spec.shape) == 3 and spec.shape[1] in (1, None))
        if not is_one or numpy_dtype(spec.dtype).kind != "f":
            raise DataError(
                f"sounds are floating-point [batch, samples] or [batch, 1, samples], but the step expects {spec}",
                remedy="gg.sound.log_mel(model) puts a spectrogram in front of a model",
                shell="put a spectrogram in front of the model first, in Python (gg.sound.log_mel)",
            )
        rate = self.rate or known.get("rate") or first
        fixed = spec.shape[-1] if isinstance(spec.shape[-1], int) else None
        length = self.length_at(rate) or fixed or known.get("length")
        if length is None:
            raise DataError(
                f"'{shown(spec.name)}' accepts sounds of any length, but a batch needs one length",
                remedy="pass it: seconds=1.0",
                shell="pass it: --sound seconds=1",
            )
        if fixed not in (None, length) or length > MOST_SAMPLES:
            expected = f"'{shown(spec.name)}' expects {fixed:,}" if fixed is not None else f"at most {MOST_SAMPLES:,}"
            raise DataError(f"sounds have {length:,} samples ({expected}); change or omit their duration in seconds")
        return SoundForm(rate, None, length)


class Sounds(Loadable):
    """WAV files with their labels; see :func:`folder` and :func:`table`.

    Attributes:
        files: the WAV files.
        form: rate and duration, as passed.
        augment: augmentation of training data.
        threads: number of reading threads; None for the default.
    """

    def __init__(self, found: LabelledFiles, form: SoundForm, augment: Augment | None, threads: int | None) -> None:
        self.files, self.form, self.threads, self._found = found.files, form, threads, found
        self.augment = None if augment is None else SoundAugmentations(augment)
        self._form_of_step: SoundForm | None = None  # as last read for a step

    @property
    def augments(self) -> bool:
        """Whether samples are augmented in training, or placed at random since their lengths differ."""
        return self.augment is not None or not all(map(self._fills, self.files))

    def __getitem__(self, i: int) -> Array:
        opened = opened_sound(self.files[i])
        rate = self.form.rate or opened.rate
        return self._samples(i, SoundForm(rate, None, self.form.length_at(rate) or length_at(rate, opened)), ())

    def _fills(self, file: Path) -> bool:
        """Whether a sound has the length that the last step reads."""
        form = self._form_of_step
        return form is None or form.rate is None or length_at(form.rate, opened_sound(file)) == form.length

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return the classes, rate and length of the sounds, taken from ``known`` if present.

        Raises:
            UnmatchedError: the data have a class that the model does not have.
            DataError: the step requires other inputs.
        """
        sound, target = _parts(specs)
        form = self._form_of_step = self._form(sound, known)
        names = DataNames(sounds={sound.name: {"rate": form.rate, "length": form.length}})
        return names if target is None else names.updated(self._found.names_for(target, known))

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of samples, read by threads.

        Longer sounds are cropped at random, or in the middle without a seed.
        """
        sound, target = _parts(specs)
        form = self._form(sound, known)
        labels = None if target is None else self._found.targets(target, known)
        for samples in prefetched_samples(batches, lambda i: (self._samples(i, form, seed), i), self.threads):
            made = np.stack([one for one, _ in samples]).astype(numpy_dtype(sound.dtype))
            batch = {sound.name: made if len(sound.shape) == 2 else made[:, None]}
            if target is not None and labels is not None:
                batch[target.name] = labels[[i for _, i in samples]]
            yield {name: batch[name] for name in specs}

    def _form(self, sound: TensorSpec, names: DataNames) -> SoundForm:
        known = names.sounds.get(sound.name, {})
        first = self.form.rate or known.get("rate") or opened_sound(self.files[0]).rate
        return self.form.of(sound, known, first)

    def _samples(self, i: int, form: SoundForm, seed: Sequence[int]) -> Array:
        """Return the samples of a sound: float32 [length]."""
        assert form.rate is not None and form.length is not None
        rng = generator(seed, i)
        opened = opened_sound(self.files[i])
        with readable(self.files[i]):
            if opened.rate == form.rate:
                first = _place(opened.frames - form.length, rng)
                sound = opened.read(max(first, 0), min(form.length, opened.frames)).mean(axis=0)
            else:
                sound = _resampled(opened, form.rate)
                first = _place(len(sound) - form.length, rng)
                sound = sound[max(first, 0) : max(first, 0) + form.length]
        made = np.zeros(form.length, np.float32)
        made[max(-first, 0) : max(-first, 0) + len(sound)] = sound
        if self.augment is None or rng is None:
            return made
        return self.augment(made, rng, form.rate)


def read_sound(path: Path, rate: int) -> Array:
    """Return all samples of a WAV file at a sampling rate: float32 [samples]. Channels are averaged.

    Raises:
        DataError: the file cannot be read, or SciPy, which resamples it, is missing.
    """
    opened = opened_sound(path)
    with readable(path):
        return opened.read().mean(axis=0) if opened.rate == rate else _resampled(opened, rate)


def check_sounds(files: Iterable[Path], rate: int) -> None:
    """Raise DataError if :func:`read_sound` cannot read one of the files at a sampling rate.

    Only files that may contain non-finite samples are read, and one file of each other sampling rate.
    """
    resampled = {rate}
    for file in files:
        opened = opened_sound(file)
        if opened.kind == FLOAT or opened.rate not in resampled:
            read_sound(file, rate if opened.rate not in resampled else opened.rate)
            resampled.add(opened.rate)


def length_at(rate: int, opened: WavFile) -> int:
    """Return the number of samples of a sound at a sampling rate, rounded up."""
    return -(-opened.frames * rate // opened.rate)


def _place(rest: int, rng: np.random.Generator | None) -> int:
    """Return the position in the file at which a sound begins: random, or centred without ``rng``.

    The file is ``rest`` samples longer than the sound. A negative ``rest`` gives a negative position: the sound begins
    with silence.
    """
    if rest == 0:
        return 0
    offset = abs(rest) // 2 if rng is None else int(rng.integers(0, abs(rest) + 1))
    return offset if rest > 0 else -offset


def opened_sound(path: Path) -> WavFile:
    """Read the header of a WAV file; raise DataError if that is impossible, or it has no samples."""
    with readable(path):
        found = wav_file(path)
    if found.frames == 0:
        raise DataError(f"'{shown(path)}' contains no samples; remove it")
    return found


def _resampled(opened: WavFile, rate: int) -> Array:
    """Return all samples, float32, resampled to ``rate`` by a polyphase filter (scipy.signal.resample_poly)."""
    rates = f"'{shown(opened.path)}' has {opened.rate:,} samples per second, but the model expects {rate:,}"
    if max(opened.frames, opened.frames * rate // opened.rate) > MOST_SAMPLES:
        raise DataError(f"{rates}; resample it first, as it is too long to resample here")
    try:
        from scipy.signal import resample_poly
    except ImportError:
        install = "pip install scipy, which resamples it"
        raise DataError(rates, remedy=install, shell=install) from None
    common = math.gcd(opened.rate, rate)
    made: Array = resample_poly(opened.read().mean(axis=0), rate // common, opened.rate // common)
    return made.astype(np.float32)


def _parts(specs: Specs) -> tuple[TensorSpec, TensorSpec | None]:
    """Return a step's sound input and its target, if any; raise DataError if it requires other inputs."""
    targets = [spec for spec in specs.values() if isinstance(spec, TargetSpec)]
    inputs = [spec for spec in specs.values() if spec not in targets]
    if len(inputs) != 1 or len(targets) > 1:
        raise DataError(f"sounds provide one input and one target, but the step expects {listed(specs)}; "
                        "pass a dataset of dicts with these names")  # fmt: skip
    return inputs[0], targets[0] if targets else None


# --- public functions ----------------------------------------------------------------------------------------------


SECONDS = Kind("a number above zero", lambda value: FINITE.fits(value) and value > 0)
AUGMENT = Kind("a function, an augmentation such as 'spec_augment', or a list of them",
               lambda value: callable(value) or isinstance(value, str | Augmentation | list | tuple))  # fmt: skip
KINDS = {
    "rate": ABOVE_ZERO.or_none(),
    "seconds": SECONDS.or_none(),
    "augment": AUGMENT.or_none(),
    "threads": ABOVE_ZERO.or_none(),
}


@checked(path=PATH, **KINDS)
def folder(
    path: str | os.PathLike[str],
    *,
    rate: int | None = None,
    seconds: float | None = None,
    augment: Augment | None = None,
    threads: int | None = None,
) -> Sounds:
    """Read WAV files in a folder with one subfolder per class, for ``fit``, ``evaluate`` and ``predict``.

    ::

        commands = gg.sound.folder("commands/", seconds=1.0)
        trainer.fit(commands, epochs=10, batch_size=32)

    Classes are the subfolders in sorted order, numbered from 0. Samples are between −1 and 1; channels are averaged. In
    training, longer sounds are cropped and shorter ones padded with silence at random positions; in
    evaluation both are centred. Randomness depends only on the trainer's seed, the epoch and the index of the
    file, so a resumed run repeats it.

    Args:
        path: the folder. Without subfolders, its sounds have no labels (for ``predict``).
        rate: samples per second; by default that of the model (:func:`log_mel`), or of the first file.
            Files with other rates are resampled by SciPy.
        seconds: duration of a sound; by default that of the model's input.
        augment: augmentation in training: ``"spec_augment"``,
            ``gradgraph.augment.spec_augment(time_masks=1)``, or a function of float32 [samples] and a
            random generator that returns an array of the same shape and type; or a list of these.
        threads: number of reading threads; by default one per core, at most 8.

    Raises:
        DataError: the folder does not exist, or a class has no sounds.
    """
    return Sounds(labelled_folder(Path(path), SOUNDS), SoundForm(rate, seconds), augment, threads)


@checked(path=TEXT.or_none(), label=TEXT.or_none(), root=PATH.or_none(), **KINDS)
def table(
    frame: Any,
    path: str | None = None,
    label: str | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    rate: int | None = None,
    seconds: float | None = None,
    augment: Augment | None = None,
    threads: int | None = None,
) -> Sounds:
    """Read WAV files listed in a table, for ``fit``, ``evaluate`` and ``predict``.

    ::

        calls = gg.sound.table("calls.csv", "file", "species", seconds=3.0)

    Labels are matched by name with the model's classes. Integers are class numbers unless classes are named by these
    integers; other numbers are regression values.

    Args:
        frame: a data frame, or the path of a ``.csv``, ``.parquet``, ….
        path: the column of paths; by default the only one that names WAV files.
        label: the label column; by default the one used in training, the one named like the target, ``label``, or the
            only column besides the paths.
        root: the base folder of relative paths; by default that of the table.
        rate, seconds, augment, threads: as for :func:`folder`.

    Raises:
        DataError: the table or a column does not exist, or a row has no path.
    """
    return Sounds(labelled_table(frame, path, label, root, SOUNDS), SoundForm(rate, seconds), augment, threads)
