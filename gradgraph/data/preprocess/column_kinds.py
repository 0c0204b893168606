"""Column kinds: parameters learnt from a training column, and the ONNX nodes that apply them.

The parameters are plain data, which saved files store. ``learn`` computes them from a training column; ``read``
converts or rejects a later column; ``write`` emits the nodes, [rows] to [rows, width].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradgraph.arguments import Table
from gradgraph.data.preprocess.column_kind import (
    ColumnKind,
    centre,
    ends,
    far_outside,
    is_number,
    is_share,
    missing,
    share,
)
from gradgraph.data.preprocess.column_parts import (
    ML,
    as_float,
    float32,
    float64,
    int64,
    is_missing,
    side_by_side,
    tensor_of,
    text_constant,
    type_of,
    word_hashes,
    zeros_unless,
)
from gradgraph.data.preprocess.date_column import Date
from gradgraph.data.preprocess.frames import (
    EXACT,
    GAP_WORDS,
    Array,
    are_durations,
    are_numbers,
    check_durations,
    column_text,
    durations_in,
    is_text,
    numbers_of,
)
from gradgraph.errors import DataError, shown

if TYPE_CHECKING:
    from gradgraph.graph.builder import Builder, Var

MOST_CATEGORIES = 100_000
MOST_BUCKETS = 1 << 16
# white space according to str.isspace: tabs and line ends, file separators, no-break and ideographic spaces, …
SPACES = (*range(0x09, 0x0E), *range(0x1C, 0x21), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F,
          0x205F, 0x3000)  # fmt: skip

KINDS: Table[type[Any]] = Table("kind of column")


@dataclass(frozen=True)
class Number(ColumnKind):
    """A number, standardised; missing values become the mean.

    Attributes:
        mean, std: mean and standard deviation of the training values that are not missing; 0 and 1 for no scaling.
        fill: replacement of missing values.
        low, high: range of the training data.
        durations: whether training data are durations, which are read as seconds.
        indicator: whether an additional feature marks missing values.
    """

    name = "number"
    mean: float
    std: float
    fill: float
    low: float
    high: float
    durations: bool = False
    indicator: bool = True

    def __post_init__(self) -> None:
        self.check(all(map(is_number, (self.mean, self.std, self.fill, self.low, self.high))))
        self.check(self.std > 0, isinstance(self.durations, bool), isinstance(self.indicator, bool))

    @classmethod
    def learn(cls, column: str, values: Array, *, scale: bool = True, indicator: bool = True) -> Number:
        seconds = durations_in(values)
        numbers = numbers_of(column, values) if seconds is None else seconds
        fill, std = centre(column, numbers)
        mean, divisor = (fill, std) if scale else (0.0, 1.0)
        gaps = share(missing(numbers))
        durations = seconds is not None or are_durations(values)
        return cls(mean, divisor, fill, *ends(numbers), durations=durations, indicator=indicator, gaps=gaps)

    @property
    def parts(self) -> list[str]:
        return ["", *([" is missing"] if self.marks_gaps else [])]

    @property
    def range(self) -> str:
        return f"{self.low:.6g} to {self.high:.6g}"

    def read(self, column: str, values: Array) -> Array:
        seconds = durations_in(values)
        if self.durations and seconds is None:
            check_durations(column, values)
        numbers = numbers_of(column, values) if seconds is None else seconds
        if (seconds is not None or are_durations(values)) != self.durations and not missing(numbers).all():
            found, trained = ("numbers", "durations") if self.durations else ("durations", "numbers")
            remedy = (
                "convert it by pandas.to_timedelta, or write durations such as 1:02:03"
                if self.durations
                else "convert it to numbers of the same unit, for example by .dt.total_seconds()"
            )
            raise DataError(
                f"the column '{shown(column)}' contains {found}, but the training data have {trained} there; {remedy}"
            )
        return numbers

    def unseen(self, values: Array) -> Array:
        return far_outside(values, self.low, self.high)

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        return np.where(rng.random(rows) < 0.1, np.nan, self.fill + self.std * rng.normal(size=rows))

    def write(self, op: Builder, x: Var) -> Var:
        gap = op.IsNaN(x)
        zeros = zeros_unless(op, op.IsInf(x), f"{x.value.name} holds an infinite number")
        x = x + op.Cast(zeros, to=float64())
        scaled = as_float((op.Where(gap, self.fill, x) - self.mean) / self.std)
        return side_by_side(op, [scaled, *([as_float(gap)] if self.marks_gaps else [])])


@dataclass(frozen=True)
class Category(ColumnKind):
    """A category, output as a one-hot vector or an index.

    Each value of the training data has a slot (a position), and a last slot is for all other values. Columns with
    integers too large for float64 are read as text.

    Attributes:
        values: the values with a slot, sorted: text, or numbers. Missing text is "".
        is_index: output an index, for an embedding, instead of a one-hot vector.
        rare: the fraction of training rows whose value is too rare for a slot.
    """

    name = "category"
    values: tuple[str, ...] | tuple[float, ...]
    is_index: bool = False
    rare: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values) if isinstance(self.values, list) else self.values)
        self.check(isinstance(self.values, tuple), isinstance(self.is_index, bool), is_share(self.rare))
        text = all(map(is_text, self.values))
        self.check(text or all(map(is_number, self.values)))
        self.check(len(set(self.values)) == len(self.values) <= MOST_CATEGORIES)

    @classmethod
    def learn(cls, column: str, values: Array, *, min_count: int = 1, index: bool = False) -> Category:
        """Return the category kind learnt from a training column; ``index`` sets ``is_index``.

        Values with fewer than ``min_count`` rows have no slot.
        """
        numbers = are_numbers(values) and not _are_large(values)
        read: Array = numbers_of(column, values) if numbers else column_text(column, values)
        gap = missing(read)
        there = read[~gap] if numbers else read
        found: Sequence[Any] = sorted(v for v, n in Counter(there.tolist()).items() if n >= min_count)
        if numbers and not found:
            found = [0.0]
        known = set(found)
        rare = sum(value not in known for value in there.tolist()) / max(len(read), 1)
        return cls(tuple(found), index, rare, gaps=share(gap))

    @property
    def takes_text(self) -> bool:  # type: ignore[override]
        return not self.values or isinstance(self.values[0], str)

    @property
    def slots(self) -> list[str]:
        """The names of the slots."""
        named = [v if isinstance(v, str) else f"{v:g}" for v in self.values]
        return [*named, *(["(missing)"] if self.has_gaps and not self.takes_text else []), "(another)"]

    @property
    def parts(self) -> list[str]:
        return [""] if self.is_index else [f"={slot}" for slot in self.slots]

    @property
    def range(self) -> str:
        return f"{len(self.values)} values"

    @property
    def others(self) -> float:
        return self.rare

    def read(self, column: str, values: Array) -> Array:
        return column_text(column, values) if self.takes_text else numbers_of(column, values)

    def unseen(self, values: Array) -> Array:
        known = set(self.values)
        return np.fromiter((value not in known for value in values.tolist()), bool, len(values)) & ~missing(values)

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        if self.takes_text:
            return rng.choice(np.array([*self.values, "", "a value that nobody has"], object), rows)
        return rng.choice(np.array([*self.values, np.nan, 0.123456789]), rows)

    def write(self, op: Builder, x: Var) -> Var:
        last, many = len(self.slots) - 1, len(self.values)
        if not many:
            slot = op.full(op.shape(x), 0, int64())
        elif self.takes_text:
            slots = {value: i for i, value in enumerate(self.values)}
            gaps = {word: slots[""] for word in GAP_WORDS if word} if "" in slots else {}
            slots |= gaps  # type: ignore[arg-type]
            slot = op.emit("LabelEncoder", x, domain=ML, keys_strings=list(slots), default_int64=last,
                           values_int64s=list(slots.values()))  # fmt: skip
            slot.value.type = type_of(np.int64)
        else:
            gap = op.IsNaN(x)
            keys, at = np.array(self.values, np.float64), np.arange(many, dtype=np.float64)
            slot = op.emit("LabelEncoder", op.Where(gap, 0.0, x), domain=ML, keys_tensor=tensor_of(keys),
                           values_tensor=tensor_of(at),
                           default_tensor=tensor_of(np.array([last], np.float64)))  # fmt: skip
            slot.value.type = type_of(np.float64)
            slot = op.Where(gap, many if self.has_gaps else last, op.Cast(slot, to=int64()))
        if self.is_index:
            return op.Unsqueeze(slot, np.array([1]))
        return op.OneHot(slot, np.array(last + 1), np.array([0, 1], np.float32), axis=-1)


@dataclass(frozen=True)
class Text(ColumnKind):
    """Free text as hashed word counts, normalised to length 1; words are split as by ``str.split``.

    Attributes:
        buckets: number of buckets.
    """

    name = "text"
    takes_text = True
    buckets: int = 64

    def __post_init__(self) -> None:
        self.check(type(self.buckets) is int and 0 < self.buckets <= MOST_BUCKETS)

    @classmethod
    def learn(cls, column: str, values: Array, *, buckets: int = 64) -> Text:
        return cls(buckets, gaps=share(missing(column_text(column, values))))

    @property
    def parts(self) -> list[str]:
        return [f", words in bucket {i}" for i in range(self.buckets)]

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        words = [" ".join(f"word{n}" for n in rng.integers(0, 1000, rng.integers(0, 8))) for _ in range(rows)]
        return np.array(words, object)

    def write(self, op: Builder, x: Var) -> Var:
        """Emit nodes that hash words in lower case (ASCII only) as scikit-learn's HashingVectorizer does.

        The hash is MurmurHash3 with seed 0.
        """
        x = op.Where(is_missing(op, x), text_constant(op, ""), x)
        lower = op.StringNormalizer(x, case_change_action="LOWER", locale="C")
        lower.value.type = type_of(object)
        words = _words_of(op, lower)
        bucket = op.Mod(op.Abs(op.Cast(word_hashes(op, words), to=int64())), self.buckets)
        is_padding = op.Equal(words, text_constant(op, ""))  # of rows with fewer words
        bucket = op.Where(is_padding, self.buckets, bucket)
        rows = op.Shape(x)
        empty = op.full(op.Concat(rows, np.array([self.buckets + 1]), axis=0), 0.0, float32())
        ones = op.full(op.Shape(bucket), 1.0, float32())
        counts = op.ScatterElements(empty, bucket, ones, axis=1, reduction="add")
        counts = op.Slice(counts, np.array([0]), np.array([self.buckets]), np.array([1]))
        length = op.Sqrt(op.ReduceSum(counts * counts, np.array([1]), keepdims=1))
        return counts / op.Max(length, 1.0)


@dataclass(frozen=True)
class Drop(ColumnKind):
    """A column that is not read."""

    name = "drop"

    @classmethod
    def learn(cls, column: str, values: Array) -> Drop:
        return cls()

    @property
    def parts(self) -> list[str]:
        return []


for _kind in (Number, Category, Date, Text, Drop):
    KINDS.add(_kind.name, _kind)


def _are_large(values: Array) -> bool:
    """Whether some numbers are so large that float64 cannot distinguish all integers."""
    if values.dtype.kind == "O":
        return any(isinstance(v, int | float) and abs(v) >= EXACT for v in values.tolist())
    return values.dtype.kind in "iuf" and bool((np.abs(values.astype(np.float64)) >= EXACT).any())


def _words_of(op: Builder, texts: Var) -> Var:
    """Emit nodes that split texts, [rows], into words: [rows, most words], padded with "".

    They use onnxruntime's ``Tokenizer``, since ONNX's StringSplit only splits at U+0020.
    """
    import onnx_ir as ir

    separator = "[" + "".join(f"\\x{{{space:X}}}" for space in SPACES) + "]+"
    attributes = [ir.AttrInt64("mark", 0), ir.AttrInt64("mincharnum", 1), ir.AttrString("pad_value", ""),
                  ir.AttrStrings("separators", [separator])]  # fmt: skip
    empty = op.Constant(value_strings=[""])
    empty.value.type = texts.value.type
    given = op.Concat(empty, texts, axis=0)  # without texts, the node returns no matrix
    given.value.type = texts.value.type
    node = ir.Node("com.microsoft", "Tokenizer", [given.value], attributes, name=op.fresh_in(op.scope, "Tokenizer"))
    node.outputs[0].name, node.outputs[0].type = node.name, texts.value.type
    op.nodes.append(node)
    words = op.Slice(op.wrap(node.outputs[0]), np.array([1]), np.array([np.iinfo(np.int64).max]), np.array([0]))
    words.value.type = texts.value.type
    return words
