"""The first build of a process imports no sympy; whoever needs it gets it whole."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from gradgraph.frontend import export, nn

MODEL = """
import sys
import gradgraph as gg
from gradgraph.frontend import nn
model = gg.frontend.export(nn.Linear(4, 3), {"x": ("batch", 4)})
gg.build(model, recompute="sqrt")
assert "sympy.core" not in sys.modules
"""


@pytest.mark.sweep(0.44)
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
        "import gradgraph\nimport onnx_ir as ir\nassert 'sympy.core' not in sys.modules\n"
        "assert str(ir.SymbolicDim('a') * 2) == '2*a' and 'exec_module' not in vars(ir.__spec__.loader)",
    ],
    ids=["none", "arithmetic", "functions", "by the user", "before", "onnx-ir before", "onnx-ir by the user"],
)
def test_sympy_comes_when_it_is_needed(code: str) -> None:
    ran = subprocess.run([sys.executable, "-c", "import sys\n" + code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


COMMANDS = {"train": "tiny.onnx --data tiny.npz --epochs 1 -o step", "check": "tiny.onnx"}
RUN = """
from gradgraph.cli.app import run
assert run(sys.argv[1:]) == 0
assert "onnx_ir" in sys.modules and "sympy.core" not in sys.modules
"""


@pytest.mark.sweep(0.01)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_import_no_sympy(command: str, tmp_path: Path) -> None:
    onnx.save(export(nn.Linear(4, 3), {"x": ("batch", 4)}), tmp_path / "tiny.onnx")
    np.savez(tmp_path / "tiny.npz", x=np.zeros((4, 4), np.float32), target=np.zeros(4, np.int64))
    words = [sys.executable, "-c", "import sys\n" + RUN, command, *COMMANDS[command].split()]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.sweep(0.11)
@pytest.mark.parametrize("module", ["runtime.trainer", "chat.finetuning", "files.protos"])
def test_no_module_imports_sympy(module: str) -> None:
    """Whatever of this package is imported first, and wherever it imports onnx-ir."""
    code = f"import sys, gradgraph.{module}\nassert 'onnx_ir' in sys.modules and 'sympy.core' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_errors_need_no_other_package() -> None:
    code = """import sys, gradgraph as gg
assert issubclass(gg.errors.DataError, gg.errors.GradgraphError)
assert not {"numpy", "onnx", "onnx_ir", "onnxruntime"} & set(sys.modules)"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
