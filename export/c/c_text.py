"""C source of planned programs: one function per distinct loop, and the statements that call them."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

import numpy as np

from gradgraph.export.c.c_names import is_named
from gradgraph.export.c.c_plan import Plan, Statement
from gradgraph.export.c.loops import INDENT, Loop, filled, loop_of
from gradgraph.export.c.operators import literal
from gradgraph.export.c.program import FAULT, PACKED, Assemble, Branch, Call, Element, Nested, Repeat, Tensor

Address = Callable[[Tensor], str]  # returns a C expression: a pointer to the tensor's elements


class Text:
    """A collector of the functions, constant arrays and kernels of several programs; duplicates are written once."""

    def __init__(self) -> None:
        self.kernels: set[str] = set()
        self._parameters: dict[tuple[int, ...], str] = {}
        self._loops: dict[str, list[Loop]] = defaultdict(list)
        self._comments: dict[str, str] = {}
        self._bytes: dict[tuple[str, bytes], str] = {}
        self.arrays: dict[str, Tensor] = {}

    # --- collected ----------------------------------------------------------------------------------------

    def constant(self, tensor: Tensor) -> str:
        """Return the name of a constant array."""
        assert tensor.data is not None
        key = (tensor.dtype, tensor.data.tobytes())
        if key not in self._bytes:
            self._bytes[key] = f"constant_{len(self._bytes)}"
            self.arrays[self._bytes[key]] = tensor
        return self._bytes[key]

    def parameter(self, numbers: tuple[int, ...]) -> str:
        return self._parameters.setdefault(numbers, f"window_{len(self._parameters)}")

    def statement(self, statement: Statement, address: Address, indent: str, plan: Plan) -> Callable[[], list[str]]:
        """Register a statement. The returned function writes its lines; call it once all statements are registered."""
        first = statement.group.operations[0]
        if isinstance(first, Call):
            self.kernels.add(first.function)
            for a in first.arguments:
                if isinstance(a, tuple):
                    self.parameter(a)
            return functools.partial(self._call, first, address, indent)
        if isinstance(first, Repeat):
            return self._repeat(first, statement.bodies[0], address, indent)
        if isinstance(first, Branch):
            return self._branch(first, statement.bodies, address, indent)
        assert isinstance(first, Element | Assemble)
        loop = loop_of(statement.group, statement.writes)
        self.kernels |= loop.kernels
        if not loop.lines:
            return list
        key = loop.key
        self._loops[key].append(loop)
        self._comments.setdefault(key, ", ".join(dict.fromkeys(o.node for o in statement.group.operations if o.node)))
        pointers = [address(p.tensor) + (f" + {p.offset}" if p.offset else "") for p in loop.pointers]
        parameters = [self.parameter(p) for p in loop.parameters]
        return lambda: [f"{indent}{self._names[key]}({', '.join([*pointers, *parameters, *self._sizes(key, loop)])});"]

    def program(self, plan: Plan, address: Address, indent: str = INDENT, stop: str = "") -> Callable[[], list[str]]:
        """Register the statements of a plan. The returned function writes their lines.

        Args:
            stop: a line that returns an error for an invalid index. It is inserted after the index checks, before the
                next write to a state tensor.
        """
        parts: list[Callable[[], list[str]]] = []
        unchecked = False
        for statement in plan.statements:
            first = statement.group.operations[0]
            if stop and unchecked and any(t in plan.direct for t in statement.writes):
                parts.append(lambda: [indent + stop])
                unchecked = False
            unchecked |= isinstance(first, Call) and first.checks
            unchecked |= isinstance(first, Nested)
            parts.append(self.statement(statement, address, indent, plan))
        if stop and unchecked:
            parts.append(lambda: [indent + stop])
        for new, old in plan.copies:
            parts.append(functools.partial(self._copy, address(old), address(new), new.nbytes, indent))
        return lambda: [line for part in parts for line in part()]

    def _copy(self, to: str, source: str, size: int, indent: str) -> list[str]:
        return [f"{indent}memcpy({to}, {source}, {size});"] if size else []

    def _call(self, call: Call, address: Address, indent: str) -> list[str]:
        written = [self._argument(a, address) for a in call.arguments]
        return [f"{indent}{call.function}({', '.join(written)});"]

    def _argument(self, a: object, address: Address) -> str:
        if a is None:
            return "NULL"
        if isinstance(a, Tensor):
            return address(a)
        if isinstance(a, tuple):
            return self.parameter(a)
        return f"&{a}" if a == FAULT else str(a)

    def _repeat(self, o: Repeat, body: Plan, address: Address, indent: str) -> Callable[[], list[str]]:
        depth = len(indent) // len(INDENT)
        step, turn = f"step_{depth}", f"turn_{depth}"
        places: dict[Tensor, str] = {} if o.counter is None else {o.counter: f"(&{turn})"}

        def turned(backwards: bool) -> str:
            if not backwards:
                return step
            assert isinstance(o.steps, int)
            return f"({o.steps - 1} - {step})"

        for outside, inside, backwards in o.slices:
            places[inside] = f"({address(outside)} + {turned(backwards)} * {inside.size})"
        for outside, result, backwards in o.stacked:
            places[result] = f"({address(outside)} + {turned(backwards)} * {result.size})"
        for (_, inside, _), last in zip(o.carried, o.last, strict=True):
            places[inside] = address(last)

        before = [
            f"{indent}memcpy({address(last)}, {address(first)}, {last.nbytes});"
            for (first, _, _), last in zip(o.carried, o.last, strict=True)
            if last.nbytes
        ]
        inside_lines = self.program(body, _inside(o, body, places, address), indent + INDENT)
        if isinstance(o.steps, int):
            head = f"for (int {step} = 0; {step} < {o.steps}; {step}++) {{"
        else:
            limit = [] if o.steps is None else [f"{step} < *{address(o.steps)}"]
            goes_on = [] if o.condition is None else [f"*{places[o.condition]}"]
            head = f"for (int64_t {step} = 0; {' && '.join([*limit, *goes_on])}; {step}++) {{"

        def write() -> list[str]:
            lines = inside_lines()
            is_read = any(is_named(turn, line) for line in lines)
            counted = [f"{indent}{INDENT}const int64_t {turn} = {step};"] if is_read else []
            return [*before, indent + head, *counted, *lines, indent + "}"]

        return write

    def _branch(self, o: Branch, plans: Sequence[Plan], address: Address, indent: str) -> Callable[[], list[str]]:
        lines = []
        for body, plan in zip(o.branches, plans, strict=True):
            places = {r: address(out) for r, out in zip(body.outputs.values(), o.out, strict=True)}
            lines.append(self.program(plan, _inside(o, plan, places, address), indent + INDENT))
        head = f"{indent}if (*{address(o.condition)}) {{"
        return lambda: [head, *lines[0](), indent + "} else {", *lines[1](), indent + "}"]

    # --- written ------------------------------------------------------------------------------------------

    def _sizes(self, key: str, loop: Loop) -> list[str]:
        return [str(loop.sizes[i]) for i in self._varying(key)]

    def _varying(self, key: str) -> list[int]:
        """Return the indices in ``sizes`` at which the loops with the text ``key`` differ."""
        loops = self._loops[key]
        return [i for i in range(len(loops[0].sizes)) if len({loop.sizes[i] for loop in loops}) > 1]

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        return {key: f"loop_{i}" for i, key in enumerate(self._loops)}

    def functions(self) -> list[str]:
        """Return the functions of all registered loops."""
        lines: list[str] = []
        for key, loops in self._loops.items():
            first, varying = loops[0], self._varying(key)
            sizes = [f"n{i}" if i in varying else str(n) for i, n in enumerate(first.sizes)]
            sizes = [f"({s})" if s.startswith("-") else s for s in sizes]
            arguments = [
                f"{'' if p.written else 'const '}{p.tensor.c_type} *p{i}" for i, p in enumerate(first.pointers)
            ]
            arguments += [f"const int *q{i}" for i in range(len(first.parameters))]
            arguments += [f"int n{i}" for i in varying]
            comment = self._comments[key]
            lines += [f"/* {comment if len(comment) < 400 else comment[:400] + ' ...'} */"] if comment else []
            lines += [f"static void {self._names[key]}({', '.join(arguments)}) {{"]
            lines += [filled(line, sizes) for line in first.lines]
            lines += ["}", ""]
        return lines

    def parameters(self) -> list[str]:
        return [
            f"static const int {name}[{len(numbers)}] = {{{', '.join(map(str, numbers))}}};"
            for numbers, name in self._parameters.items()
        ]


def _inside(o: Nested, plan: Plan, places: Mapping[Tensor, str], address: Address) -> Address:
    """Return the addresses of tensors in a program that ``o`` runs; ``places`` has the tensors stored outside."""

    def inner(tensor: Tensor) -> str:
        tensor = plan.direct.get(tensor, tensor)
        if tensor in places:
            return places[tensor]
        if tensor in plan.offsets:
            assert o.workspace is not None
            return at(tensor, f"(unsigned char *){address(o.workspace)} + {plan.offsets[tensor]}")
        return address(tensor)

    return inner


def at(tensor: Tensor, address: str) -> str:
    """Return a C expression that casts a byte address to a pointer to the tensor's elements."""
    return f"(({tensor.c_type} *)(void *)({address}))"


def elements(tensor: Tensor) -> str:
    """Return the elements of a constant as C literals."""
    assert tensor.data is not None
    found = tensor.data.ravel()
    if tensor.dtype in PACKED:
        halves = np.append(found, np.zeros(found.size % 2, found.dtype)).view(np.uint8) & 15
        return ", ".join(map(str, halves[::2] | halves[1::2] << 4))
    return ", ".join(literal(x, tensor.dtype) for x in found)


_HEAD = re.compile(r"^/\* == (\w+)(?: \(([\w, ]+)\))?: ?(.*)", re.MULTILINE)


@functools.lru_cache(maxsize=1)
def kernels() -> Mapping[str, tuple[tuple[str, ...], str]]:
    """Return for each kernel, by name, the names of the kernels that it calls, and its C source."""
    text = resources.files("gradgraph.export.c").joinpath("kernels/kernels.c").read_text("utf-8")
    found = list(_HEAD.finditer(text))
    ends = [*(m.start() for m in found[1:]), len(text)]
    return {
        m[1]: (tuple(filter(None, (m[2] or "").split(", "))), f"/* {m[3]}{text[m.end() : end].rstrip()}\n")
        for m, end in zip(found, ends, strict=True)
    }


def kernel_text(wanted: set[str]) -> str:
    """Return the C source of the ``wanted`` kernels, each after the kernels that it calls."""
    names: dict[str, None] = {}
    for name in sorted(wanted):
        for other in (*kernels()[name][0], name):
            names[other] = None
    return "\n".join(kernels()[name][1] for name in names)
