"""Inputs that share the name of a size: fed one size they are right, and fed two the model does not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg
from tests.kit.running import run

MODELS = {
    "sum": "(float[N,3] x, float[N,3] z) => (float[N,3] y) { y = Add(x, z) }",
    "second axis": "(float[2,N] x, float[2,N] z) => (float[2,N] y) { y = Mul(x, z) }",
    "of three": "(float[N] x, float[M,N] z, float[M,1] w) => (float[M,N] y) { p = Mul(x, z) y = Add(p, w) }",
    "mean": "(float[N,3] x, float[N,3] z) => (float y) { p = Mul(x, z) y = ReduceMean<keepdims=0>(p) }",
}
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vjp": gg.vjp, "jvp": gg.jvp, "jacobian": gg.jacobian, "value_and_grad": gg.value_and_grad, "hvp": gg.hvp,
    "hessian": gg.hessian,
}  # fmt: skip
SIZES = {"N": 4, "M": 2}


def fed(model: onnx.ModelProto, other: str = "") -> dict[str, np.ndarray]:
    """Numbers for all inputs, open sizes as in ``SIZES``; 1 in the input ``other``."""
    sizes = {
        v.name: [d.dim_value or SIZES[d.dim_param] for d in v.type.tensor_type.shape.dim] for v in model.graph.input
    }
    if other:
        (value,) = (v for v in model.graph.input if v.name == other)
        sizes[other] = [d.dim_value or 1 for d in value.type.tensor_type.shape.dim]
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.normal(size=size), np.float32) for name, size in sizes.items()}


@pytest.mark.parametrize("backend", ["portable", "ort-cpu"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", MODELS)
def test_two_sizes_under_one_name_do_not_run(name: str, transform: str, backend: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {MODELS[name]}')
    if name != "mean" and transform in ("value_and_grad", "hvp", "hessian"):
        pytest.skip("no scalar")
    made = TRANSFORMS[transform](model, wrt=["x", "z"], backend=backend)
    onnx.checker.check_model(made, full_check=True)
    right = run(made, fed(made))
    for result in made.graph.output:
        if result.name.startswith(("x.", "z.")) and result.name.endswith((".grad", ".hvp")):
            assert right[result.name].shape == fed(made)[result.name[0]].shape
    for other in (v.name for v in made.graph.input if v.type.tensor_type.shape.dim and v.name != "w"):
        with pytest.raises(Exception, match="is_as_long_as"):
            run(made, fed(made, other))


def test_a_model_of_one_input_compares_nothing() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N,3] x) => (float[N,3] y) { y = Exp(x) }'
    )
    assert not [n.name for n in gg.vjp(model).graph.node if "is_as_long_as" in n.name]
