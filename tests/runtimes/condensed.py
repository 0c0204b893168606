"""From what became of models of one operator to a row of a table: the fewest facts that tell failures from the rest."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradgraph.backends.capability import ALWAYS, Condition, Kind, age, row_at
from gradgraph.backends.facts import Facts

_TYPE = re.compile(r"(\w+) (b?float\d+|u?int\d+|bool|string)")
# which facts are believed first to be the reason, where several would be one
_ORDER = (_TYPE, r"size 0", r"depthwise|outputs alike|slices read", r"output \d", r"\w+=",
          r"\w+ (set|not|uneven|negative)", r"captures", r"input \d+ (computed|derived|negative|zero|empty)",
          r"open", r"(channels|space) open", r"input \d+ open", r"rank", r"input \d+$", r"broadcasts", r"")  # fmt: skip
_WEAK = re.compile(r"!?((input \d+ )?rank .*|input \d+|broadcasts)")  # believed only where nothing else is the reason
_ACCIDENT = re.compile(rf"{_TYPE.pattern}|\w+=\d+")  # that it is another type or number is no reason
_UNSIGNED = ("uint32", "uint64")  # wide unsigned numbers are computed for their bits: they are right in full or wrong


@dataclass(frozen=True)
class Outcome:
    """What became of one model: ``words`` of the runtime, or the numbers that are wrong."""

    operator: str
    facts: Facts
    magnitude: int
    label: str
    kind: Kind
    words: str


def rows_of(outcomes: Iterable[Outcome]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The rows of a table, and what no facts explain."""
    of: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        of[outcome.operator].append(outcome)
    unexplained: list[str] = []
    rows = {}
    for operator, all_of_it in sorted(of.items()):
        rows[operator] = _row(all_of_it, unexplained)
    return rows, unexplained


def _row(outcomes: Sequence[Outcome], unexplained: list[str]) -> dict[str, Any]:
    small, limits = _within_limits(outcomes)
    right = [o.facts for o in small if o.kind == "right"]
    row: dict[str, Any] = {}
    if not right:
        worst: Kind = "refused" if all(o.kind == "refused" for o in small) else "wrong"
        return {worst: [ALWAYS]}
    types = defaultdict(list)
    for fact in sorted(set().union(*right)):
        if match := _TYPE.fullmatch(fact):
            types[match[1]].append(match[2])
    row |= {variable: " ".join(names) for variable, names in types.items()}
    for kind in ("wrong", "refused"):
        left = [o for o in small if o.kind == kind]
        found = list(_conditions([o.facts for o in left], right, deep=kind == "wrong"))
        if found:
            row[kind] = found
        for o in left:
            if not any(Condition.read(c).holds(o.facts) for c in found):
                unexplained.append(f"{o.operator} {o.label}: {o.kind} {o.words}")
    return row | ({"exact": limits} if limits else {})


def _within_limits(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], dict[str, str]]:
    """Signed numbers that are right only below a power of two: that is a limit, and no failure. Unsigned ones fail."""
    kept, limits = [], dict[str, str]()
    for o in outcomes:
        type_ = next((f for f in sorted(o.facts) if o.magnitude and f in _types_in(o.label)), "")
        if o.magnitude and o.kind == "wrong" and type_.split()[-1:] not in ([u] for u in _UNSIGNED):
            limits.setdefault(type_, f"2^{o.magnitude}")
        else:
            kept.append(o)
    bad = {f for o in kept for f in _types_in(o.label) if o.magnitude and o.kind == "wrong"}
    return [o for o in kept if o.kind != "right" or bad.isdisjoint(o.facts)], limits


def _types_in(label: str) -> list[str]:
    return [f"{m[1]} {m[2]}" for m in _TYPE.finditer(label)]


def _conditions(failed: list[Facts], right: Sequence[Facts], deep: bool) -> Iterator[str]:
    """Conditions that hold for failures and for nothing that is right, the most telling ones first.

    Of three facts they are if ``deep``: wrong numbers are worth a condition that may be too narrow.
    """
    while failed:
        best = max(_candidates(failed, right, deep), key=lambda c: _worth(c, failed), default=None)
        if best is None:
            return
        condition = Condition(best)
        failed = [f for f in failed if not condition.holds(f)]
        yield " & ".join(best)


def _candidates(failed: Sequence[Facts], right: Sequence[Facts], deep: bool) -> Iterator[tuple[str, ...]]:
    facts = sorted(set().union(*failed))
    every = sorted(set().union(*failed, *right))
    single = [(f,) for f in facts if not _WEAK.fullmatch(f)]
    weak = [(f,) for f in facts if _WEAK.fullmatch(f)]
    absent = [(f"!{f}",) for f in every if any(f not in x for x in failed) and not _ACCIDENT.fullmatch(f)]
    mixed = itertools.product(facts, (t for (t,) in absent))
    stages = [single, weak, itertools.combinations(facts, 2), absent, mixed]
    if deep:
        stages.append((a, b, c) for (a, b), (c,) in itertools.product(itertools.combinations(facts, 2), absent))
    for stage in stages:
        found = [c for c in stage if _tells(Condition(c), failed, right)]
        if found:
            yield from found
            return


def _tells(condition: Condition, failed: Sequence[Facts], right: Sequence[Facts]) -> bool:
    return any(map(condition.holds, failed)) and not any(map(condition.holds, right))


def _worth(candidate: tuple[str, ...], failed: Sequence[Facts]) -> tuple[int, int, int, str]:
    covers = sum(Condition(candidate).holds(f) for f in failed)
    places = [next(i for i, p in enumerate(_ORDER) if re.match(p, t.lstrip("!"))) for t in candidate]
    return covers, -max(places), -sum(places), candidate[0]


# --- several versions of one runtime ---------------------------------------------------------------------------


def with_version(table: Mapping[str, Any], found: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    """``table``, a file's, with what was ``found`` of one version as a whole, and its ``rows``, in place of its own."""
    version = found["version"]
    measured = [*(m for m in table["measured"] if m["version"] != version), found]
    measured.sort(key=lambda m: age(m["version"]))
    before = table["operators"]
    told = {m["version"]: {op: row_at(row, m["version"]) for op, row in before.items()} for m in measured}
    told[version] = dict(rows)
    every = sorted({op for of_version in told.values() for op, row in of_version.items() if row is not None})
    operators = {op: _since([(v, told[v].get(op)) for v in told]) for op in every}
    return {**table, "measured": measured, "operators": operators}


def _since(rows: Sequence[tuple[str, Mapping[str, Any] | None]]) -> Any:
    """One row where all versions agree; else those that differ from the one before, with their first versions."""
    known: list[tuple[str, Mapping[str, Any]]] = []
    for version, row in rows:
        if row is not None or known:
            known.append((version, {"refused": [ALWAYS]} if row is None else row))
    changed = [known[i] for i in range(len(known)) if i == 0 or known[i][1] != known[i - 1][1]]
    if len(changed) == 1 and len(known) == len(rows):
        return changed[0][1]
    return [{"since": version, **row} for version, row in changed]


# --- the file -------------------------------------------------------------------------------------------------


def written(head: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]], unexplained: Sequence[str]) -> str:
    """The file of a table; what no facts explain stands in it as remarks."""
    lines = ["# Written by `python -m tests.runtimes.probe`; see gradgraph/backends/capability.py."]
    measured = head.get("measured", ())
    lines += [f"{key} = {json.dumps(value)}" for key, value in head.items() if value is not measured]
    for of_version in measured:
        lines += ["", "[[measured]]", *(f"{key} = {json.dumps(value)}" for key, value in of_version.items())]
    lines += ["", "[operators]", *(f"{_key(operator)} = {_inline(row)}" for operator, row in rows.items())]
    lines += ["", "# failed where models with the same facts did not:", *(f"# {u[:110]}" for u in unexplained)] * bool(
        unexplained
    )
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
        return "[\n" + "".join(f"  {_inline(v)},\n" for v in value) + "]"
    return json.dumps(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else json.dumps(name)
