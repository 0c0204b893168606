"""Kinds of columns: what is learnt of one, and the ONNX nodes that make numbers of it.

Each kind is plain data, which is all that a file keeps of it. ``learn`` makes one of the column of a training table;
``write`` emits its nodes, [rows] to [rows, width].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gradgraph.arguments import Table
from gradgraph.errors import ArgumentError, DataError, shown
from gradgraph.preprocess.frames import Array, are_numbers, is_text, numbers_of, text_of
from gradgraph.preprocess.words import words_of

if TYPE_CHECKING:
    from gradgraph.graph.builder import Builder, Var

ML = "ai.onnx.ml"
MOST_CATEGORIES = 100_000
MOST_BUCKETS = 1 << 16
DATE = (
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-9]{2}([.][0-9]+)?)?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2})?)?"
)


class ColumnKind:
    """A kind of column.

    Attributes:
        name: in overrides, in help and in files.
        takes_text: the model reads the column as text, or else as float64.
        is_index: it gives int64 numbers of categories, or else float32.
    """

    name: ClassVar[str]
    takes_text: bool = False
    is_index: bool = False

    @property
    def parts(self) -> list[str]:
        """Words for each number that is made."""
        raise NotImplementedError

    def write(self, op: Builder, x: Var) -> Var:
        """Emit nodes: [rows], text or float64, to [rows, width]."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        """A column, as the nodes read it, with gaps and values that training data lack: text, or float64."""
        raise NotImplementedError

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in own.items()}}

    def check(self, *fits: bool) -> None:
        """Raise ArgumentError unless all is as :meth:`learn` makes it."""
        if not all(fits):
            raise ArgumentError(f"a column of the kind {self.name} has values that it cannot have")


KINDS: Table[type[Any]] = Table("kind of column")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e308 < value < 1e308


def _centre(name: str, values: Array) -> tuple[float, float]:
    """Mean and standard deviation of the numbers that are there, such that they can be taken off and divided by."""
    there = values[~np.isnan(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = (float(there.mean()), float(there.std())) if there.size else (0.0, 1.0)
    if not (math.isfinite(mean) and math.isfinite(std)):
        raise DataError(f"the column '{shown(name)}' holds infinite numbers, or too large ones; correct them")
    return mean, std if std > 1e-14 * abs(mean) else 1.0


@dataclass(frozen=True)
class Number(ColumnKind):
    """Take off the mean, divide by the standard deviation; a gap is the mean, and a column of its own says so.

    Attributes:
        mean, std: of the numbers that are there; 0 and 1 where nothing is scaled.
        fill: what a gap is taken for.
        has_gaps: whether the training data have some.
    """

    name = "number"
    mean: float
    std: float
    fill: float
    has_gaps: bool

    def __post_init__(self) -> None:
        numbers = all(map(_is_number, (self.mean, self.std, self.fill)))
        self.check(numbers and self.std > 0, isinstance(self.has_gaps, bool))

    @classmethod
    def learn(cls, column: str, values: Array, *, scale: bool = True) -> Number:
        numbers = numbers_of(column, values)
        fill, std = _centre(column, numbers)
        gaps = bool(np.isnan(numbers).any())
        return cls(fill, std, fill, gaps) if scale else cls(0.0, 1.0, fill, gaps)

    @property
    def parts(self) -> list[str]:
        return ["", *([" is missing"] if self.has_gaps else [])]

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        return np.where(rng.random(rows) < 0.1, np.nan, self.fill + self.std * rng.normal(size=rows))

    def write(self, op: Builder, x: Var) -> Var:
        gap = op.IsNaN(x)
        scaled = _float((op.Where(gap, self.fill, x) - self.mean) / self.std)
        return _side_by_side(op, [scaled, *([_float(gap)] if self.has_gaps else [])])


@dataclass(frozen=True)
class Category(ColumnKind):
    """One of the values that training data have, each with a slot of its own; the last slot is for all others.

    Attributes:
        values: sorted; text, or numbers.
        has_gaps: of numbers, whether a gap is one of them. (That of text is "".)
        is_index: its number is given, for an embedding, or else one number for each slot (one-hot).
    """

    name = "category"
    values: tuple[str, ...] | tuple[float, ...]
    has_gaps: bool = False
    is_index: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values) if isinstance(self.values, list) else self.values)
        self.check(isinstance(self.values, tuple), isinstance(self.has_gaps, bool), isinstance(self.is_index, bool))
        text = all(map(is_text, self.values))
        self.check(text or all(map(_is_number, self.values)), not (text and self.values and self.has_gaps))
        self.check(len(set(self.values)) == len(self.values) <= MOST_CATEGORIES)

    @classmethod
    def learn(
        cls, column: str, values: Array, *, min_count: int = 1, index: bool = False, numbers: bool | None = None
    ) -> Category:
        """Args: ``min_count``: rarer values are as those that training data do not have. ``index``: ``is_index``."""
        if are_numbers(values):
            given = numbers_of(column, values)
            there = given[~np.isnan(given)].tolist()
            found: Sequence[Any] = sorted(v for v, n in Counter(there).items() if n >= min_count)
            return cls(tuple(found), len(there) < len(given), index) if found else cls((0.0,), False, index)
        return cls(tuple(sorted(v for v, n in Counter(text_of(values).tolist()).items() if n >= min_count)),
                   is_index=index)  # fmt: skip

    @property
    def takes_text(self) -> bool:  # type: ignore[override]
        return not self.values or isinstance(self.values[0], str)

    @property
    def slots(self) -> list[str]:
        """The names of the slots."""
        named = [v if isinstance(v, str) else f"{v:g}" for v in self.values]
        return [*named, *(["(missing)"] if self.has_gaps else []), "(another)"]

    @property
    def parts(self) -> list[str]:
        return [""] if self.is_index else [f"={slot}" for slot in self.slots]

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        if self.takes_text:
            return rng.choice(np.array([*self.values, "", "a value that nobody has"], object), rows)
        return rng.choice(np.array([*self.values, np.nan, 0.123456789]), rows)

    def write(self, op: Builder, x: Var) -> Var:
        last, many = len(self.slots) - 1, len(self.values)
        if not many:
            slot = op.full(op.shape(x), 0, _int64())
        elif self.takes_text:
            slot = op.emit("LabelEncoder", x, domain=ML, keys_strings=list(self.values), default_int64=last,
                           values_int64s=list(range(many)))  # fmt: skip
            slot.value.type = _typed(np.int64)
        else:
            gap = op.IsNaN(x)
            keys, at = np.array(self.values, np.float64), np.arange(many, dtype=np.float64)
            slot = op.emit("LabelEncoder", op.Where(gap, 0.0, x), domain=ML, keys_tensor=_tensor(keys),
                           values_tensor=_tensor(at), default_tensor=_tensor(np.array([last], np.float64)))  # fmt: skip
            slot.value.type = _typed(np.float64)
            slot = op.Where(gap, many if self.has_gaps else last, op.Cast(slot, to=_int64()))
        if self.is_index:
            return op.Unsqueeze(slot, np.array([1]))
        return op.OneHot(slot, np.array(last + 1), np.array([0, 1], np.float32), axis=-1)


@dataclass(frozen=True)
class Date(ColumnKind):
    """The year, and where in the year, in the week and in the day it is, as the sine and cosine of a circle.

    Dates are text in ISO form, such as 2024-05-31 or 2024-05-31 12:30; anything else is a gap, whose numbers are 0.

    Attributes:
        mean, std: of the years.
        has_gaps, has_times: whether training data have gaps, and times of the day.
    """

    name = "date"
    takes_text = True
    mean: float
    std: float
    has_gaps: bool
    has_times: bool

    def __post_init__(self) -> None:
        self.check(_is_number(self.mean), _is_number(self.std) and self.std > 0)
        self.check(isinstance(self.has_gaps, bool), isinstance(self.has_times, bool))

    @classmethod
    def learn(cls, column: str, values: Array) -> Date:
        import re

        texts = [text for text in text_of(values).tolist() if re.fullmatch(DATE, text)]
        mean, std = _centre(column, np.array([float(text[:4]) for text in texts]))
        times = any(text[11:16] not in ("", "00:00") for text in texts)
        return cls(mean, std, len(texts) < len(values), times)

    @property
    def parts(self) -> list[str]:
        circles = ["of the year", "of the week", *(["of the day"] if self.has_times else [])]
        cyclic = [f", {part} {circle}" for circle in circles for part in ("sine", "cosine")]
        return [", year", *cyclic, *([" is missing"] if self.has_gaps else [])]

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        seconds = np.array(round(self.mean) - 1970) * 31_556_952 + rng.integers(0, 31_556_952, rows)
        texts = np.datetime_as_string(seconds.astype("datetime64[s]")).astype(object)
        return np.where(rng.random(rows) < 0.1, "", texts)

    def write(self, op: Builder, x: Var) -> Var:
        there = op.RegexFullMatch(x, pattern=DATE)
        date, time = self._split(op, op.Where(there, x, _text(op, "1970-01-01")))
        year, month, day = (_column(op, date, i) for i in range(3))
        numbers = [_float((op.Cast(year, to=_float64()) - self.mean) / self.std)]
        turns = [_float(month - 1) / 12.0, _float(self._weekday(op, year, month, day)) / 7.0]
        if self.has_times:
            turns.append(_float(_column(op, time, 0) * 60 + _column(op, time, 1)) / 1440.0)
        for turn in turns:
            angle = turn * (2 * math.pi)
            numbers += [op.Sin(angle), op.Cos(angle)]
        numbers = [op.Where(there, number, 0.0) for number in numbers]
        return _side_by_side(op, [*numbers, *([_float(op.Not(there))] if self.has_gaps else [])])

    @staticmethod
    def _split(op: Builder, text: Var) -> tuple[Var, Var]:
        """The numbers of dates, [rows, 3], and of times, [rows, 2]: 2024-05-31, 2024-05-31 12:30, 2024-05-31T12:30."""
        halves = _split_at(op, op.StringConcat(text, _text(op, " ")), " ", 1)
        first, second = _column(op, halves, 0), _column(op, halves, 1)
        without = op.StringConcat(first, _text(op, "T00:00"))  # which comes second where there is a time
        with_time = op.StringConcat(first, op.StringConcat(_text(op, "T"), second))
        halves = _split_at(op, op.Where(op.Equal(second, _text(op, "")), without, with_time), "T", 1)
        date, time = (_split_at(op, _column(op, halves, i), sign, 2) for i, sign in enumerate("-:"))
        return op.Cast(date, to=_int64()), op.Cast(op.Gather(time, np.array([0, 1]), axis=1), to=_int64())

    @staticmethod
    def _weekday(op: Builder, year: Var, month: Var, day: Var) -> Var:
        """The day of the week, Monday being 0: Sakamoto's formula, with a year that is never negative."""
        shift = op.Gather(op.const(np.array([0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4])), month - 1)
        y = year + 400 - op.Cast(op.Less(month, 3), to=_int64())
        return op.Mod(y + y / 4 - y / 100 + y / 400 + shift + day + 6, 7)


@dataclass(frozen=True)
class Text(ColumnKind):
    """How often each of some buckets occurs among the hashes of the words of ``str.split``, as a vector of length 1.

    Attributes:
        buckets: their number.
    """

    name = "text"
    takes_text = True
    buckets: int = 64

    def __post_init__(self) -> None:
        self.check(type(self.buckets) is int and 0 < self.buckets <= MOST_BUCKETS)

    @classmethod
    def learn(cls, column: str, values: Array, *, buckets: int = 64) -> Text:
        return cls(buckets)

    @property
    def parts(self) -> list[str]:
        return [f", words in bucket {i}" for i in range(self.buckets)]

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        words = [" ".join(f"word{n}" for n in rng.integers(0, 1000, rng.integers(0, 8))) for _ in range(rows)]
        return np.array(words, object)

    def write(self, op: Builder, x: Var) -> Var:
        """MurmurHash3 with seed 0, as scikit-learn's HashingVectorizer has it, of words with ASCII in lower case."""
        lower = op.StringNormalizer(x, case_change_action="LOWER", locale="C")
        lower.value.type = _typed(object)
        words = words_of(op, lower)
        bucket = op.Mod(op.Abs(op.Cast(_hashes(op, words), to=_int64())), self.buckets)
        bucket = op.Where(op.Equal(words, _text(op, "")), self.buckets, bucket)  # where a row has fewer words
        rows = op.Shape(x)
        empty = op.full(op.Concat(rows, np.array([self.buckets + 1]), axis=0), 0.0, _float32())
        ones = op.full(op.Shape(bucket), 1.0, _float32())
        counts = op.ScatterElements(empty, bucket, ones, axis=1, reduction="add")
        counts = op.Slice(counts, np.array([0]), np.array([self.buckets]), np.array([1]))
        length = op.Sqrt(op.ReduceSum(counts * counts, np.array([1]), keepdims=1))
        return counts / op.Max(length, 1.0)


@dataclass(frozen=True)
class Drop(ColumnKind):
    """Not read at all."""

    name = "drop"

    @classmethod
    def learn(cls, column: str, values: Array) -> Drop:
        return cls()

    @property
    def parts(self) -> list[str]:
        return []


for _kind in (Number, Category, Date, Text, Drop):
    KINDS.add(_kind.name, _kind)


# --- nodes ----------------------------------------------------------------------------------------------------


def _typed(dtype: Any) -> Any:
    import onnx_ir as ir

    return ir.TensorType(ir.DataType.STRING if dtype is object else ir.DataType.from_numpy(np.dtype(dtype)))


def _int64() -> Any:
    return _typed(np.int64).dtype


def _float64() -> Any:
    return _typed(np.float64).dtype


def _float32() -> Any:
    return _typed(np.float32).dtype


def _tensor(array: Array) -> Any:
    import onnx_ir as ir

    return ir.Tensor(array)


def _float(x: Var) -> Var:
    return x.op.Cast(x, to=_float32())


def _text(op: Builder, text: str) -> Var:
    constant = op.Constant(value_string=text)
    constant.value.type = _typed(object)
    return constant


def _split_at(op: Builder, x: Var, sign: str, most: int) -> Var:
    parts, _ = op.StringSplit(x, delimiter=sign, maxsplit=most, outputs=2)
    parts.value.type = _typed(object)
    return parts


def _hashes(op: Builder, words: Var) -> Var:
    """A node that onnxruntime alone knows."""
    import onnx_ir as ir

    attributes = [ir.AttrInt64("seed", 0), ir.AttrInt64("positive", 0)]
    node = ir.Node("com.microsoft", "MurmurHash3", [words.value], attributes, name=op.fresh_in(op.scope, "MurmurHash3"))
    node.outputs[0].name, node.outputs[0].type = node.name, _typed(np.int32)
    op.nodes.append(node)
    return op.wrap(node.outputs[0])


def _column(op: Builder, x: Var, i: int) -> Var:
    return op.Gather(x, np.array(i), axis=1)


def _side_by_side(op: Builder, columns: Sequence[Var]) -> Var:
    """[rows] each, to [rows, columns]."""
    made = [op.Unsqueeze(column, np.array([1])) for column in columns]
    return made[0] if len(made) == 1 else op.Concat(*made, axis=1)
