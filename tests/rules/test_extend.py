"""Rules of users' own through the one door: operators of other domains, replaced rules, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference.op_run import OpRun

import gradgraph as gg
from gradgraph import extend
from gradgraph.errors import ModelError, UnknownNameError, UnsupportedOperatorError
from gradgraph.extend import case, check, integers, operator, point, positive, real, vjp
from gradgraph.rules.registry import NO_GRADIENT, RULES
from gradgraph.verify.kit import problems
from gradgraph.verify.reference import Oracle
from tests.kit.running import run

DOMAIN = "test.extend"


class Snake(OpRun):
    """x + sin²(αx)/α."""

    op_domain = DOMAIN

    def _run(self, x: np.ndarray, alpha: float = 1.0) -> tuple[np.ndarray]:
        return (x + np.sin(alpha * x) ** 2 / alpha,)


class Weigh(OpRun):
    """Rows of x chosen and scaled, and their sum; the scale is optional."""

    op_domain = DOMAIN

    def _run(self, x: np.ndarray, i: np.ndarray, w: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        y = x[i] * (1.0 if w is None else w)
        return y, y.sum(axis=0)


class Total(OpRun):
    """The sum of any number of tensors, each times its factor; without factors their plain sum."""

    op_domain = DOMAIN

    def _run(self, *xs: np.ndarray, factors: list[float] | None = None, sign: int = 1) -> tuple[np.ndarray]:
        return (sign * sum(f * x for f, x in zip(factors or [1.0] * len(xs), xs, strict=True)),)


class Alone(OpRun):
    op_domain = DOMAIN

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (2.0 * x,)


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    """Whatever a test registers is gone after it."""
    rules, stops = dict(RULES), dict(NO_GRADIENT)
    operator("Snake", DOMAIN, inputs=["T"], outputs=["T"], attributes={"alpha": 1.0}, shape=same, reference=Snake)
    operator(
        "Weigh",
        DOMAIN,
        inputs=["T", "tensor(int64)", "T?"],
        outputs=["T", "T"],
        shape=lambda x, i, w=None: [(i[0], x[1]), (x[1],)],
        reference=Weigh,
    )
    operator(
        "Total",
        DOMAIN,
        inputs=["T*"],
        outputs=["T"],
        attributes={"factors": list[float], "sign": 1},
        shape=lambda *xs, **_: [xs[0]],
        reference=Total,
    )
    operator("Alone", DOMAIN, inputs=["T"], outputs=["T"], shape=same, reference=Alone)
    yield
    RULES.clear()
    RULES.update(rules)
    NO_GRADIENT.clear()
    NO_GRADIENT.update(stops)


def same(x: Any, **_: Any) -> list[Any]:
    return [x]


def register_snake() -> None:
    @vjp("Snake", case(real(2, 3)), case(real(4), alpha=2.0), point([0.0], gives=[[1.0]]), domain=DOMAIN)
    def snake(op: Any, dy: Any, y: Any, x: Any, *, alpha: float) -> Any:
        return (dy * (1.0 + op.Sin(x * (2.0 * alpha))),)


def register_weigh() -> None:
    @vjp(
        "Weigh",
        case(real(4, 3), integers(0, 4, 2), positive(3), outputs=2),
        case(real(4, 3), [1, 1], outputs=2, read=[0]),
        domain=DOMAIN,
    )
    def weigh(op: Any, dys: Any, ys: Any, x: Any, i: Any, w: Any = None) -> Any:
        dy, total = dys
        both = [d for d in (dy, None if total is None else op.Expand(total, op.shape(ys[0]))) if d is not None]
        dy = op.sum_of(both)
        rows = dy if w is None else dy * w
        dx = op.ScatterND(op.zeros_like(x), op.Unsqueeze(i, [-1]), rows, reduction="add")
        dw = None if w is None else op.ReduceSum(dy * op.Gather(x, i), [0], keepdims=0)
        return dx, None, dw


def register_total() -> None:
    @vjp("Total", case(real(2), real(2), real(2)), case(real(3), factors=[2.0], sign=-1), domain=DOMAIN)
    def total(op: Any, dy: Any, y: Any, *xs: Any, sign: int, factors: Any = None) -> Any:
        return [dy * (sign * f) for f in factors or [1.0] * len(xs)]


def model(op_type: str, then: str = "Neg") -> onnx.ModelProto:
    """The model then(op(x)), with the operator in the middle, so that its output's type must be inferred."""
    nodes = [
        onnx.helper.make_node(op_type, ["x"], ["h"], domain=DOMAIN, name="mine"),
        onnx.helper.make_node(then, ["h"], ["y"]),
    ]
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N"]) for n in "xy")
    graph = onnx.helper.make_graph(nodes, "g", [x], [y])
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(
    ("op_type", "register"), [("Snake", register_snake), ("Weigh", register_weigh), ("Total", register_total)]
)
def test_a_rule_of_another_domain_passes_the_kit(op_type: str, register: Any) -> None:
    register()
    check(op_type, DOMAIN)


def test_a_model_with_an_operator_of_another_domain_is_differentiated() -> None:
    register_snake()
    gradient = Oracle(gg.vjp(model("Snake"), wrt=["x"]))
    x = np.array([0.5, -1.0], np.float32)
    got = gradient({"x": x, "y.cotangent": np.ones_like(x)})
    np.testing.assert_allclose(got["x.grad"], -(1 + np.sin(2 * x)), rtol=1e-6)


def test_a_rule_may_emit_operators_of_its_own_domain() -> None:
    @vjp("Alone", case(real(3)), domain=DOMAIN)
    def alone(op: Any, dy: Any, y: Any, x: Any) -> Any:
        return (op.emit("Alone", dy, domain=DOMAIN),)

    check("Alone", DOMAIN)


def test_a_rule_may_emit_operators_of_a_domain_that_the_model_does_not_import() -> None:
    @vjp("Neg", case(real(3)))
    def neg(op: Any, dy: Any, y: Any, x: Any) -> Any:
        return (op.emit("Alone", dy, domain=DOMAIN) * -0.5,)

    vjp("Alone", case(real(3)), domain=DOMAIN)(lambda op, dy, y, x: (dy * 2.0,))
    assert [p for p in problems(RULES["", "Neg"]) if "onnxruntime" not in p] == []


def test_a_rule_of_ones_own_replaces_the_one_that_is_there() -> None:
    @vjp("Neg", case(real(2)))
    def neg(op: Any, dy: Any, y: Any, x: Any) -> Any:
        return (dy * 7.0,)

    m = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Neg", ["x"], ["y"])],
            "g",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 21)],
        ir_version=10,
    )
    got = run(gg.value_and_grad(m, wrt=["x"]), {"x": np.ones(1, np.float32)})
    assert got["x.grad"] == 7.0
    with pytest.raises(AssertionError, match="Neg, case 0, first order"):
        check("Neg")


def test_no_gradient_stops_at_an_operator_of_another_domain() -> None:
    extend.no_gradient("a test", "Alone", domain=DOMAIN)
    with pytest.raises(gg.errors.DifferentiationError, match=r"Alone.*a test"):
        gg.vjp(model("Alone"), wrt=["x"])


def test_without_a_rule_the_error_says_how_to_register_one() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"Snake.*'mine'.*extend\.vjp"):
        gg.vjp(model("Snake"), wrt=["x"])


def test_check_wants_a_rule() -> None:
    with pytest.raises(UnknownNameError, match=r"'Snake' in domain 'test\.extend'"):
        check("Snake", DOMAIN)


def test_check_wants_cases() -> None:
    vjp("Snake", domain=DOMAIN)(lambda op, dy, y, x, **_: (dy,))
    with pytest.raises(AssertionError, match="no cases"):
        check("Snake", DOMAIN)


@pytest.mark.parametrize(
    ("op_type", "domain", "message"),
    [
        ("Snake", "", "ONNX's own domain"),
        ("Other", DOMAIN, "does not match the operator"),
        ("Snake", "else", "does not match the operator"),
    ],
)
def test_declarations_that_cannot_be(op_type: str, domain: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        operator(op_type, domain, inputs=["T"], outputs=["T"], reference=Snake)


def test_a_shape_rule_that_fails_is_named() -> None:
    operator("Snake", DOMAIN, inputs=["T"], outputs=["T"], shape=lambda: [()])
    register_snake()
    with pytest.raises(ModelError, match="the shape rule of operator 'Snake' failed"):
        gg.vjp(model("Snake"), wrt=["x"])


def test_the_guide_runs() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "adding-a-rule.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "adding-a-rule.md", "exec"), {"__name__": "guide"})
    assert ("my.ops", "Snake") in RULES
