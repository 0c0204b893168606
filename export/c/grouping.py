"""Group elementwise operations, reductions and products into loops.

1. Operations whose results nothing reads are removed. 2. A Map that only one reduction reads becomes part of the
reduction's loop, so that its result is never stored. 3. Operations with equal domains (shapes without axes of size 1)
share a loop if one reads the other's result at the
   same index, unless a third computation must run between them. For example, a matrix product and the optimizer's
   update form one loop, and the gradient of the weight is never stored. 4. A reduction to one number becomes part of
   the loop that computes its operand, so that, for example, the errors that a loss averages are never stored.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from gradgraph.export.c.program import Element, Map, Nested, Operation, Program, Reduce, Shape, Tensor, View


@dataclass(eq=False)
class Group:
    """Operations that one statement computes, in order: several Elements, or any single operation."""

    operations: list[Operation] = field(default_factory=list)

    def reset(self, operations: list[Operation]) -> None:
        self.operations = operations
        for name in ("domain", "made", "read"):
            self.__dict__.pop(name, None)

    @functools.cached_property
    def domain(self) -> Shape | None:
        first = self.operations[0]
        return long_axes(first.out.shape) if isinstance(first, Element) else None

    @property
    def totals(self) -> list[Reduce]:
        """The reductions of results to one number."""
        operations = self.operations if self.domain else []
        return [o for o in operations if isinstance(o, Reduce) and long_axes(o.out.shape) != self.domain]

    @functools.cached_property
    def made(self) -> set[Tensor]:
        return {t for o in self.operations for t in o.outputs}

    @functools.cached_property
    def read(self) -> set[Tensor]:
        return {v.tensor for o in self.operations for v in o.views} - self.made


def long_axes(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def in_place(view: View) -> bool:
    """Whether ``view`` reads its tensor at the current index of a loop over the domain of the tensor."""
    return view.is_whole and long_axes(view.shape) == long_axes(view.tensor.shape)


def remove_unread(program: Program) -> None:
    read = set(program.outputs.values())
    kept = []
    for operation in reversed(program.operations):
        if read.intersection(operation.outputs):
            kept.append(operation)
            read.update(v.tensor for v in operation.views)
    program.operations = kept[::-1]
    for operation in kept:
        for body in operation.bodies if isinstance(operation, Nested) else ():
            remove_unread(body)


def put_into_reductions(program: Program) -> None:
    """Move each Map that only one Reduce reads, at its own index, into the loop of the reduction."""
    readers: Counter[Tensor] = Counter(v.tensor for o in program.operations for v in o.views)
    readers.update(program.outputs.values())
    makers = {o.out: o for o in program.operations if isinstance(o, Map)}
    moved: set[Operation] = set()
    for operation in program.operations:
        if not isinstance(operation, Reduce):
            continue
        waiting, found = [operation.operand], []
        while waiting:
            view = waiting.pop()
            maker = makers.get(view.tensor)
            if maker is None or maker in moved or readers[view.tensor] != 1 or not in_place(view):
                continue
            moved.add(maker)
            found.append(maker)
            waiting.extend(maker.operands)
        operation.inner = sorted(found, key=program.operations.index)
    program.operations = [o for o in program.operations if o not in moved]


def grouped(program: Program) -> list[Group]:
    """Return the groups of ``program``, in topological order; ``program`` keeps its operations."""
    for operation in program.operations:
        if isinstance(operation, Reduce):
            operation.inner = []  # from an earlier plan
    remove_unread(program)
    program = Program(program.inputs, program.outputs, list(program.operations))
    put_into_reductions(program)
    groups = _Groups(program.operations)
    for operation in reversed(program.operations):  # last reader first: masks go to the backward pass
        if isinstance(operation, Map):
            for view in operation.operands:
                source = groups.maker.get(view.tensor)
                if source is not None and in_place(view) and _is_again(source) >= operation.again:
                    groups.merge(groups.of[source], groups.of[operation])
    groups.put_into_makers()
    return groups.in_order()


def _is_again(operation: Operation) -> bool:
    return isinstance(operation, Element) and operation.again


class _Groups:
    """The groups of operations, at first one each.

    Attributes:
        of: the group of each operation.
        maker: the operation that writes each tensor.
        place: the position of each operation.
    """

    def __init__(self, operations: list[Operation]) -> None:
        self.of = {o: Group([o]) for o in operations}
        self.maker = {t: o for o in operations for t in o.outputs}
        self.place = {o: i for i, o in enumerate(operations)}

    def merge(self, first: Group, second: Group) -> None:
        """Merge both groups if they can share a loop."""
        if first is second or first.domain is None or first.domain != second.domain:
            return
        if not _may_share(first, second) or not _may_share(second, first):
            return
        if self.is_between(first, second) or self.is_between(second, first):
            return
        first.reset(sorted([*first.operations, *second.operations], key=self.place.__getitem__))
        self.of.update(dict.fromkeys(second.operations, first))

    def put_into_makers(self) -> None:
        """Move each reduction to one number into the loop that computes a tensor it reads."""
        for operation in list(self.of):
            if not isinstance(operation, Reduce) or operation.out.size != 1 or operation.how.before:
                continue
            own, alone = self.of[operation], Group([operation])
            if alone.read & own.made:
                continue
            read = sorted(alone.read & self.maker.keys(), key=lambda tensor: tensor.name)
            for group in dict.fromkeys(self.of[self.maker[t]] for t in read):
                if (
                    group.domain
                    and group.domain == long_axes(operation.operand.shape)
                    and all(in_place(v) for v in operation.views if v.tensor in group.made)
                    and not self.is_between(group, alone)
                ):
                    own.reset([o for o in own.operations if o is not operation])
                    group.reset([*group.operations, operation])
                    self.of[operation] = group
                    break

    def read_by(self, group: Group) -> set[Group]:
        """Return the other groups whose results ``group`` reads."""
        return {self.of[self.maker[t]] for t in group.read if t in self.maker} - {group}

    def is_between(self, first: Group, second: Group) -> bool:
        """Whether ``second`` depends on ``first`` through a third group."""
        earliest = min(self.place[o] for o in first.operations)
        seen: set[Group] = set()
        waiting = [*self.read_by(second) - {first}]
        while waiting:
            group = waiting.pop()
            if group is first:
                return True
            if group not in seen and self._last(group) >= earliest:
                waiting += self.read_by(group)
            seen.add(group)
        return False

    def _last(self, group: Group) -> int:
        return max(map(self.place.__getitem__, group.operations))

    def in_order(self) -> list[Group]:
        """Return the groups in topological order, otherwise in the order of their last operations."""
        number = {g: i for i, g in enumerate(dict.fromkeys(self.of.values()))}
        sorter = TopologicalSorter({g: self.read_by(g) for g in number})
        sorter.prepare()
        order, ready = list[Group](), list[tuple[int, int, Group]]()
        while sorter.is_active():
            for g in sorter.get_ready():
                heapq.heappush(ready, (self._last(g), number[g], g))
            order.append(heapq.heappop(ready)[2])
            sorter.done(order[-1])
        return order


def _may_share(first: Group, second: Group) -> bool:
    """Whether ``second`` reads the results of ``first`` only at the index it computes."""
    made = first.made
    return all(isinstance(o, Map) and in_place(v) for o in second.operations for v in o.views if v.tensor in made)
