"""Sizes that are computed without sympy are those that onnx-ir computes with it."""

from __future__ import annotations

import subprocess
import sys

import onnx_ir as ir
import pytest

from gradgraph.graph import size_context

NAMES = ("batch", "N", "E", "a.b", "unk__0", "µ", "2*h", "h + 1", "floor(h/2)")
OPERATIONS = ("__add__", "__sub__", "__mul__", "__floordiv__")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_sizes_are_those_of_onnx_ir(operation: str) -> None:
    ours = getattr(ir.SymbolicDim, operation)
    theirs, plain = ours.__wrapped__, 0
    for name in NAMES:
        plain += size_context.PLAIN.fullmatch(name) is not None
        for number in (-2, -1, 0, 1, 2, 3, 64, 2**40):
            if number or operation != "__floordiv__":
                size = ir.SymbolicDim(name)
                assert ours(size, number) == theirs(size, number), (name, number)
    assert plain == 6


MODEL = """
import sys
import gradgraph as gg
from gradgraph.frontend import Input, export, nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)
    def forward(self, x):
        return self.head(self.words(x)).flatten(0, 1)
gg.build(export(Net(), {"x": Input(("batch", 5), "int64")}), "cross_entropy")
assert "sympy.core" not in sys.modules
"""


def test_a_batch_of_rows_needs_no_sympy() -> None:
    subprocess.run([sys.executable, "-c", MODEL], check=True, timeout=300)
