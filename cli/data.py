"""Data that the command line reads otherwise than Python does: how files become arrays is said by options there."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from gradgraph.cli.choices import PATH, Suggested
from gradgraph.cli.key_values import arguments
from gradgraph.cli.sections import placed
from gradgraph.errors import DataError, ModelError, shown, suggestion

if TYPE_CHECKING:
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.data_names import DataNames

F = TypeVar("F", bound=Callable[..., Any])

READING = (
    placed(
        "data",
        "--image",
        of="",
        multiple=True,
        callback=arguments,
        metavar="KEY=VALUE",
        help="How images become arrays, such as mean=[0.5,0.5,0.5], std=…, size=[224,224], shorter=256, "
        "resample=bicubic, layout=NHWC, order=BGR, scale=1; repeatable.",
    ),
    placed(
        "data",
        "--tokenizer",
        type=PATH,
        help="The tokenizer.json by which the texts of a table (or of .conll) become what the model takes; it is kept "
        "beside the trained model, and found there.",
    ),
    placed(
        "data",
        "--text",
        of="",
        multiple=True,
        callback=arguments,
        metavar="KEY=VALUE",
        help="How texts are read, such as text=review, pair=answer, words=tokens, length=128; repeatable.",
    ),
    placed(
        "data",
        "--sound",
        of="",
        multiple=True,
        callback=arguments,
        metavar="KEY=VALUE",
        help="How WAV files become samples: rate=16000, seconds=1; repeatable.",
    ),
)


def _columns(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """``a,b``: the names of columns; one that has a comma stands in quotes, as in a .csv, or beside another option."""
    if len(given) != 1 or ctx.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
        return tuple(given)  # a recipe lists them
    from gradgraph.files.untrusted.documents import csv_head

    return tuple(name for name in csv_head(given[0].encode())[0] if name)


TARGET = placed(
    "data",
    "--target",
    multiple=True,
    callback=_columns,
    metavar="COLUMN,…",
    help="The column of a table that is learnt, or several; repeatable. A name that has a comma stands in quotes, as "
    "in a .csv. By default that of the target's name.",
)


AUGMENT = placed(
    "data",
    "--augment",
    multiple=True,
    type=Suggested("augment:AUGMENTATIONS"),
    metavar="NAME",
    help="Change the images or sounds that are trained on at random: flip, 'random_resized_crop(scale=[0.5,1])', "
    "'mixup(alpha=0.2)', spec_augment, …; repeatable.",
)


def reading_options(command: F) -> F:
    """The options that say how data become arrays; :class:`Reading` takes them."""
    for option in reversed(READING):
        command = option(command)
    return command


@dataclass(frozen=True)
class Reading:
    """The way from files to arrays, as it was typed.

    Args:
        image, text, sound: arguments for images, for texts and for sounds.
        tokenizer: the path of that which texts are read with.
        model: the model, its step folder or its run, beside which a tokenizer may lie.
    """

    image: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    sound: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None

    def data(
        self, path: Path, names: DataNames | None = None, augment: Sequence[str] = (), one_length: bool = False
    ) -> Any:
        """The dataset of texts, sounds, shards, or images of any kind; any other ``path`` as it is.

        Args:
            path: of the data.
            names: of those that the model was trained on: who has read texts, reads texts.
            augment: how images or sounds are changed.
            one_length: fill up all texts to the length of the longest.

        Raises:
            DataError: an option says how something is read that is not there, or says it wrongly.
        """
        from gradgraph.runtime.data.image_tables import image_table, is_image_table
        from gradgraph.runtime.data.images import image_folder, is_image_folder
        from gradgraph.runtime.data.shards import is_shards, shards
        from gradgraph.vision.reading import reader_of

        if self.tokenizer is not None or self.text or (names is not None and names.texts and self._is_text(path)):
            return self._texts(path, names, one_length)
        kinds: dict[Callable[..., Any], Callable[[Path], bool]] = {
            shards: is_shards,
            image_folder: is_image_folder,
            image_table: is_image_table,
        }
        read = reader_of(path) or next((read for read, is_one in kinds.items() if is_one(path)), None)
        if read is None:
            if self.image:
                raise DataError(f"--image says how images become arrays, but '{shown(path)}' holds no images")
            sounds = self._sounds(path, augment)
            if augment and sounds is None:
                raise DataError(f"--augment changes images and sounds, but '{shown(path)}' holds none")
            return path if sounds is None else sounds
        _check("image", self.image, read, ("path", "augment"))
        return read(path, **self.image, augment=list(augment) or None)

    def rows(self, path: Path) -> int:
        """How many samples there are."""
        from gradgraph.runtime.data.sources import rows_in
        from gradgraph.vision.reading import reader_of

        if (read := reader_of(path)) is not None:
            return len(read(path, **self.image))
        if self.tokenizer is not None or self.text:
            from gradgraph.text.frame_columns import FrameColumns

            return FrameColumns(path).rows
        sounds = self._sounds(path)
        return rows_in(path) if sounds is None else len(sounds)

    def _sounds(self, path: Path, augment: Sequence[str] = ()) -> Any:
        """The dataset of WAV files in a folder, or that a table names; None where there are none."""
        from gradgraph.sound import folder, table
        from gradgraph.sound.sounds import is_sound_folder, is_sound_table

        read: Any = folder if is_sound_folder(path) else table if is_sound_table(path) else None
        if read is None:
            if self.sound:
                raise DataError(f"--sound says how sounds are read, but '{shown(path)}' holds no WAV files")
            return None
        _check("sound", self.sound, folder, ("path", "augment", "threads"))
        return read(path, **self.sound, augment=list(augment) or None)

    def _is_text(self, path: Path) -> bool:
        from gradgraph.text.frame_columns import is_text_file

        return is_text_file(path)

    def _texts(self, path: Path, names: DataNames | None, one_length: bool) -> Any:
        from gradgraph.text import table, tokenizer_beside

        _check("text", self.text, table, ("frame", "tokenizer", "label", "one_length"))
        tokenizer: Any = self.tokenizer
        if tokenizer is None:
            tokenizer = None if self.model is None or names is None else tokenizer_beside(self.model, names)
        if tokenizer is None:
            raise DataError("--text says how texts are read, and no tokenizer is given; add --tokenizer, the "
                            "tokenizer.json that lies beside the model where it comes from")  # fmt: skip
        return table(path, tokenizer, one_length=one_length, **self.text)


def _check(option: str, given: Mapping[str, Any], function: Callable[..., Any], others: Iterable[str]) -> None:
    """Raise DataError for an argument that ``function`` does not have, or that is given otherwise."""
    known = [name for name in inspect.signature(function).parameters if name not in others]
    for name in given:
        if name not in known:
            raise DataError(f"--{option} has no '{shown(name)}'{suggestion(name, known)}")


def check_longest(trainer: Trainer, data: Any) -> None:
    """Run the longest of texts, which a model with fewer positions fails on; raises DataError."""
    from gradgraph.runtime.data.batch import fixed_rows
    from gradgraph.step.classes import as_class_numbers
    from gradgraph.text import TextTable

    if not isinstance(data, TextTable):
        return
    specs = {spec.name: spec for spec in (*trainer.manifest.inputs, *trainer.manifest.targets)}
    longest, tokens = data.longest
    rows = [longest] * (fixed_rows(specs.values()) or 1)
    try:
        batch = next(data.load(iter([rows]), specs, (), trainer.names))
        trainer.evaluate([as_class_numbers(batch, [target.name for target in trainer.manifest.targets])])
    except ModelError as error:
        raise DataError(
            f"the model fails on the longest text, of {tokens:,} tokens ({error.problem}); if it has fewer positions, "
            "cut texts to these with --text length=64, say"
        ) from None


# --- tokenizers that go with what is written ------------------------------------------------------------------------


def keep_tokenizer(data: Any, written: Iterable[Path | None], run: Path | None = None) -> None:
    """Write the tokenizer of texts beside each model and step folder that is written; once into a run's folder."""
    from gradgraph.text import TextTable
    from gradgraph.text.tokenizer import NAME, place_beside

    if not isinstance(data, TextTable):
        return
    paths = [path.absolute() for path in written if path is not None]
    for place in dict.fromkeys(p.parent / NAME if _lies_in(p, run) else place_beside(p) for p in paths):
        data.tokenizer.save(place)


def carry_tokenizer(model: Path, out: Path) -> Path | None:
    """Write the tokenizer that lies beside a step folder beside the model that is made of it, too; give its path."""
    from gradgraph.step.step import Step
    from gradgraph.text import tokenizer_beside
    from gradgraph.text.tokenizer import place_beside

    with contextlib.suppress(DataError):
        tokenizer = tokenizer_beside(model, Step.load(model).manifest.data)
        if tokenizer is not None:
            return tokenizer.save(place_beside(out))
    return None


def _lies_in(path: Path, folder: Path | None) -> bool:
    return folder is not None and path.parent == folder.absolute()
