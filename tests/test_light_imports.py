"""The first build of a process imports no sympy; whoever needs it gets it whole."""

import subprocess
import sys

import pytest

MODEL = """
import sys
import gradgraph as gg
from gradgraph.frontend import nn
model = gg.frontend.export(nn.Linear(4, 3), {"x": ("batch", 4)})
gg.build(model, recompute="sqrt")
assert "sympy.core" not in sys.modules
"""


@pytest.mark.parametrize(
    "code",
    [
        MODEL,
        MODEL + "import onnx_ir as ir\nassert str(ir.SymbolicDim('2 * a') + 1) == '2*a + 1'",
        MODEL + "import onnx_ir as ir\nassert str(ir.SymbolicDim('max(a, 2)').simplify()) == 'Max(2, a)'",
        MODEL
        + "import sympy\nfrom sympy import Symbol\nassert sympy.__file__ and Symbol('a') + 1 == 1 + sympy.Symbol('a')",
        "import sympy\nimport gradgraph as gg\ngg.build\nassert sys.modules['sympy'] is sympy",
        "import onnx_ir as ir\nimport gradgraph as gg\ngg.build\nassert str(ir.SymbolicDim('a') * 2) == '2*a'",
    ],
    ids=["none", "arithmetic", "functions", "by the user", "before", "onnx-ir before"],
)
def test_sympy_comes_when_it_is_needed(code: str) -> None:
    ran = subprocess.run([sys.executable, "-c", "import sys\n" + code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_errors_need_no_other_package() -> None:
    code = """import sys, gradgraph as gg
assert issubclass(gg.errors.DataError, gg.errors.GradgraphError)
assert not {"numpy", "onnx", "onnx_ir", "onnxruntime"} & set(sys.modules)"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
