"""Plans of programs: the order of statements, and the location of each tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradgraph.export.c.grouping import Group
from gradgraph.export.c.program import Operation, Reduce, Repeat, Rows, Tensor

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

    @property
    def multiply_adds(self) -> int:
        """The number of multiplications in products and convolutions; a Loop whose steps are unknown counts once."""
        total = 0
        for s in self.statements:
            total += sum(map(_multiply_adds, s.group.operations))
            inside = max((body.multiply_adds for body in s.bodies), default=0)
            first = s.group.operations[0]
            total += inside * (first.steps if isinstance(first, Repeat) and isinstance(first.steps, int) else 1)
        return total


def _multiply_adds(o: Operation) -> int:
    if isinstance(o, Reduce):  # a sum of products
        is_product = any(m.out is o.operand.tensor and m.template == "{0} * {1}" for m in o.inner)
        return o.operand.size if is_product else 0
    if not isinstance(o, Rows) or not o.out.size:
        return 0
    if o.function == "gemm_rows":
        terms = o.arguments[2]
        return o.out.size * terms if isinstance(terms, int) else 0
    p = next(a for a in o.arguments if isinstance(a, tuple))  # see kernels.c
    if o.function.startswith("conv_weight"):
        return p[15] * p[4] * p[5] * o.out.size
    taps = p[6] * p[7] * (1 if o.function.startswith("average") else p[0] // p[14])
    images = o.out.size // (p[0] * p[1] * p[2] if "_input_" in o.function else p[3] * p[4] * p[5])
    return images * p[3] * p[4] * p[5] * taps
