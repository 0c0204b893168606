"""The example for solvers: a dynamics model and its Jacobian in C, as CasADi and acados call them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

from examples.solvers import __main__ as example
from tests.kit.compiled_c import NEEDS_COMPILER, compiler
from tests.kit.running import run

pytestmark = NEEDS_COMPILER
CASADI = Path(__file__).parents[3] / ".venv-runtimes" / "casadi" / "bin" / "python"
RNG = np.random.default_rng(0)
X, U = RNG.normal(size=example.STATES), RNG.normal(size=example.CONTROLS)
Expected = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """The folder of the exported code, and the results of onnxruntime at X, U."""
    folder = tmp_path_factory.mktemp("solvers")
    jacobian: onnx.ModelProto = example.write_c(example.dynamics_model(), folder)
    return folder, run(jacobian, {"x": X.astype(np.float32), "u": U.astype(np.float32)})


@pytest.fixture(scope="module")
def library(written: tuple[Path, Expected]) -> Path:
    return example.compiled(written[0], "casadi_dynamics.c", "libdynamics.so", "-shared", "-fPIC", "-Wall", "-Werror")


def pointers(*arrays: np.ndarray | None) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(None if a is None else a.ctypes.data for a in arrays))


def test_the_external_function_of_casadi_is_by_column(library: Path, written: tuple[Path, Expected]) -> None:
    expected = written[1]
    functions = ctypes.CDLL(str(library))
    y = np.zeros(example.STATES)
    assert functions.dynamics(pointers(X, U), pointers(y), None, None, 0) == 0
    np.testing.assert_allclose(y, expected["next"], atol=1e-6)
    dx = np.zeros((example.STATES, example.STATES), order="F")
    du = np.zeros((example.STATES, example.CONTROLS), order="F")
    assert functions.jac_dynamics(pointers(X, U, y), pointers(dx, du), None, None, 0) == 0
    np.testing.assert_allclose(dx, expected["x.jacobian"], atol=1e-6)
    np.testing.assert_allclose(du, expected["u.jacobian"], atol=1e-6)
    only = np.zeros_like(du)
    assert functions.jac_dynamics(pointers(X, U, None), pointers(None, only), None, None, 0) == 0
    np.testing.assert_array_equal(only, du)
    assert functions.dynamics(pointers(None, U), pointers(None), None, None, 0) == 0  # NULL: zeros; not wanted


@pytest.mark.skipif(not CASADI.exists(), reason="CasADi is not installed: make runtimes")
def test_casadi_differentiates_and_optimizes_with_it(
    library: Path, written: tuple[Path, Expected], tmp_path: Path
) -> None:
    script = f"""
import sys, numpy as np, casadi
f = casadi.external("dynamics", {str(library)!r})
x, u = casadi.MX.sym("x", {example.STATES}), casadi.MX.sym("u", {example.CONTROLS})
j = casadi.Function("j", [x, u], [f(x, u), casadi.jacobian(f(x, u), x), casadi.jacobian(f(x, u), u)])
np.savez({str(tmp_path / "found.npz")!r}, *map(np.array, j(np.array({X.tolist()}), np.array({U.tolist()}))))
"""
    subprocess.run([CASADI, "-c", script], check=True)
    found = np.load(tmp_path / "found.npz")
    expected = written[1]
    for i, name in enumerate(("next", "x.jacobian", "u.jacobian")):
        np.testing.assert_allclose(found[f"arr_{i}"].squeeze(), expected[name], atol=1e-6, err_msg=name)


STUBS = {
    "acados/utils/external_function_generic.h": """
struct blasfeo_dmat { int m; double *values; };
struct blasfeo_dvec { double *values; };
struct blasfeo_dmat_args { struct blasfeo_dmat *A; int ai, aj; };
struct blasfeo_dvec_args { struct blasfeo_dvec *x; int xi; };
""",
    "blasfeo_d_aux.h": """
static void blasfeo_unpack_dvec(int m, struct blasfeo_dvec *x, int xi, double *y, int step) {
    for (int i = 0; i < m; i++) y[i * step] = x->values[xi + i];
}
static void blasfeo_pack_dvec(int m, double *x, int step, struct blasfeo_dvec *y, int yi) {
    for (int i = 0; i < m; i++) y->values[yi + i] = x[i * step];
}
static void blasfeo_pack_dmat(int m, int n, double *a, int lda, struct blasfeo_dmat *b, int bi, int bj) {
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++) b->values[(bj + j) * b->m + bi + i] = a[j * lda + i];
}
""",
}  # acados's and BLASFEO's declarations, with plain arrays


class Vector(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p),)


class VectorPlace(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("xi", ctypes.c_int))


class Matrix(ctypes.Structure):
    _fields_ = (("m", ctypes.c_int), ("values", ctypes.c_void_p))


class MatrixPlace(ctypes.Structure):
    _fields_ = (("A", ctypes.c_void_p), ("ai", ctypes.c_int), ("aj", ctypes.c_int))


def test_acados_gets_transposed_jacobians_one_below_the_other(written: tuple[Path, Expected], tmp_path: Path) -> None:
    folder, expected = written
    for name, text in STUBS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    library = tmp_path / "acados.so"
    source = example.HERE / "acados_dynamics.c"
    includes = f"-I{tmp_path}", f"-I{folder / 'net_jac'}"
    compiler("-std=c99", "-Wall", "-Werror", *includes, "-shared", "-fPIC", source, "-o", library, "-lm")
    functions = ctypes.CDLL(str(library))
    nx, nu = example.STATES, example.CONTROLS
    together = np.concatenate([U, X])  # as acados stores a stage
    held = Vector(together.ctypes.data)
    y, jacobian = np.zeros(nx + 1), np.zeros((nu + nx, nx), order="F")
    result, matrix = Vector(y.ctypes.data), Matrix(nu + nx, jacobian.ctypes.data)
    places = [VectorPlace(ctypes.addressof(v), i) for v, i in ((held, nu), (held, 0), (result, 1))]
    x, u, after = (ctypes.addressof(p) for p in places)
    below = MatrixPlace(ctypes.addressof(matrix), 0, 0)
    given, wanted = (ctypes.c_void_p * 2)(x, u), (ctypes.c_void_p * 2)(after, ctypes.addressof(below))
    assert functions.dynamics_fun(given, wanted, None) == 0
    np.testing.assert_allclose(y[1:], expected["next"], atol=1e-6)
    y[:] = 0
    assert functions.dynamics_fun_jac(given, wanted, None) == 0
    np.testing.assert_allclose(y, [0, *expected["next"]], atol=1e-6)
    np.testing.assert_allclose(jacobian[:nu].T, expected["u.jacobian"], atol=1e-6)
    np.testing.assert_allclose(jacobian[nu:].T, expected["x.jacobian"], atol=1e-6)
