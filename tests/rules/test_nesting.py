"""Bodies in bodies, functions in functions, transforms of transforms: names stay short, and work does not multiply."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph.graph.scoped_names import LONGEST, scoped
from tests.kit.running import run
from tests.kit.small_models import every_node

DEEPEST = 30  # protobuf reads up to 32

# one level: what it computes before the level inside, from {x}; the level inside gives {inner}
BODIES = {
    "then": """{v} = Sin({x})
        {y} = If (c) < then_branch = t () => (float[2] {t}) {{ {inner} {t} = Neg({z}) }},
                       else_branch = e () => (float[2] {e}) {{ {e} = Mul({v}, w) }} >""",
    "else": """{v} = Sin({x})
        {y} = If (d) < then_branch = t () => (float[2] {e}) {{ {e} = Mul({v}, w) }},
                       else_branch = e () => (float[2] {t}) {{ {inner} {t} = Tanh({z}) }} >""",
    "loop": """{y} = Loop < body = b (int64 {i}, bool {g}, float[2] {v}) => (bool {h}, float[2] {t}) {{
                   {h} = Identity({g}) {inner} {t} = Tanh({z}) }} > (n, , {x})""",
    "growing loop": """{y} = Loop < body = b (int64 {i}, bool {g}, float[k] {v}) => (bool {h}, float[m] {t}) {{
                   {h} = Identity({g}) {inner} {e} = Tanh({z}) {t} = Concat <axis = 0> ({e}, w) }} > (n, , {x})""",
    "scan": """{y} = Scan <num_scan_inputs = 1, body = b (float[2] {v}, float {k}) => (float[2] {t}) {{
                   {inner} {e} = Add({z}, {k}) {t} = Tanh({e}) }} > ({x}, s)""",
}


def nested(kind: str, depth: int) -> onnx.ModelProto:
    text, z = "a = Mul(level0_v, w)", "a"
    for level in range(depth):
        names = {key: f"level{level}_{key}" for key in "vytegihk"}
        x = f"level{level + 1}_v" if level + 1 < depth else "x"
        text, z = BODIES[kind].format(x=x, inner=text, z=z, **names), names["y"]
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[2] x, bool c, int64 n, float[1] s) => (float loss)
        <float[2] w = {{0.5, 2}}> {{ d = Not(c) {text} loss = ReduceSum <keepdims = 0> ({z}) }}"""
    )


def longest(model: onnx.ModelProto) -> int:
    return max(len(name) for node in every_node(model.graph) for name in (node.name, *node.output))


def count(model: onnx.ModelProto) -> int:
    return sum(1 for _ in every_node(model.graph))


FEEDS = {
    "x": np.array([0.3, 0.2], np.float32),
    "c": np.array(True),
    "n": np.array(1),
    "s": np.array([0.1], np.float32),
}


@pytest.mark.sweep(0.26)
@pytest.mark.parametrize(("kind", "depth"), [(kind, DEEPEST if kind == "then" else 15) for kind in BODIES])
def test_deep_bodies_have_gradients(kind: str, depth: int) -> None:
    """Names and proofs of shapes doubled with each level: 12 levels took 336 kB, 30 never ended."""
    model = nested(kind, depth)
    backward, forward = gg.vjp(model, wrt=["x"]), gg.jvp(model, wrt=["x"])
    assert longest(backward) < LONGEST + 8 and longest(forward) < LONGEST + 8
    direction = np.array([1, -2], np.float32)
    needed = {i.name for i in model.graph.input} & {i.name for i in backward.graph.input}
    feeds = {k: v for k, v in FEEDS.items() if k in needed}
    pulled = run(backward, feeds | {"loss.cotangent": np.array(1, np.float32)})["x.grad"]
    pushed = run(forward, feeds | {"x.tangent": direction})["loss.tangent"]
    np.testing.assert_allclose(pulled @ direction, pushed, rtol=1e-4)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("transform", [gg.value_and_grad, gg.jvp, gg.hvp])
def test_work_does_not_multiply_with_levels(kind: str, transform: Any) -> None:
    """Forward passes of inner levels are computed again in each level's gradient: quadratic, as checkpoints are."""
    few, many = (count(transform(nested(kind, n), wrt=["x"])) for n in (3, 9))
    assert many < 9 * few


@pytest.mark.sweep(0)
def test_where_nothing_is_computed_again_files_grow_with_depth() -> None:
    def size(depth: int) -> int:
        return gg.value_and_grad(nested("then", depth), wrt=["x"]).ByteSize()

    assert size(DEEPEST) - size(25) < 1.1 * (size(25) - size(20))


def test_repeated_transforms_keep_names_short() -> None:
    model, output = nested("then", 2), "loss"
    for order in range(3):
        model = gg.value_and_grad(model, output=output, wrt=["x"])
        output = f"loss{order}"
        model.graph.node.append(helper.make_node("ReduceSum", [model.graph.output[-1].name], [output], keepdims=0))
        model.graph.output.insert(0, helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
    assert longest(model) < LONGEST + 8


def test_second_derivatives_of_growing_states_end() -> None:
    """Sizes that ONNX names anew each time (unk__0) are no news about the sequences that a gradient remembers in."""
    m = nested("growing loop", 1)
    second = gg.vjp(gg.vjp(m, wrt=["x"]), wrt=["x"])
    assert "x.grad_1" in {o.name for o in second.graph.output}


def test_functions_in_functions_keep_names_short() -> None:
    calls = "".join(
        f'<domain: "f", opset_import: ["": 21, "f": 1]> block_{i} (a) => (b) {{ t = Tanh(a) b = f.block_{i + 1}(t) }}'
        for i in range(200)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "f": 1]> g (float[2] x) => (float[2] y) {{ y = f.block_0(x) }}
        {calls} <domain: "f", opset_import: ["": 21]> block_200 (a) => (b) {{ b = Sin(a) }}"""
    )
    gradient = gg.vjp(model)
    assert longest(gradient) < LONGEST + 8
    assert [o.name for o in gradient.graph.output] == ["y", "x.grad"]


def test_names_that_users_gave_stay_however_long_they_are() -> None:
    name = "a" * 500
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[2] {name}) => (float[2] y) {{ y = Sin({name}) }}'
    )
    found = gg.vjp(model)
    assert {i.name for i in found.graph.input} == {name, "y.cotangent"}
    assert found.graph.output[-1].name == f"{name}.grad"


@pytest.mark.parametrize(
    ("scope", "name", "expected"),
    [
        ("", "Mul", "Mul"),
        ("grad", "conv", "grad/conv"),
        ("grad", "grad/conv", "grad/conv"),
        ("grad//block/conv", "Mul", "grad//block/conv/Mul"),
        ("grad/outer", "grad/outer/inner", "grad/outer/inner"),
        ("grad/outer/if", "grad/outer/inner", "grad/outer/if/inner"),
        ("grad/outer", "outer", "grad/outer/outer"),
        ("grad", "grad", "grad/grad"),
    ],
)
def test_scopes_are_said_once(scope: str, name: str, expected: str) -> None:
    assert scoped(scope, name) == expected


def test_scopes_in_the_middle_are_left_out() -> None:
    name = scoped("grad/" + "/".join(f"layer{i}" for i in range(100)), "Mul")
    assert len(name) <= LONGEST
    assert name.startswith("grad/../layer") and name.endswith("/layer98/layer99/Mul")
    assert len(scoped("x" * 10**6, "y" * 10**6)) <= LONGEST
