"""Memory planning: the order of statements, and the offset of each temporary tensor in the arena.

1. A state tensor is updated in place if all other readers of the old value can run first, and if the loop that
   computes the new value reads the old one only at the index it writes. Otherwise the new value is copied over the old
   one at the end.
2. Several orders are tried: the order of the model, and greedy orders that prefer statements that free memory, and
   finally the order with the smallest peak (``least_peak``), if the search ends. That with the smallest arena is used.
3. Tensors that are cheap to compute are recomputed for late readers (``recomputing``).
4. Tensors whose lifetimes do not overlap share memory. The output of an elementwise loop reuses the memory of an input
   that nothing reads afterwards.

"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np

from gradgraph.export.c.c_plan import ALIGNMENT, Plan, Statement, aligned
from gradgraph.export.c.grouping import Group, grouped, in_place
from gradgraph.export.c.least_peak import least_peak_order
from gradgraph.export.c.program import Call, Element, Map, Nested, Program, Reduce, Repeat, Tensor
from gradgraph.export.c.recomputing import put_into_products, recomputed

MOST_ROUNDS = 6


def planned(
    program: Program,
    nexts: Mapping[Tensor, Tensor] | None = None,
    placed: Iterable[Tensor] = (),
    enough: int = 0,
) -> Plan:
    """Return the best plan of ``program``, which recomputes cheap tensors where that makes the arena smaller.

    Args:
        nexts: for the next value of each state tensor, the state tensor itself.
        placed: results that are stored outside the arena.
        enough: the size of the arena, in bytes, below which no better plan is searched.
    """
    problem = functools.partial(_problem, program, dict(nexts or {}), set(placed), {})
    last = problem()
    best = last.plan(last.greedy_orders())
    for _ in range(MOST_ROUNDS if best.arena > enough else 0):
        arenas = {}
        for change in (recomputed, put_into_products):
            fused = {o: o.inner for o in program.operations if isinstance(o, Reduce)}
            undo = change(program, best)
            if undo is not None:
                other = problem()
                arenas[change] = other.plan(other.greedy_orders()).arena
                undo()
                for o, inner in fused.items():
                    o.inner = inner
        if not arenas or min(arenas.values()) >= best.arena:
            break
        min(arenas, key=arenas.__getitem__)(program, best)
        last = problem()
        best = last.plan(last.greedy_orders())
    order = last.least_peak_order() if best.arena > enough else None
    found = best if order is None else last.plan([order])
    return found if found.arena < best.arena else best


@dataclass
class _Problem:
    """The statements of a program, of which no tensor is recomputed, before they have an order.

    Attributes:
        needs: for each statement, those that must run before it.
        nexts, direct: see ``planned`` and ``Plan``.
        elsewhere: the tensors that are not in the arena.
        results: the tensors that stay alive to the end.
    """

    statements: list[Statement]
    needs: dict[Statement, set[Statement]]
    nexts: Mapping[Tensor, Tensor]
    direct: dict[Tensor, Tensor]
    elsewhere: set[Tensor]
    results: set[Tensor]

    def plan(self, orders: Iterable[list[Statement]]) -> Plan:
        """Return the plan of the order with the smallest arena."""
        best: Plan | None = None
        for order in orders:
            offsets, arena, peak, peak_at = _placed(order, self.elsewhere, self.results)
            if best is None or arena < best.arena:
                copies = [(new, old) for new, old in self.nexts.items() if new not in self.direct]
                best = Plan(order, self.direct, copies, offsets, arena, peak, peak_at)
        assert best is not None
        return best

    def greedy_orders(self) -> Iterator[list[Statement]]:
        place = {s: i for i, s in enumerate(self.statements)}
        greedy = functools.partial(_greedy, self.statements, self.needs, self.elsewhere, self.results)
        yield greedy(lambda s, grown: (place[s],))
        yield greedy(lambda s, grown: (grown, place[s]))
        yield greedy(lambda s, grown: (grown > 0, place[s]))
        yield greedy(lambda s, grown: (max(grown, 0), -place[s]))

    def least_peak_order(self) -> list[Statement] | None:
        own = {t for s in self.statements for t in s.writes} - self.elsewhere
        return least_peak_order(self.statements, self.needs, own, self.results)


def _problem(
    program: Program, nexts: Mapping[Tensor, Tensor], placed: set[Tensor], inner: dict[Nested, list[Plan]]
) -> _Problem:
    """Return the statements of ``program``; missing plans of programs inside are added to ``inner``."""
    statements = _statements(program, inner)
    makers = {t: s for s in statements for t in s.writes}
    needs: dict[Statement, set[Statement]] = {s: {makers[t] for t in s.reads if t in makers} - {s} for s in statements}
    direct = _direct(statements, makers, needs, nexts)
    return _Problem(statements, needs, nexts, direct, placed.union(direct), set(program.outputs.values()))


def _statements(program: Program, inner: dict[Nested, list[Plan]]) -> list[Statement]:
    groups = grouped(program)
    read_by: dict[Tensor, set[Group]] = defaultdict(set)
    for group in groups:
        for tensor in group.read:
            read_by[tensor].add(group)
    results = set(program.outputs.values())
    found = []
    for group in groups:
        first = group.operations[0]
        bodies: list[Plan] = []
        if isinstance(first, Nested):
            bodies = inner[first] = inner.get(first) or _bodies(first)
            size = aligned(max(body.arena for body in bodies)) // ALIGNMENT
            first.workspace = Tensor((size,), "int64", "workspace") if size else None
            writes = [*first.outputs]
        else:
            single = not isinstance(first, Element)
            writes = [t for o in group.operations for t in o.outputs if single or read_by[t] or t in results]
        found.append(Statement(group, group.read, writes, _safe(group), bodies))
    return found


def _bodies(o: Nested) -> list[Plan]:
    if isinstance(o, Repeat):
        nexts = {new: inside for _, inside, new in o.carried}
        return [planned(o.body, nexts, [t for _, t, _ in o.stacked])]
    return [planned(body, None, body.outputs.values()) for body in o.bodies]


def _safe(group: Group) -> set[Tensor]:
    first = group.operations[0]
    if isinstance(first, Call) and first.in_place is not None:
        return {first.in_place}
    good: set[Tensor] = set()
    bad: set[Tensor] = set()
    for operation in group.operations:
        at_index = isinstance(operation, Map) or operation in group.totals
        for view in operation.views:
            (good if at_index and in_place(view) else bad).add(view.tensor)
    domain = group.domain
    return set() if domain is None else good - bad


def _direct(
    statements: Sequence[Statement],
    makers: Mapping[Tensor, Statement],
    needs: dict[Statement, set[Statement]],
    nexts: Mapping[Tensor, Tensor],
) -> dict[Tensor, Tensor]:
    """Return the state updates that can run in place, as {new value: state tensor}.

    In ``needs``, the statements of these updates become dependent on all other readers of the state.
    """
    readers: dict[Tensor, set[Statement]] = defaultdict(set)
    for statement in statements:
        for tensor in statement.reads:
            readers[tensor].add(statement)
    direct: dict[Tensor, Tensor] = {}
    for new, old in nexts.items():
        maker = makers.get(new)
        if maker is None or maker.bodies or maker.group.domain is None:
            continue
        others = readers[old] - {maker}
        if (maker in readers[old] and old not in maker.safe) or _reaches(needs, others, maker):
            continue
        needs[maker] |= others
        direct[new] = old
    return direct


def _reaches(needs: Mapping[Statement, set[Statement]], sources: set[Statement], goal: Statement) -> bool:
    """Whether any statement in ``sources`` depends on ``goal``, directly or indirectly."""
    seen, waiting = set(sources), list(sources)
    while waiting:
        for other in needs[waiting.pop()]:
            if other is goal:
                return True
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return False


# --- order ------------------------------------------------------------------------------------------------


def _greedy(
    statements: Sequence[Statement],
    needs: Mapping[Statement, set[Statement]],
    elsewhere: set[Tensor],
    results: set[Tensor],
    priority: Callable[[Statement, int], tuple[int, ...]],
) -> list[Statement]:
    """Return an order that always runs next the ready statement with the lowest value of ``priority``.

    ``priority`` receives the statement and the number of bytes by which it increases the live memory.
    """
    own = {t for s in statements for t in s.writes} - elsewhere
    uses = Counter(t for s in statements for t in s.reads & own)
    sorter = TopologicalSorter({s: needs[s] for s in statements})
    sorter.prepare()
    order, ready = list[Statement](), list[Statement]()

    def grown(s: Statement) -> int:
        more = sum(aligned(t.nbytes) for t in s.writes if t in own and (uses[t] or t in results))
        less = sum(aligned(t.nbytes) for t in s.reads if t in own and uses[t] == 1 and t not in results)
        return more - less

    while sorter.is_active():
        ready += sorter.get_ready()
        s = min(ready, key=lambda s: priority(s, grown(s)))
        ready.remove(s)
        order.append(s)
        uses.subtract(s.reads & own)
        sorter.done(s)
    return order


# --- places -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Life:
    """Tensors that occupy the same memory one after another, from statement ``first`` to statement ``last``."""

    tensors: list[Tensor]
    first: int
    last: int
    size: int
    offset: int = 0


def _placed(
    order: Sequence[Statement], elsewhere: set[Tensor], results: set[Tensor]
) -> tuple[dict[Tensor, int], int, tuple[str, list[Tensor]], int]:
    lives = _lives(order, elsewhere, results)
    arena = 0
    done: list[_Life] = []
    for life in sorted(lives, key=lambda life: (-life.size, life.first)):
        near = sorted((d for d in done if d.first <= life.last and life.first <= d.last), key=lambda d: d.offset)
        offset = 0
        for other in near:
            if offset + life.size <= other.offset:
                break
            offset = max(offset, other.offset + other.size)
        life.offset = offset
        arena = max(arena, offset + life.size)
        done.append(life)
    offsets = {t: life.offset for life in lives for t in life.tensors}
    return offsets, arena, *_peak(order, lives)


def _lives(order: Sequence[Statement], elsewhere: set[Tensor], results: set[Tensor]) -> list[_Life]:
    last: dict[Tensor, int] = {}
    for i, s in enumerate(order):
        for t in (*s.writes, *s.reads):
            last[t] = i
    last.update(dict.fromkeys(results, len(order)))
    lives: dict[Tensor, _Life] = {}
    found: list[_Life] = []
    for i, s in enumerate(order):
        taken: set[_Life] = set()
        for t in s.writes:
            if t in elsewhere:
                continue
            size = aligned(t.nbytes)
            heirs = (
                lives[r]
                for r in sorted(s.safe & set(lives), key=lambda r: r.name)
                if last[r] == i and r.dtype == t.dtype and r.nbytes == t.nbytes and lives[r] not in taken
            )
            life = next(heirs, None)
            if life is None:
                life = _Life([], i, i, size)
                found.append(life)
            taken.add(life)
            life.tensors.append(t)
            life.last = max(life.last, last[t])
            lives[t] = life
    return found


def _peak(order: Sequence[Statement], lives: Sequence[_Life]) -> tuple[tuple[str, list[Tensor]], int]:
    if not lives:
        return ("", []), 0
    totals = np.zeros(len(order) + 2, np.int64)
    for life in lives:
        totals[life.first] += life.size
        totals[life.last + 1] -= life.size
    at = int(np.argmax(np.cumsum(totals)))
    alive = [life for life in lives if life.first <= at <= life.last]
    alive.sort(key=lambda life: -life.size)
    node = order[min(at, len(order) - 1)].group.operations[0].node
    return (node, [_alive(life, at, order) for life in alive]), at


def _alive(life: _Life, at: int, order: Sequence[Statement]) -> Tensor:
    """Return the tensor of ``life`` that is in memory when statement ``at`` runs."""
    written = [t for t in life.tensors if any(t in s.writes for s in order[: at + 1])]
    return written[-1] if written else life.tensors[0]
