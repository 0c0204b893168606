"""ONNX's own node tests, some 1,900 models of up to opset 28, give the expected outputs in normal form, too."""

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

from gradgraph.errors import ModelError
from gradgraph.passes.normal import normalise

CHUNKS = 8  # so that pytest-xdist can share them out

REFUSED = {
    "test_cumprod_": "their axis is an input, and must be a constant",
    "test_scan_sum": "the batched form of opset 8",
}
UNDETERMINED = {
    "test_bernoulli": "random",
    "test_strnormalizer_export_monday": "neither runtime gives the expected output for the original",
    "test_range_bfloat16": "neither runtime gives the expected output for the original",
}


def _known(name, table):
    return any(name.startswith(start) for start in table)


def _array(value):
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _same(expected, found, rtol, atol):
    if isinstance(expected, list):
        return len(expected) == len(found) and all(
            _same(*pair, rtol, atol) for pair in zip(expected, found, strict=True)
        )
    if expected is None or found is None:
        return expected is found
    a, b = np.asarray(_array(expected)), np.asarray(_array(found))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.name == "bfloat16":  # computed in float32 and rounded once, not after every operator
        return np.allclose(a.astype(np.float32), b.astype(np.float32), rtol=2**-7, atol=2**-7, equal_nan=True)
    if a.dtype.kind in "fc":
        return np.allclose(a, b, rtol=max(rtol, 1e-3), atol=max(atol, 1e-5), equal_nan=True)
    return a.tobytes() == b.tobytes() if a.dtype.kind == "V" else bool(np.all(a == b))


def _onnxruntime(model, feeds):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {n: np.asarray(a) if isinstance(a, np.generic) else a for n, a in feeds.items()})


def _reference(model, feeds):
    return ReferenceEvaluator(model).run(None, feeds)


def _holds(model, inputs, expected, case):
    """Does one of the two runtimes give the expected outputs? Neither implements every operator and type."""
    feeds = {info.name: _array(value) for info, value in zip(model.graph.input, inputs, strict=False)}
    for runtime in (_onnxruntime, _reference):
        try:
            if _same(list(expected), runtime(model, feeds), case.rtol, case.atol):
                return True
        except Exception:
            continue
    return False


@pytest.fixture(scope="module")
def cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about the overflows that the cases are about
        return collect_testcases(None)


@pytest.mark.sweep(0)
@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.filterwarnings("ignore")
def test_node_cases(chunk, cases):
    wrong = []
    for case in cases[chunk::CHUNKS]:
        try:
            result = normalise(ir.from_proto(case.model))
        except ModelError:
            if not _known(case.name, REFUSED):
                wrong.append((case.name, "refused"))
            continue
        model = ir.to_proto(result)
        if _known(case.name, UNDETERMINED):
            continue
        if not all(_holds(model, inputs, outputs, case) for inputs, outputs in case.data_sets):
            wrong.append((case.name, "other outputs"))
        if ir.to_proto(normalise(result)) != model:
            wrong.append((case.name, "not idempotent"))
    assert wrong == []
