"""The names of the data that a model was trained on: columns, classes, and how images, texts and sounds were read.

Later data are matched by them. They stand in the manifest of a step, in checkpoints, and in the metadata of an exported
model under ``gradgraph.data``; here alone they are written and read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gradgraph.augment.augmentation import INTERPOLATIONS
from gradgraph.errors import ArgumentError, ModelError, escaped_json, shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.preprocess.computed import Preprocessing

NAMES_KEY = "gradgraph.data"
MOST_NAMES = 1_000_000
MOST_PIXELS = 64_000_000  # of an image that is made


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ArgumentError(f"{name} should hold names")
    return value


def is_text(name: str) -> bool:
    """Whether UTF-8 can say it; the name of a file need not be so."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _names(what: str, names: Any) -> tuple[str, ...]:
    listed = isinstance(names, list | tuple)
    if not listed or len(names) > MOST_NAMES or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"the names of {shown(what)!r} should be a list of texts")
    if not all(map(is_text, names)):
        raise ArgumentError(f"a name of {shown(what)!r} holds half a character")
    if len(set(names)) < len(names):
        raise ArgumentError(f"a name of {shown(what)!r} stands twice")
    return tuple(names)


def _is_size(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_side, value))
    return is_pair and math.prod(value) <= MOST_PIXELS


def _is_side(value: Any) -> bool:
    return type(value) is int and 0 < value <= MOST_PIXELS


def _are_numbers(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and 0 < len(value) <= 4
    return is_list and all(type(n) in (int, float) and abs(n) < math.inf for n in value)


_IMAGES: dict[str, Callable[[Any], bool]] = {
    "size": _is_size,
    "mean": _are_numbers,
    "std": _are_numbers,
    "layout": lambda value: value in ("NCHW", "NHWC"),
    "shorter": lambda value: _is_size([value, value]),
    "resample": lambda value: isinstance(value, str) and value in INTERPOLATIONS,
    "order": lambda value: value in ("RGB", "BGR"),
    "scale": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "letterbox": lambda value: isinstance(value, bool),
    "crop": lambda value: value in ("round", "floor"),
}


def _is_column(value: Any) -> bool:
    return isinstance(value, str) and is_text(value)


_TEXTS: dict[str, Callable[[Any], bool]] = {
    "text": _is_column,
    "pair": _is_column,
    "choices": lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_column, value)),
    "words": _is_column,
    "length": _is_side,
    "tokenizer": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
}
_SOUNDS: dict[str, Callable[[Any], bool]] = {"rate": _is_side, "length": _is_side}
_READ = {"images": _IMAGES, "texts": _TEXTS, "sounds": _SOUNDS}


def _as_read(what: str, name: str, given: Any) -> dict[str, Any]:
    """Check how an input of images, texts or sounds was read."""
    for key, value in _mapping(f"{what} of {shown(name)}", given).items():
        if key not in _READ[what] or not _READ[what][key](value):
            raise ArgumentError(f"how {what} of {shown(name)!r} are read: {shown(key)!r} is {shown(repr(value))}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def _fitting(held: Mapping[str, Sequence[str]], sizes: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    fits = {name: len(names) == sizes[name] for name, names in held.items() if isinstance(sizes.get(name), int)}
    return {name: names for name, names in held.items() if name in sizes and fits.get(name, True)}


@dataclass(frozen=True)
class DataNames:
    """The names by which data are matched with those that a model was trained on.

    Args:
        columns: of an input, the columns of a table that it is made of, in their order.
        classes: of a target, the names of its classes, that of number 0 first.
        images: of an input, how images became its arrays: arguments of ``gradgraph.image_folder``.
        softmax: the targets whose classes have the Softmax of the model's scores for probabilities.
        texts: of an input, how texts became its numbers: arguments of ``gradgraph.text.table``, with the SHA-256 of
            the tokenizer's file in place of its path.
        sounds: of an input, how sounds became its samples: arguments of ``gradgraph.sound.folder``.
        preprocess: what becomes of the columns of a table before the model reads them.
        sigmoid: the targets of two classes whose second one has the Sigmoid of the model's only score for probability.
        numbered: the targets whose data have numbers of classes in place of their names.

    Raises:
        ArgumentError: a name is no text or stands twice, or an argument cannot be meant.
    """

    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    images: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    softmax: Sequence[str] = ()
    texts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sounds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    preprocess: Preprocessing | None = None
    sigmoid: Sequence[str] = ()
    numbered: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("columns", "classes"):
            lists = _mapping(name, getattr(self, name))
            object.__setattr__(self, name, {key: _names(key, names) for key, names in lists.items()})
        for what in _READ:
            read = {name: _as_read(what, name, given) for name, given in _mapping(what, getattr(self, what)).items()}
            object.__setattr__(self, what, read)
        for name in ("softmax", "sigmoid", "numbered"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if not isinstance(self.preprocess, Preprocessing | None):
            object.__setattr__(self, "preprocess", Preprocessing.from_data(self.preprocess))

    def __bool__(self) -> bool:
        return bool(self.columns or self.classes or self.images or self.texts or self.sounds or self.preprocess)

    def updated(self, other: DataNames) -> DataNames:
        """These names, with those of ``other`` in place of what it names, too."""
        return DataNames(
            {**self.columns, **other.columns},
            {**self.classes, **other.classes},
            {**self.images, **other.images},
            tuple(dict.fromkeys([*self.softmax, *other.softmax])),
            {**self.texts, **other.texts},
            {**self.sounds, **other.sounds},
            other.preprocess or self.preprocess,
            tuple(dict.fromkeys([*self.sigmoid, *other.sigmoid])),
            tuple(dict.fromkeys([*filter(self._keeps_in(other), self.numbered), *other.numbered])),
        )

    def _keeps_in(self, other: DataNames) -> Callable[[str], bool]:
        """Whether ``other`` has no classes of its own for a target."""
        return lambda target: other.classes.get(target, self.classes.get(target)) == self.classes.get(target)

    def fitting(self, columns: Mapping[str, Any], classes: Mapping[str, Any]) -> DataNames:
        """These names for a step that was built from the model: without those of another head, input or loss.

        The only target takes the names of the only one before, whatever it is called.

        Args:
            columns, classes: of each input, the columns of its matrix; of each target of labels, its classes. What is
                no number may be any.
        """
        held, numbered = self.classes, list(self.numbered)
        if len(held) == 1 and len(classes) == 1:
            numbered = list(classes) if numbered == list(held) else []
            held = dict(zip(classes, held.values(), strict=True))
        fit = _fitting(held, classes)
        named = replace(self, columns=_fitting(self.columns, columns), classes=fit,
                        numbered=[target for target in numbered if target in fit])  # fmt: skip
        made = {} if self.preprocess is None else {n: len(own) for n, own in self.preprocess.features.items()}
        fits = all(columns.get(name) == count for name, count in made.items())
        return replace(named.without_activations(), preprocess=self.preprocess if fits else None)

    def without_activations(self) -> DataNames:
        """These names without what a step's losses say of them."""
        return replace(self, softmax=(), sigmoid=())

    # --- written and read -----------------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON; what names nothing is left out."""
        plan = {} if self.preprocess is None else {"preprocess": self.preprocess.as_data()}
        numbered = [target for target in self.numbered if target in self.classes]
        plain = replace(self, preprocess=None, numbered=numbered)
        return {name: value for name, value in asdict(plain).items() if value} | plan

    @classmethod
    def from_data(cls, data: Any) -> DataNames:
        """Check plain data that somebody may have written, such as JSON has; raises ArgumentError."""
        known = {f.name for f in fields(cls)}
        for name in _mapping("data", data):
            if name not in known:
                raise ArgumentError(f"unknown field {shown(name)!r}")
        return cls(**data)

    def as_metadata(self) -> dict[str, str]:
        """The entry for the metadata of a model; none where there are no names."""
        return {NAMES_KEY: escaped_json(json.dumps(self.as_data(), ensure_ascii=False))} if self else {}

    @classmethod
    def read_from(cls, metadata: Mapping[str, str]) -> DataNames:
        """The names in the metadata of a model; none where there are none.

        Raises:
            ModelError: they are damaged.
        """
        try:
            return cls.from_data(json_of(metadata.get(NAMES_KEY, "{}")))
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"the metadata '{NAMES_KEY}' of the model is damaged ({shown(error)}); export the model again"
            ) from None


NO_NAMES = DataNames()
