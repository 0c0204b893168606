"""Plans of programs: the order of statements, and the location of each tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradgraph.export.c.grouping import Group
from gradgraph.export.c.program import Tensor

ALIGNMENT = 8


def aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Statement:
    """A group of operations, and the tensors that it reads and writes.

    Attributes:
        writes: the tensors that it stores, for other statements or as results of the program.
        safe: the inputs that a result may overwrite, as the loop reads them only at the index it writes.
        bodies: the plans of the programs of a Scan, Loop or If.
    """

    group: Group
    reads: set[Tensor]
    writes: list[Tensor]
    safe: set[Tensor]
    bodies: list[Plan] = field(default_factory=list)


@dataclass
class Plan:
    """An execution plan of a program.

    Attributes:
        direct: state updates that run in place, as {new value: state tensor}.
        copies: pairs (new value, state tensor) to copy at the end.
        offsets: the offsets of temporary tensors in the arena, in bytes.
        arena: the size of the arena in bytes.
        peak: the node that runs at peak memory use, and the tensors alive then. peak_at: the index of its statement.
    """

    statements: list[Statement]
    direct: dict[Tensor, Tensor]
    copies: list[tuple[Tensor, Tensor]]
    offsets: dict[Tensor, int]
    arena: int
    peak: tuple[str, list[Tensor]]
    peak_at: int = 0
