"""Training data in ``.tar`` shards, in WebDataset's format."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gradgraph.arguments import ABOVE_ZERO, PATH, checked, described, instance
from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.augmentation import Augmentations
from gradgraph.data.dataset import Loadable
from gradgraph.data.images.image_files import IMAGES, opened
from gradgraph.data.images.image_form import KINDS, Augment, ImageForm, Layout, Order, form_of, stacked
from gradgraph.data.images.mixed_batches import check_mixing, mixed
from gradgraph.data.labels import Labels, as_targets
from gradgraph.data.prefetch import prefetched_samples
from gradgraph.data.record.classes import Classes, takes_labels
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, TensorSpec
from gradgraph.data.shards.tar_members import members, name_at
from gradgraph.data.shuffling import displaced, generator, permutation
from gradgraph.errors import DataError, listed, shown, suggestion
from gradgraph.files.untrusted.array_files import npy_header
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import open_regular, readable

_IMAGES = tuple(suffix[1:] for suffix in IMAGES.suffixes)
READ = ("npy", "cls", "json", *_IMAGES)
MOST_TEXT, MOST_NAME = 1 << 24, 1000  # maximum bytes of a .json, and of a .cls (a number or a name)
MOST_FIELDS = 1000
BUFFER = 10_000
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")
_ZEROS = re.compile(r"[-+]?0[0-9]")  # leading zeros, which JSON does not allow in numbers
NAME = re.compile(r"^((?:.*/|)[^./][^./]*)[.]([^/]+)$", re.DOTALL)


class Field(NamedTuple):
    """The location of an input or target in a sample: the extension of a member, and for JSON a key in it."""

    extension: str
    key: str | None = None


class Shards(Loadable):
    """A dataset of samples in tar files; see :func:`shards`.

    Attributes:
        extensions: member extension → its number, in order of appearance.
    """

    def __init__(self, paths: Sequence[Path], names: Mapping[str, str], form: ImageForm, augment: Augment,
                 buffer: int, threads: int | None) -> None:  # fmt: skip
        self.paths, self.names, self.form = list(paths), dict(names), form
        self.augmented = None if augment is None else Augmentations(augment)
        self._labels: dict[Field, Labels] = {}  # labels that may be class names, read once
        self.buffer, self.threads = buffer, threads
        self.extensions: dict[str, int] = {}
        # offset, size and number of the extension of each member
        self._offsets, self._sizes, self._kinds = array("q"), array("q"), array("H")
        self._firsts = array("q")  # index of the first member of each sample
        self._shards = [0]  # index of the first sample of each shard, and finally the number of samples
        self._bytes: list[int] = []  # size of each file
        for path in self.paths:
            self._add(path)
        if not len(self):
            raise DataError(f"'{shown(self.paths[0])}' contains no samples; name members 000000.npy, 000000.cls, …")
        self._firsts.append(len(self._offsets))

    def __len__(self) -> int:
        return self._shards[-1]

    def __getitem__(self, i: int) -> dict[str, Array]:
        """Return the arrays of a sample, by extension."""
        ends = list(self.extensions)
        held = [ends[self._kinds[m]] for m in range(self._firsts[i], self._firsts[i + 1])]
        form = replace(self.form, layout=self.form.layout or "NCHW")
        forms = {end: form for end in held if _last(end) in _IMAGES}
        return self._sample(i, {end: Field(end) for end in held if _last(end) in READ}, forms, ())

    def _add(self, path: Path) -> None:
        last, seen, samples = None, set[int](), self._shards[-1]
        for member in members(path):
            parts = NAME.match(member.name)
            if parts is None or parts[1].rpartition("/")[2].startswith("__"):
                continue
            kind = self.extensions.setdefault(parts[2].lower(), len(self.extensions))
            if len(self.extensions) > MOST_FIELDS:
                raise DataError(
                    f"the members of '{shown(path)}' have more than {MOST_FIELDS:,} different extensions; use the same "
                    "extension in all samples: 000000.npy, 000001.npy, …"
                )
            if parts[1] != last:
                last, samples = parts[1], samples + 1
                self._firsts.append(len(self._offsets))
                seen.clear()
            elif kind in seen:
                raise DataError(f"'{shown(path)}' contains '{shown(member.name)}' twice; write it again")
            seen.add(kind)
            self._offsets.append(member.offset)
            self._sizes.append(member.size)
            self._kinds.append(kind)
        self._shards.append(samples)
        self._bytes.append(path.stat().st_size)

    def order(self, seed: int, epoch: int, batch_size: int) -> Array:
        """Return the sample order of a shuffled epoch: shards in a new order, and samples displaced within the buffer.

        Reading stays fast since nearby samples stay close to each other.
        """
        ranges = [np.arange(self._shards[i], self._shards[i + 1]) for i in permutation(seed, epoch, len(self.paths))]
        order: Array = np.concatenate(ranges)[displaced(seed, epoch, len(self), self.buffer)]
        return order

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return the image options for a step, and the class names if labels have them; ``known`` takes precedence.

        Raises:
            UnmatchedError: if a class is not known from training.
        """
        fields = self._fields(specs)
        check_mixing(self.augmented, next((spec for spec in specs.values() if isinstance(spec, TargetSpec)), None))
        images = (name for name, field in fields.items() if _last(field.extension) in _IMAGES)
        names = DataNames(images={name: self.form.like(known.images.get(name, {})).given for name in images})
        for name, field in fields.items():
            mine = Classes.known(known, name)
            if (labels := self._named(specs[name], field, mine)) is not None:
                names = names.updated(labels.matched(specs[name], mine)[1].of(name))
        return names

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches for a step, read and decoded in threads; arguments as for ``Images.load``."""
        fields = self._fields(specs)
        self._check_all_have(fields.values())
        images = [name for name, field in fields.items() if _last(field.extension) in _IMAGES]
        forms = {name: self.form.like(known.images.get(name, {})).of(specs[name]) for name in images}
        of = {name: Classes.known(known, name) for name in fields}
        named = {name: self._named(specs[name], field, of[name]) for name, field in fields.items()}
        targets = {name: labels.targets(specs[name], of[name]) for name, labels in named.items() if labels is not None}
        read = {name: field for name, field in fields.items() if name not in targets}
        for samples in prefetched_samples(batches, lambda i: (self._sample(i, read, forms, seed), i), self.threads):
            numbers = [i for _, i in samples]
            where = [f"sample {i} of the shards" for i in numbers]
            batch = {name: stacked([sample[name] for sample, _ in samples], where) for name in read}
            for name, rows in batch.items():
                if isinstance(specs[name], TargetSpec) and rows.ndim == 1:
                    batch[name] = as_targets(rows, specs[name], None, f"'{shown(self.paths[0])}'")
            batch |= {name: rows[numbers] for name, rows in targets.items()}
            if len(forms) == 1:
                label = next((name for name, spec in specs.items() if isinstance(spec, TargetSpec)), None)
                batch = mixed(batch, images[0], label, forms[images[0]], self.augmented, seed, numbers[0])
            yield {name: batch[name] for name in specs}

    def _named(self, spec: TensorSpec, field: Field, known: Classes | None) -> Labels | None:
        """Return all labels of a target if they are class names (also numbers, if the model's classes have such names).

        Otherwise return None.
        """
        if not isinstance(spec, TargetSpec) or _last(field.extension) not in ("cls", "json"):
            return None
        if field not in self._labels:
            self._check_all_have([field])
            first = next(self._labels_in(field))
            is_text, is_number = isinstance(first, str), np.ndim(first) == 0
            may_be_named = takes_labels(spec) if known is None else known.may_be_named_by_numbers
            if not is_text and not (is_number and may_be_named):
                return None
            values = np.empty(len(self), object)
            for i, found in enumerate(self._labels_in(field)):
                found = found.item() if isinstance(found, np.ndarray) and found.ndim == 0 else found
                values[i] = str(found) if _last(field.extension) == "cls" else found  # a .cls is untyped text
            self._labels[field] = Labels(f"'{shown(self.paths[0])}'", values)
        return self._labels[field]

    # --- matching of fields and inputs -------------------------------------------------------------------------

    def _fields(self, specs: Specs) -> dict[str, Field]:
        return {name: self._field(spec, specs) for name, spec in specs.items()}

    def _field(self, spec: TensorSpec, specs: Specs) -> Field:
        name = spec.name
        if name in self.names:
            given = self.names[name]
            if given in self.extensions:
                return Field(given)
            extension, _, key = given.partition("json.")
            if key and f"{extension}json" in self.extensions:
                return Field(f"{extension}json", key)
            raise DataError(
                f"no member of the shards has the extension '{shown(given)}'{suggestion(given, self.extensions)}"
            )
        own = [e for e in self.extensions if e.rpartition(".")[0] == name.lower()]
        alike = [s for s in specs.values() if isinstance(s, TargetSpec) is isinstance(spec, TargetSpec)]
        if not own and len(alike) == 1:
            kinds = ("cls",) if isinstance(spec, TargetSpec) else (*_IMAGES, "npy")
            own = [e for e in self.extensions if e in kinds and e not in self.names.values()]
        if not own and "json" in self.extensions:
            return Field("json", name)
        if len(own) != 1:
            raise DataError(
                f"none of the extensions of members of {listed(self.paths, 1)} ({listed(self.extensions)}) is clearly "
                f"the input or target '{shown(name)}'",
                remedy=f"map it: names={{'{shown(name)}': '{shown(next(iter(self.extensions)))}'}}",
                shell=f"rename them to 000000.{shown(name)}.npy, …",
            )
        return Field(own[0])

    def _check_all_have(self, fields: Iterable[Field]) -> None:
        """Raise DataError if a sample lacks a member for one of these fields."""
        kinds, firsts = np.frombuffer(self._kinds, np.uint16), np.frombuffer(self._firsts, np.int64)
        for field in fields:
            has = np.add.reduceat(kinds == self.extensions[field.extension], firsts[:-1])
            if not has.all():
                i = int(has.argmin())
                path = self.paths[self._shard_of(i)]
                first = name_at(path, self._offsets[self._firsts[i]])
                raise DataError(
                    f"the sample of '{shown(first)}' in '{shown(path)}' has no member with the extension "
                    f"'{shown(field.extension)}'; write it again"
                )

    def _shard_of(self, i: int) -> int:
        return int(np.searchsorted(self._shards, i, "right")) - 1

    # --- reading ------------------------------------------------------------------------------------------------

    def _sample(
        self, i: int, fields: Mapping[str, Field], forms: Mapping[str, ImageForm], seed: Sequence[int]
    ) -> dict[str, Array]:
        """Return the arrays of sample ``i`` by input or target name, augmented unless ``seed`` is empty."""
        shard, sample = self._shard_of(i), {}
        with self._opened(shard) as file:
            for name, field in fields.items():
                content, where = self._content(file, shard, i, field)
                if name in forms:
                    sample[name] = forms[name](opened(content, where), self.augmented, generator(seed, i))
                else:
                    sample[name] = _read(content, field, where)
        return sample

    def _labels_in(self, field: Field) -> Iterator[Any]:
        """Yield the label in ``field`` of every sample, in order; see :func:`_label`."""
        for shard in range(len(self.paths)):
            with self._opened(shard) as file:
                for i in range(self._shards[shard], self._shards[shard + 1]):
                    content, where = self._content(file, shard, i, field)
                    yield _label(content, field, where)

    @contextlib.contextmanager
    def _opened(self, shard: int) -> Iterator[BinaryIO]:
        path = self.paths[shard]
        with readable(path), open_regular(path) as file:
            if os.fstat(file.fileno()).st_size != self._bytes[shard]:
                raise DataError(f"'{shown(path)}' was changed while being read; start again")
            yield file

    def _content(self, file: BinaryIO, shard: int, i: int, field: Field) -> tuple[bytes, str]:
        """Return the bytes of a sample's member for ``field``, and the member's description for messages."""
        kind, number = _last(field.extension), self.extensions[field.extension]
        m = next(m for m in range(self._firsts[i], self._firsts[i + 1]) if self._kinds[m] == number)
        size, where = self._sizes[m], f"{self.paths[shard]}, {field.extension} of sample {i}"
        if kind not in READ:
            raise DataError(f"'{shown(where)}' has an unsupported type; use .npy, .cls, .json or images")
        if size > {"cls": MOST_NAME, "json": MOST_TEXT}.get(kind, size):
            raise DataError(f"'{shown(where)}' has {size:,} bytes, too many for a .{kind}; write the shard again")
        file.seek(self._offsets[m])
        return file.read(size), where


def _read(content: bytes, field: Field, where: str) -> Array:
    """Return the array in the bytes of a ``.npy``, ``.cls`` or ``.json``."""
    kind = _last(field.extension)
    try:
        if kind == "npy":
            return _array(content)
        value = json_of(content)
        if field.key is not None:
            value = value[field.key] if isinstance(value, dict) else None
        made = np.asarray(value)
        if made.dtype.kind not in "biuf" or (kind == "cls" and (made.ndim or made.dtype.kind == "f")):
            raise ValueError("it is not a number or a regular list of numbers")
        return made
    except (ValueError, KeyError, EOFError, OverflowError, RecursionError, MemoryError) as error:
        what = f"it has no '{field.key}'" if isinstance(error, KeyError) else str(error).split("\n", 1)[0]
        raise DataError(f"'{shown(where)}' cannot be read ({shown(what)}); write the shard again") from None


def _label(content: bytes, field: Field, where: str) -> Any:
    """Return the label in the bytes of a ``.cls`` or ``.json``: a string if it is a class name, otherwise an array."""
    if field.key is None:
        try:
            text = content.decode().strip()
        except UnicodeDecodeError:
            text = ""
        if _last(field.extension) == "cls" and text and (not _NUMBER.fullmatch(text) or _ZEROS.match(text)):
            return text
        return _read(content, field, where)
    try:
        value = json_of(content)
    except ValueError:
        value = None
    found = value.get(field.key) if isinstance(value, dict) else None
    return found if isinstance(found, str) and found else _read(content, field, where)


def _array(content: bytes) -> Array:
    """Return the array in the bytes of a ``.npy``; pickles are never loaded."""
    # the end of a header of version 1; others are parsed from all bytes
    size = int.from_bytes(content[8:10], "little") + 10
    head = content[:size] if content[6:7] == b"\1" else content
    shape, is_fortran, dtype, start = (_header if len(head) < 1000 else _header.__wrapped__)(head)
    if dtype.hasobject:
        raise ValueError("it contains pickled objects, which are never loaded")
    if math.prod(shape) * dtype.itemsize != len(content) - start:
        raise ValueError("its size does not match its header")
    return np.frombuffer(content, dtype, offset=start).reshape(shape, order="F" if is_fortran else "C")


@functools.lru_cache(64)
def _header(content: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether in Fortran order, dtype and data offset from the header of a ``.npy``.

    Results are cached, since parsing takes longer than reading the array, and most headers are equal.
    """
    file = io.BytesIO(content)
    shape, is_fortran, dtype = npy_header(file)
    return shape, is_fortran, dtype, file.tell()


def _last(extension: str) -> str:
    return extension.rpartition(".")[2]


# --- paths --------------------------------------------------------------------------------------------------------


def is_shards(path: Path) -> bool:
    """Whether the path is a tar file, a glob or range of tar files, or a folder with tar files."""
    try:
        return path.suffix.lower() == ".tar" or (path.is_dir() and next(path.glob("*.tar"), None) is not None)
    except OSError:
        return False


def _paths(given: Any) -> list[Path]:
    each = [given] if PATH.fits(given) else list(given)
    if not all(map(PATH.fits, each)):
        raise DataError(f"{described(each)} are not paths of shards; pass paths of .tar files")
    found: list[Path] = []
    for path in map(Path, each):
        with readable(path, "path"):  # fails for a name that is too long
            if path.is_dir():
                some = sorted(path.glob("*.tar"))
            else:
                spelt = [path] if path.exists() else map(Path, _ranges(str(path)))
                some = [p for s in spelt for p in (sorted(s.parent.glob(s.name)) if "*" in s.name else [s])]
        if not some or not all(p.is_file() for p in some):
            raise DataError(
                f"'{shown(path)}' is not a tar file, or a folder, glob or range of tar files; check the path"
            )
        found += some
    if not found:
        raise DataError("there are no shards; pass the path of a .tar, or a list of them")
    return found


def _ranges(text: str) -> Iterator[str]:
    """Yield the paths of a range such as ``train-{000..012}.tar``."""
    parts = re.split(r"\{(\d{1,6}\.\.\d{1,6})\}", text)
    counts = [
        [str(n).zfill(len(a)) for n in range(int(a), int(b) + 1)] for a, b in (p.split("..") for p in parts[1::2])
    ]
    if math.prod(map(len, counts)) > 100_000:
        raise DataError(f"'{shown(text)}' expands to more than 100,000 files; use a folder")
    for numbers in itertools.product(*counts):
        yield "".join(itertools.chain.from_iterable(itertools.zip_longest(parts[::2], numbers, fillvalue="")))


@checked(path=instance(str | os.PathLike | list | tuple, "a path, or a list of them"),
         names=instance(Mapping, "a dict of extensions by name").or_none(), buffer=ABOVE_ZERO, **KINDS)  # fmt: skip
def shards(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    names: Mapping[str, str] | None = None,
    *,
    buffer: int = BUFFER,
    size: tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: Layout | None = None,
    shorter: int | None = None,
    resample: str | None = None,
    order: Order | None = None,
    scale: float | None = None,
    augment: Augment = None,
    threads: int | None = None,
) -> Shards:
    """Read samples in tar files in WebDataset's format, for ``fit``, ``evaluate`` and ``predict``.

    ::

        data = gg.shards("train-{000..099}.tar", {"x": "jpg", "target": "cls"}, size=(224, 224))
        trainer.fit(data, epochs=3, batch_size=64)

    Consecutive members with the same name up to the first dot are one sample: ``000000.jpg``, ``000000.cls``. Supported
    members are ``.npy``, ``.cls`` (an integer, or a class name), ``.json`` (numbers, or a dict of numbers and class
    names) and images; pickles are never loaded.

    This function reads only the headers. Samples are read from the shards during training, with only a few
    batches in memory. A shuffled epoch reorders the shards, and displaces each sample within ``buffer``. The
    order depends only on the trainer's seed and the epoch, so a resumed run continues at the same sample.

    Args:
        path: a ``.tar`` file, a folder of such files, a glob or a range (``train-{000..099}.tar``), or a list of these.
        names: the extension of each input and target, which is everything after the first dot: ``"jpg"``,
            ``"mask.png"``, or ``"json.label"`` for a key in a JSON member. By default, ``000000.x.npy`` is the input or
            target ``x``, a ``.cls`` is the target, and the only other array or image is the input.
        buffer: the approximate maximum displacement of a sample.
        size, mean, std, layout, shorter, resample, order, scale, augment, threads: options of images, as for
            :func:`gradgraph.image_folder`.

    Raises:
        DataError: if a file is missing, damaged or compressed, or contains members that are not regular files.
    """
    form = form_of(size, mean, std, layout, shorter, resample, order, scale)
    return Shards(_paths(path), names or {}, form, augment, buffer, threads)
