"""Names in a model's training data: columns, classes, and the options for reading images, texts and sounds.

Data for later training, evaluation and prediction are matched against them. They are stored in the manifest of a step,
in checkpoints, and in the metadata of an exported model under ``gradgraph.data``; only this module reads and writes
that format.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gradgraph.data.augment.augmentation import INTERPOLATIONS
from gradgraph.data.preprocess.computed import Preprocessing
from gradgraph.data.preprocess.frames import is_text
from gradgraph.errors import ArgumentError, ModelError, escaped_json, shown
from gradgraph.files.untrusted.documents import json_of

NAMES_KEY = "gradgraph.data"
MOST_NAMES = 1_000_000
MOST_PIXELS = 64_000_000  # of a generated image


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ArgumentError(f"{name} should be a dict with names as keys")
    return value


def _names(what: str, names: Any) -> tuple[str, ...]:
    listed = isinstance(names, list | tuple)
    if not listed or len(names) > MOST_NAMES or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"the names of {shown(what)!r} should be a list of strings")
    if not all(map(is_text, names)):
        raise ArgumentError(f"a name of {shown(what)!r} contains an unpaired surrogate, which is not valid text")
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise ArgumentError(f"the names of {shown(what)!r} contain {shown(twice)!r} twice; give each name once")
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


_TEXTS: dict[str, Callable[[Any], bool]] = {
    "text": is_text,
    "pair": is_text,
    "choices": lambda value: isinstance(value, list | tuple) and bool(value) and all(map(is_text, value)),
    "words": is_text,
    "length": _is_side,
    "tokenizer": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
}
_SOUNDS: dict[str, Callable[[Any], bool]] = {"rate": _is_side, "length": _is_side}
_READ = {"images": _IMAGES, "texts": _TEXTS, "sounds": _SOUNDS}


def _as_read(what: str, name: str, given: Any) -> dict[str, Any]:
    """Return the checked reading options of an input of images, texts or sounds, with tuples in place of lists."""
    for key, value in _mapping(f"{what} of {shown(name)}", given).items():
        if key not in _READ[what] or not _READ[what][key](value):
            raise ArgumentError(
                f"the option {shown(key)!r} for reading {what} of {shown(name)!r} is unknown or has an invalid value: "
                f"{shown(repr(value))}"
            )
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def _fitting(held: Mapping[str, Sequence[str]], sizes: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    fits = {name: len(names) == sizes[name] for name, names in held.items() if isinstance(sizes.get(name), int)}
    return {name: names for name, names in held.items() if name in sizes and fits.get(name, True)}


@dataclass(frozen=True)
class DataNames:
    """The names that match new data to a model's training data.

    Args:
        columns: for each input, the table columns that it consists of, in order.
        classes: for each target, the names of its classes, in the order of their indices.
        images: for each input, how images are read: arguments of ``gradgraph.image_folder``.
        softmax: the targets whose class probabilities are the Softmax of the model's scores.
        texts: for each input, how texts are tokenized: arguments of ``gradgraph.text.table``, with the SHA-256 of the
            tokenizer's file in place of its path.
        sounds: for each input, how sounds are read: arguments of ``gradgraph.sound.folder``.
        preprocess: how the columns of a table are preprocessed.
        sigmoid: the targets of two classes for which the model has a single score, whose Sigmoid is the probability of
            the second class.
        numbered: the targets whose labels in the data are class indices instead of names.

    Raises:
        ArgumentError: if a name is not text or occurs twice, or an argument is invalid.
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
        """Return these names, updated with those of ``other``; a target whose classes change is not ``numbered``."""
        names = ("columns", "classes", *_READ)
        new: dict[str, Any] = {name: {**getattr(self, name), **getattr(other, name)} for name in names}
        numbered = [target for target in self.numbered if new["classes"].get(target) == self.classes.get(target)]
        for name, own in (("softmax", self.softmax), ("sigmoid", self.sigmoid), ("numbered", numbered)):
            new[name] = tuple(dict.fromkeys([*own, *getattr(other, name)]))
        return DataNames(**new, preprocess=other.preprocess or self.preprocess)

    def fitting(self, columns: Mapping[str, Any], classes: Mapping[str, Any]) -> DataNames:
        """Return the names that still apply to a new step of the model with other inputs, head or loss.

        If there is a single target before and now, it keeps its class names even if its name changed.

        Args:
            columns: for each input of the new step, the number of columns of its matrix.
            classes: for each target of labels, its number of classes. A size that is not an int matches any.
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
        """Return these names without ``softmax`` and ``sigmoid``, which depend on a step's losses."""
        return replace(self, softmax=(), sigmoid=())

    # --- reading and writing ----------------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """Return plain dicts and lists, for JSON; empty fields are omitted."""
        plan = {} if self.preprocess is None else {"preprocess": self.preprocess.as_data()}
        numbered = [target for target in self.numbered if target in self.classes]
        plain = replace(self, preprocess=None, numbered=numbered)
        return {name: value for name, value in asdict(plain).items() if value} | plan

    @classmethod
    def from_data(cls, data: Any) -> DataNames:
        """Return names from untrusted plain data, such as parsed JSON.

        Raises:
            ArgumentError: the data are invalid.
        """
        known = {f.name for f in fields(cls)}
        for name in _mapping("data", data):
            if name not in known:
                raise ArgumentError(f"unknown field {shown(name)!r}")
        return cls(**data)

    def as_metadata(self) -> dict[str, str]:
        """Return the metadata entry for a model with these names; empty if there are none."""
        return {NAMES_KEY: escaped_json(json.dumps(self.as_data(), ensure_ascii=False))} if self else {}

    @classmethod
    def read_from(cls, metadata: Mapping[str, str]) -> DataNames:
        """Return the names stored in the metadata of a model; empty if there are none.

        Raises:
            ModelError: the entry is damaged.
        """
        try:
            return cls.from_data(json_of(metadata.get(NAMES_KEY, "{}")))
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"the metadata '{NAMES_KEY}' of the model is damaged ({shown(error)}); export the model again"
            ) from None


NO_NAMES = DataNames()
