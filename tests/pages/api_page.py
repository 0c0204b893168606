"""docs/reference/api-*.md of the site: every public name with its signature and docstring."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import gradgraph
from gradgraph import (
    augment,
    chat,
    errors,
    export,
    extend,
    frontend,
    losses,
    metrics,
    optim,
    sound,
    surgery,
    text,
    vision,
)
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.frontend import functional, init, nn
from gradgraph.frontend.module import Module
from gradgraph.frontend.tensor import Tensor, TensorMethods
from gradgraph.runs.training import Trained
from gradgraph.runtime.execution.memory import Memory
from gradgraph.runtime.execution.nonfinite import NonFinite
from gradgraph.runtime.execution.profiler import Profile
from gradgraph.runtime.loop.sizing import BatchSize
from gradgraph.runtime.loop.trials import Overfit, RateCurve
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.saved.partial import Loaded
from gradgraph.step.manifest import Manifest, MeasureSpec, PartSpec, StateSpec, StepSpec

FOLDER = "docs/reference"
# classes that have a page of their own, and what methods and functions give
TRAINER = {"Trainer": gradgraph.Trainer}
GIVEN = {
    c.__name__: c
    for c in (
        History,
        Trained,
        RateCurve,
        Overfit,
        NonFinite,
        Loaded,
        Profile,
        Memory,
        BatchSize,
        Manifest,
        StepSpec,
        PartSpec,
        MeasureSpec,
        StateSpec,
        TargetSpec,
        TensorSpec,
    )
}


def families(face: ModuleType, of_losses: bool) -> list[ModuleType]:
    """The files that ``face`` gathers, and those of layers from elsewhere: those of losses, or all others."""
    members = [getattr(face, name) for name in face.__all__ if name != "init"]
    others = nn.LAYERS.values() if face is nn else []
    found = dict.fromkeys(sys.modules[member.__module__] for member in [*members, *others])
    return [m for m in found if ("losses" in m.__name__) == of_losses]


# page: its title, and what stands on it
PAGES: dict[str, tuple[str, list[ModuleType | Mapping[str, type]]]] = {
    "api-gradgraph.md": ("gradgraph", [gradgraph]),
    "api-trainer.md": ("Trainer", [TRAINER, GIVEN]),
    "api-optim.md": ("Optimizers", [optim]),
    "api-losses.md": ("Losses and metrics", [losses, metrics]),
    "api-augment.md": ("Augmentation", [augment]),
    "api-surgery.md": ("Surgery", [surgery]),
    "api-text.md": ("Text", [text]),
    "api-chat.md": ("Chat", [chat]),
    "api-sound.md": ("Audio", [sound]),
    "api-vision.md": ("Object detection and segmentation", [vision]),
    "api-frontend.md": ("Networks", [frontend, init]),
    "api-layers.md": ("Layers", families(nn, of_losses=False)),
    "api-functions.md": ("Functions", families(functional, of_losses=False)),
    "api-loss-functions.md": (
        "Loss functions",
        [*families(nn, of_losses=True), *families(functional, of_losses=True)],
    ),
    "api-export.md": ("Export", [export]),
    "api-extend.md": ("Extensions and errors", [extend, errors]),
}
HEAD = """# API: {title}

{others}
"""


def page(name: str) -> str:
    """The whole page of that name."""
    title, parts = PAGES[name]
    others = [f"[{t}]({n})" if n != name else t for n, (t, _) in PAGES.items()]
    lines = [HEAD.format(title=title, others=" · ".join(others))]
    if len(parts) > 2:
        lines += _overview([part for part in parts if isinstance(part, ModuleType)])
    for part in parts:
        if isinstance(part, Mapping):
            lines += [] if part is TRAINER else ["## What calls give", ""]
            lines += [line for n, c in part.items() for line in _entry("##" if part is TRAINER else "###", n, c)]
        else:
            lines += [f"## {_heading(part)}", "", *markdown(part.__doc__ or ""), ""]
            lines += [line for n, thing in public(part) if n not in TRAINER for line in _entry("###", n, thing)]
    return "\n".join(lines).rstrip() + "\n"


def _heading(part: ModuleType) -> str:
    """The name that users import; of a file of layers or functions, what it has."""
    own = part in families(nn, False) + families(nn, True) + families(functional, False) + families(functional, True)
    return re.split("[,:.]", first_paragraph(part))[0] if own else part.__name__


def _overview(parts: list[ModuleType]) -> list[str]:
    """A table of the names in each file, with links to where they are told."""
    rows = []
    for part in parts:
        names = ", ".join(f"[{n}](#{n.lower()})" for n, _ in public(part))
        rows.append(f"| {_inline(first_paragraph(part)).rstrip('.')} | {names} |")
    return ["| what they are | names |", "|---|---|", *rows, ""]


def first_paragraph(thing: Any) -> str:
    """On one line."""
    return " ".join(inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].split())


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Names that users may use, and what they stand for: classes, functions and values, in order."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            n
            for n, v in vars(module).items()
            if not n.startswith("_") and f"{getattr(v, '__module__', '')}.".startswith(f"{module.__name__}.")
        ]
    found = {name: getattr(module, name) for name in names}
    for table in [thing for thing in found.values() if isinstance(thing, Mapping)]:  # of losses, of metrics
        found |= table
    for name in sorted(found, key=lambda n: (n.lower(), n)):
        if not inspect.ismodule(found[name]) and not isinstance(found[name], Mapping):
            yield name, found[name]


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, those of its own bases that are not public themselves included."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("gradgraph") or (
            base in (Module, TensorMethods) and cls not in (base, Tensor)
        ):
            continue
        for name, member in vars(base).items():
            if (
                not name.startswith("_")
                and name not in seen
                and (inspect.isroutine(member) or isinstance(member, property))
            ):
                seen.add(name)
                yield name, member


def plain(member: Any) -> Any:
    """The function behind a property, a class method or a static method."""
    if isinstance(member, functools.cached_property):
        return member.func
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def is_told_by_its_class(name: str, cls: type) -> bool:
    """What a layer computes stands in its class; methods of tensors are functions of their names."""
    return (name in ("forward", "extra_repr", "function") and issubclass(cls, Module)) or issubclass(cls, TensorMethods)


def _entry(level: str, name: str, thing: Any) -> Iterator[str]:
    if not callable(thing):
        yield from [f"{level} {name}", "", f"`{thing!r}`", ""]
        return
    yield from [f"{level} {name}", ""]
    if not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        yield from ["```", *signature(name, thing), "```", ""]
    yield from [*markdown(inspect.getdoc(thing) or ""), ""]
    if not inspect.isclass(thing) or issubclass(thing, BaseException):
        return
    untold = []
    for member_name, member in members(thing):
        if issubclass(thing, Module) and is_told_by_its_class(member_name, thing):
            continue
        function = plain(member)
        if not function.__doc__:
            untold.append(member_name)
            continue
        whole = f"{name}.{member_name}"
        if isinstance(member, property | functools.cached_property):
            yield from [f"{level}# {whole}", "", *markdown(f"(property) {inspect.getdoc(function)}"), ""]
        else:
            yield from [f"{level}# {whole}", "", "```", *signature(whole, function), "```", ""]
            yield from [*markdown(inspect.getdoc(function) or ""), ""]
    if thing is Tensor:
        yield from [
            f"Also, as in `torch.Tensor`: {', '.join(f'`{n}`' for n in sorted({*untold} - {'traced'}))}.",
            "",
        ]


def signature(name: str, thing: Callable[..., Any]) -> list[str]:
    """As it would be written in Python; on several lines where it is long."""
    try:
        found = inspect.signature(thing)
    except ValueError:
        return [name]
    given, starred = [], False
    for p in found.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            given.append("*")
        starred |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        given.append(_parameter(p))
    result = (
        ""
        if inspect.isclass(thing) or found.return_annotation is found.empty
        else f" -> {_type(found.return_annotation)}"
    )
    line = f"{name}({', '.join(given)}){result}"
    return [line] if len(line) <= 100 else [f"{name}(", *(f"    {p}," for p in given), f"){result}"]


def _parameter(p: inspect.Parameter) -> str:
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    typed = "" if p.annotation is p.empty else f": {_type(p.annotation)}"
    equals = "" if p.default is p.empty else f"{' = ' if typed else '='}{_value(p.default)}"
    return f"{stars}{p.name}{typed}{equals}"


def _value(default: Any) -> str:
    if inspect.isroutine(default) or inspect.isclass(default):
        return "…" if default.__name__ == "<lambda>" else default.__name__
    return "…" if repr(default) == "<factory>" else re.sub(r"<function .*? at 0x\w+>", "…", repr(default))


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


# --- docstrings as Markdown --------------------------------------------------------------------------------

SECTIONS = {
    "Args": "Arguments",
    "Returns": "Returns",
    "Raises": "Raises",
    "Attributes": "Attributes",
    "Yields": "Yields",
}
ITEM = re.compile(r"^    (\*{0,2}\w[\w.,* ]*): +(.*)$")


def markdown(text: str) -> list[str]:
    """A docstring of ours: sections become lists, literals get single quotes, ``::`` begins code."""
    lines: list[str] = []
    section, is_code = "", False
    for line in inspect.cleandoc(text).splitlines():
        if is_code and (line.startswith("    ") or not line):
            if line or lines[-1] != "```":
                lines.append(line[4:])
            continue
        if is_code:
            _end_code(lines)
        is_code = line.endswith("::")
        if line[:-1] in SECTIONS and line.endswith(":"):
            section = line[:-1]
            lines += [f"**{SECTIONS[section]}**", ""]
        elif is_code:
            before = line[:-2].rstrip()
            lines += [*([f"{_inline(before)}:", ""] if before else []), "```"]
        else:
            section = section if line.startswith(" ") or not line else ""
            lines.append(_line(line, section))
    if is_code:
        _end_code(lines)
    return lines


def _end_code(lines: list[str]) -> None:
    while not lines[-1]:
        lines.pop()
    lines += ["```", ""]


def _line(line: str, section: str) -> str:
    if not section or not line:
        return _inline(line)
    item = ITEM.match(line)
    if section in ("Returns", "Yields"):
        return _inline(line[4:])
    if item is None:
        return f"  {_inline(line.strip())}"
    return f"- {', '.join(f'`{n.strip()}`' for n in item[1].split(','))}: {_inline(item[2])}"


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")
