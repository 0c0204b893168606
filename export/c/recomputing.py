"""Recompute cheap tensors for late readers, instead of storing them from the forward to the backward pass.

A tensor is cheap if Maps without slow functions (such as exp) compute it from tensors that stay in memory until its
last reader anyway. An example is the Relu of a BatchNormalization, computed from the input of the normalisation.
Results stay bit-identical.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from gradgraph.export.c.c_plan import Plan
from gradgraph.export.c.program import Assemble, Call, Map, Operation, Program, Reduce, Repeat, Rows, Tensor, View

_SLOW = re.compile("exp|log|pow|tan|erf|sin|cos|mod")
LEAST_BYTES = 256
LONGEST_CHAIN = 16


@dataclass
class Again:
    """A tensor, its recomputed ``copy`` for the readers ``late``, and the operations ``added`` to compute the copy."""

    tensor: Tensor
    copy: Tensor
    late: list[Operation]
    added: list[Map]


def recomputed(program: Program, plan: Plan) -> list[Again]:
    """Recompute cheap tensors that are alive at the peak of ``plan`` for their readers after it; return the changes."""
    place = {o: i for i, s in enumerate(plan.statements) for o in s.group.operations}
    for s in plan.statements:
        for o in s.group.operations:
            place.update(dict.fromkeys(o.inner if isinstance(o, Reduce) else [], place[o]))
    readers: dict[Tensor, list[Operation]] = defaultdict(list)
    for o in program.operations:
        for t in {v.tensor for v in ([o.operand] if isinstance(o, Reduce) else o.views)}:
            readers[t].append(o)
    makers: dict[Tensor, Operation] = {t: o for o in program.operations for t in o.outputs}
    last = {t: max(place[o] for o in found) for t, found in readers.items()}
    results = set(program.outputs.values())
    stored = set(plan.offsets)
    found: list[Again] = []
    copied: set[Tensor] = set()
    for tensor in plan.peak[1]:
        if tensor.nbytes < LEAST_BYTES or tensor in results or not isinstance(makers.get(tensor), Map):
            continue
        late = [o for o in readers[tensor] if place[o] > plan.peak_at]
        early = [o for o in readers[tensor] if place[o] <= plan.peak_at]
        chain = _chain(tensor, makers, stored)
        if not late or not early or any(isinstance(o, Repeat) for o in late) or chain is None:
            continue
        leaves = {v.tensor for m in chain for v in m.operands} - {m.out for m in chain}
        kept = [t for t in leaves if t in stored and t.nbytes * 4 > tensor.nbytes]
        if any(last[t] <= plan.peak_at for t in kept) or leaves & copied:
            continue
        copied.add(tensor)
        found.append(_copy(program, tensor, chain, late))
    return found


def _chain(tensor: Tensor, makers: dict[Tensor, Operation], stored: set[Tensor]) -> list[Map] | None:
    """Return the Maps that compute ``tensor`` from stored tensors, in order; None if that would be slow."""
    chain: list[Map] = []
    waiting = [tensor]
    while waiting:
        maker = makers.get(waiting.pop())
        if not isinstance(maker, Map) or maker in chain:
            continue
        if _SLOW.search(maker.template) or len(chain) == LONGEST_CHAIN:
            return None
        chain.append(maker)
        waiting += [v.tensor for v in maker.operands if v.tensor in makers and v.tensor not in stored]
        if any(v.tensor not in stored and not isinstance(makers.get(v.tensor), Map) and v.tensor in makers
               for v in maker.operands):  # fmt: skip
            return None  # a product that is never stored
    order = {o: i for i, o in enumerate(makers.values())}
    return sorted(chain, key=order.__getitem__)


def _copy(program: Program, tensor: Tensor, chain: list[Map], late: list[Operation]) -> Again:
    copies = {m.out: Tensor(m.out.shape, m.out.dtype, m.out.name) for m in chain}
    added = [
        Map(copies[m.out], m.template, [_of(v, copies) for v in m.operands], node=m.node, again=True) for m in chain
    ]
    at = min(program.operations.index(o) for o in late)
    program.operations[at:at] = added
    for o in late:
        _substitute(o, {tensor: copies[tensor]})
    return Again(tensor, copies[tensor], late, added)


def undo(program: Program, changes: list[Again]) -> None:
    """Revert ``changes``, as returned by ``recomputed``."""
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
