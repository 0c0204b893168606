"""Mutation of rules: are wrong rules caught? ``python -m tests.mutate_rules`` changes each in many small ways.

A mutant is one change in one function of ``gradgraph/rules``: a sign, a term left out, operands swapped, another
operator, a constant, a condition negated, a gradient left out, a mask taken from the output, a float32 copy left out.
The cases and points of the rules that compute the changed expression are tried in the ways of the rule kit and in
float16 (``test_float16.py``), and of composites what looks like them (``near_misses.py``), until one disagrees: the
mutant is caught. One that ends in an error, does not end, or ends the process is caught, too. What no case notices
survives, and is printed; mutants that compute the same are listed with the reason in ``EQUIVALENT``.

    python -m tests.mutate_rules                          every rule: two hours of one core
    python -m tests.mutate_rules elementwise reduction    two families
    python -m tests.mutate_rules --sample 200 --seed 3    some of all
    python -m tests.mutate_rules reduction --own          a minute: with the cases of this family alone

It ends with status 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import os
import pkgutil
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

import gradgraph as gg
import gradgraph.rules
from gradgraph.composites import COMPOSITES, rules_with_cases
from gradgraph.errors import ModelError
from gradgraph.operators import OPERATORS
from gradgraph.registry import Case, Point, Rule
from gradgraph.verify import cases
from gradgraph.verify.kit import WAYS

sys.path.insert(0, str(Path(__file__).parent))  # as pytest has it
import near_misses
from float16_forms import disagreements as in_float16
from float16_forms import reason_to_skip as not_in_float16

SECONDS = 30  # of a processor, after which a case does not end
WAITED = 20 * SECONDS  # of the clock: it waits for something that never comes
TRIED = 100  # cases or points a mutant is tried on
FEW = 8  # if nothing should notice it
FOLDER = Path(gradgraph.rules.__file__ or "").parent
MODULES = {  # the full name of each, by the last part of its name
    m.name.rsplit(".", 1)[-1]: m.name for m in pkgutil.walk_packages([str(FOLDER)], "gradgraph.rules.") if not m.ispkg
}

# --- what is changed ---------------------------------------------------------------------------------------------

OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
PAIRS = ("Sin Cos", "Sinh Cosh", "Max Min", "ReduceMax ReduceMin", "Add Sub", "Mul Div", "And Or", "Floor Ceil")
RENAMED = {a: b for pair in PAIRS for a, b in (pair.split(), reversed(pair.split()))}
SWAPPED = {"Where": (1, 2), "Sub": (0, 1), "Div": (0, 1), "MatMul": (0, 1), "Pow": (0, 1)}  # which operands
ELSEWHERE = (  # what these give is tried elsewhere
    "elementwise.stepped_sign",  # for forward mode alone: tests/test_forward.py
    "pool._refuse_windows_behind_the_end",  # tests/rules/test_conv.py
    "resize._copied",  # tests/normal/test_resize_scales.py
    "windows.Windows.count",  # for lowering alone: tests/passes
)
FLAGS = ("allowzero", "count_include_pad", "exclusive", "keepdims", "largest", "reverse", "transA", "transB", "upper")
COMPARISONS = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")


Span = tuple[int, int, int, int]  # first and last line, first and last column, as ``co_positions`` has them


@dataclass(frozen=True)
class Mutant:
    """``was`` became ``now`` in a function."""

    module: str
    function: str
    span: Span
    was: str
    now: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.was}  ->  {self.now}"


def changes(node: ast.AST, outputs: Sequence[str]) -> Iterator[ast.AST]:
    """What may stand in place of ``node``; ``outputs`` are parameters that hold what the operator gave."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in OTHER:
            yield ast.BinOp(node.left, OTHER[type(node.op)](), node.right)  # type: ignore[arg-type]
        yield node.left
        if not isinstance(node.op, ast.Pow):
            yield node.right
        if isinstance(node.op, ast.MatMult | ast.Sub | ast.Div):
            yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        if type(node.ops[0]) in OTHER:
            yield ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
        if isinstance(node.left, ast.Name) and isinstance(node.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE):
            yield from (ast.Compare(ast.Name(y, ast.Load()), node.ops, node.comparators) for y in outputs)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)
        if node.value not in (0, 1):
            yield ast.Constant(-node.value)
    elif isinstance(node, ast.keyword) and _is_flag(node):
        yield ast.keyword(node.arg, ast.Constant(1 - node.value.value))  # type: ignore[attr-defined]
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        for i, e in enumerate(node.value.elts):
            if not (isinstance(e, ast.Constant) and e.value is None):
                kept = [ast.Constant(None) if j == i else x for j, x in enumerate(node.value.elts)]
                yield ast.Return(ast.Tuple(kept, ast.Load()))
    elif isinstance(node, ast.Call):
        yield from _calls(node, outputs)


def _is_flag(node: ast.AST) -> bool:
    """An attribute that is 0 or 1, and not any number."""
    return isinstance(node, ast.keyword) and node.arg in FLAGS and isinstance(node.value, ast.Constant)


def _calls(node: ast.Call, outputs: Sequence[str]) -> Iterator[ast.AST]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Attribute) and name in RENAMED:
        yield ast.Call(ast.Attribute(node.func.value, RENAMED[name], ast.Load()), node.args, node.keywords)
    if name in SWAPPED and len(node.args) > max(SWAPPED[name]):
        args, (i, j) = list(node.args), SWAPPED[name]
        args[i], args[j] = args[j], args[i]
        yield ast.Call(node.func, args, node.keywords)
    if name in ("wide", "Abs", "Neg", "Sign", "cast") and len(node.args) > (name == "wide"):
        yield node.args[name == "wide"]
    if name == "all_wide":
        yield ast.List(node.args[1:], ast.Load())
    if name in COMPARISONS:
        for i, arg in enumerate(node.args):
            if isinstance(arg, ast.Name):
                for y in outputs:
                    yield ast.Call(node.func, [*node.args[:i], ast.Name(y, ast.Load()), *node.args[i + 1 :]], [])


def mutants_of(module: str) -> Iterator[Mutant]:
    """Of every function of a family, methods included; tables outside of functions stay as they are."""
    tree = ast.parse(Path(importlib.import_module(MODULES[module]).__file__ or "").read_text())
    for name, function in _functions(tree.body, ""):
        if function.returns is not None and any(
            word in ast.unparse(function.returns) for word in ("Case", "Point", "Draw")
        ):
            continue  # it makes cases
        if f"{module}.{name}" in ELSEWHERE:
            continue
        parameters = [a.arg for a in function.args.args]
        outputs = [p for p in parameters[:3] if p in ("y", "z")]
        bare = _bare(function)
        flags = [node.value for node in ast.walk(bare) if isinstance(node, ast.keyword) and _is_flag(node)]
        for i, node in enumerate(ast.walk(bare)):
            if any(node is flag for flag in flags):
                continue
            for k, now in enumerate(changes(node, outputs)):
                changed = copy.deepcopy(bare)
                found = _nth(changed, i)
                new = list(changes(found, outputs))[k]
                _replace(changed, found, ast.copy_location(new, found))
                was, text = (" ".join(ast.unparse(n).split())[:120] for n in (node, now))
                if was != text:
                    yield Mutant(module, name, _span(found), was, text, _compiled(changed))


def _span(node: Any) -> Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield prefix + statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body, f"{statement.name}.")


def _bare(function: ast.FunctionDef) -> ast.FunctionDef:
    """Without what runs when the function is defined, without types and without words."""
    bare = copy.deepcopy(function)
    bare.decorator_list, bare.args.defaults, bare.args.kw_defaults = [], [], [None] * len(bare.args.kwonlyargs)
    for node in list(ast.walk(bare)):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("Any", ast.Load())
    return bare


def _nth(tree: ast.AST, i: int) -> ast.AST:
    return next(node for k, node in enumerate(ast.walk(tree)) if k == i)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(v is old for v in value):
                setattr(parent, field, [new if v is old else v for v in value])


def _compiled(function: ast.FunctionDef) -> CodeType:
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([future, function], []))
    code = compile(tree, "<mutant>", "exec")
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == function.name)


# --- where it runs -----------------------------------------------------------------------------------------------


def functions() -> dict[tuple[str, str], FunctionType]:
    """Those of the rules by module and name: what is decorated lies in a table."""
    found: dict[tuple[str, str], FunctionType] = {}
    modules = [importlib.import_module(name) for name in MODULES.values()]
    held = [v for m in modules for v in vars(m).values()]
    held += [m for v in held if isinstance(v, type) for m in vars(v).values()]
    for value in [*held, *(r.emit for r in rules_with_cases()), *(o.portable for o in OPERATORS.values())]:
        plain = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        plain = getattr(plain, "__wrapped__", plain)
        if isinstance(plain, FunctionType) and plain.__module__.startswith("gradgraph.rules."):
            found[plain.__module__.rsplit(".", 1)[-1], plain.__qualname__] = plain
    return found


Trial = Case | Point
Place = tuple[str, Span]  # a module, and an expression in it


def places_run(rule: Rule, trial: Trial) -> set[Place]:
    """What rules compute to write the gradient of a case, with shapes known, unknown, mixed, and literals fed."""
    seen: set[tuple[CodeType, int]] = set()
    folder = str(FOLDER)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            seen.add((frame.f_code, frame.f_lasti // 2))
        return trace

    for t, wrt in _built(rule, trial):
        sys.settrace(trace)
        with contextlib.suppress(ModelError):  # a few operators have outputs that cannot be float16
            gg.vjp(t.model, outputs=t.read, wrt=wrt, allow_unused=True)
        sys.settrace(None)
    return {(Path(code.co_filename).stem, span) for code, i in seen if (span := _spans(code)[i]) is not None}


@functools.cache
def _spans(code: CodeType) -> list[Span | None]:
    """Which expression each instruction is for."""
    return [None if None in p else p for p in code.co_positions()]  # type: ignore[misc]


def _all_spans(code: CodeType) -> Iterator[Span]:
    """Of a function and of those inside."""
    yield from (span for span in _spans(code) if span is not None)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _all_spans(inner)


def _lies_in(inner: Span, outer: Span) -> bool:
    first, last, start, end = outer
    return (first, start) <= (inner[0], inner[2]) and (inner[1], inner[3]) <= (last, end)


def _built(rule: Rule, trial: Trial) -> Iterator[tuple[cases.Trial, list[str]]]:
    """What is differentiated, and by which inputs."""
    if isinstance(trial, Point):
        for unknown in (False, True):
            t = cases.trial(rule, trial.case, fed=True, unknown=unknown)
            yield t, [f"x{i}" for i, g in enumerate(trial.gives) if g is not None]
        return
    known: list[tuple[cases.Unknown, bool]] = [(False, False), (True, False), ("even", False), ("odd", False)]
    ways: list[tuple[cases.Unknown, bool, Any]] = [(u, f, np.float64) for u, f in (*known, (True, True))]
    if not trial.onnxruntime:
        ways += [(not trial.known_shapes, False, np.float32)]
    if not trial.onnxruntime and rule.op_type != "Det":
        ways += [(False, False, np.float16)]
    for unknown, fed, dtype in ways:
        if not (unknown and trial.known_shapes) and not (fed and trial.constant_literals):
            t = cases.trial(rule, trial, unknown=unknown, fed=fed, dtype=dtype)
            yield t, t.wrt


Reach = dict[Place, list[tuple[Rule, Trial]]]


def reach(rules: Sequence[Rule]) -> Reach:
    """Which cases and points compute an expression."""
    found: Reach = defaultdict(list)
    for rule in rules:
        for trial in (*rule.cases, *rule.points):
            for place in places_run(rule, trial):
                found[place].append((rule, trial))
    return found


def trials_of(mutant: Mutant, code: CodeType, reached: Reach) -> list[tuple[Rule, Trial]]:
    """Those that compute what is changed; where Python has folded it into a constant, what this stands in."""
    spans = set(_all_spans(code))
    inside = [s for s in spans if _lies_in(s, mutant.span)]
    around = sorted((s for s in spans if _lies_in(mutant.span, s)), key=lambda s: (s[1] - s[0], s[3] - s[2]))
    rows = (row for span in inside or around[:1] for row in reached.get((mutant.module, span), []))
    return list({id(trial): (rule, trial) for rule, trial in rows}.values())


def chosen(trials: Sequence[tuple[Rule, Trial]], count: int, draw: random.Random) -> list[tuple[Rule, Trial]]:
    """A few, of as many rules as there are."""
    mixed = sorted(draw.sample(list(trials), len(trials)), key=lambda row: isinstance(row[1], Case))  # points first
    turns: Counter[str] = Counter()
    order = []
    for rule, trial in mixed:
        order.append((turns[rule.op_type], rule, trial))
        turns[rule.op_type] += 1
    return [(rule, trial) for _, rule, trial in sorted(order, key=lambda row: row[0])][:count]


# --- is it noticed? ----------------------------------------------------------------------------------------------


def noticed(rule: Rule, trial: Trial) -> str:
    """How a case or a point notices that something is wrong; "" if it does not."""
    if isinstance(trial, Point):
        return "point" if _disagrees(lambda: cases.check_point(rule, trial)) else ""
    for name, way in WAYS.items():
        if not way.reason_to_skip(trial) and _disagrees(lambda way=way: way.disagreements(rule, trial)):  # type: ignore[misc]
            return name
    if rule.op_type in COMPOSITES:
        if _disagrees(lambda: [rule.op_type] * near_misses.is_missed(rule, trial)):
            return "not found"
        if _disagrees(lambda: near_misses.disagreements(rule, trial)):
            return "near miss"
    return "float16" if not not_in_float16(rule, trial) and _disagrees(lambda: in_float16(rule, trial)) else ""


def _in_time(rule: Rule, trial: Trial) -> str:
    """``noticed``, or the end of this process."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # a busy machine makes no mutant look endless
    signal.alarm(WAITED)
    return noticed(rule, trial)


def _disagrees(run: Callable[[], list[str]]) -> bool:
    try:
        return bool(run())
    except Exception:  # whatever a wrong rule provokes, in whichever library
        return True


def caught(mutant: Mutant, function: FunctionType, trials: Sequence[tuple[Rule, Trial]]) -> str:
    """Which way catches a mutant, in a process of its own; "" if none does."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        function.__code__ = mutant.code
        way = next((w for w in (_in_time(*t) for t in trials) if w), "")
        os.write(writer, way.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        way = pipe.read()
    _, status = os.waitpid(child, 0)
    return "end of process" if status else way


# --- equivalent mutants ------------------------------------------------------------------------------------------

# parts of what is printed, and why nothing can notice; counted only where nothing does
_SPEED = "chooses between two formulas that give the same, one of them faster"
_ALIKE = "onnxruntime's CPU provider reads all of these in float32; one with more kernels for float16 need not"
_TWICE = "of many numbers, too, a projection may be done twice"
_NO_STEP = "no step is 0"
_SHAPE_ONLY = "only its shape is read"
_NUMPY = "NumPy works out the size for any negative number"
_FACTS = "what is known of sizes in a loop changes nothing that is computed"
_SCALAR = "a vector of one number broadcasts as a scalar does"
_CROPS = "it crops where there is nothing to crop"
_INSIDE = "only the first output of these axes is read: their region need only begin inside"
_BEYOND = "so far out lies no tap that weighs anything"
_ONCE = "adds up rows once, or in every iteration: the sums are the same"
_OF_FOUR = "of four axes, axis 2 is the last but one"
_MATRIX = "of a matrix, the last axis is 1"
_NUMBERS = "tanh, sigmoid and relu read neither number"
EQUIVALENT: dict[str, str] = {
    "activation.leaky_relu: 0.0  ->  1.0": _SPEED,
    "activation.leaky_relu: alpha >= 0.0  ->  alpha > 0.0": "for alpha = 0 the output tells as much as the input",
    "activation.elu: alpha >= 0.0  ->  alpha > 0.0": "for alpha = 0 the output tells as much as the input",
    "activation.elu: 0.0  ->  1.0": "for alpha from 0 to 1 the input tells as much as the output",
    "activation.hard_sigmoid: abs(alpha) <= min(": _SPEED,
    "activation.hard_sigmoid: 1.0 - beta  ->  beta - 1.0": _SPEED,
    "activation.hard_sigmoid: wide(op, x)  ->  x": _ALIKE,
    "activation.normal_cdf: if x.dtype == ir.DataType.FLOAT": _SPEED,
    "activation.normal_cdf: x.dtype == ir.DataType.FLOAT": _SPEED,
    "activation._tanh_gelu_slope: if x.dtype": _ALIKE,
    "activation._tanh_gelu_slope: x.dtype": _ALIKE,
    "conv.conv_transpose: more >= stride  ->  y >= stride": _CROPS,
    "conv._kernel: k if isinstance": _SPEED,
    "conv.hand_back: _channels(w)[1] or LEAST_CHANNELS_TURNED": _SPEED,
    "conv.hand_back: c * group": _SPEED,
    "conv.weight_gradient: seen.pointwise and c or (": _SPEED,
    "conv.weight_gradient: c >= LEAST_CHANNELS_GATHERED": _SPEED,
    "conv._turned: 2  ->  3": "it counts backwards from as far as that",
    "conv._turned: 31  ->  32": "it counts backwards from as far as that",
    "conv._channels_traded: 2  ->": _SPEED,
    "conv.by_conv: group > 1  ->  group >= 1": _SPEED,
    "conv.by_conv: s - 1  ->  s": _CROPS,
    "conv.by_conv: r - c  ->  r": _CROPS,
    "conv._by_matmul: keepdims=0": "it is reshaped",
    "conv._columns: 2  ->  -2": _OF_FOUR,
    "conv._channels: 0  ->  1": "one of them alone is as good as unknown",
    "conv._channels: w.shape or ()": _SPEED,
    "control.scan: k >= n  ->  k > n": "it saves what is at hand",
    "control.scan: 0  ->  1": "any output leads to the node",
    "control.loop: 0  ->  1": "both have as many rows",
    "control.loop: k - 1  ->  1": "it replays what could be saved",
    "elementwise.fixed: x.const if": "the number of an initializer is right until it is trained",
    "elementwise.pow: all_wide(": _ALIKE,
    "elementwise._ordered: a <= b  ->  a < b": _SPEED,
    "elementwise._power_slope: op.Equal(x, 0.0) & op.Equal(e, 0.0)  ->  op.Equal(e, 0.0)": "it is multiplied by e = 0",
    "dot_product_attention._condition: 1  ->  2": "any number but 0 says yes",
    "dot_product_attention.weights_gradient: isinstance(keys, int)": _SPEED,
    "dot_product_attention.weights_gradient: not longer": _SPEED,
    "dot_product_attention.weights_gradient: None if p.shape is None": _SPEED,
    "gated_units._factors: 1  ->  2": "one more look finds nothing",
    "grid_sample: wide(": _ALIKE,
    "grid_sample: return (dx, op.zeros_like(grid))  ->": "no gradient counts as zeros",
    "grid_sample: 2  ->  -2": "both axes are 1 long",
    "indexing.slice_: stride < 0  ->  stride <= 0": _NO_STEP,
    "indexing.slice_: s < 0  ->  s <= 0": _NO_STEP,
    "indexing._lowest: stride < 0  ->  stride <= 0": _NO_STEP,
    "indexing._lowest: not back.any()  ->  back.any()": _SPEED,
    "indexing._lowest: starts.const < 0  ->  starts.const <= 0": _SPEED,
    "indexing._along: starts.shape[0] if starts.shape is not None": _SPEED,
    "indexing._constant: starts.shape[0] if starts.shape is not None": _SPEED,
    "indexing._single: index * one  ->  index / one": "one is 1",
    "indexing._single: (-index - 1) * one  ->  (-index - 1) / one": "one is 1",
    "indexing._product: 1.0  ->  2.0": "it is multiplied, then divided by",
    "indexing.scatter_nd: if how in ('max', 'min')": _SPEED,
    "iteration.Backward._models: self.": "the state itself is as good a model",
    "iteration.Backward._put_together: [None] * rank": _FACTS,
    "iteration.Backward._put_together: allowzero=1": "where a size is 0, so is the one that would be copied",
    "iteration.gathers_by_counting: x.value.is_graph_output() and": _ONCE,
    "iteration.gathers_by_counting: 0  ->  1": _ONCE,
    "iteration._counts: if node is None or": _ONCE,
    "iteration._counts: node is None or": _ONCE,
    "iteration._counts: if len(moving) != 1": _ONCE,
    "iteration._counts: len(moving) != 1": _ONCE,
    "iteration._counts: bool(lead and": _ONCE,
    "iteration._counts: 2": _ONCE,
    "iteration._counts: 1  ->": _ONCE,
    "iteration._counts: 0  ->": _ONCE,
    "iteration._counts: not _is_integer": _ONCE,
    "iteration._counts: lead and": _ONCE,
    "iteration._counts: v is not None": _ONCE,
    "iteration._counts: k": _ONCE,
    "iteration._is_integer:": _ONCE,
    "iteration._steps:": _ONCE,
    "iteration.saved: ": "names are made unique",
    "iteration._last: ": "names are made unique",
    "iteration._already_saved: len(body": "it saves what is at hand",
    "iteration._already_saved: list(body.outputs).index(c) - lead  ->  lead - list": "it saves what is at hand",
    "iteration._already_saved: place >= states  ->  place > states": "it saves what is at hand",
    "iteration._already_saved: place - states  ->  states - place": "it saves what is at hand",
    "iteration._history:": _FACTS,
    "iteration.Backward.gradients: k - self.first  ->": "only a Scan has slices, and it has no lead",
    "linalg.mat_mul: 2  ->  -2": _SPEED,
    "linalg._vector_product: 1  ->  2": "vectors on both sides are dealt with before",
    "linalg._without_repeats: next(fresh) if label in target": _SPEED,
    "linalg._sizes: joint[0] if joint": "a size may be unknown",
    "linalg.subscripts: max(widths) > len(free)": "no tensor has so many axes",
    "linalg.subscripts: len(spread) - width": "ONNX's shape rule wants ellipses of one width",
    "linalg._eye: 0  ->  1": _SHAPE_ONLY,
    "linalg.det: 1  ->  2": "matrices are square",
    "linalg.det: 2  ->  -2": _OF_FOUR,
    "norm.columns: 2  ->  -2": "it adds no axes",
    "norm.columns: x.rank > 2  ->  x.rank >= 2": "it adds no axes",
    "norm._size: keepdims=0": _SCALAR,
    "norm.batch_normalization: 0  ->  1": "both outputs have one type",
    "norm.mean_variance_normalization: all_wide(": _ALIKE,
    "norm.mean_variance_normalization: op.Equal(deviation, 0.0)  ->  op.Equal(y, 0.0)": "0 is divided either way",
    "norm.mean_variance_normalization: 1.0  ->  2.0": "0 / 2 is 0, too",
    "norm.lp_normalization: all_wide(": _ALIKE,
    "norm._batch_statistics: x - columns(op, mean, x)  ->  columns(op, mean, x) - x": "it is squared",
    "norm.has_few: x.shape is not None and": _TWICE,
    "random.dropout: op.cast(ratio": _ALIKE,
    "recurrent_layer.Direction.scan: None if s.shape": _FACTS,
    "recurrent_layer.Direction.scan: shapes.shape_of(y) or": _FACTS,
    "recurrent_layer._value: shape or MATRIX": _FACTS,
    "recurrent_layer.directions: X is not None and": "they are always there",
    "recurrent_layer.directions: 0.0  ->  1.0": "any number is masked; padding may hold others",
    "resize.resize: a % x.rank  ->  a": "the oracle knows no axes counted from the end",
    "resize._repeats: centre == 'asymmetric' and rounding == 'floor' or": _SPEED,
    "resize._repeats: 1  ->  2": _SPEED,
    "resize._repeats: 2  ->": _SPEED,
    "resize._repeats: 3  ->": _SPEED,
    "resize._repeats: 5  ->  -5": _SPEED,
    "resize._repeats: r == int(r)  ->  r != int(r)": _SPEED,
    "resize._repeats: r >= 1  ->  r > 1": _SPEED,
    "resize._ratio: None if v.shape": _SPEED,
    "resize._matrix: 0  ->  1": _SHAPE_ONLY,
    "resize._contracted: x.rank - ": _SPEED,
    "resize._contracted: 2  ->  -2": _SPEED,
    "resize._contracted: allowzero=1": "the oracle resizes nothing that has no elements",
    "resize.resize: None if tied else": _SPEED,
    "resize.resize: _stays(x, y, axis": _SPEED,
    "resize.resize: j + len(along)  ->  j - len(along)": "it is the same entry, counted from the end",
    "resize_tied._common_scale: keepdims=0": _SCALAR,
    "resize_tied._read_off: 1.0  ->  2.0": "any negative number will do",
    "resize_tied._region: 0.0  ->  1.0": _INSIDE,
    "resize_tied._region: 1.0  ->  2.0": _INSIDE,
    "resize_tied._weights: 0  ->  1": _BEYOND,
    "resize_tied._weights: op.cast(op.Ceil(reach / op.Reshape(shrunk, [1])), INT64) + 1  ->": _BEYOND,
    "resize_tied._weights: op.Ceil(": _BEYOND,
    "resize_tied._weights: 1  ->  2": _BEYOND,
    "resize_tied._weights: reach + 1  ->  reach": _BEYOND,
    "resize_tied._gaps: op.Unsqueeze(c, [1]) - taps  ->  taps - op": "only its size is read",
    "resize_tied._kernel: u <= 1.0  ->": "both pieces agree there",
    "resize_tied._kernel: u < 2.0  ->": "both pieces agree there",
    "resize_tied._wide: x.dtype.bitwidth >= 32  ->": "float32 stays float32",
    "resize_tied._wide: 32  ->  33": "float32 stays float32",
    "resize_tied._wide: 32  ->  -32": _ALIKE,
    "resize_tied._wide: x.dtype if": "of so few pixels, float32 has digits enough for float64, too",
    "resize_tied._region: k + 2  ->": _INSIDE,
    "resize_tied._region: 2  ->  -2": _INSIDE,
    "resize_tied._region: j + count  ->  j - count": "it is the same entry, counted from the end",
    "rounding.all_wide:": _ALIKE,
    "sequence.from_the_front: op.cast(place": "the oracle subtracts int32 from int64",
    "sequence.from_the_front: place.const >= 0": _SPEED,
    "sequence.from_the_front: 0  ->  1": _SPEED,
    "shape.dims: x.shape[start:stop] if": _SPEED,
    "shape.reshaped: len(": _SPEED,
    "signal.dft: 1  ->  2": "any number but 0 says yes",
    "signal._resized: if changed.shape": "a known rank changes nothing that is computed",
    "signal.stft: 2  ->": f"{_OF_FOUR}; tests/rules/test_signal.py has a signal of two",
    "signal.col2im: 0  ->  1": "only its length is read",
    "signal.col2im: 2  ->  3": "they are all zeros",
    "signal._axes: image_shape.shape or": "the normal form writes strides where it knows the number of axes",
    "spatial.affine_grid: 0  ->  1": _SHAPE_ONLY,
    "spatial.affine_grid: 3  ->  4": "there are three",
    "spatial.deform_conv: keepdims=0": "it is reshaped",
    "spatial._offset_places: [1] * axes  ->": "the normal form writes strides and dilations",
    "spatial._offset_places: 1  ->  2": "the normal form writes strides and dilations",
    "spatial._offset_places: [0] * axes  ->": "the normal form writes pads",
    "spatial._offset_places: 0  ->  1": "the normal form writes pads",
    "spatial._offset_places: wide(": _ALIKE,
    "spatial._lattice: 1  ->  2": "any number but 0 will do",
    "spatial._column: 1  ->  2": _NUMPY,
    "spatial._product: keepdims=0": "it is reshaped",
    "spatial_rois.Geometry.samples: 1  ->  2": "of sizes and samples, what is too many is masked",
    "spatial_rois.Geometry.samples: op.cast(count": "both types hold whole numbers",
    "spatial_rois.roi_align: wide(op, v)  ->  v": _ALIKE,
    "spatial_rois.roi_align: 2  ->  -2": _OF_FOUR,
    "spatial_rois._mean: 2  ->  -2": _OF_FOUR,
    "spatial_rois._hats: op.cast(size": "both types hold whole numbers",
    "spatial_rois._neighbours: t * share  ->  t": "a sample that has no share lies on the first or last pixel",
    "spatial_rois._crossed: allowzero=1": "there may be no regions, whose axis is the first of both",
    "spatial_rois._winners: keepdims=1": _SCALAR,
    "spatial_rois._winners: 2  ->  -2": _OF_FOUR,
    "spatial_rois._winners: 4  ->  5": _OF_FOUR,
    "spatial_rois.max_roi_pool: wide(op, rois)": _ALIKE,
    "spatial_rois.max_roi_pool: 2  ->  -2": _OF_FOUR,
    "spatial_rois._whole_pixels: 1  ->  2": "of sizes and pixels, what is too many is masked",
    "spatial_rois._whole_pixels: op.Sub(high": "of sizes and pixels, what is too many is masked",
    "spatial_taps.taps: op.cast((inner > 0.0)": "linear slopes are 1 and -1",
    "spatial_taps.taps: 2  ->  -2": _OF_FOUR,
    "spatial_taps.taps: 1  ->  2": _NUMPY,
    "spatial_taps.taps: 0  ->  1": "all rows are equally long",
    "spatial_taps._polynomial: 1  ->  2": _NUMPY,
    "spatial_taps._mirrored: i - low  ->  low - i": "only its size is read",
    "spatial_taps._mirrored: 2.0  ->  -2.0": "fmod reads no sign of a divisor",
    "spatial_taps.add_back: 2  ->  -2": _OF_FOUR,
    "spatial_taps.add_at: keepdims=0": _SCALAR,
    "spatial_rois._ends: 2  ->  -2": "both axes are 1 long",
    "padding._border: keepdims=0": "it is reshaped",
    "padding._cut: 1  ->  2": _NUMPY,
    "padding._cut: pads.const < 0  ->": _SPEED,
    "padding._cut: 0  ->  1": _SPEED,
    "padding._widths: int(a) % x.rank  ->  int(a)": "an axis may be counted from the end",
    "padding._widths: pads.const < 0  ->": _SPEED,
    "padding._widths: 0  ->  1": _SPEED,
    "padding._widths: 1  ->  2": _NUMPY,
    "padding._folds: mode == 'edge' or": _SPEED,
    "padding._folds: x.shape[axis] if": _SPEED,
    "padding._folds: size + (mode == 'wrap')  ->": _SPEED,
    "padding._folds: mode == 'wrap'  ->": _SPEED,
    "placement.add_slices: not distinct and (not _differ(where))  ->": _SPEED,
    "placement.sizes_of: axes[0] + len(axes)  ->": _SPEED,
    "placement.as_int64: op.cast(x, INT64)  ->  x": "onnxruntime takes no two types: tests/rules/test_indexing.py",
    "placement.few_places:": _SPEED,
    "placement._placed: -1  ->  1": "of a vector, both are the axis behind it",
    "placement._one_hot: 1  ->  2": _NUMPY,
    "placement._differ: known.min() >= 0  ->": _SPEED,
    "placement._differ: 0  ->  1": _SPEED,
    "placement._summed: largest=0": "sums are the same in either order",
    "placement._summed: 1  ->  2": "no place is negative",
    "softmax.softmax: None if y.shape is None else y.rank - 1": _SPEED,
    "softmax.softmax: y.rank - 1": _SPEED,
    "softmax.softmax: 1  ->  2": _SPEED,
    "softmax.softmax_gradient: do is None or o is None": "both are there, or neither",
    "softmax._attention_row:": _SPEED,
    "softmax._is: node.domain == ''": _SPEED,
    "softmax._picked: zeros.producer() if zeros is not None": _SPEED,
    "softmax._picked: attributes(node)['axis'] % y.rank": _SPEED,
    "softmax._picked: axis % y.rank": _SPEED,
    "softmax._picked: not _fills_zeros(filled)  ->": _SPEED,
    "softmax._picked: i == axis % y.rank  ->": _SPEED,
    "softmax._fills_zeros: value is None or": _SPEED,
    "softmax._fills_zeros: not value": "no rule scatters into a constant that is not 0",
    "softmax._shared: keepdims=0": _SCALAR,
    "softmax._count:": _SPEED,
    "windows.Windows.pointwise: not any(self.pads)": _SPEED,
    "windows.Windows.spatial: x.shape or ()": _CROPS,
    "windows.Windows.spatial:": "of a tensor of unknown rank: tests/rules/test_conv.py",
    "windows.Windows.rest: v.shape or ()": _CROPS,
    "windows._rest: not isinstance(": _CROPS,
    "windows.windows: (1,) * n  ->": "the normal form writes strides and dilations",
    "windows.windows: 1  ->  2": "the normal form writes strides and dilations",
    "windows.windows: (0,) * (2 * n)  ->": "the normal form writes pads",
    "windows.windows: 2": "the normal form writes pads",
    "windows.windows: 0  ->  1": "the normal form writes pads",
    "windows.sizes: None if x.shape is None": _SPEED,
    "resize_tied._read_off: 1  ->  2": "of lines that are equal one is read",
    "rms_norm.find_rms_norm: 1  ->  2": "any number but 0 says yes",
    "rms_norm._axes_of_mean: axes is not None and axes.size > 0": "the mean over no axes is that over all",
    "rms_norm._axes_of_mean: axes.size > 0": "the mean over no axes is that over all",
    "rms_norm._axes_of_mean: 1  ->  2": _NUMPY,
    "pool._seen: if ceil_mode:": "what it refuses is tried in tests/rules/test_conv.py",
    "pool.max_pool: 1  ->  2": _SPEED,
    "pool._to_winners: e <= s  ->  e < s": _SPEED,
    "pool.lp_pool: all_wide(": _ALIKE,
    "pool.global_lp_pool: all_wide(": _ALIKE,
    "pool.global_average_pool: dy / op.cast(": "ones",
    "pool.global_average_pool: keepdims=1": _SCALAR,
    "pool._norm_cotangent: 1.0  ->  2.0": "it is multiplied by 0",
    "pool._norm_cotangent: 2  ->  -2": _SPEED,
    "pool._norm_slope: 2  ->  -2": _SPEED,
    "pool.spread: r >= 0  ->  r > 0": _SPEED,
    "pool.spread: 0  ->  1": _SPEED,
    "pool._may_lack_taps: ceil and (": "where none lacks taps, the ratio is 1",
    "pool._may_lack_taps: not pads_count and (": "where none lacks taps, the ratio is 1",
    "pool._may_lack_taps: rest < 0": "where none lacks taps, the ratio is 1",
    "pool._may_lack_taps: 0  ->  1": "where none lacks taps, the ratio is 1",
    "pool._may_lack_taps: seen.": "where none lacks taps, the ratio is 1",
    "recurrent._plain: 0.0  ->  1.0": _SPEED,
    "recurrent._direction: 0.0  ->  1.0": _NUMBERS,
    "recurrent._gru_reset_after: -1  ->  1": _MATRIX,
    "recurrent._gru_reset_before: -1  ->  1": _MATRIX,
    "recurrent._lstm: 2  ->  3": "there are two",
    "recurrent._lstm_gradients: -1  ->  1": _MATRIX,
    "recurrent_activations.activations: 0.0  ->  1.0": "both are numbers",
    "recurrent_activations.activations: math.isnan(": "what it refuses is tried in tests/rules/test_recurrent.py",
    "reduction.reduce_log_sum_exp: wide(": _ALIKE,
    "reduction.reduce_log_sum_exp: 0.0  ->  1.0": "exp(-inf - 1) is 0, too",
    "reduction.reduce_l2: all_wide(": _ALIKE,
    "reduction.reduce_l2: op.Equal(norm, 0.0)  ->  op.Equal(y, 0.0)": _ALIKE,
    "reduction.reduce_l2: 1.0  ->  2.0": "0 / 2 is 0, too",
    "reduction.reduce_prod: all_wide(": _ALIKE,
}


def excuse(mutant: Mutant) -> str:
    return next((reason for part, reason in EQUIVALENT.items() if part in str(mutant)), "")


# --- the command -------------------------------------------------------------------------------------------------


SURVIVES, UNREACHED, EQUAL = "survives", "run by no case", "equivalent"


@dataclass
class Score:
    """What became of each mutant: the way that caught it, or one of the three words above."""

    outcomes: list[tuple[Mutant, str]]

    @property
    def left(self) -> list[Mutant]:
        return [m for m, way in self.outcomes if way in (SURVIVES, UNREACHED)]

    def row(self, name: str) -> str:
        ways = Counter(way for _, way in self.outcomes)
        equal, left = ways.pop(EQUAL, 0), ways.pop(SURVIVES, 0) + ways.pop(UNREACHED, 0)
        hit = ways.total()
        share = 100 * hit / max(hit + left, 1)
        by = ", ".join(f"{w} {n}" for w, n in ways.most_common())
        return f"{name}: {hit} of {hit + left} caught ({share:.1f} %); equivalent: {equal}; by {by}"

    def __str__(self) -> str:
        modules = sorted({m.module for m, _ in self.outcomes})
        rows = [Score([(m, w) for m, w in self.outcomes if m.module == name]).row(name) for name in modules]
        return "\n".join([*rows, self.row("all")] if len(rows) > 1 else rows)


def try_all(mutants: Sequence[Mutant], rules: Sequence[Rule], seed: int = 0) -> Score:
    draw = random.Random(seed)
    found = functions()
    reached = reach(rules)
    score = Score([])
    for mutant in mutants:
        function = found.get((mutant.module, mutant.function))
        reaching = [] if function is None else trials_of(mutant, function.__code__, reached)
        trials = chosen(reaching, FEW if excuse(mutant) else TRIED, draw)
        way = caught(mutant, function, trials) or SURVIVES if trials and function is not None else UNREACHED
        if way in (SURVIVES, UNREACHED) and excuse(mutant):
            way = EQUAL
        score.outcomes.append((mutant, way))
        if way in (SURVIVES, UNREACHED):
            print(f"{way}: {mutant} (line {mutant.span[0]})", flush=True)
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="modules of gradgraph/rules; all by default")
    parser.add_argument("--sample", type=int, help="that many mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--own", action="store_true", help="try cases of these families' own rules only: a quick start")
    options = parser.parse_args()
    started = time.monotonic()
    families = options.families or sorted(MODULES)
    mutants = [m for family in families for m in mutants_of(family)]
    if options.sample:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    rules = [r for r in rules_with_cases() if r.family in families or not options.own]
    score = try_all(mutants, rules, options.seed)
    print(f"{score} ({time.monotonic() - started:.0f} s)")
    sys.exit(bool(score.left))


if __name__ == "__main__":
    main()
