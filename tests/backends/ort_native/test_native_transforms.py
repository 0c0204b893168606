"""Transforms written for native kernels: opened with session options that have them, and refused without."""

from __future__ import annotations

import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.backends.machine_requirements import BACKEND_KEY
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from gradgraph.backends.ort_native import library as native
from gradgraph.errors import UnsupportedOperatorError
from gradgraph.runtime.execution.session import RuntimeOptions
from tests.backends.test_transform_backends import assert_alike, feeds_of
from tests.kit.lowered_networks import NETWORKS, batches, exported
from tests.kit.running import run

RELU = '<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }'


def opened(model: onnx.ModelProto) -> ort.InferenceSession:
    options = RuntimeOptions(native_kernels=True, threads=2).session_options()
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.one_level  # kernels of whole networks are tried in test_native_steps.py
@pytest.mark.sweep(0.11)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", [8, "n"], ids=["fixed", "open"])
@pytest.mark.parametrize("transform", ["vjp", "jvp"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, transform: str, rows: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)  # lower small layers, too
    model, x = exported(name, rows), batches(name, 8, 1)[0]["x"]
    portable, fast = (getattr(gg, transform)(model, backend=t) for t in ("portable", "ort-cpu-native"))
    feeds = feeds_of(portable, x)
    session = opened(fast)
    found = session.run(None, feeds)
    assert_alike(dict(zip([o.name for o in session.get_outputs()], found, strict=True)), run(portable, feeds))


def test_a_file_with_native_kernels_says_so_where_there_are_none() -> None:
    model = gg.vjp(onnx.parser.parse_model(RELU), backend="ort-cpu-native")
    assert native.DOMAIN in {n.domain for n in model.graph.node}
    assert {p.key: p.value for p in model.metadata_props}[BACKEND_KEY].endswith("RuntimeOptions(native_kernels=True)")
    with pytest.raises(Exception, match=native.DOMAIN):
        run(model)
    with pytest.raises(UnsupportedOperatorError, match=native.DOMAIN):
        gg.jvp(model)
