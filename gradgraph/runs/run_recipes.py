"""Recipes: the options of a build or a run in TOML. Every option is a key in the table of its section."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradgraph.building.option import TABLES, Shell
from gradgraph.errors import ArgumentError, BuildError, OutputError, shown, suggestion
from gradgraph.files.untrusted.documents import toml_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.runs.run_options import OPTIONS, Run, run_of
from gradgraph.runs.spelled_build import BUILDING, SPELLINGS, SpelledBuild

SECTIONS = ("model", "data", "loss", "optimizer", "schedule", "training", "output")
STDIN = "-"
LARGEST = 1 << 20  # bytes of a recipe

Tables = dict[str, dict[str, Any]]

OUT = Shell("output", "The step folder to write.", "path", "out", flags="-o --out", key="step", default="step")
STORE = Shell("output", "Storage type of the weights. float16 halves the file; the weights are float32 again once the "
              "file is loaded.", name="store", choices=("float32", "float16"), default="float32")  # fmt: skip
SPLIT = Shell("output", "Write the frozen layers as features.onnx, to be computed once for each sample, and the step "
              "of the rest as step/.", "flag", "split_frozen", default=False)  # fmt: skip
BUILD_ONLY = ("separate", "size")
_MODEL = {"model": Shell("model", takes="path", name="model", key="path")}
COMMANDS: dict[str, dict[str, Shell]] = {
    "build": _MODEL
    | SPELLINGS
    | {"out": OUT, "store": STORE, "split_frozen": SPLIT}
    | {n: OPTIONS[n] for n in ("share_weights", "force")},
    "train": _MODEL | OPTIONS | {n: s for n, s in SPELLINGS.items() if n not in (*BUILD_ONLY, *OPTIONS)},
}
"The options of each command that accepts a recipe, by parameter name, in the order of the command line."


# --- reading -------------------------------------------------------------------------------------------


@dataclass
class Recipe:
    """The contents of a recipe, for one command.

    Attributes:
        model: the path of MODEL.
        values: the values of options, by parameter name.
        arguments: the tables of options with arguments, such as ``loss_option``, by parameter name.
    """

    model: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)


def read(path: str, command: str) -> Recipe:
    """Return the contents of the recipe at ``path`` (or on stdin, for "-") for a command, "build" or "train".

    Keys of options that only the other command has are ignored.

    Raises:
        ArgumentError: if the recipe cannot be read, or has an unknown key or a value of the wrong type.
    """
    tables = _load(path)
    name = "stdin" if path == STDIN else path
    folder = Path.cwd() if path == STDIN else Path(path).parent.absolute()
    own = {shell.place: shell for shell in COMMANDS[command].values()}
    every: dict[str, set[str]] = {}
    for section, key in (shell.place for options in COMMANDS.values() for shell in options.values()):
        every.setdefault(section, set()).add(key)
    recipe = Recipe()
    for section, keys in tables.items():
        if section not in every or not isinstance(keys, dict):
            raise ArgumentError(f"there is no table [{shown(section)}] in recipes ('{shown(name)}')"
                                f"{suggestion(section, every)}")  # fmt: skip
        for key, value in keys.items():
            if key not in every[section]:
                raise ArgumentError(_unknown(section, key, name, every))
            if shell := own.get((section, key)):
                _take(recipe, shell, value, folder, f"[{section}] {key} in '{shown(name)}'")
    if "path" not in tables.get("model", {}) and "start" not in recipe.values:
        raise ArgumentError(f"'{shown(name)}' names no model; write path = \"model.onnx\" in its table [model]")
    return recipe


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the run that a recipe describes, such as the ``recipe.toml`` of a run folder.

    Paths in the recipe are relative to its folder.

    Raises:
        ArgumentError: the recipe cannot be read, or has an unknown key or an invalid value.
    """
    recipe = read(os.fspath(path), "train")
    return run_of(recipe.model, {**recipe.values, **recipe.arguments})


def _load(path: str) -> Tables:
    try:
        content = sys.stdin.buffer.read(LARGEST + 1) if path == STDIN else regular_bytes(path, LARGEST)
    except UnreadableError as error:
        raise ArgumentError(f"'{shown(path)}' cannot be read ({error}); give a recipe (.toml)") from None
    if len(content) > LARGEST:
        raise ArgumentError("the recipe is larger than 1 MiB; pass a recipe (.toml)")
    try:
        return toml_of(content)
    except UnreadableError as error:
        raise ArgumentError(f"'{shown(path)}' is not valid TOML: {error}") from None


def _unknown(section: str, key: str, name: str, every: Mapping[str, set[str]]) -> str:
    others = [other for other, keys in every.items() if key in keys]
    there = f"; it belongs to [{others[0]}]" if others else suggestion(key, sorted(every[section]))
    return f"there is no key '{shown(key)}' in the table [{section}] of recipes ('{shown(name)}'){there}"


def _take(recipe: Recipe, shell: Shell, value: Any, folder: Path, where: str) -> None:
    if shell.takes in TABLES:
        recipe.arguments[shell.name] = _arguments(shell.name, value, folder, where)
        return
    checked = _checked(shell, value, where)
    if shell.takes == "paths":
        checked = tuple(placed(path, folder) for path in checked)
    elif shell.takes == "path":
        checked = placed(checked, folder)
    elif shell.name == "schedule":
        checked = moved(checked, folder)
    if shell.name == "model":
        recipe.model = Path(str(checked))
    else:
        recipe.values[shell.name] = checked


_WHOLE, _NUMBER = ((int,), "a whole number"), ((int, float), "a number")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "whole": _WHOLE, "count": _WHOLE, "number": _NUMBER, "share": _NUMBER, "seconds": _NUMBER,
    "batch size": ((int, str), 'a whole number or "auto"'),
}  # fmt: skip


def _checked(shell: Shell, value: Any, where: str) -> Any:
    """Return the value of an option in a recipe; raise ArgumentError if its type does not fit the option."""
    if shell.takes == "flag":
        if shell.name == "accumulate" and type(value) is int:  # a flag of `build`; for `train` the number of batches
            return True
        if isinstance(value, bool):
            return value is not shell.is_opposite
        raise ArgumentError(f"{where} should be true or false, not {shown_value(value)}")
    if shell.takes in ("list", "paths", "columns"):
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(v, str) for v in values):
            return tuple(values)
        raise ArgumentError(f"{where} should be a string or a list of strings, not {shown_value(value)}")
    wanted, words = _KINDS.get(shell.takes, ((str,), "a string"))
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ArgumentError(f"{where} should be {words}, not {shown_value(value)}")
    return value


def _arguments(name: str, value: Any, folder: Path, where: str) -> dict[str, Any]:
    """Return a table with arguments of the option ``name`` in the form that the command line's parsers return."""
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} should be a table, not {shown_value(value)}")
    if name == "loss_option":  # [loss.options.boxes] applies to the loss of the output "boxes"
        parts = [(f"{k}.{n}", v) for k, own in value.items() if isinstance(own, dict) for n, v in own.items()]
        return dict(parts) | {k: v for k, v in value.items() if not isinstance(v, dict)}
    if name == "group":
        for glob, group in value.items():
            if not isinstance(group, dict):
                raise ArgumentError(f'{where} should contain tables, such as [optimizer.groups."{shown(glob)}"]')
            if isinstance(group.get("lr"), str):
                group["lr"] = moved(group["lr"], folder)
    return value


# --- writing -------------------------------------------------------------------------------------------


def tables(run: Run) -> Tables:
    """Return all options of a run, including defaults, as recipe tables; unset options are None.

    Raises:
        OutputError: a build option is a Python object, which recipes cannot contain.
    """
    own = {name: (getattr(run, shell.field), shell.is_opposite) for name, shell in OPTIONS.items()}
    values = {name: not value if is_opposite else value for name, (value, is_opposite) in own.items()}
    values |= {name: getattr(SpelledBuild(run.build), name) for name in SPELLINGS.keys() - OPTIONS.keys()}
    for name, value in run.build.items():
        if name not in SPELLINGS or not _is_plain(value):
            raise OutputError(
                f"the recipe in the run folder cannot contain '{shown(name)}' of build, which is an object; pass its "
                "name as text, such as 'adamw(1e-3)', or omit run="
            )
    return tables_of("train", {**values, "model": run.model}, "loss" in run.build)


def tables_of(command: str, values: Mapping[str, Any], has_loss: bool) -> Tables:
    """Return the options of a command as recipe tables.

    Args:
        command: the command, "build" or "train".
        values: the value of each option by parameter name.
        has_loss: whether a loss was given; otherwise a starting model uses its default loss.
    """
    model = values["model"]
    left_out: tuple[str, ...] = (*BUILDING, "out") if model is not None and model.is_dir() else ()
    if values.get("start") is not None and not has_loss:
        left_out = ("loss",)
    found: Tables = {section: {} for section in SECTIONS}
    for name, shell in COMMANDS[command].items():
        if name not in left_out:
            section, key = shell.place
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
