"""A mask that is kept hides padding on the left, or the model is refused: one case for each way to count positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from gradgraph import surgery
from gradgraph.errors import BuildError

WORDS, WIDTH = 20, 4
IDS = np.random.default_rng(0).integers(3, WORDS, (2, 6))
RNG = np.random.default_rng(1)
STORED: dict[str, Any] = {
    "E": RNG.normal(size=(WORDS, WIDTH)), "P": RNG.normal(size=(32, WIDTH)), "W": RNG.normal(size=(WIDTH, WORDS)),
    "K": RNG.normal(size=(WIDTH, WIDTH, 3)), "rates": RNG.normal(size=WIDTH), "one": 1, "zero": 0, "two": 2,
    "first": [0], "last": [-1], "flat": [1, -1, WIDTH], "far": [-1e9], "slope": 0.3,
    "R": 0.3 * RNG.normal(size=(1, 3 * WIDTH, WIDTH)),
}  # fmt: skip
LENGTH = [("Shape", "input_ids", "sizes"), ("Gather", "sizes one", "length"), ("Range", "zero length one", "count")]
SINES = [*LENGTH, ("Cast", "count", "places", {"to": TensorProto.FLOAT}), ("Unsqueeze", "places last", "column"),
         ("Mul", "column rates", "angles"), ("Sin", "angles", "sines")]  # fmt: skip
SHOWN = [("Cast", "attention_mask", "floats", {"to": TensorProto.FLOAT}), ("Unsqueeze", "floats last", "shown")]
CONVOLVED: list[Any] = [
    ("Transpose", "x", "turned", {"perm": [0, 2, 1]}), ("Conv", "turned K", "mixed", {"pads": [2, 0]}),
    ("Transpose", "mixed", "h", {"perm": [0, 2, 1]}),
]  # fmt: skip
# nodes from the rows ``said`` of the tokens to ``h``, and whether the mask hides padding on the left
WAYS: dict[str, tuple[list[Any], bool]] = {
    "not": ([("Identity", "said", "h")], True),
    "rows of a table": ([*LENGTH, ("Gather", "P count", "p"), ("Add", "said p", "h")], True),  # repaired
    "rows after the second": (
        [*LENGTH, ("Add", "count two", "from_2"), ("Gather", "P from_2", "p"), ("Add", "said p", "h")], False,
    ),
    "reshaped rows, as in XGLM": (
        [*LENGTH, ("Gather", "P count", "p"), ("Reshape", "p flat", "q"), ("Add", "said q", "h")], False,
    ),
    "the beginning of a table, as in Whisper": (
        [*LENGTH, ("Unsqueeze", "length first", "end"), ("Slice", "P first end first", "p"), ("Add", "said p", "h")],
        False,
    ),
    "sines that are added": ([*SINES, ("Add", "said sines", "h")], False),
    "sines that multiply": ([*SINES, ("Mul", "said sines", "h")], False),
    "the mask, as in OPT": (
        [("CumSum", "attention_mask one", "counted"), ("Gather", "P counted", "p"), ("Add", "said p", "h")], True,
    ),
    "a convolution": ([("Identity", "said", "x"), *CONVOLVED], False),
    "a convolution of hidden padding": ([*SHOWN, ("Mul", "said shown", "x"), *CONVOLVED], True),
    "a recurrence": (
        [("Transpose", "said", "x", {"perm": [1, 0, 2]}), ("GRU", "x R R", "y", {"hidden_size": WIDTH}),
         ("Squeeze", "y one_axis", "z"), ("Transpose", "z", "h", {"perm": [1, 0, 2]})], False,
    ),
    "sums": ([("CumSum", "said one", "h")], False),
    "sums of what is seen": ([*SHOWN, ("Mul", "said shown", "x"), ("CumSum", "x one", "h")], True),
    "attention by distance": (
        [*LENGTH, ("Cast", "count", "places", {"to": TensorProto.FLOAT}), ("Mul", "places slope", "bias"),
         ("Transpose", "said", "turned", {"perm": [0, 2, 1]}), ("MatMul", "said turned", "scores"),
         ("Add", "scores bias", "closer"), ("Cast", "attention_mask", "kept", {"to": TensorProto.BOOL}),
         ("Unsqueeze", "kept one_axis", "keys"), ("Where", "keys closer far", "visible"),
         ("Softmax", "visible", "shares", {"axis": -1}), ("MatMul", "shares said", "h")], True,
    ),
}  # fmt: skip


def decoder(nodes: list[Any]) -> onnx.ModelProto:
    written = [("Gather", "E input_ids", "said"), *nodes, ("MatMul", "h W", "logits")]
    made = [helper.make_node(op, i.split(), [o], **(more[0] if more else {})) for op, i, o, *more in written]
    arrays = {n: np.array(x, np.float32 if np.array(x).dtype.kind == "f" else np.int64) for n, x in STORED.items()}
    arrays["one_axis"] = np.array([1])
    used = {name for node in made for name in node.input}
    tensors = [numpy_helper.from_array(x, name) for name, x in arrays.items() if name in used]
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["b", "s"]) for n in ("input_ids", "attention_mask")]
    scores = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", WORDS])
    graph = helper.make_graph(made, "g", inputs, [scores], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def logits(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids, "attention_mask": mask}
    return np.asarray(session.run(["logits"], {v.name: feeds[v.name] for v in session.get_inputs()})[0])


@pytest.mark.parametrize("way", WAYS)
def test_the_scores_are_those_without_padding_or_the_model_is_refused(way: str) -> None:
    nodes, hides = WAYS[way]
    plain = decoder(nodes)
    wanted = logits(surgery.language_model(plain), IDS, np.ones_like(IDS))
    if not hides:
        with pytest.raises(BuildError, match=r"pad rows at their ends, and do not keep the mask"):
            surgery.language_model(plain, keep="attention_mask")
        return
    found = surgery.language_model(plain, keep="attention_mask")
    for left, right in ((4, 0), (2, 3)):
        ids = np.pad(IDS, ((0, 0), (left, right)), constant_values=5)
        mask = np.pad(np.ones_like(IDS), ((0, 0), (left, right)))
        seen = logits(found, ids, mask)[:, left : left + IDS.shape[1]]
        np.testing.assert_allclose(seen, wanted, atol=1e-5)


def test_a_model_that_cannot_be_run_on_random_tokens_is_refused() -> None:
    """Such as one whose inputs fit only each other's values."""
    model = decoder([("Reshape", "said three", "h")])
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 3, WIDTH]), "three"))
    with pytest.raises(BuildError, match=r"cannot be verified .* pad rows at their ends"):
        surgery.language_model(model, keep="attention_mask")
