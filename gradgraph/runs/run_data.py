"""Data files of a run: reading options, and tokenizers for text."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradgraph.errors import DataError, ModelError, shown, suggestion

if TYPE_CHECKING:
    from gradgraph.data.record.data_names import DataNames
    from gradgraph.runtime.trainer import Trainer

# arguments of functions that read images and sounds, but not options of --image and --sound
OF_IMAGES = ("path", "augment")
OF_SOUNDS = ("frame", "path", "label", "root", "augment", "threads")


@dataclass(frozen=True)
class Reading:
    """Options for reading data files.

    Args:
        image, text, sound: arguments from --image, --text and --sound, by name.
        tokenizer: the path of the tokenizer.
        model: the path of the model, step folder or run folder; a tokenizer may be stored next to it.
    """

    image: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    sound: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None

    def data(
        self, path: Path, names: DataNames | None = None, augment: Sequence[str] = (), one_length: bool = False
    ) -> Any:
        """Return a dataset for text, audio, shards or images at ``path``; for other data, ``path`` itself.

        Args:
            path: the path of the data.
            names: the ``DataNames`` of the model, if any. For a model trained on text, the data are read as text.
            augment: augmentations of images or sounds.
            one_length: whether to pad all texts to the length of the longest.

        Raises:
            DataError: if an option does not apply to the data, or is invalid.
        """
        from gradgraph.data.sources.sources import reader_at
        from gradgraph.data.texts.frame_columns import is_text_file

        if self.tokenizer is not None or self.text or (names is not None and names.texts and is_text_file(path)):
            return self._texts(path, names, one_length)
        kind, read = reader_at(path) or ("", None)
        for option, given, what in (("image", self.image, "images"), ("sound", self.sound, "WAV files")):
            if given and option != kind:
                raise DataError.of_options(
                    f"--{option} describes how {what} are read, but '{shown(path)}' contains no {what}; omit it"
                )
        if read is None:
            if augment:
                raise DataError.of_options(
                    f"--augment applies to images and sounds, but '{shown(path)}' contains none; omit it"
                )
            return path
        options = self.image if kind == "image" else self.sound
        _check(kind, options, read, OF_IMAGES if kind == "image" else OF_SOUNDS)
        return read(path, **options, augment=list(augment) or None)

    def rows(self, path: Path) -> int:
        """Return the number of samples at ``path``."""
        from gradgraph.data.sources.sources import rows_in
        from gradgraph.data.texts.frame_columns import FrameColumns

        if self.tokenizer is not None or self.text:
            return FrameColumns(path).rows
        data = self.data(path)
        return rows_in(path) if data is path else len(data)

    def _texts(self, path: Path, names: DataNames | None, one_length: bool) -> Any:
        from gradgraph.text import table, tokenizer_beside

        _check("text", self.text, table, ("frame", "tokenizer", "label", "one_length"))
        tokenizer: Any = self.tokenizer
        if tokenizer is None:
            tokenizer = None if self.model is None or names is None else tokenizer_beside(self.model, names)
        if tokenizer is None:
            raise DataError.of_options(
                "--text describes how texts are read, but no tokenizer is given; add --tokenizer with the model's "
                "tokenizer.json"
            )
        return table(path, tokenizer, one_length=one_length, **self.text)


def _check(option: str, given: Mapping[str, Any], function: Callable[..., Any], others: Iterable[str]) -> None:
    """Raise DataError if a name in ``given`` is not an argument of ``function``, or is in ``others``."""
    known = [name for name in inspect.signature(function).parameters if name not in others]
    for name in given:
        if name not in known:
            raise DataError.of_options(f"--{option} has no argument '{shown(name)}'{suggestion(name, known)}")


def check_longest(trainer: Trainer, data: Any) -> None:
    """Run the model on the longest text in ``data``; raise DataError if that fails, such as for lack of positions."""
    from gradgraph.data.arrays.batch import fixed_rows
    from gradgraph.data.record.classes import as_class_numbers
    from gradgraph.text import TextTable

    if not isinstance(data, TextTable):
        return
    specs = {spec.name: spec for spec in trainer.manifest.batch}
    longest, tokens = data.longest
    rows = [longest] * (fixed_rows(specs.values()) or 1)
    try:
        batch = next(data.load(iter([rows]), specs, (), trainer.names))
        trainer.evaluate([as_class_numbers(batch, [target.name for target in trainer.manifest.targets])])
    except ModelError as error:
        raise DataError.of_options(
            f"the model fails on the longest text, of {tokens:,} tokens ({error.problem}); if it has fewer positions, "
            "truncate texts, for example with --text length=64"
        ) from None


# --- copies of the tokenizer next to written models -----------------------------------------------------------------


def keep_tokenizer(data: Any, written: Iterable[Path | None], run: Path | None = None) -> None:
    """Copy the tokenizer of ``data`` next to each written model and step folder, or once into a run folder.

    Args:
        data: the training data; without a tokenizer, nothing is copied.
        written: the paths of the written models and step folders.
        run: the run folder, if any.
    """
    from gradgraph.data.texts.tokenizer import NAME, place_beside
    from gradgraph.text import TextTable

    if not isinstance(data, TextTable):
        return
    paths = [path.absolute() for path in written if path is not None]
    folder = None if run is None else run.absolute()
    for place in dict.fromkeys(p.parent / NAME if p.parent == folder else place_beside(p) for p in paths):
        data.tokenizer.save(place)


def carry_tokenizer(model: Path, out: Path) -> Path | None:
    """Copy the tokenizer that is stored next to the step folder ``model`` next to the exported model ``out``.

    Return the path of the copy, or None if there is no tokenizer.
    """
    from gradgraph.data.texts.tokenizer import place_beside
    from gradgraph.step.step import Step
    from gradgraph.text import tokenizer_beside

    with contextlib.suppress(DataError):
        tokenizer = tokenizer_beside(model, Step.load(model).manifest.data)
        if tokenizer is not None:
            return tokenizer.save(place_beside(out))
    return None
