"""Tables of supported operators, types and conditions of runtimes, one data file per backend (``tables/*.toml``).

For each node, a table states whether the runtime computes it correctly, rejects it, silently computes it *incorrectly*,
or was not tested with it. Most tables were measured: ``python -m tests.runtimes.probe`` runs single-operator models in
the runtime, compares results, and writes the file. Some are from a runtime's documentation.

A row lists, for each type variable of the operator's schema, the types that work, and conditions under which the
operator is rejected or wrong regardless of types. A condition is a conjunction of facts (``facts.py``):
``"mode=cubic"``, ``"input 1 computed & !rank 4"``; ``!`` negates a fact, and ``*`` is always true.

The table of onnxruntime covers several versions: ``[[measured]]`` lists them, and an operator that changed between them
has several rows, each valid from its ``since`` version until the next row's. For the installed version, the newest rows
that are not newer than it apply.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from gradgraph.backends.facts import Facts, facts_of
from gradgraph.backends.forms import Call
from gradgraph.rules.registry import key_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES = Path(__file__).parent / "tables"
ALWAYS = "*"

Kind = Literal["right", "untried", "falls back", "refused", "wrong"]  # from best to worst
KINDS: tuple[Kind, ...] = ("right", "untried", "falls back", "refused", "wrong")


@dataclass(frozen=True)
class Verdict:
    """A runtime's support for one node.

    Attributes:
        kind: one of ``KINDS``.
        reason: a clause such as "it has no operator Loop"; empty if the node is supported.
    """

    kind: Kind
    reason: str = ""

    @property
    def fails(self) -> bool:
        """Whether a model with this node is rejected, or its results are wrong."""
        return self.kind in ("refused", "wrong")


RIGHT = Verdict("right")


@dataclass(frozen=True)
class Condition:
    """A conjunction of facts for which an operator is rejected or wrong, and the reason, if the table states one."""

    terms: tuple[str, ...]
    why: str = ""

    @classmethod
    def read(cls, text: str) -> Condition:
        """Parse a condition in a table's file, such as ``"fact & fact: reason"``."""
        terms, _, why = text.partition(": ")
        return cls(tuple(t.strip() for t in terms.split(" & ")), why)

    def holds(self, facts: Facts) -> bool:
        """Return whether all terms of the condition hold for a node with these facts."""
        return all(t == ALWAYS or ((t[1:] not in facts) if t[0] == "!" else t in facts) for t in self.terms)

    def in_words(self) -> str:
        """Return the condition in words that fit after "with", such as ``mode=cubic and input 1 computed or fed``."""
        return " and ".join(_in_words(term) for term in self.terms if term != ALWAYS)


_WORDS = (  # facts as words after "with"
    (r"(\w+) (b?float\w+|u?int\d+|bool|string|complex\w+)", r"\2"),
    (r"input (\d+) computed", r"input \1 computed or fed, not constant"),
    (r"input (\d+) derived", r"input \1 computed from constants"),
    (r"input (\d+) open", r"open sizes of input \1"),
    (r"input (\d+) open inside", r"open sizes of input \1 after its first axis"),
    (r"channels open", r"an open number of channels"),
    (r"space open", r"open sizes after the channels"),
    (r"input (\d+) rank unknown", r"an unknown number of axes of input \1"),
    (r"input (\d+) rank (\d+)", r"\2 axes of input \1"),
    (r"rank unknown", r"an unknown number of axes"),
    (r"rank (\d+)", r"\1 axes"),
    (r"open", r"open sizes"),
    (r"open inside", r"open sizes after the first axis"),
    (r"channels in threes", r"6, 9, 15 or so channels"),
    (r"filters in fours", r"4, 8, 12 or so filters"),
    (r"depthwise", r"one filter for each channel"),
    (r"size 0", r"an input without elements"),
    (r"broadcasts", r"inputs of different shapes"),
    (r"captures", r"bodies that read values from outside"),
    (r"slices read", r"a body that also reads its scan outputs"),
    (r"outputs alike", r"a constant that another output also returns"),
    (r"output (\d+)", r"output \1 read"),
)


def _in_words(term: str) -> str:
    negated, fact = term[0] == "!", term.lstrip("!")
    words = next((re.sub(p, w, fact) for p, w in _WORDS if re.fullmatch(p, fact)), fact)
    return f"not {words}" if negated else words


@dataclass(frozen=True)
class Row:
    """One operator: supported types, by type variable, and conditions under which it is rejected or wrong.

    A ``fatal`` condition is an error even for runtimes that fall back to the CPU for unsupported nodes.
    """

    types: Mapping[str, frozenset[str]]
    refused: tuple[Condition, ...] = ()
    wrong: tuple[Condition, ...] = ()
    fatal: tuple[Condition, ...] = ()

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Row:
        """Parse a row of a table's file."""
        types = {k: frozenset(v.split()) for k, v in data.items() if isinstance(v, str)}
        return cls(types, *(tuple(map(Condition.read, data.get(kind, ()))) for kind in ("refused", "wrong", "fatal")))


@dataclass(frozen=True)
class Table:
    """The table of one runtime.

    Attributes:
        runtime, version: the name and version of the runtime.
        source: where the data come from, in words.
        tested: whether the data were measured in the runtime.
        complete: whether unlisted operators and types are rejected; otherwise they are untested.
        falls_back: whether unsupported nodes are computed elsewhere (by onnxruntime on the CPU).
        functions: whether the runtime supports model-local functions.
        opsets, ir_versions: the oldest and newest supported opset of ai.onnx, and IR version.
        rows: by operator; operators of other domains have keys of the form ``domain.Operator``.
    """

    runtime: str
    version: str
    source: str
    tested: bool
    complete: bool
    falls_back: bool
    functions: bool
    opsets: tuple[int, int]
    ir_versions: tuple[int, int]
    rows: Mapping[str, Row] = field(repr=False)

    @property
    def title(self) -> str:
        """The runtime's name and version, for messages."""
        return f"{self.runtime} {self.version}".strip()

    def verdict(self, node: ir.Node, facts: Facts | None = None) -> Verdict:
        """Return the verdict on ``node``; pass the node's ``facts`` if they are known."""
        domain, op_type = key_of(node)
        row = self.rows.get(f"{domain}.{op_type}" if domain else op_type)
        if row is None:
            if self.complete or domain:
                return self._refusal(f"it has no operator {op_type}" + (f" of the domain {domain}" if domain else ""))
            return Verdict("untried", f"{op_type} was not tested in it")
        known = facts_of(node) if facts is None else facts
        for condition in row.wrong:
            if condition.holds(known):
                return Verdict("wrong", condition.why or f"it computes {_case_in_words(op_type, condition)} wrong")
        for condition in row.fatal:
            if condition.holds(known):
                return Verdict("refused", condition.why)
        for condition in row.refused:
            if condition.holds(known):
                return self._refusal(condition.why or f"it does not support {_case_in_words(op_type, condition)}")
        return self._by_types(op_type, row, known)

    def _by_types(self, op_type: str, row: Row, facts: Facts) -> Verdict:
        """Return the verdict by the types in ``facts`` only, for a node to which no condition of ``row`` applies."""
        for fact in sorted(facts):
            variable, _, type_ = fact.partition(" ")
            if variable in row.types and type_ not in row.types[variable]:
                if self.complete:
                    return self._refusal(f"it has no {op_type} of {type_}")
                return Verdict("untried", f"{op_type} of {type_} was not tested in it")
        return RIGHT

    def _refusal(self, reason: str) -> Verdict:
        return Verdict("falls back" if self.falls_back else "refused", reason)

    def takes(self, node: ir.Node) -> bool:
        """Return whether the runtime computes ``node`` correctly or was not tested with it."""
        return self.verdict(node).kind in ("right", "untried")


def _case_in_words(op_type: str, condition: Condition) -> str:
    words = condition.in_words()
    return f"{op_type} with {words}" if words else f"the operator {op_type}"


def installed() -> str:
    """Return the version of the installed onnxruntime."""
    import onnxruntime  # not needed for the tables of other runtimes

    return str(onnxruntime.__version__)


def age(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, as a sort key."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def holding(rows: Sequence[Mapping[str, Any]], version: str, since: str = "version") -> Mapping[str, Any]:
    """Return the newest of ``rows`` (oldest first) whose ``since`` is not above ``version``, or else the oldest."""
    return next((row for row in reversed(rows) if age(row[since]) <= age(version)), rows[0])


def row_at(rows: Mapping[str, Any] | Sequence[Mapping[str, Any]], version: str) -> Mapping[str, Any] | None:
    """Return the one of an operator's ``rows`` that applies to ``version``, or None if the operator came later."""
    if isinstance(rows, Mapping):
        return rows
    row = holding(rows, version, "since")
    return {k: v for k, v in row.items() if k != "since"} if age(row["since"]) <= age(version) else None


@functools.cache
def table_of(name: str) -> Table | None:
    """Return the table of the backend ``name``, read from its file; None if the backend has no table."""
    path = TABLES / f"{name}.toml"
    if not path.exists():
        return None
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    if measured := data.pop("measured", ()):
        data |= holding(measured, installed())
    found = {op_type: row_at(row, data["version"]) for op_type, row in data.pop("operators").items()}
    rows = {op_type: Row.read(row) for op_type, row in found.items() if row is not None}
    opsets, ir_versions = (tuple(data.pop(key)) for key in ("opsets", "ir_versions"))
    return Table(**data, opsets=opsets, ir_versions=ir_versions, rows=rows)


@dataclass(frozen=True)
class Everywhere(Table):
    """The intersection of several tables: a node gets its worst verdict in any of them."""

    tables: tuple[Table, ...] = ()

    def verdict(self, node: ir.Node, facts: Facts | None = None) -> Verdict:
        """Return the worst verdict, with the reasons of all tables that share it."""
        known = facts_of(node) if facts is None else facts
        verdicts = [(t.title, t.verdict(node, known)) for t in self.tables]
        kind = max((v for _, v in verdicts), key=lambda v: KINDS.index(v.kind)).kind
        said = [f"{title}: {v.reason}" for title, v in verdicts if v.kind == kind]
        return RIGHT if kind == "right" else Verdict(kind, "; ".join(said))


@functools.cache
def everywhere() -> Table:
    """Return the intersection of all measured tables."""
    every = [t for path in sorted(TABLES.glob("*.toml")) if (t := table_of(path.stem)) is not None and t.tested]
    opsets, ir_versions = (
        (max(first for first, _ in ranges), min(last for _, last in ranges))
        for ranges in ([t.opsets for t in every], [t.ir_versions for t in every])
    )
    return Everywhere(
        runtime="every runtime that was tested",
        version="",
        source=f"the tables of {', '.join(t.title for t in every)}",
        tested=True,
        complete=False,
        falls_back=False,
        functions=all(t.functions for t in every),
        opsets=opsets,
        ir_versions=ir_versions,
        rows={},
        tables=tuple(every),
    )


def lacking(name: str) -> Callable[[Call], bool]:
    """Return a predicate for a form's ``when=``: whether the runtime ``name`` does not support a call."""

    def when(call: Call) -> bool:
        found = table_of(name)
        return found is None or not found.takes(call.node)

    return when
