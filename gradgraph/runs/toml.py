"""A writer of recipes in TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gradgraph.errors import shown


def written(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return ``tables`` as TOML text. A key with the value None becomes a comment; empty nested tables are omitted."""
    return "\n\n".join("\n".join(_table(name, table)) for name, table in tables.items())


def _table(name: str, table: Mapping[str, Any]) -> list[str]:
    inner = [line for key, value in table.items() if isinstance(value, Mapping) and value
             for line in ("", *_table(f"{name}.{_key(key)}", value))]  # fmt: skip
    own = [f"# {_key(key)} =" if value is None else f"{_key(key)} = {_value(value)}"
           for key, value in table.items() if not isinstance(value, Mapping)]  # fmt: skip
    return [f"[{name}]", *own, *inner] if own else inner[1:]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def shown_value(value: Any) -> str:
    """Return ``value`` in TOML syntax, for a message."""
    return shown(_value(value))
