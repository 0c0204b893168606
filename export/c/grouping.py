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
from collections import Counter, defaultdict
from dataclasses import dataclass, field

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
    group_of = {o: Group([o]) for o in program.operations}
    maker = {t: o for o in program.operations for t in o.outputs}
    place = {o: i for i, o in enumerate(program.operations)}
    for operation in reversed(program.operations):  # last reader first: masks go to the backward pass
        if isinstance(operation, Map):
            for view in operation.operands:
                source = maker.get(view.tensor)
                if source is not None and in_place(view) and _is_again(source) >= operation.again:
                    _merge(group_of, maker, group_of[source], group_of[operation], place)
    put_into_makers(group_of, maker, place)
    return _sorted(list(dict.fromkeys(group_of.values())), maker, group_of, place)


def put_into_makers(
    group_of: dict[Operation, Group], maker: dict[Tensor, Operation], place: dict[Operation, int]
) -> None:
    """Move each reduction to one number into the loop that computes a tensor it reads."""
    for operation in list(group_of):
        if not isinstance(operation, Reduce) or operation.out.size != 1 or operation.how.before:
            continue
        own, alone = group_of[operation], Group([operation])
        if alone.read & own.made:
            continue
        for group in dict.fromkeys(group_of[maker[t]] for t in sorted(alone.read & maker.keys(), key=_name)):
            if (
                group.domain
                and group.domain == long_axes(operation.operand.shape)
                and all(in_place(v) for v in operation.views if v.tensor in group.made)
                and not _is_between(group_of, maker, group, alone, place)
            ):
                own.reset([o for o in own.operations if o is not operation])
                group.reset([*group.operations, operation])
                group_of[operation] = group
                break


def _name(tensor: Tensor) -> str:
    return tensor.name


def _is_again(operation: Operation) -> bool:
    return isinstance(operation, Element) and operation.again


def _merge(
    group_of: dict[Operation, Group],
    maker: dict[Tensor, Operation],
    first: Group,
    second: Group,
    place: dict[Operation, int],
) -> None:
    if first is second or first.domain is None or first.domain != second.domain:
        return
    if not _may_share(first, second) or not _may_share(second, first):
        return
    if _is_between(group_of, maker, first, second, place) or _is_between(group_of, maker, second, first, place):
        return
    first.reset(sorted([*first.operations, *second.operations], key=place.__getitem__))
    for operation in second.operations:
        group_of[operation] = first


def _may_share(first: Group, second: Group) -> bool:
    """Whether ``second`` reads the results of ``first`` only at the index it computes."""
    made = first.made
    return all(isinstance(o, Map) and in_place(v) for o in second.operations for v in o.views if v.tensor in made)


def _is_between(
    group_of: dict[Operation, Group],
    maker: dict[Tensor, Operation],
    first: Group,
    second: Group,
    place: dict[Operation, int],
) -> bool:
    """Whether ``second`` depends on ``first`` through a third group."""
    earliest = min(place[o] for o in first.operations)
    seen: set[Group] = set()
    waiting = [group_of[maker[t]] for t in second.read if t in maker and group_of[maker[t]] not in (first, second)]
    while waiting:
        group = waiting.pop()
        if group in seen:
            continue
        seen.add(group)
        if group is first:
            return True
        if max(place[o] for o in group.operations) < earliest:
            continue
        waiting.extend(group_of[maker[t]] for t in group.read if t in maker)
    return False


def _sorted(
    groups: list[Group], maker: dict[Tensor, Operation], group_of: dict[Operation, Group], place: dict[Operation, int]
) -> list[Group]:
    """Return ``groups`` in topological order, otherwise in the order of their last operations."""
    needs = {g: {group_of[maker[t]] for t in g.read if t in maker} - {g} for g in groups}
    readers: dict[Group, list[Group]] = defaultdict(list)
    for group, before in needs.items():
        for other in before:
            readers[other].append(group)
    left = {g: len(before) for g, before in needs.items()}
    ready = [(max(map(place.__getitem__, g.operations)), i, g) for i, g in enumerate(groups) if not left[g]]
    heapq.heapify(ready)
    number = {g: i for i, g in enumerate(groups)}
    order = []
    while ready:
        group = heapq.heappop(ready)[2]
        order.append(group)
        for reader in readers[group]:
            left[reader] -= 1
            if not left[reader]:
                last = max(map(place.__getitem__, reader.operations))
                heapq.heappush(ready, (last, number[reader], reader))
    assert len(order) == len(groups), "a cycle of loops"
    return order
