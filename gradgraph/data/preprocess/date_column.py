"""Columns of dates, read only in the format of the training data."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradgraph.data.preprocess.column_kind import ColumnKind, centre, ends, far_outside, is_number, missing, share
from gradgraph.data.preprocess.column_parts import (
    ML,
    as_float,
    column_at,
    float64,
    int64,
    is_missing,
    side_by_side,
    split_at,
    text_constant,
    type_of,
    zeros_unless,
)
from gradgraph.data.preprocess.date_forms import (
    FIRST_YEAR_OF_TWO_DIGITS,
    FORMS,
    ISO,
    MONTH_NUMBERS,
    DateForm,
    forms_of,
    nearest,
)
from gradgraph.data.preprocess.frames import Array, are_dates, column_text
from gradgraph.errors import DataError, row_at, shown

if TYPE_CHECKING:
    from gradgraph.graph.builder import Builder, Var

DAY = 1440  # minutes


@dataclass(frozen=True)
class Date(ColumnKind):
    """A date as the year, and the position in the year, the week and the day as points on circles (sine, cosine).

    Text is read in one format. Dates with a time zone are converted to UTC. Missing values become zeros.

    Attributes:
        mean, std: mean and standard deviation of the years.
        low, high: first and last day of the training data, in days since 1970.
        form: the date format of the training data, one of ``date_forms.FORMS``.
        zone: whether dates have a time zone.
        has_times: whether training dates have times of day.
        indicator: whether an additional feature marks missing values.
    """

    name = "date"
    takes_text = True
    mean: float
    std: float
    low: float
    high: float
    form: str
    zone: bool
    has_times: bool
    indicator: bool = True

    def __post_init__(self) -> None:
        self.check(*map(is_number, (self.mean, self.std, self.low, self.high)))
        self.check(self.std > 0, isinstance(self.form, str) and self.form in FORMS)
        self.check(*(isinstance(flag, bool) for flag in (self.zone, self.has_times, self.indicator)))

    @classmethod
    def learn(cls, column: str, values: Array, *, dayfirst: bool | None = None, indicator: bool = True) -> Date:
        """Return the date kind with the format and the range learnt from a training column.

        ``dayfirst`` determines whether the day precedes the month, if the data do not.
        """
        form, zone = _form(column, values, dayfirst)
        texts = _read(column, values, form, zone)
        found = [date for text in texts if text and (date := form.read(text, zone))]
        mean, std = centre(column, np.array([float(date.year) for date in found]))
        times = any(date.hour or date.minute for date in found)
        low, high = ends(np.array([_days(date) for date in found]))
        return cls(mean, std, low, high, form.name, zone, times, indicator, gaps=share(missing(texts)))

    @property
    def parts(self) -> list[str]:
        circles = ["of the year", "of the week", *(["of the day"] if self.has_times else [])]
        cyclic = [f", {part} {circle}" for circle in circles for part in ("sine", "cosine")]
        return [", year", *cyclic, *([" is missing"] if self.marks_gaps else [])]

    def read(self, column: str, values: Array) -> Array:
        return _read(column, values, FORMS[self.form], self.zone)

    def unseen(self, values: Array) -> Array:
        days = {text: self._days(text) for text in set(values.tolist())}
        return far_outside(np.array([days[text] for text in values.tolist()], np.float64), self.low, self.high)

    def _days(self, text: str) -> float:
        date = FORMS[self.form].read(text, self.zone)
        return math.nan if date is None else _days(date)

    @property
    def range(self) -> str:
        first, last = (datetime.date(1970, 1, 1) + datetime.timedelta(days=days) for days in (self.low, self.high))
        return f"{first} to {last}"

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        first = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc if self.zone else None)
        days = rng.integers(int(self.low), int(self.high) + 1, rows)
        dates = [first + datetime.timedelta(days=int(day), minutes=int(rng.integers(DAY))) for day in days]
        texts = np.array([FORMS[self.form].written(date, self.zone) for date in dates], object)
        return np.where(rng.random(rows) < 0.1, "", texts)

    def write(self, op: Builder, x: Var) -> Var:
        form = FORMS[self.form]
        gap, fits = is_missing(op, x), op.RegexFullMatch(x, pattern=f"({form.pattern(self.zone)})")
        date, hour, minute, offset = self._split(op, op.Where(fits, x, text_constant(op, form.example(self.zone))))
        year, month, day = (date[form.at(letter)] for letter in "YMD")
        if form.is_short:
            year = year + op.Where(op.Less(year, FIRST_YEAR_OF_TWO_DIGITS), 2000, 1900)
        lengths = op.Gather(op.const(np.array([31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])), month - 1)
        leap = op.And(op.Equal(month, 2), _is_leap(op, year))
        fits = op.And(fits, op.And(op.LessOrEqual(day, lengths + op.Cast(leap, to=int64())), op.Greater(year, 0)))
        why = f"{x.value.name} holds no date of the form {self.form}{' with a time zone' if self.zone else ''}"
        year = year + zeros_unless(op, op.Not(op.Or(gap, fits)), why)
        days, minutes = _days_from(op, year, month, day), hour * 60 + minute
        if offset is not None:
            minutes = minutes - offset + DAY  # nonnegative, as the division requires
            days, minutes = days + minutes / DAY - 1, op.Mod(minutes, DAY)
            year = _year_of(op, days)
        numbers = [as_float((op.Cast(year, to=float64()) - self.mean) / self.std)]
        of_year = as_float(days - _days_from(op, year, op.const(np.array(1)), op.const(np.array(1))))
        length = as_float(op.Cast(_is_leap(op, year), to=int64()) + 365)
        turns = [of_year / length, as_float(op.Mod(days + 2, 7)) / 7.0]
        if self.has_times:
            turns.append(as_float(minutes) / float(DAY))
        for turn in turns:
            angle = turn * (2 * math.pi)
            numbers += [op.Sin(angle), op.Cos(angle)]
        numbers = [op.Where(fits, number, 0.0) for number in numbers]
        return side_by_side(op, [*numbers, *([as_float(op.Not(fits))] if self.marks_gaps else [])])

    def _split(self, op: Builder, text: Var) -> tuple[list[Var], Var, Var, Var | None]:
        """Emit nodes that split dates into year, month and day (in the format's order), hour, minute, and time zone.

        The time zone is the offset from UTC in minutes, or None without zones.
        """
        form = FORMS[self.form]
        words = _parts(op, text, " ", form.words + 3)  # 2024-05-31, 2024-05-31 12:30 PM +02:00, May 31, 2024, 12:30
        dates, more = words[: form.words], words[form.words :]
        if form.has_names:
            dates = [_parts(op, word, ",", 2)[0] for word in dates]
            time = text_constant(op, "")
        else:
            dates[0], time = _parts(op, dates[0], "T", 2)  # 2024-05-31T12:30+02:00
        for part in more:
            time = op.StringConcat(time, part)
        if form.sign:
            parts = dates if form.words > 1 else _parts(op, dates[0], form.sign, 3)
            numbers = [_month(op, part) if name == "MON" else op.Cast(part, to=int64())
                       for name, part in zip(form.parts, parts, strict=True)]  # fmt: skip
        else:
            number = op.Cast(dates[0], to=int64())
            numbers = [number / 10_000, op.Mod(number / 100, 100), op.Mod(number, 100)]
        offset = None
        if self.zone:
            time, _ = _parts(op, time, "Z", 2)
            time, east = _parts(op, time, "+", 2)
            time, west = _parts(op, time, "-", 2)
            offset = _minutes_of(op, east) - _minutes_of(op, west)
        is_half = {letter: op.RegexFullMatch(time, pattern=f".*[{letter}{letter.lower()}][Mm]") for letter in "AP"}
        for letter in "AaPp":
            time, _ = _parts(op, time, letter, 2)
        hour, minute = (_whole(op, part) for part in _parts(op, time, ":", 2))
        afternoon = op.Cast(is_half["P"], to=int64()) * 12
        hour = op.Where(op.Or(is_half["A"], is_half["P"]), op.Mod(hour, 12) + afternoon, hour)
        return numbers, hour, minute, offset


def _form(column: str, values: Array, dayfirst: bool | None) -> tuple[DateForm, bool]:
    """Return the date format of a training column, and whether its dates have a time zone.

    Raises:
        DataError: no format matches all values, or the order of day and month is unknown or contradicts ``dayfirst``.
    """
    if are_dates(values):
        return FORMS[ISO], values.dtype.kind == "O" and any(getattr(v, "tzinfo", None) for v in values.tolist())
    texts = column_text(column, values)
    different = set(texts.tolist()) - {""}
    if not different:
        return FORMS[ISO], False
    found = forms_of(different)
    if not found:
        raise _no_date(column, texts, *(nearest(different) or (FORMS[ISO], False)))
    first = {form.at("D") < form.at("M") for form, _ in found if form.at("Y") == 2 and not form.has_names}
    if dayfirst is not None and first and dayfirst not in first:
        raise DataError(
            f"the column '{shown(column)}' contains dates such as '{shown(_of_day(different))}', whose order of day "
            "and month contradicts dayfirst; omit dayfirst"
        )
    if len(first) == 2 and dayfirst is None:
        raise DataError(
            f"the column '{shown(column)}' contains dates such as '{shown(min(different))}', whose first number may "
            "be the day or the month",
            remedy=f"say which: kinds={{'{shown(column)}': {{'kind': 'date', 'dayfirst': True}}}} (or False)",
            shell=f"""say which: --column '{shown(column)}={{"kind": "date", "dayfirst": true}}' (or false)""",
        )
    return next(one for one in found if dayfirst is None or not first or (one[0].at("D") < one[0].at("M")) == dayfirst)


def _of_day(texts: set[str]) -> str:
    """Return the date with the largest day or month, which best shows their order."""
    return max(
        texts, key=lambda text: max(int(part or 0) for part in text[:5].replace(".", "/").replace("-", "/").split("/"))
    )


def _read(column: str, values: Array, form: DateForm, zone: bool) -> Array:
    """Return a column of dates as text in the format; raise DataError for a value that does not match it."""
    if values.dtype.kind == "M" and form.name == ISO and not zone:
        texts = np.datetime_as_string(values.astype("datetime64[s]")).astype(object)
        texts[np.isnat(values)] = ""
    else:
        values = values.astype("datetime64[us]").astype(object) if values.dtype.kind == "M" else values
        texts = column_text(column, _written(values, form, zone) if values.dtype.kind == "O" else values)
    if any(form.read(text, zone) is None for text in set(texts.tolist()) - {""}):
        raise _no_date(column, texts, form, zone)
    return texts


def _written(values: Array, form: DateForm, zone: bool) -> Array:
    """Return ``values`` with Python dates as text in the format, or as ``str`` writes them if they do not fit it."""
    every = (
        (form.written(value, zone) or str(value)) if isinstance(value, datetime.date) and value == value else value
        for value in values.tolist()
    )
    return np.fromiter(every, object, len(values))


def _no_date(column: str, texts: Array, form: DateForm, zone: bool) -> DataError:
    wrong = [(row, text) for row, text in enumerate(texts.tolist()) if text and form.read(text, zone) is None]
    row, text = wrong[0]
    others = f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
    zoned = " with a time zone" if zone else ""
    return DataError(
        f"the column '{shown(column)}' contains {shown(repr(text))} in {row_at(row)}{others}, which is not a date of "
        f"the form {form.name}{zoned} as in the training data; correct it, or leave it empty"
    )


def _days(date: datetime.datetime) -> float:
    return float((date - datetime.datetime(1970, 1, 1)).days)


# --- nodes ----------------------------------------------------------------------------------------------------


def _parts(op: Builder, text: Var, sign: str, count: int) -> list[Var]:
    """Emit nodes that split text at ``sign``; return the first ``count`` parts, with "" for missing ones."""
    parts = split_at(op, op.StringConcat(text, text_constant(op, sign * (count - 1))), sign, None)
    return [column_at(op, parts, i) for i in range(count)]


def _month(op: Builder, name: Var) -> Var:
    """Emit nodes that convert a month name to its number."""
    lower = op.StringNormalizer(name, case_change_action="LOWER", locale="C")
    lower.value.type = type_of(object)
    number = op.emit("LabelEncoder", lower, domain=ML, keys_strings=list(MONTH_NUMBERS), default_int64=1,
                     values_int64s=list(MONTH_NUMBERS.values()))  # fmt: skip
    number.value.type = type_of(np.int64)
    return number


def _whole(op: Builder, text: Var) -> Var:
    """Emit nodes that convert digits to int64; empty text becomes 0."""
    return op.Cast(op.Where(op.Equal(text, text_constant(op, "")), text_constant(op, "0"), text), to=int64())


def _minutes_of(op: Builder, zone: Var) -> Var:
    """Emit nodes that convert a time zone's offset (``02:00``, ``0200``, ``02`` or empty text) to minutes."""
    hours, minutes = (_whole(op, part) for part in _parts(op, zone, ":", 2))
    together = op.RegexFullMatch(zone, pattern="[0-9]{4}")
    return op.Where(together, hours / 100 * 60 + op.Mod(hours, 100), hours * 60 + minutes)


def _is_leap(op: Builder, year: Var) -> Var:
    of_four, of_hundred, of_all = (op.Equal(op.Mod(year, n), 0) for n in (4, 100, 400))
    return op.And(of_four, op.Or(op.Not(of_hundred), of_all))


def _days_from(op: Builder, year: Var, month: Var, day: Var) -> Var:
    """Compute the days since 1 March of year 0, a Wednesday, in the Gregorian calendar.

    Source: H. Hinnant, chrono-Compatible Low-Level Date Algorithms. Intermediate results are nonnegative (years ≥ 1).
    """
    is_early = op.Cast(op.Less(month, 3), to=int64())
    y = year - is_early
    of_year = (153 * (month + 12 * is_early - 3) + 2) / 5 + day - 1
    return y * 365 + y / 4 - y / 100 + y / 400 + of_year


def _year_of(op: Builder, days: Var) -> Var:
    """Compute the year of a number of days since 1 March of year 0; source as for :func:`_days_from`."""
    era = days / 146_097
    of_era = days - era * 146_097
    y = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365
    of_year = of_era - (y * 365 + y / 4 - y / 100)
    return era * 400 + y + op.Cast(op.GreaterOrEqual(of_year, 306), to=int64())
