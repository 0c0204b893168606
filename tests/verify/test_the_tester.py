"""The rule kit must catch wrong rules: each of these is wrong on purpose, and is caught for the reason beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from gradgraph.extend import case, check, integers, point, positive, real, vjp
from gradgraph.rules.registry import NO_GRADIENT, RULES, Case, Point
from gradgraph.verify.kit import WAYS, problems

Rule = Callable[..., Any]


@pytest.fixture(autouse=True)
def restored_rules() -> Iterator[None]:
    rules, stops = dict(RULES), dict(NO_GRADIENT)
    yield
    RULES.clear()
    RULES.update(rules)
    NO_GRADIENT.clear()
    NO_GRADIENT.update(stops)


# --- wrong formulas ----------------------------------------------------------------------------------


def a_thousandth_too_much(op: Any, dy: Any, y: Any, x: Any) -> Any:
    return (dy * y * 1.001,)


def forgotten(op: Any, dy: Any, y: Any, x: Any) -> Any:
    return (None,)


def of_wrong_shape(op: Any, dy: Any, y: Any, x: Any) -> Any:
    return (op.ReduceSum(dy * y, [0], keepdims=1),)


def of_wrong_type(op: Any, dy: Any, y: Any, x: Any) -> Any:
    other = ir.DataType.FLOAT if x.dtype != ir.DataType.FLOAT else ir.DataType.DOUBLE
    return (op.Cast(dy * y, to=int(other)),)


def with_a_size_fixed_at_build_time(op: Any, dy: Any, y: Any, x: Any) -> Any:
    size = [d if isinstance(d, int) else 1 for d in x.shape]
    return (op.Reshape(dy * y, size),)


def that_takes_open_sizes_for_1(op: Any, dy: Any, y: Any, x: Any) -> Any:
    sizes = [d if isinstance(d, int) else 1 for d in x.shape]
    return (dy * y if max(sizes) == 1 else op.Reshape(dy * y, sizes),)


def without_broadcasting(op: Any, dz: Any, z: Any, x: Any, y: Any) -> Any:
    return dz * y, dz * x


def not_transposed(op: Any, dz: Any, z: Any, x: Any, y: Any) -> Any:
    return dz @ y, x @ dz


def one_output_only(op: Any, dys: Any, ys: Any, x: Any, *_: Any, axis: int, **__: Any) -> Any:
    dy = op.zeros_like(x) if dys[0] is None else op.Concat(dys[0], op.zeros_like(ys[1]), axis=axis)
    return (dy,)


def that_overwrites_repeated_indices(op: Any, dy: Any, y: Any, x: Any, i: Any, *, axis: int) -> Any:
    return (op.ScatterElements(op.zeros_like(x), i, dy, axis=axis),)


def with_baked_in_axes(op: Any, dy: Any, y: Any, x: Any, axes: Any = None, *, keepdims: int, **_: Any) -> Any:
    known = [0] if axes is None or axes.const is None else axes.const
    return (op.Expand(dy if keepdims else op.Unsqueeze(dy, known), op.shape(x)),)


def with_nan_at_zero(op: Any, dy: Any, y: Any, x: Any) -> Any:
    return (dy * x / op.Abs(x),)


def raising(op: Any, dy: Any, y: Any, x: Any) -> Any:
    raise ZeroDivisionError("by accident")


WRONG: list[tuple[Rule, str, list[Case | Point], str]] = [
    (a_thousandth_too_much, "Exp", [case(real(2, 3))], "case 0, first order: along a random direction of x0"),
    (forgotten, "Exp", [case(real(2, 3))], "case 0, first order: .* the gradient is 0, "),
    (of_wrong_shape, "Exp", [case(real(2, 3))], r"case 0, first order: .*'x0' has shape \(1, 3\); expected"),
    (of_wrong_type, "Exp", [case(real(2, 3))], "a gradient must have its input's type and shape"),
    (with_a_size_fixed_at_build_time, "Exp", [case(real(2, 3))], "case 0, shapes unknown: "),
    (that_takes_open_sizes_for_1, "Exp", [case(real(2, 3))], "case 0, some sizes open: "),
    (without_broadcasting, "Mul", [case(real(2, 3), real(2, 3)), case(real(2, 3), real(3))], "case 1, first"),
    (not_transposed, "MatMul", [case(real(3, 3), real(3, 3))], "case 0, first order: along"),
    (one_output_only, "Split", [case(real(4), outputs=2, num_outputs=2, axis=0)], "case 0, first order: along"),
    (that_overwrites_repeated_indices, "GatherElements", [case(real(3), [1, 1])], "case 0, first order: along"),
    (with_baked_in_axes, "ReduceSum", [case(real(2, 3), [1], keepdims=0)], "literals fed: "),
    (with_nan_at_zero, "Abs", [case(real(3)), point([0.0], gives=[[0.0]])], r"point 0: input 0: \[nan\]; expected"),
    (raising, "Exp", [case(real(2))], "case 0, first order: ZeroDivisionError: by accident"),
]


@pytest.mark.parametrize(("rule", "op_type", "trials", "reason"), WRONG, ids=[f"{r[1]}-{r[0].__name__}" for r in WRONG])
def test_a_wrong_rule_is_caught(rule: Rule, op_type: str, trials: Any, reason: str) -> None:
    vjp(op_type, *trials)(rule)
    with pytest.raises(AssertionError, match=reason):
        check(op_type)


def test_a_rule_right_at_first_order_only_is_caught_at_second() -> None:
    @vjp("Cos", case(real(2, 3)))
    def cos(op: Any, dy: Any, y: Any, x: Any) -> Any:  # the sign is missing
        return (dy * op.Sin(x),)

    @vjp("Sin", case(real(2, 3)))
    def sin(op: Any, dy: Any, y: Any, x: Any) -> Any:
        return (dy * op.Cos(x),)

    found = problems(RULES["", "Sin"])
    assert found
    assert all(p.startswith("Sin, case 0, second order: along") for p in found)


def test_a_gradient_that_is_cut_off_is_caught_at_second_order() -> None:
    @vjp("Exp", case(real(2, 3)))
    def exp(op: Any, dy: Any, y: Any, x: Any) -> Any:  # right, but through integers, where gradients stop
        digits = op.Cast(op.Round(y * 1e12), to=int(ir.DataType.INT64))
        return (dy * op.cast(digits, x.dtype) * 1e-12,)

    found = problems(RULES["", "Exp"])
    assert any("second order" in p for p in found)
    assert not any("first order" in p or "shapes unknown" in p for p in found)


def test_a_rule_wrong_in_single_precision_only_is_caught_in_onnxruntime() -> None:
    @vjp("Exp", case(positive(2, 3)))
    def exp(op: Any, dy: Any, y: Any, x: Any) -> Any:  # the sum keeps enough of y in float64 only
        return (dy * ((y + 65536.0) - 65536.0),)

    found = problems(RULES["", "Exp"])
    assert found
    assert all("case 0, onnxruntime" in p for p in found)


@pytest.mark.parametrize(
    ("reason", "skipped"),
    [
        ("first_order_only", {"second order"}),
        ("known_shapes", {"shapes unknown", "some sizes open", "literals fed"}),
        ("constant_literals", {"literals fed"}),
        ("onnxruntime", {"onnxruntime"}),
    ],
)
def test_a_way_is_skipped_by_its_reason_only(reason: str, skipped: set[str]) -> None:
    trial = case(real(2), **{reason: "a test"})
    assert {name for name, way in WAYS.items() if way.reason_to_skip(trial)} == skipped


@pytest.mark.parametrize("op_type", ["Exp", "Mul", "MatMul", "GatherElements"])
def test_right_rules_pass(op_type: str) -> None:
    check(op_type)


def test_integers_are_not_differentiated() -> None:
    @vjp("Gather", case(real(3), integers(0, 3, 2)))
    def gather(op: Any, dy: Any, y: Any, x: Any, i: Any, *, axis: int) -> Any:
        return op.ScatterElements(op.zeros_like(x), i, dy, axis=axis, reduction="add"), np.nan

    check("Gather")
