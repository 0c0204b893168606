"""A reader of untrusted YAML files with one flat table: each value is a string, or a list or table of strings."""

from __future__ import annotations

import re

from gradgraph.errors import shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError

LARGEST = 1 << 20  # bytes: names of classes and paths
_KEY = re.compile(r"""("[^"]*"|'[^']*'|[^\s:#'"\[{-][^:#]*?)\s*:(?:\s+(.*))?$""")

Value = str | list[str] | dict[str, str]


def flat_yaml_of(content: bytes) -> dict[str, Value]:
    """Return the table of a YAML document whose values are strings, lists of strings or tables of strings.

    Lists and tables may be block style (``- cat``, ``0: cat``) or flow style (``[cat, dog]``, ``{0: cat, 1: dog}``).
    Anchors, tags, several documents, multi-line texts and deeper tables are not supported.

    Raises:
        UnreadableError: if the content is anything else, is not UTF-8, is larger than LARGEST, or has duplicate keys.
    """
    if len(content) > LARGEST:
        raise UnreadableError(f"it is larger than {LARGEST >> 20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableError("it is not UTF-8") from None
    table: dict[str, Value] = {}
    key = ""
    for number, line in enumerate(_whole(text.splitlines()), 1):
        bare = _without_comment(line).rstrip()
        if not bare.strip() or bare in ("---", "..."):
            continue
        inner = bare.strip()
        if inner.startswith("- ") or inner == "-":
            _append(table, key, _scalar(inner[1:].strip(), number), number)
        elif (found := _KEY.match(inner)) is None:
            raise _odd(number, inner)
        elif bare[0] in " \t":
            _set(table, key, _scalar(found[1], number), _scalar(found[2] or "", number), number)
        else:
            key = _scalar(found[1], number)
            if key in table:
                raise UnreadableError(f"line {number} repeats '{shown(key)}'")
            table[key] = _value(found[2] or "", number)
    return table


def _whole(lines: list[str]) -> list[str]:
    """Return the lines after joining each list or table in brackets that spans several lines to a single line."""
    joined: list[str] = []
    for line in lines:
        before = _without_comment(joined[-1]) if joined else ""
        opened = ": [" in before or ": {" in before
        if opened and before.rstrip()[-1] not in "]}":
            joined[-1] = f"{before} {line.strip()}"
        else:
            joined.append(line)
    return joined


def _value(text: str, number: int) -> Value:
    if not text or text[0] not in "[{":
        return _scalar(text, number)
    if text[-1] != {"[": "]", "{": "}"}[text[0]]:
        raise _odd(number, text)
    parts = [part for part in _split(text[1:-1]) if part]
    if text[0] == "[":
        return [_scalar(part, number) for part in parts]
    pairs = [_KEY.match(part.replace(":", ": ", 1)) for part in parts]
    if None in pairs:
        raise _odd(number, text)
    return {_scalar(pair[1], number): _scalar((pair[2] or "").strip(), number) for pair in pairs if pair}


def _split(text: str) -> list[str]:
    """Return the parts of ``text`` between unquoted commas, stripped."""
    parts, start, quote = [], 0, ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == ",":
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def _without_comment(line: str) -> str:
    quote = ""
    for i, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (i == 0 or line[i - 1] in " [{,:-"):
            quote = char
        elif char == "#" and (i == 0 or line[i - 1] in " \t"):
            return line[:i]
    return line


def _scalar(text: str, number: int) -> str:
    if text[:1] in "&*!|>[{@`%" and text:
        raise _odd(number, text)
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        value = json_of(text)
        return str(value)
    return text


def _append(table: dict[str, Value], key: str, item: str, number: int) -> None:
    held = table.get(key)
    if held == "":
        held = table[key] = []
    if not isinstance(held, list):
        raise UnreadableError(f"line {number} is an item without a list")
    held.append(item)


def _set(table: dict[str, Value], key: str, name: str, item: str, number: int) -> None:
    held = table.get(key)
    if held == "":
        held = table[key] = {}
    if not isinstance(held, dict):
        raise UnreadableError(f"line {number} is indented, but not part of a table")
    if name in held:
        raise UnreadableError(f"line {number} repeats '{shown(name)}'")
    held[name] = item


def _odd(number: int, text: str) -> UnreadableError:
    return UnreadableError(
        f"line {number} ('{shown(text[:60])}') is not a key with a string, a list or a table of strings"
    )
