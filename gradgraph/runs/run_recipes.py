"""Recipes: the options of a build or a run as TOML tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradgraph.errors import BuildError, OutputError, shown
from gradgraph.runs.run_options import OPTIONS, Run
from gradgraph.runs.spelled_build import BUILDING, SPELLINGS, SpelledBuild

SECTIONS = ("model", "data", "loss", "optimizer", "schedule", "training", "output")
STDIN = "-"

Tables = dict[str, dict[str, Any]]
Place = tuple[str, str, str]  # an option's section and key in recipes, and its name


def tables(run: Run) -> Tables:
    """Return all options of a run, including defaults, as recipe tables; unset options are None.

    Raises:
        OutputError: a build option is a Python object, which recipes cannot contain.
    """
    places = [(shell.section, shell.key or name, name) for name, shell in {**OPTIONS, **SPELLINGS}.items()
              if name not in ("separate", "size")]  # fmt: skip
    own = {name: (getattr(run, shell.field), shell.is_opposite) for name, shell in OPTIONS.items()}
    values = {name: not value if is_opposite else value for name, (value, is_opposite) in own.items()}
    values |= {name: getattr(SpelledBuild(run.build), name) for name in SPELLINGS.keys() - OPTIONS.keys()}
    for name, value in run.build.items():
        if name not in SPELLINGS or not _is_plain(value):
            raise OutputError(
                f"the recipe in the run folder cannot contain '{shown(name)}' of build, which is an object; pass its "
                "name as text, such as 'adamw(1e-3)', or omit run="
            )
    return tables_of([("model", "path", "model"), *places], {**values, "model": run.model}, "loss" in run.build)


def tables_of(places: Iterable[Place], values: Mapping[str, Any], has_loss: bool) -> Tables:
    """Return the options at ``places`` as recipe tables.

    Args:
        places: the section, key and name of each option, in order.
        values: the value of each option by name.
        has_loss: whether a loss was given; otherwise a starting model uses its default loss.
    """
    model = values["model"]
    left_out: tuple[str, ...] = (*BUILDING, "out") if model is not None and model.is_dir() else ()
    if values.get("start") is not None and not has_loss:
        left_out = ("loss",)
    found: Tables = {section: {} for section in SECTIONS}
    for section, key, name in places:
        if name not in left_out:
            found[section][key] = _as_data(name, values[name])
    return {section: table for section, table in found.items() if table}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, str | int | float)


def _as_data(name: str, value: Any) -> Any:
    if isinstance(value, Path):
        return placed(str(value), Path.cwd())
    if isinstance(value, bool):
        return (1 if value else None) if name == "accumulate" else value is not name.startswith("no_")
    if name == "schedule":
        return None if value is None else moved(value, Path.cwd())
    if name == "group":
        return {glob: {k: moved(v, Path.cwd()) if k == "lr" and isinstance(v, str) else v for k, v in own.items()}
                for glob, own in value.items()}  # fmt: skip
    if name == "loss_option":
        nested: dict[str, Any] = {}
        for key, argument in value.items():
            of, _, last = key.rpartition(".")
            (nested.setdefault(of, {}) if of else nested)[last] = argument
        value = nested
    if isinstance(value, dict) and (key := next((k for k, v in value.items() if v is None), None)):
        raise BuildError(f"{shown(key)} is None, which TOML cannot express; omit it")
    if isinstance(value, list | tuple):
        values = [_as_data(name, v) for v in value]
        return values[0] if name == "loss" and len(values) == 1 else values
    return value


def placed(path: str, folder: Path) -> str:
    """Return an absolute path for a path relative to ``folder``; "-" (stdin) is unchanged."""
    return path if path == STDIN else str(folder / path)


def moved(schedule: str, folder: Path) -> str:
    """Return a schedule with absolute paths for its files, which are relative to ``folder``."""
    from gradgraph.optim import written

    return written.moved(schedule, folder)


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
