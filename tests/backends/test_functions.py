"""Named operators in a saved step: one node each, a function with a standard body behind it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import for_machine
from gradgraph.backends.functions import write_functions, write_inline
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_cuda import ORT_CUDA
from gradgraph.backends.portable import PORTABLE
from gradgraph.files.models import to_proto
from gradgraph.graph.scoped_names import operator_name
from gradgraph.rules.named_operators import DOMAIN, OPERATORS
from gradgraph.rules.registry import Case
from tests.kit.convolutions import convolutions, feeds
from tests.kit.form_kit import differences, one_call, portable
from tests.kit.running import run

SIZES = {"batch": 3}


def step(batch: int | str = 3) -> gg.Step:
    return gg.build(convolutions(batch), "mse", gg.optim.sgd(0.1))


@pytest.mark.parametrize("batch", [3, "batch"])
def test_one_node_each_and_one_function_for_equal_bodies(batch: int | str) -> None:
    train = step(batch).train
    calls = [n.op_type for n in train.graph.node if n.domain == DOMAIN]
    assert Counter(calls) == {"ConvGradInput": 2, "ConvGradWeight": 1, "ConvGradWeight_2": 2}
    assert sorted(f.name for f in train.functions) == sorted(set(calls))
    assert not any(f.overload for f in train.functions)
    assert {n.domain for f in train.functions for n in f.node} == {""}
    onnx.checker.check_model(train, full_check=True)


def test_a_name_alone_says_which_function_is_called() -> None:
    """For runtimes that ignore overloads; onnx's ReferenceEvaluator is one."""
    train = step().train
    given = feeds(train)
    expected = run(train, given)
    found = dict(zip(expected, ReferenceEvaluator(train).run(list(expected), given), strict=True))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def named_by_overload(train: onnx.ModelProto) -> onnx.ModelProto:
    """As steps were saved before: functions of one name, told apart by their overload."""
    old = onnx.ModelProto.FromString(train.SerializeToString())
    for call in (n for n in old.graph.node if n.domain == DOMAIN):
        call.op_type, call.overload = older(call.op_type)
    for function in old.functions:
        function.name, function.overload = older(function.name)
    return old


def older(name: str) -> tuple[str, str]:
    operator = operator_name(name)
    return operator, name.removeprefix(operator).removeprefix("_") or "1"


@pytest.mark.parametrize("backend", [PORTABLE, ORT_CPU])
def test_steps_whose_functions_are_told_apart_by_overload_still_open(backend: Backend) -> None:
    train = step().train
    old = named_by_overload(train)
    assert {f.overload for f in old.functions} == {"1", "2"}
    given, known = feeds(train), for_machine(train, backend, SIZES)
    found = for_machine(old, backend, SIZES)
    assert [n.op_type for n in found.graph.node] == [n.op_type for n in known.graph.node]
    for a, b in zip(run(known, given).values(), run(found, given).values(), strict=True):
        np.testing.assert_array_equal(b, a)
    assert "x.grad" in {v.name for v in gg.value_and_grad(old, output="loss", wrt=["x"]).graph.output}


def test_the_summary_counts_operators_not_functions() -> None:
    assert "ConvGradWeight 3" in step().summary()


@pytest.mark.sweep(0)
def test_whoever_only_lowers_knows_every_operator() -> None:
    """A Trainer that opens a folder imports neither the pipeline nor the optimizers."""
    code = "import gradgraph.backends.engine, gradgraph.rules.named_operators as n; print(*n.OPERATORS)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == set(OPERATORS)


CASES = [
    pytest.param(o.name, case, unknown, id=f"{o.name}-{i}-{'unknown' if unknown else 'known'}")
    for o in OPERATORS.values()
    for i, case in enumerate(o.cases)
    for unknown in (False, True)
]


@pytest.mark.parametrize(("name", "case", "unknown"), CASES)
def test_a_call_gives_what_its_body_gives_in_place(name: str, case: Case, unknown: bool) -> None:
    model, given = one_call(DOMAIN, name, case, unknown)
    called = to_proto(write_functions(model.clone()))
    onnx.checker.check_model(called, full_check=True)
    assert [n.op_type for n in called.graph.node] == [name]
    assert differences(portable(model), called, given) == []


@pytest.mark.parametrize("batch", [3, "batch"])
@pytest.mark.parametrize("backend", [PORTABLE, ORT_CPU, ORT_CUDA])
def test_lowered_steps_give_the_same_numbers(batch: int | str, backend: Backend) -> None:
    train = step(batch).train
    lowered = for_machine(train, backend, SIZES)
    assert not lowered.functions and DOMAIN not in {n.domain for n in lowered.graph.node}
    if backend == ORT_CUDA:
        return  # the numbers need such a device
    given = feeds(train)
    for a, b in zip(run(train, given).values(), run(lowered, given).values(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


def test_known_sizes_leave_no_shape_arithmetic() -> None:
    """With batch and image size known every index is a constant."""
    moving = {"Shape", "Range", "ReduceProd"}
    train = gg.build(convolutions("batch", "size"), "mse", gg.optim.sgd(0.1)).train
    dynamic = for_machine(train, PORTABLE)
    assert moving & {n.op_type for n in dynamic.graph.node}
    static = for_machine(train, PORTABLE, {"batch": 3, "size": 6})
    assert not moving & {n.op_type for n in static.graph.node}
    assert static.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 3


def test_inlined_steps_hold_standard_nodes_only() -> None:
    train = step().train
    inlined = ir.to_proto(write_inline(ir.from_proto(train)))
    assert {n.domain for n in inlined.graph.node} == {""} and not inlined.functions
    given = feeds(train)
    for a, b in zip(run(train, given).values(), run(inlined, given).values(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_a_step_is_itself_differentiable() -> None:
    """Its functions are inlined like anybody's."""
    train = step().train
    second = gg.value_and_grad(train, output="loss", wrt=["x"])
    assert "x.grad" in {v.name for v in second.graph.output}
