"""C source of the loop over one group of operations, as a function of addresses and sizes.

Sizes in the text are placeholder tokens, so that loops that differ only in tensors and sizes share one function.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradgraph.export.c.c_names import is_named
from gradgraph.export.c.grouping import Group, long_axes
from gradgraph.export.c.operators import literal
from gradgraph.export.c.program import (
    C_TYPES,
    FLAT,
    PACKED,
    Assemble,
    Element,
    Map,
    Reduce,
    Rows,
    Shape,
    Tensor,
    View,
    row_major,
    squeezed,
)

INDENT = "    "
_TOKEN = re.compile("@([0-9]+)@")


@dataclass
class Pointer:
    """A pointer argument of a loop function: the address of a tensor plus an offset in elements."""

    tensor: Tensor
    offset: int
    written: bool


@dataclass
class Loop:
    """The body of a loop function, with tokens ``@0@``, ``@1@``, … for its ``sizes``, and its arguments."""

    lines: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    pointers: list[Pointer] = field(default_factory=list)
    parameters: list[tuple[int, ...]] = field(default_factory=list)  # constant arrays
    kernels: set[str] = field(default_factory=set)

    def size(self, n: int) -> str:
        """Return the token for a size; 0 and 1 are returned as text, as the loop's form depends on them."""
        if n in (0, 1):
            return str(n)
        if n not in self.sizes:
            self.sizes.append(n)
        return f"@{self.sizes.index(n)}@"

    def pointer(self, tensor: Tensor, offset: int, written: bool = False) -> str:
        for i, known in enumerate(self.pointers):
            if (known.tensor, known.offset, known.written) == (tensor, offset, written):
                return f"p{i}"
        self.pointers.append(Pointer(tensor, offset, written))
        return f"p{len(self.pointers) - 1}"

    def parameter(self, numbers: tuple[int, ...]) -> str:
        self.parameters.append(numbers)
        return f"q{len(self.parameters) - 1}"

    @property
    def key(self) -> str:
        types = ",".join(f"{p.tensor.c_type}{p.written}" for p in self.pointers)
        return "\n".join([types, str(len(self.parameters)), *self.lines])


def filled(text: str, sizes: Sequence[str]) -> str:
    return _TOKEN.sub(lambda found: sizes[int(found[1])], text)


def loop_of(group: Group, stored: Iterable[Tensor]) -> Loop:
    """Return the loop that computes a group and writes those of its tensors that are in ``stored``."""
    first = group.operations[0]
    writer = _Writer(group, set(stored))
    if isinstance(first, Assemble):
        writer.assemble(first)
    else:
        writer.elements()
    return writer.loop


def collapsed(domain: Shape, accesses: Sequence[Shape]) -> tuple[Shape, list[Shape]]:
    """Merge adjacent axes that every access traverses with a uniform stride.

    Return the merged domain and the strides of each access in it.
    """
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in accesses]
    for axis, n in enumerate(domain):
        own = [a[axis] for a in accesses]
        if sizes and all(s[-1] == n * step for s, step in zip(strides, own, strict=True)):
            sizes[-1] *= n
            for s, step in zip(strides, own, strict=True):
                s[-1] = step
            continue
        sizes.append(n)
        for s, step in zip(strides, own, strict=True):
            s.append(step)
    return tuple(sizes), [tuple(s) for s in strides]


class _Writer:
    """A writer of one loop; ``names`` maps results to their local C variables."""

    def __init__(self, group: Group, stored: set[Tensor]) -> None:
        self.group = group
        self.stored = [t for o in group.operations for t in o.outputs if t in stored]
        self.loop = Loop()
        self.names: dict[Tensor, str] = {}
        self.loads: dict[tuple[Tensor, int, str], str] = {}
        self.depth = 1
        self.count = 0
        self.tile_begin = 0

    def line(self, text: str) -> None:
        self.loop.lines.append(INDENT * self.depth + text)

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count - 1}"

    def open(self, variable: str, size: int) -> None:
        self.line(f"for (int {variable} = 0; {variable} < {self.loop.size(size)}; {variable}++) {{")
        self.depth += 1

    def close(self, count: int = 1) -> None:
        for _ in range(count):
            self.depth -= 1
            self.line("}")

    def index(self, variables: Sequence[str], strides: Sequence[int]) -> str:
        terms = [v if s == 1 else f"{v} * {self.loop.size(s)}" for v, s in zip(variables, strides, strict=True) if s]
        return " + ".join(terms)

    # --- loops over elements ------------------------------------------------------------------------------

    def elements(self) -> None:
        totals = self.group.totals
        operations = [o for o in self.group.operations if isinstance(o, Element) and o not in totals]
        domain = long_axes(operations[0].out.shape)
        rows = [o for o in operations if isinstance(o, Rows)]
        if rows and not domain:
            domain = (1,)
        accesses = self._accesses([*operations, *totals], domain)
        sizes, strides = collapsed(domain, list(accesses.values()))
        self.strides = dict(zip(accesses, strides, strict=True))
        self.variables = [f"i{k}" for k in range(len(sizes))]
        if 0 in sizes:
            return
        if sizes:
            self._hoist([*operations, *(m for o in totals for m in o.inner)])
        for o in totals:
            self.names[o.out] = self.fresh("sum")
            self.line(f"{o.out.c_type} {self.names[o.out]} = {o.how.start};")
        for variable, n in zip(self.variables[: -1 if rows else None], sizes, strict=False):
            self.open(variable, n)
        if rows:
            self._open_tiles(rows, sizes[-1])
        for operation in operations:
            if isinstance(operation, Map):
                self._map(operation, self._operand)
            elif isinstance(operation, Reduce):
                self._reduce(operation)
        for o in totals:
            self._add_to_total(o)
        for tensor in self.stored:
            if all(tensor is not o.out for o in totals):
                pointer = self.loop.pointer(tensor, 0, written=True)
                self.line(f"{pointer}[{self.index(self.variables, self.strides[FLAT]) or '0'}] = {self.names[tensor]};")
        if rows and not any(is_named(self.variables[-1], line) for line in self.loop.lines[self.tile_begin :]):
            del self.loop.lines[self.tile_begin - 1]  # its declaration
        self.close(self.depth - 1)
        for o in totals:
            finished = self._finished(o, self.names[o.out], o.operand.size)
            self.line(f"{self.loop.pointer(o.out, 0, written=True)}[0] = {finished};")

    def _accesses(self, operations: Sequence[Element], domain: Shape) -> dict[object, Shape]:
        """Return the strides of each access along the axes of ``domain``, by view; the key FLAT is for results."""
        flat = row_major(domain)
        found: dict[object, Shape] = {FLAT: flat} if self.stored or any(isinstance(o, Rows) for o in operations) else {}
        made, totals = self.group.made, self.group.totals
        for o in operations:
            if isinstance(o, Reduce) and o not in totals:
                found.update({(o, v): self._split(o, v)[0] for v in o.views if not is_literal(v)})
                continue
            if isinstance(o, Rows):
                views = [a for a in o.arguments if isinstance(a, View)]
            else:
                views = [v for v in o.views if v.tensor not in made and not is_literal(v)]
            found.update({v: _fit(squeezed(v.shape, v.strides), domain) for v in views})
        return found

    @staticmethod
    def _split(o: Reduce, view: View) -> tuple[Shape, Shape]:
        """Return the strides of ``view`` along the kept axes and along the reduced axes of a reduction."""
        shape = o.operand.shape
        strides = iter(squeezed(view.shape, view.strides))
        every = [0 if n == 1 else next(strides) for n in shape]
        kept = tuple(s for a, s in enumerate(every) if a not in o.axes and shape[a] != 1)
        reduced = tuple(s for a, s in enumerate(every) if a in o.axes and shape[a] != 1)
        return kept, reduced

    def _hoist(self, operations: Sequence[Element]) -> None:
        """Load loop-invariant elements into variables before the loop."""
        for o in operations:
            if isinstance(o, Map):
                for v in o.operands:
                    if v in self.strides and not any(self.strides[v]):
                        self._load(v, "0")

    def _open_tiles(self, rows: Sequence[Rows], size: int) -> None:
        variable, n = self.variables[-1], self.loop.size(size)
        self.line(f"for (int first = 0; first < {n}; first += TILE) {{")
        self.depth += 1
        self.line(f"const int count = {n} - first < TILE ? {n} - first : TILE;")
        at = [*self.variables[:-1], "first"]
        for o in rows:
            sums = self.fresh("sums")
            self.line(f"float {sums}[TILE];")
            arguments = [self._argument(a, at) for a in o.arguments]
            self.line(f"{o.function}({', '.join([sums, 'count', *arguments])});")
            self.loop.kernels.add(o.function)
            self.names[o.out] = f"{sums}[j]"
        self.line("for (int j = 0; j < count; j++) {")
        self.depth += 1
        self.line(f"const int {variable} = first + j;")
        self.tile_begin = len(self.loop.lines)

    def _argument(self, a: object, at: Sequence[str]) -> str:
        if isinstance(a, View):
            pointer, index = self.loop.pointer(a.tensor, a.offset), self.index(at, self.strides[a])
            return f"{pointer} + {index}" if index else pointer
        if isinstance(a, Tensor):
            return self.loop.pointer(a, 0)
        if a == FLAT:
            return self.index(at, self.strides[FLAT]) or "0"
        if isinstance(a, tuple):
            return self.loop.parameter(a)
        assert isinstance(a, int)
        return self.loop.size(a)

    # --- operations ---------------------------------------------------------------------------------------

    def _operand(self, view: View) -> str:
        if is_literal(view):
            return literal_of(view)
        if view.tensor in self.names:
            return self.names[view.tensor]
        return self._load(view, self.index(self.variables, self.strides[view]) or "0")

    def _load(self, view: View, index: str) -> str:
        key = (view.tensor, view.offset, index)
        if key not in self.loads:
            self.loads[key] = self.fresh("x")
            if view.dtype in PACKED:
                self.line(f"const {C_TYPES[PACKED[view.dtype]]} {self.loads[key]} = {self._half(view, index)};")
            else:
                pointer = self.loop.pointer(view.tensor, view.offset)
                self.line(f"const {view.tensor.c_type} {self.loads[key]} = {pointer}[{index}];")
        return self.loads[key]

    def _half(self, view: View, index: str) -> str:
        """Return an element of 4 bits as a C expression."""
        pointer = self.loop.pointer(view.tensor, 0)
        at = f"({index} + {self.loop.size(view.offset)})" if view.offset else f"({index})"
        half = f"(({pointer}[{at} / 2] >> ({at} % 2 * 4)) & 15)"
        return f"(uint8_t){half}" if view.dtype == "uint4" else f"(int8_t)(({half} ^ 8) - 8)"

    def _map(self, o: Map, operand: object) -> None:
        text = o.template.format(*(operand(v) for v in o.operands))  # type: ignore[operator]
        self.names[o.out] = name = self.fresh("t")
        if o.out.dtype not in ("float32", "float64"):  # the result of the C expression may be an int
            text = f"({o.out.c_type})({text})"
        self.line(f"const {o.out.c_type} {name} = {text};")

    def _reduce(self, o: Reduce) -> None:
        views = [v for v in o.views if not is_literal(v)]
        split = {v: self._split(o, v)[1] for v in views}
        reduced = tuple(n for a, n in enumerate(o.operand.shape) if a in o.axes and n != 1)
        sizes, strides = collapsed(reduced, list(split.values()))
        inside = dict(zip(split, strides, strict=True))
        level = self.fresh("r")
        variables = [f"{level}_{k}" for k in range(len(sizes))]
        names = {"a": self.fresh("sum"), "t": C_TYPES[o.operand.dtype], "r": variables[0] if variables else "0"}
        if o.how.before:
            self.line(o.how.before.format(**names))
        self.line(f"{o.how.c_type or o.out.c_type} {names['a']} = {o.how.start};")
        outer = dict(self.loads)
        for variable, size in zip(variables, sizes, strict=True):
            self.open(variable, size)

        def operand(view: View) -> str:
            if is_literal(view):
                return literal_of(view)
            if view.tensor in self.names and view not in inside:
                return self.names[view.tensor]
            terms = [self.index(self.variables, self.strides[o, view]), self.index(variables, inside[view])]
            return self._load(view, " + ".join(filter(None, terms)) or "0")

        for m in o.inner:
            self._map(m, operand)
        step = o.how.step.format(**names, v=operand(o.operand))
        self.line(step if step.endswith("}") else step + ";")
        self.close(len(sizes))
        self.loads = outer
        self.names[o.out] = name = self.fresh("t")
        self.line(f"const {o.out.c_type} {name} = {self._finished(o, names['a'], math.prod(reduced))};")

    def _finished(self, o: Reduce, total: str, count: int) -> str:
        """Return the result of a reduction of ``count`` elements from its accumulator."""
        n = f"({o.out.c_type}){self.loop.size(count)}" if "{n}" in o.how.finish else ""
        return o.how.finish.format(a=total, n=n)

    def _add_to_total(self, o: Reduce) -> None:
        for m in o.inner:
            self._map(m, self._operand)
        step = o.how.step.format(a=self.names[o.out], v=self._operand(o.operand))
        self.line(step if step.endswith("}") else step + ";")

    # --- copies -------------------------------------------------------------------------------------------

    def assemble(self, o: Assemble) -> None:
        target = self.loop.pointer(o.out, 0, written=True)
        if o.fill is not None and o.out.size:
            self.line(f"for (int i = 0; i < {self.loop.size(o.out.size)}; i++) {target}[i] = {o.fill};")
        for source, to in o.parts:
            domain = long_axes(source.shape)
            pair = [squeezed(source.shape, source.strides), squeezed(to.shape, to.strides)]
            sizes, strides = collapsed(domain, pair)
            variables = [f"i{k}" for k in range(len(sizes))]
            for variable, n in zip(variables, sizes, strict=True):
                self.open(variable, n)
            value = literal_of(source) if is_literal(source) else self._element(source, variables, strides[0])
            written = self.loop.pointer(o.out, to.offset, written=True)
            self.line(f"{written}[{self.index(variables, strides[1]) or '0'}] = {value};")
            self.close(len(sizes))

    def _element(self, view: View, variables: Sequence[str], strides: Shape) -> str:
        return f"{self.loop.pointer(view.tensor, view.offset)}[{self.index(variables, strides) or '0'}]"


def _fit(strides: Shape, domain: Shape) -> Shape:
    return (0,) if domain == (1,) and not strides else strides


def is_literal(view: View) -> bool:
    """Whether all elements of ``view`` are the same known number."""
    return view.tensor.data is not None and view.tensor.size == 1


def literal_of(view: View) -> str:
    assert view.tensor.data is not None
    return literal(view.tensor.data.ravel()[0], view.dtype)
