"""Tables of what runtimes can do: operators, types and conditions, one data file a backend (``tables/*.toml``).

A table says of a node that the runtime computes it right, that it refuses it, that it computes it *wrong* without
saying so, or that nobody has tried. Most were measured: ``python -m tests.runtimes.probe`` runs models of
one operator in the runtime, compares what it gives, and writes the file. Some are from a runtime's documents.

A row tells, for each type variable of the operator's schema, the types that are right; and conditions under which it
is refused or wrong in spite of its types. A condition is made of facts (``facts.py``) that hold together:
``"mode=cubic"``, ``"input 1 computed & !rank 4"``; ``!`` stands before one that must not hold, and ``*`` always does.

A table of a runtime that is installed here, onnxruntime, tells what several versions can do: ``[[measured]]`` names
them, and an operator in which they differ has several rows, each of which holds from the version that it is ``since``
on until the next row's. The rows of the newest version that is no newer than the installed one are taken.
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

Kind = Literal["right", "untried", "falls back", "refused", "wrong"]  # from good to bad
KINDS: tuple[Kind, ...] = ("right", "untried", "falls back", "refused", "wrong")


@dataclass(frozen=True)
class Verdict:
    """A runtime's answer to one node; ``reason`` is a clause such as "it has no operator Loop", empty if right."""

    kind: Kind
    reason: str = ""

    @property
    def fails(self) -> bool:
        """Is a model with this node refused, or are its results wrong?"""
        return self.kind in ("refused", "wrong")


RIGHT = Verdict("right")


@dataclass(frozen=True)
class Condition:
    """Facts that hold together, and why they matter, if the file says so."""

    terms: tuple[str, ...]
    why: str = ""

    @classmethod
    def read(cls, text: str) -> Condition:
        """Read ``"facts & more: why"``."""
        terms, _, why = text.partition(": ")
        return cls(tuple(t.strip() for t in terms.split(" & ")), why)

    def holds(self, facts: Facts) -> bool:
        """Is it so of a node with these facts?"""
        return all(t == ALWAYS or ((t[1:] not in facts) if t[0] == "!" else t in facts) for t in self.terms)

    def in_words(self) -> str:
        """The condition as words behind "with": ``mode=cubic and input 1 computed or fed``."""
        return " and ".join(_in_words(term) for term in self.terms if term != ALWAYS)


_WORDS = (  # facts as they are said behind "with"
    (r"(\w+) (b?float\w+|u?int\d+|bool|string|complex\w+)", r"\2"),
    (r"input (\d+) computed", r"input \1 computed or fed, not constant"),
    (r"input (\d+) derived", r"input \1 computed from constants"),
    (r"input (\d+) open", r"open sizes of input \1"),
    (r"input (\d+) open inside", r"open sizes of input \1 beside that of its first axis"),
    (r"channels open", r"an open number of channels"),
    (r"space open", r"open sizes behind the channels"),
    (r"input (\d+) rank unknown", r"an unknown number of axes of input \1"),
    (r"input (\d+) rank (\d+)", r"\2 axes of input \1"),
    (r"rank unknown", r"an unknown number of axes"),
    (r"rank (\d+)", r"\1 axes"),
    (r"open", r"open sizes"),
    (r"open inside", r"open sizes beside that of the first axis"),
    (r"channels in threes", r"6, 9, 15 or so channels"),
    (r"filters in fours", r"4, 8, 12 or so filters"),
    (r"depthwise", r"one filter for each channel"),
    (r"size 0", r"an input without elements"),
    (r"broadcasts", r"inputs of different shapes"),
    (r"captures", r"bodies that read values from outside"),
    (r"slices read", r"a body that reads what it writes turn by turn"),
    (r"outputs alike", r"a constant that is another output, too"),
    (r"output (\d+)", r"output \1 read"),
)


def _in_words(term: str) -> str:
    """A term of a condition in words."""
    negated, fact = term[0] == "!", term.lstrip("!")
    words = next((re.sub(p, w, fact) for p, w in _WORDS if re.fullmatch(p, fact)), fact)
    return f"not {words}" if negated else words


@dataclass(frozen=True)
class Row:
    """One operator: types that are right, by type variable, and what is refused or wrong in spite of them.

    What is ``fatal`` is refused even where other nodes that a runtime does not take are computed elsewhere.
    """

    types: Mapping[str, frozenset[str]]
    refused: tuple[Condition, ...] = ()
    wrong: tuple[Condition, ...] = ()
    fatal: tuple[Condition, ...] = ()

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Row:
        """Read a row of a file."""
        types = {k: frozenset(v.split()) for k, v in data.items() if isinstance(v, str)}
        return cls(types, *(tuple(map(Condition.read, data.get(kind, ()))) for kind in ("refused", "wrong", "fatal")))


@dataclass(frozen=True)
class Table:
    """The table of one runtime.

    Attributes:
        runtime, version: its name and version.
        source: where it comes from, in words.
        tested: was it measured in that runtime?
        complete: are operators and types that it does not list refused? Else nobody has tried them.
        falls_back: nodes that it does not take are computed elsewhere (by onnxruntime on the CPU).
        functions: does it call model-local functions?
        opsets, ir_versions: of ai.onnx and of files, from the first to the last that it takes.
        rows: by operator; one of another domain is written ``domain.Operator``.
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
        """The runtime with its version."""
        return f"{self.runtime} {self.version}".strip()

    def verdict(self, node: ir.Node, facts: Facts | None = None) -> Verdict:
        """The runtime's answer to ``node``; a caller that has the node's ``facts`` gives them."""
        domain, op_type = key_of(node)
        row = self.rows.get(f"{domain}.{op_type}" if domain else op_type)
        if row is None:
            if self.complete or domain:
                return self._refusal(f"it has no operator {op_type}" + (f" of the domain {domain}" if domain else ""))
            return Verdict("untried", f"{op_type} was not tried in it")
        known = facts_of(node) if facts is None else facts
        for condition in row.wrong:
            if condition.holds(known):
                return Verdict("wrong", condition.why or f"it computes {_case_in_words(op_type, condition)} wrong")
        for condition in row.fatal:
            if condition.holds(known):
                return Verdict("refused", condition.why)
        for condition in row.refused:
            if condition.holds(known):
                return self._refusal(condition.why or f"it does not take {_case_in_words(op_type, condition)}")
        return self._by_types(op_type, row, known)

    def _by_types(self, op_type: str, row: Row, facts: Facts) -> Verdict:
        """The verdict where no condition of the row holds: whether each type variable has one of its types."""
        for fact in sorted(facts):
            variable, _, type_ = fact.partition(" ")
            if variable in row.types and type_ not in row.types[variable]:
                if self.complete:
                    return self._refusal(f"it has no {op_type} of {type_}")
                return Verdict("untried", f"{op_type} of {type_} was not tried in it")
        return RIGHT

    def _refusal(self, reason: str) -> Verdict:
        return Verdict("falls back" if self.falls_back else "refused", reason)

    def takes(self, node: ir.Node) -> bool:
        """Is it computed right, as far as is known?"""
        return self.verdict(node).kind in ("right", "untried")


def _case_in_words(op_type: str, condition: Condition) -> str:
    words = condition.in_words()
    return f"{op_type} with {words}" if words else f"the operator {op_type}"


def installed() -> str:
    """The version of the onnxruntime that is installed here."""
    import onnxruntime  # not needed for the tables of others

    return str(onnxruntime.__version__)


def age(version: str) -> tuple[int, ...]:
    """The numbers that versions are sorted by."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def holding(rows: Sequence[Mapping[str, Any]], version: str, since: str = "version") -> Mapping[str, Any]:
    """The last of ``rows``, oldest first, that is ``since`` no later version; the first if all are."""
    return next((row for row in reversed(rows) if age(row[since]) <= age(version)), rows[0])


def row_at(rows: Mapping[str, Any] | Sequence[Mapping[str, Any]], version: str) -> Mapping[str, Any] | None:
    """The row of a file for an operator at ``version``; None before the first that has it."""
    if isinstance(rows, Mapping):
        return rows
    row = holding(rows, version, "since")
    return {k: v for k, v in row.items() if k != "since"} if age(row["since"]) <= age(version) else None


@functools.cache
def table_of(name: str) -> Table | None:
    """The table of the backend ``name``, from its file; None if it has none."""
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
    """The intersection of several tables: of each node what the runtime that does worst by it makes of it."""

    tables: tuple[Table, ...] = ()

    def verdict(self, node: ir.Node, facts: Facts | None = None) -> Verdict:
        """The worst verdict, with all that are as bad in its reason."""
        known = facts_of(node) if facts is None else facts
        verdicts = [(t.title, t.verdict(node, known)) for t in self.tables]
        kind = max((v for _, v in verdicts), key=lambda v: KINDS.index(v.kind)).kind
        said = [f"{title}: {v.reason}" for title, v in verdicts if v.kind == kind]
        return RIGHT if kind == "right" else Verdict(kind, "; ".join(said))


@functools.cache
def everywhere() -> Table:
    """The intersection of all tables that were measured."""
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
    """``when=lacking("openvino")``: a form of a standard operator is of use where that does not take the node."""

    def when(call: Call) -> bool:
        found = table_of(name)
        return found is None or not found.takes(call.node)

    return when
