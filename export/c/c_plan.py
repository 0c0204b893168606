"""Plans of programs: which statements run, and where tensors lie."""

from __future__ import annotations

from dataclasses import dataclass

from gradgraph.export.c.grouping import Group
from gradgraph.export.c.program import Tensor


@dataclass(eq=False)
class Statement:
    """A group with what it reads and writes.

    Attributes:
        writes: tensors that other statements read, or results of the program.
        safe: tensors that a result may replace: the loop reads them at the index that it writes.
        body: the plan of a Scan's body.
    """

    group: Group
    reads: set[Tensor]
    writes: list[Tensor]
    safe: set[Tensor]
    body: Plan | None = None


@dataclass
class Plan:
    """A program with everything decided.

    Attributes:
        direct: new states that are written over old ones: from the new tensor to the old one.
        copies: new states that are copied to the old ones at the end.
        offsets: the places of temporary tensors in the arena, in bytes.
        arena: the size of the arena in bytes.
        peak: the tensors alive when the arena is fullest, and the node that runs then; ``peak_at`` is its statement.
    """

    statements: list[Statement]
    direct: dict[Tensor, Tensor]
    copies: list[tuple[Tensor, Tensor]]
    offsets: dict[Tensor, int]
    arena: int
    peak: tuple[str, list[Tensor]]
    peak_at: int = 0
