"""Which cases and points of rules compute which expression, seen by tracing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.named_operators import OPERATORS
from gradgraph.rules.registry import Case, Point, Rule
from gradgraph.verify import cases
from tests.mutate_rules.changes import FOLDER, MODULES, Mutant, Span

Trial = Case | Point
Place = tuple[str, Span]  # a module, and an expression in it
Reach = dict[Place, list[tuple[Rule, Trial]]]


def functions() -> dict[tuple[str, str], FunctionType]:
    """Those of the rules by module and name: what is decorated lies in a table."""
    found: dict[tuple[str, str], FunctionType] = {}
    modules = [importlib.import_module(name) for name in MODULES.values()]
    held = [v for m in modules for v in vars(m).values()]
    held += [m for v in held if isinstance(v, type) for m in vars(v).values()]
    for value in [*held, *(r.emit for r in rules_with_cases()), *(o.portable for o in OPERATORS.values())]:
        plain = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        plain = getattr(plain, "__wrapped__", plain)
        if isinstance(plain, FunctionType) and plain.__module__.startswith("gradgraph.rules."):
            found[plain.__module__.rsplit(".", 1)[-1], plain.__qualname__] = plain
    return found


def places_run(rule: Rule, trial: Trial) -> set[Place]:
    """What rules compute to write the gradient of a case, with shapes known, unknown, mixed, and literals fed."""
    seen: set[tuple[CodeType, int]] = set()
    folder = str(FOLDER)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            seen.add((frame.f_code, frame.f_lasti // 2))
        return trace

    for t, wrt in _built(rule, trial):
        sys.settrace(trace)
        with contextlib.suppress(ModelError):  # a few operators have outputs that cannot be float16
            gg.vjp(t.model, outputs=t.read, wrt=wrt, allow_unused=True)
        sys.settrace(None)
    return {(Path(code.co_filename).stem, span) for code, i in seen if (span := _spans(code)[i]) is not None}


@functools.cache
def _spans(code: CodeType) -> list[Span | None]:
    """Which expression each instruction is for."""
    return [None if None in p else p for p in code.co_positions()]  # type: ignore[misc]


def _all_spans(code: CodeType) -> Iterator[Span]:
    """Of a function and of those inside."""
    yield from (span for span in _spans(code) if span is not None)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _all_spans(inner)


def _lies_in(inner: Span, outer: Span) -> bool:
    first, last, start, end = outer
    return (first, start) <= (inner[0], inner[2]) and (inner[1], inner[3]) <= (last, end)


def _built(rule: Rule, trial: Trial) -> Iterator[tuple[cases.Trial, list[str]]]:
    """What is differentiated, and by which inputs."""
    if isinstance(trial, Point):
        for unknown in (False, True):
            t = cases.trial(rule, trial.case, fed=True, unknown=unknown)
            yield t, [f"x{i}" for i, g in enumerate(trial.gives) if g is not None]
        return
    known: list[tuple[cases.Unknown, bool]] = [(False, False), (True, False), ("even", False), ("odd", False)]
    ways: list[tuple[cases.Unknown, bool, Any]] = [(u, f, np.float64) for u, f in (*known, (True, True))]
    if not trial.onnxruntime:
        ways += [(not trial.known_shapes, False, np.float32)]
    if not trial.onnxruntime and rule.op_type != "Det":
        ways += [(False, False, np.float16)]
    for unknown, fed, dtype in ways:
        if not (unknown and trial.known_shapes) and not (fed and trial.constant_literals):
            t = cases.trial(rule, trial, unknown=unknown, fed=fed, dtype=dtype)
            yield t, t.wrt


def reach(rules: Sequence[Rule]) -> Reach:
    """Which cases and points compute an expression."""
    found: Reach = defaultdict(list)
    for rule in rules:
        for trial in (*rule.cases, *rule.points):
            for place in places_run(rule, trial):
                found[place].append((rule, trial))
    return found


def trials_of(mutant: Mutant, code: CodeType, reached: Reach) -> list[tuple[Rule, Trial]]:
    """Those that compute what is changed; where Python has folded it into a constant, what this stands in."""
    spans = set(_all_spans(code))
    inside = [s for s in spans if _lies_in(s, mutant.span)]
    around = sorted((s for s in spans if _lies_in(mutant.span, s)), key=lambda s: (s[1] - s[0], s[3] - s[2]))
    rows = (row for span in inside or around[:1] for row in reached.get((mutant.module, span), []))
    return list({id(trial): (rule, trial) for rule, trial in rows}.values())


def chosen(trials: Sequence[tuple[Rule, Trial]], count: int, draw: random.Random) -> list[tuple[Rule, Trial]]:
    """A few, of as many rules as there are."""
    mixed = sorted(draw.sample(list(trials), len(trials)), key=lambda row: isinstance(row[1], Case))  # points first
    turns: Counter[str] = Counter()
    order = []
    for rule, trial in mixed:
        order.append((turns[rule.op_type], rule, trial))
        turns[rule.op_type] += 1
    return [(rule, trial) for _, rule, trial in sorted(order, key=lambda row: row[0])][:count]
