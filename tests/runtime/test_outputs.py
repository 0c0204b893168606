"""Outputs of one batch after the other, from memory that stays bound where shapes allow it."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from gradgraph.errors import ModelError
from gradgraph.runtime.execution.computing import ComputingSession
from gradgraph.runtime.execution.session import Placement, create_session
from gradgraph.runtime.execution.state import State

CPU = Placement.choose("cpu")


def session(text: str, *outputs: str) -> ComputingSession:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> ' + text)
    return ComputingSession(create_session(model, CPU), State([], CPU), outputs)


DOUBLED = "g (float[n, 3] x) => (float[n, 3] y, int64[n] z) { y = Add(x, x)  z = ArgMax<axis = 1, keepdims = 0>(x) }"


def test_every_batch_has_its_own_outputs() -> None:
    bound, random, found, given = session(DOUBLED, "z", "y"), np.random.default_rng(0), [], []
    for rows in (4, 4, 4, 2, 2, 4):
        x = random.normal(size=(rows, 3)).astype(np.float32)
        given.append(x)
        found.append(bound.compute({"x": x}))
    for x, outputs in zip(given, found, strict=True):
        assert list(outputs) == ["z", "y"]
        assert np.array_equal(outputs["y"], 2 * x) and outputs["y"].dtype == np.float32
        assert np.array_equal(outputs["z"], x.argmax(1)) and outputs["z"].dtype == np.int64


def test_memory_stays_bound_for_batches_of_one_shape() -> None:
    bound, x = session(DOUBLED, "y"), np.ones((4, 3), np.float32)
    memory = [bound.compute({"x": x}) and bound._memory.get("y") for _ in range(3)]
    assert memory[0] is None and memory[1] is not None and memory[1] is memory[2]
    bound.compute({"x": x[:2]})
    assert not bound._memory


@pytest.mark.parametrize("size", ["k", "n"])
def test_shapes_that_depend_on_values(size: str) -> None:
    """Said by a size of its own, or by one of an input, which is wrong."""
    bound = session(f"g (float[n] x) => (int64[1, {size}] y) {{ y = NonZero(x) }}", "y")
    for ones in (1, 3, 2, 0, 3):
        x = (np.arange(3) < ones).astype(np.float32)
        assert np.array_equal(bound.compute({"x": x})["y"], [np.arange(ones)])


def test_an_error_is_said_whichever_way_it_ran() -> None:
    bound = session("g (float[n] x, int64[n] i) => (float[n] y) { y = Gather(x, i) }", "y")
    x, i = np.arange(3, dtype=np.float32), np.array([2, 1, 0])
    for _ in range(2):
        assert np.array_equal(bound.compute({"x": x, "i": i})["y"], [2, 1, 0])
    for _ in range(2):
        with pytest.raises(ModelError, match=r"^running the model failed at Gather"):
            bound.compute({"x": x, "i": i + 9})
    assert np.array_equal(bound.compute({"x": x, "i": i})["y"], [2, 1, 0])


def test_an_output_that_is_an_input_has_its_numbers_in_every_batch() -> None:
    bound = session("g (float[n, 3] x) => (float[n, 3] y, float[n, 3] x) { y = Add(x, x) }", "y", "x")
    for number in range(3):
        x = np.full((4, 3), number, np.float32)
        assert np.array_equal(bound.compute({"x": x})["x"], x)


def test_an_output_of_a_type_that_numpy_lacks_is_a_model_error() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (int4[n] y) '
        "{ s = Constant <value_float = 0.5> ()  y = QuantizeLinear <output_dtype = 22> (x, s) }"
    )
    bound = ComputingSession(create_session(model, CPU), State([], CPU), ["y"])
    with pytest.raises(ModelError, match="running the model failed: No corresponding Numpy type"):
        bound.compute({"x": np.ones(4, np.float32)})
