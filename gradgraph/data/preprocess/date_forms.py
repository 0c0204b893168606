"""Date formats, one of which is detected per column in the training data; a column accepts no other later."""

from __future__ import annotations

import datetime
import functools
import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_YEAR = {"YYYY": "(?P<y>[0-9]{4})", "YY": "(?P<y>[0-9]{2})"}
_PADDED = {"MM": "(?P<m>0[1-9]|1[0-2])", "DD": "(?P<d>0[1-9]|[12][0-9]|3[01])"}
_PLAIN = {"M": "(?P<m>0?[1-9]|1[0-2])", "D": "(?P<d>0?[1-9]|[12][0-9]|3[01])"}
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
           "December")  # fmt: skip
SHORT_MONTHS = tuple(month[:3] for month in _MONTHS)
MONTH_NUMBERS: Mapping[str, int] = {  # by names in lower case
    name.lower(): i
    for i, month in enumerate(_MONTHS, 1)
    for name in (month, month[:3], f"{month[:3]}.", *(("Sept", "Sept.") if month == "September" else ()))
}
_NAMED = {"MON": f"(?P<m>(?i:{'|'.join(map(re.escape, MONTH_NUMBERS))}))", "D,": f"{_PLAIN['D']},?"}
_PARTS = _YEAR | _PADDED | _PLAIN | _NAMED
_MINUTES = ":[0-5][0-9](?::[0-5][0-9](?:[.][0-9]+)?)?"
_HOURS = {True: "(?:[01][0-9]|2[0-3])", False: "(?:[01]?[0-9]|2[0-3])"}
_HALF_DAY = f"(?:0?[1-9]|1[0-2]){_MINUTES} ?[AaPp][Mm]"
_ZONE = "(?P<zone>Z|[+-](0[0-9]|1[0-4])(:?[0-5][0-9])?)"
LOOKED_AT = 200  # maximum number of texts from which the nearest format is detected
FIRST_YEAR_OF_TWO_DIGITS = 69  # 69 is 1969 and 68 is 2068, as for strptime


@dataclass(frozen=True)
class DateForm:
    """A date format such as ``D.M.YYYY``, optionally followed by a time of day (with AM or PM) and a time zone.

    Attributes:
        name: the parts in order, with their separator. ``M`` and ``D`` may have one digit; ``MON`` is the
            English name of a month, in full or in three letters.
    """

    name: str

    @property
    def sign(self) -> str:
        """The separator; empty for ``YYYYMMDD``."""
        return next((sign for sign in "-/. " if sign in self.name), "")

    @property
    def parts(self) -> list[str]:
        """The parts ``YYYY``, ``MM`` and ``DD``, or their variants, in order."""
        return self.name.split(self.sign) if self.sign else ["YYYY", "MM", "DD"]

    @property
    def is_short(self) -> bool:
        """Whether years have two digits."""
        return "YYYY" not in self.name

    @property
    def has_names(self) -> bool:
        """Whether months are names."""
        return "MON" in self.name

    @property
    def words(self) -> int:
        """The number of space-separated words in a date."""
        return len(self.parts) if self.sign == " " else 1

    def at(self, letter: str) -> int:
        """Return the position of the year (``Y``), the month (``M``) or the day (``D``)."""
        return next(i for i, part in enumerate(self.parts) if part[0] == letter)

    def pattern(self, zone: bool) -> str:
        """Return the regular expression (of RE2 and of Python) for the format, with or without a zone."""
        date = (f"[{self.sign}]" if self.sign else "").join(_PARTS[part] for part in self.parts)
        apart = ",? " if self.has_names else "[T ]"
        time = f"{apart}(?P<time>{_HOURS[self.name == ISO]}{_MINUTES}|{_HALF_DAY})"
        return f"{date}{time} ?{_ZONE}" if zone else f"{date}(?:{time})?"

    def read(self, text: str, zone: bool) -> datetime.datetime | None:
        """Parse a date, converted to UTC if it has a zone; None for other text and for an impossible day."""
        found = _compiled(self.pattern(zone)).fullmatch(text)
        if found is None:
            return None
        year = int(found["y"])
        if self.is_short:
            year += 2000 if year < FIRST_YEAR_OF_TWO_DIGITS else 1900
        month = MONTH_NUMBERS[found["m"].lower()] if self.has_names else int(found["m"])
        try:
            date = datetime.datetime(year, month, int(found["d"]), *_clock(found["time"] or "0:00"))
            return date - _offset(found["zone"]) if zone else date
        except (ValueError, OverflowError):
            return None

    def written(self, date: datetime.date, zone: bool) -> str | None:
        """Return a Python date as text in this format.

        None if only one of the date and ``zone`` has a time zone, or if a two-digit year would be read as a different
        year.
        """
        if self.is_short and not 0 <= date.year - 1900 - FIRST_YEAR_OF_TWO_DIGITS < 100:
            return None
        time = ""
        if isinstance(date, datetime.datetime):
            if (date.tzinfo is not None) != zone:
                return None
            date = date.astimezone(datetime.timezone.utc) if zone else date
            time = f"{' ' if self.has_names else 'T'}{date:%H:%M:%S}{'Z' if zone else ''}"
        elif zone:
            return None
        values = {
            "Y": f"{date.year:04d}"[-2 if self.is_short else 0 :],
            "M": SHORT_MONTHS[date.month - 1] if self.has_names else f"{date.month:02d}",
            "D": f"{date.day:02d}",
        }
        return self.sign.join(values[part[0]] + "," * part.endswith(",") for part in self.parts) + time

    def example(self, zone: bool) -> str:
        """Return the first day of 1970 in this format."""
        return self.written(datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc if zone else None), zone) or ""


ISO = "YYYY-MM-DD"
FORMS: Mapping[str, DateForm] = {
    name: DateForm(name)
    for name in (
        ISO,
        "YYYYMMDD",
        *(f"YYYY{sign}M{sign}D" for sign in "-/."),
        *(sign.join(("D", "M", year)) for sign in "./-" for year in _YEAR),
        *(sign.join(("M", "D", year)) for sign in "./-" for year in _YEAR),
        *(sign.join(("D", "MON", year)) for sign in " -/" for year in _YEAR),
        "MON D, YYYY",
    )
}


@functools.lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _clock(time: str) -> tuple[int, int]:
    """Return the hour and the minute of ``13:30``, ``1:30 PM`` or ``01:30:59.9pm``."""
    hour, minute = int(time.split(":")[0]), int(time.split(":")[1][:2])
    half = time[-2:].lower()
    return (hour % 12 + 12 * (half == "pm") if half in ("am", "pm") else hour), minute


def _offset(zone: str) -> datetime.timedelta:
    if zone == "Z":
        return datetime.timedelta()
    digits = zone[1:].replace(":", "").ljust(4, "0")
    offset = datetime.timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return -offset if zone[0] == "-" else offset


def forms_of(texts: Collection[str]) -> list[tuple[DateForm, bool]]:
    """Return the formats that match all texts, strictest first, each with whether it has a time zone.

    The result is empty without texts.
    """
    found = [(form, zone) for form in FORMS.values() for zone in (False, True)
             if all(form.read(text, zone) is not None for text in texts)]  # fmt: skip
    return found if texts else []


def nearest(texts: Collection[str]) -> tuple[DateForm, bool] | None:
    """Return the format that matches most of the texts, and whether it has a time zone; None if none matches any."""
    some = list(itertools.islice(texts, LOOKED_AT))
    counted = {
        (form, zone): sum(form.read(text, zone) is not None for text in some)
        for form in FORMS.values()
        for zone in (False, True)
    }
    best = max(counted, key=lambda one: counted[one])
    return best if counted[best] else None


_WORD = "[^\\W\\d_]{3,12}[.]?"
_DAY = "[0-9]{1,2}(st|nd|rd|th|[.])?"
_YEAR_ALONE = "(?:19|20)[0-9]{2}"
_LIKE_DATES = re.compile(
    f"({_WORD},? )?({_DAY}[ -]{_WORD}|{_WORD}[ -]{_DAY}),?[ -]{_YEAR_ALONE}.*"
    f"|{_YEAR_ALONE}[-/.](0?[1-9]|1[0-2])|(0?[1-9]|1[0-2])[-/.]{_YEAR_ALONE}|{_YEAR_ALONE}-?W[0-5][0-9](-?[1-7])?"
    f"|{_YEAR_ALONE}[-/.](0?[1-9]|1[0-2])[-/.](0?[1-9]|[12][0-9]|3[01])[T ].*"
    "|[0-2]?[0-9]:[0-5][0-9](:[0-5][0-9])?( ?[AaPp][Mm])?"
    "|[0-3]?[0-9][-/.][0-3]?[0-9][-/.](19|20)?[0-9]{2},? .*"
)


def looks_like_date(text: str) -> bool:
    """Whether a text looks like a date or a time, such as ``Fri, 31 May 2024``, ``2024-05``, ``13:30``.

    Its format need not be one of :data:`FORMS`.
    """
    return len(text) < 60 and _LIKE_DATES.fullmatch(text) is not None
