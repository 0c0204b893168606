"""FlexAttention's graphs become part of the model: values of the reference, gradients by differences."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, real, run

Q, K, V = real(2, 4, 3, 4), real(2, 4, 5, 4, seed=1), real(2, 4, 5, 6, seed=2)
GROUPED = {"q": Q, "k": K[:, :2], "v": V[:, :2]}
FEEDS = {"q": Q, "k": K, "v": V}


def mod(name, nodes, numbers):
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", "h", "s", "t"]) for n in ("in", "out")]
    tensors = [numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in numbers.items()]
    return helper.make_graph([helper.make_node(*n) for n in nodes], name, ends[:1], ends[1:], tensors)


CAPPED = mod("cap", [("Div", ["in", "c"], ["d"]), ("Tanh", ["d"], ["t"]), ("Mul", ["t", "c"], ["out"])], {"c": 1.5})
SLOPED = mod("slope", [("Mul", ["in", "s"], ["out"])], {"s": np.linspace(0.5, 1.5, 5)})

CASES = {
    "plain": (FEEDS, {}),
    "grouped, scaled": (GROUPED, {"scale": 0.3}),
    "score": (FEEDS, {"score_mod": CAPPED}),
    "probability": (FEEDS, {"prob_mod": SLOPED}),
    "both, grouped": (GROUPED, {"score_mod": CAPPED, "prob_mod": SLOPED}),
}


@pytest.mark.parametrize("case", CASES)
def test_flex_attention(case):
    feeds, attrs = CASES[case]
    node = helper.make_node("FlexAttention", list(feeds), ["y"], domain="ai.onnx.preview", **attrs)
    model = model_of([node], feeds, opset=26, domains={"ai.onnx.preview": 1})
    found = normal_form(model)
    assert {o.domain for o in found.opset_import} == {""}
    assert_same(ReferenceEvaluator(model).run(None, feeds), run(found, feeds), atol=2e-6)
    assert wrong_gradients(model, found, feeds, list(feeds)) == []
