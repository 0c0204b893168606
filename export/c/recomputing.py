"""Recompute cheap tensors for late readers, instead of storing them from the forward to the backward pass.

A tensor is cheap if Maps without slow functions (such as exp) and reductions compute it from tensors that stay in
memory until its last reader anyway. Examples are the Relu of a BatchNormalization, computed from the input of the
normalisation, and its variance, computed from the centred input. Results stay bit-identical, except that the weight
gradient of a pointwise convolution is summed in another order if a factor is computed in its loop.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gradgraph.export.c.c_plan import Plan
from gradgraph.export.c.c_products import with_factor
from gradgraph.export.c.program import Assemble, Call, Map, Nested, Operation, Program, Reduce, Rows, Tensor, View

Undo = Callable[[], None]
_SLOW = re.compile("exp|log|pow|tan|erf|sin|cos|mod")
LEAST_BYTES = 256
LONGEST_CHAIN = 16


@dataclass
class Again:
    """A tensor, its recomputed ``copy`` for the readers ``late``, and the operations ``added`` to compute the copy."""

    tensor: Tensor
    copy: Tensor
    late: list[Operation]
    added: list[Map | Reduce]


@dataclass
class _Late:
    """A cheap tensor that is alive at the peak, the operations that compute it, and its readers before and after."""

    tensor: Tensor
    chain: list[Map | Reduce]
    early: list[Operation]
    late: list[Operation]


def _cheap_at_peak(program: Program, plan: Plan, within: bool = False) -> Iterator[_Late]:
    """Yield the tensors at the peak of ``plan`` that can be computed for their late readers from others still alive.

    With ``within``, the statement at the peak is a late reader of the tensors that it does not write.
    """
    place = {o: i for i, s in enumerate(plan.statements) for o in s.group.operations}
    for s in plan.statements:
        for o in s.group.operations:
            place.update(dict.fromkeys(o.inner if isinstance(o, Reduce) else [], place[o]))
    readers: dict[Tensor, list[Operation]] = defaultdict(list)
    for o in program.operations:
        for t in set(_read(o)):
            readers[t].append(o)
    makers: dict[Tensor, Operation] = {t: o for o in program.operations for t in o.outputs}
    last = {t: max(place[o] for o in found) for t, found in readers.items()}
    results = set(program.outputs.values())
    stored = set(plan.offsets)
    computed: set[Tensor] = set()
    for tensor in plan.peak[1]:
        if tensor.nbytes < LEAST_BYTES or tensor in results or not isinstance(makers.get(tensor), Map | Reduce):
            continue
        since = plan.peak_at if within and place[makers[tensor]] < plan.peak_at else plan.peak_at + 1
        late = [o for o in readers[tensor] if place[o] >= since]
        early = [o for o in readers[tensor] if place[o] < since]
        chain = _chain(tensor, makers, stored)
        if not late or chain is None:
            continue
        leaves = {t for m in chain for t in _read(m)} - {m.out for m in chain}
        kept = [t for t in leaves if t in stored and t.nbytes * 4 > tensor.nbytes]
        if any(last[t] < since for t in kept) or leaves & computed:
            continue
        computed.add(tensor)
        yield _Late(tensor, chain, early, late)


def recomputed(program: Program, plan: Plan) -> Undo | None:
    """Compute cheap tensors that are alive at the peak of ``plan`` again for their readers after it."""
    found = [c for c in _cheap_at_peak(program, plan) if c.early and not any(isinstance(o, Nested) for o in c.late)]
    changes = [_copy(program, c.tensor, c.chain, c.late) for c in found]
    return functools.partial(_undo, program, changes) if changes else None


def put_into_products(program: Program, plan: Plan) -> Undo | None:
    """Compute cheap tensors that are alive at the peak of ``plan`` in the loops of the products that read them."""
    before = list(program.operations)
    for c in _cheap_at_peak(program, plan, within=True):
        products = {o: with_factor(o, c.tensor, c.chain) for o in c.late}
        if all(products.values()):
            program.operations = [n for o in program.operations for n in products.get(o) or [o]]
    return functools.partial(setattr, program, "operations", before) if program.operations != before else None


def _chain(tensor: Tensor, makers: dict[Tensor, Operation], stored: set[Tensor]) -> list[Map | Reduce] | None:
    """Return the operations that compute ``tensor`` from stored tensors, in order; None if that would be slow."""
    chain: list[Map | Reduce] = []
    waiting = [tensor]
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is None or maker in chain:
            continue
        slow = not isinstance(maker, Map | Reduce) or (isinstance(maker, Map) and _SLOW.search(maker.template))
        if slow or len(chain) == LONGEST_CHAIN:
            return None
        assert isinstance(maker, Map | Reduce)
        chain.append(maker)
        waiting += [t for t in _read(maker) if t not in stored]
    order = {o: i for i, o in enumerate(makers.values())}
    return sorted(chain, key=order.__getitem__)


def _read(o: Operation) -> list[Tensor]:
    """Return the tensors that ``o`` reads; a Reduce is taken without the Maps in its loop, which are apart."""
    return [v.tensor for v in ([o.operand] if isinstance(o, Reduce) else o.views)]


def _copy(program: Program, tensor: Tensor, chain: list[Map | Reduce], late: list[Operation]) -> Again:
    copies = {m.out: Tensor(m.out.shape, m.out.dtype, m.out.name) for m in chain}
    added = [replace(m, out=copies[m.out], again=True) for m in chain]
    for m in added:
        _substitute(m, copies)
    at = min(program.operations.index(o) for o in late)
    program.operations[at:at] = added
    for o in late:
        _substitute(o, {tensor: copies[tensor]})
    return Again(tensor, copies[tensor], late, added)


def _undo(program: Program, changes: list[Again]) -> None:
    for change in changes:
        for o in change.late:
            _substitute(o, {change.copy: change.tensor})
    gone = {o for change in changes for o in change.added}
    program.operations = [o for o in program.operations if o not in gone]


def _of(view: View, copies: dict[Tensor, Tensor]) -> View:
    return View(copies.get(view.tensor, view.tensor), view.shape, view.strides, view.offset)


def _substitute(o: Operation, copies: dict[Tensor, Tensor]) -> None:
    """Replace the tensors that ``o`` reads, in place: keys of ``copies`` by their values."""
    if isinstance(o, Map):
        o.operands = [_of(v, copies) for v in o.operands]
    elif isinstance(o, Reduce):
        o.operand = _of(o.operand, copies)
    elif isinstance(o, Assemble):
        o.parts = [(_of(source, copies), to) for source, to in o.parts]
    elif isinstance(o, Rows):
        o.arguments = [_of(a, copies) if isinstance(a, View) else copies.get(a, a) if isinstance(a, Tensor) else a
                       for a in o.arguments]  # fmt: skip
    elif isinstance(o, Call):
        o.arguments = [copies.get(a, a) if isinstance(a, Tensor) else a for a in o.arguments]
        o.in_place = None if o.in_place is None else copies.get(o.in_place, o.in_place)
