"""Transforms of models that are larger than a ModelProto can be: the limit is lowered here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.files import models as files
from gradgraph.files.models import load_model
from tests.kit.command_line import Cli

Transform = Callable[..., Any]
X = np.array([[1, 2]], np.float32)
W = np.arange(2000, dtype=np.float32).reshape(2, 1000) / 1000


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its weight lies in a file, and is larger than what goes inside."""
    monkeypatch.setattr(files, "INLINE_LIMIT", 1000)
    monkeypatch.setattr(files, "PROTOBUF_LIMIT", 4000)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[1, 2] x) => (float y) '
        "{ a = MatMul(x, w) b = Mul(a, a) y = ReduceSum <keepdims = 0> (b) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(W, "w"))
    onnx.save(model, tmp_path / "large.onnx", save_as_external_data=True, location="large.data", size_threshold=0)
    return tmp_path / "large.onnx"


def results(path: Path) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(path)
    fed = {"x": X, "y.cotangent": np.array(1, np.float32), "x.tangent": np.ones_like(X)}
    names = {i.name for i in session.get_inputs()}
    found = session.run(None, {k: v for k, v in fed.items() if k in names})
    return dict(zip([o.name for o in session.get_outputs()], found, strict=True))


@pytest.mark.parametrize(
    ("transform", "name", "expected"),
    [
        (gg.value_and_grad, "x.grad", 2 * X @ W @ W.T),
        (gg.vjp, "x.grad", 2 * X @ W @ W.T),
        (gg.jvp, "y.tangent", (2 * X @ W @ W.T).sum()),
        (gg.hvp, "x.hvp", 2 * np.ones_like(X) @ W @ W.T),
    ],
)
def test_what_is_too_large_is_written_with_its_weights_beside_it(
    large: Path, transform: Transform, name: str, expected: np.ndarray
) -> None:
    out = large.with_name("result.onnx")
    written = transform(large, wrt=["x"], out=out)
    assert name in [o.name for o in written.graph.outputs]
    assert out.with_name("result.onnx.data").stat().st_size >= W.nbytes and out.stat().st_size < W.nbytes
    np.testing.assert_allclose(results(out)[name], expected, rtol=1e-5)


@pytest.mark.parametrize("transform", [gg.value_and_grad, gg.vjp, gg.jvp, gg.hvp])
def test_without_a_path_the_error_names_it(large: Path, transform: Transform) -> None:
    with pytest.raises(ModelError, match=r"a ModelProto can store at most .* GB; pass the path .* \(out= of") as caught:
        transform(large, wrt=["x"])
    assert "gradgraph grad MODEL -o" in caught.value.in_shell()


def test_a_model_over_itself(large: Path) -> None:
    gg.value_and_grad(large, wrt=["x"], out=large)
    np.testing.assert_allclose(results(large)["x.grad"], 2 * X @ W @ W.T, rtol=1e-5)


def test_what_is_an_ir_model_stays_one(large: Path) -> None:
    found = gg.vjp(load_model(large), wrt=["x"])
    assert "x.grad" in [o.name for o in found.graph.outputs]  # type: ignore[union-attr]


def test_the_command_writes_it(large: Path, cli: Cli) -> None:
    out = large.with_name("grad.onnx")
    assert cli("grad", str(large), "--wrt", "x", "-o", str(out)).code == 0
    np.testing.assert_allclose(results(out)["x.grad"], 2 * X @ W @ W.T, rtol=1e-5)
