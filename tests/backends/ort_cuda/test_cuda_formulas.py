"""Functions that CUDA has no kernel for, digit by digit: as right as float32 and float64 can be, also far out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph.rules.families  # noqa: F401 (fills the tables)
from gradgraph.backends.engine import lower
from gradgraph.backends.ort_cuda import ORT_CUDA
from gradgraph.backends.ort_cuda.cuda_kernels import without_kernel
from gradgraph.files.models import to_proto
from tests.kit.running import run

WIDE = np.concatenate([[0.0], np.logspace(-30, 30, 601)])
UNIT = np.concatenate([[0.0], np.logspace(-30, -1, 60), np.linspace(0.1, 1, 400), 1 - np.logspace(-7, -1, 40)])
INF, NAN = np.inf, np.nan

FUNCTIONS: dict[str, tuple[Callable[..., np.ndarray], np.ndarray, dict[float, float]]] = {
    "Tan": (np.tan, np.linspace(0, 1.5, 400), {INF: NAN}),
    "Atan": (np.arctan, WIDE, {INF: np.pi / 2}),
    "Asin": (np.arcsin, UNIT, {1.0: np.pi / 2, 1.1: NAN, INF: NAN}),
    "Acos": (np.arccos, UNIT, {1.0: 0.0, -1.0: np.pi, 1.1: NAN, -1.1: NAN, INF: NAN}),
    "Sinh": (np.sinh, np.concatenate([np.logspace(-30, 1, 300), np.linspace(10, 88, 100)]), {INF: INF, 0.0: 0.0}),
    "Cosh": (np.cosh, np.concatenate([np.logspace(-30, 1, 300), np.linspace(10, 88, 100)]), {INF: INF, 0.0: 1.0}),
    "Asinh": (np.arcsinh, WIDE, {INF: INF}),
    "Acosh": (
        np.arccosh,
        1 + np.concatenate([[0.0], np.logspace(-7, 30, 400)]),
        {INF: INF, 0.5: NAN, -1.0: NAN, -2.0: NAN},
    ),
    "Atanh": (np.arctanh, UNIT[UNIT < 1], {1.0: INF, 1.1: NAN, INF: NAN}),
}
ONE_SIDED = ("Acosh",)


def lowered(operator: str, dtype: str) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : 21]> m ({dtype}[n] x) => ({dtype}[n] y) {{ y = {operator}(x) }}'
    return lower(ir.from_proto(onnx.parser.parse_model(text)), ORT_CUDA)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_digits(operator: str, dtype: type[np.floating]) -> None:
    function, points, special = FUNCTIONS[operator]
    model = lowered(operator, "float" if dtype is np.float32 else "double")
    assert without_kernel(model) == []
    x = points if operator in ONE_SIDED else np.concatenate([points, -points])
    x = x.astype(dtype)
    (found,) = run(to_proto(model), {"x": x}).values()
    with np.errstate(all="ignore"):
        expected = function(x.astype(np.longdouble))
    off = np.abs(found - expected) / np.maximum(np.abs(expected), np.finfo(dtype).tiny)
    worst = int(np.argmax(off))
    assert off[worst] < 6 * np.finfo(dtype).eps, (x[worst], found[worst], expected[worst])
    (found,) = run(to_proto(model), {"x": np.array([*special, NAN], dtype)}).values()
    np.testing.assert_allclose(found, [*special.values(), NAN], rtol=1e-6)


def test_half_precision_does_not_overflow() -> None:
    x = np.array([3.0, 199.0, 300.0, 60000.0], np.float16)
    for operator, function in (("Asinh", np.arcsinh), ("Acosh", np.arccosh)):
        (found,) = run(to_proto(lowered(operator, "float16")), {"x": x}).values()
        np.testing.assert_allclose(found, function(x.astype(np.float64)), rtol=2e-3)
