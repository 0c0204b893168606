"""A rule's case in float16 in onnxruntime, in three forms, against its gradient in float64.

onnxruntime's CPU provider has few float16 kernels: it computes other operators in float32 and omits roundings between
two of them, so that two readers of one tensor may see different digits. The forms are ``plain``, the gradient as it is;
``moved``, in which an operator with a float16 kernel rounds the forward outputs; and ``computed``, in which inputs are
computed, and so are unrounded for some readers. Shapes are known in the first form, and unknown in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.rules.registry import Case, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle
from tests.kit.running import run

Feeds = dict[str, np.ndarray]


def reason_to_skip(rule: Rule, case: Case) -> str:
    """Return why a case cannot be tested in float16; "" if it can."""
    if case.onnxruntime:
        return case.onnxruntime
    if rule.op_type == "Det":
        return "NumPy has no determinant in float16, so the oracle cannot tell the output's shape"
    half = cases.trial(rule, case, dtype=np.float16)
    try:
        run(half.model, half.feeds)
    except Exception as error:  # onnxruntime's own classes, which it does not export
        return f"onnxruntime does not run the operator forwards: {str(error)[:60]}"
    return ""


def disagreements(rule: Rule, case: Case) -> list[str]:
    """Return one sentence for each gradient in float16 that differs from float64 by more than a few roundings."""
    half, exact = (cases.trial(rule, case, dtype=dtype) for dtype in (np.float16, np.float64))
    ys, rng = run(half.model, half.feeds), np.random.default_rng(0)
    drawn = {f"{y}.cotangent": np.asarray(rng.uniform(-1, 1, ys[y].shape), np.float16) for y in half.read}
    round_literals(exact.model)
    # if a symbolic size of an Einsum is 1 at run time, onnxruntime takes it for the label's, and reuses a small buffer
    unknown = not case.known_shapes and rule.op_type != "Einsum"
    open_sizes = cases.trial(rule, case, dtype=np.float16, unknown=unknown)
    gradient, of_open, judge = (gradient_of(t) for t in (half, open_sizes, exact))
    wanted, wrong = Oracle(judge), []
    for name, form in FORMS.items():
        model, feeds, seen = form(gradient if name == "plain" else of_open, half)
        found, expected = run(model, {**feeds, **typed(gradient, drawn)}), wanted(in_float64({**seen, **drawn}))
        for x in half.wrt:
            g, e = found[f"{x}.grad"], expected[f"{x}.grad"]
            close = np.allclose(g.astype(np.float64), e, rtol=1e-2, atol=1e-2 * np.abs(e).max(initial=1e-2))
            if g.dtype != np.float16 or not close:
                wrong.append(f"{name}: the gradient of {x} is {g.dtype} {g}, not {e}")
    return wrong


def gradient_of(t: cases.Trial) -> onnx.ModelProto:
    whole = gg.vjp(t.model, outputs=t.read, wrt=t.wrt, allow_unused=True)
    assert isinstance(whole, onnx.ModelProto)
    return whole


def typed(model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """Return each array in the element type of its input; some operators return float32 for any input type."""
    types = {x.name: helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type) for x in model.graph.input}
    return {name: array.astype(types[name]) for name, array in feeds.items()}


def round_literals(model: onnx.ModelProto) -> None:
    """Round the float64 initializers of ``model`` to float16, in place."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.DOUBLE:
            rounded = numpy_helper.to_array(tensor).astype(np.float16).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))


def in_float64(feeds: Mapping[str, np.ndarray]) -> Feeds:
    return {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in feeds.items()}


# --- forms: return a model, its feeds, and the values that its operator then reads --------------------------

Form = Callable[[onnx.ModelProto, cases.Trial], tuple[onnx.ModelProto, Feeds, Feeds]]


def plain(gradient: onnx.ModelProto, trial: cases.Trial) -> tuple[onnx.ModelProto, Feeds, Feeds]:
    return gradient, trial.feeds, trial.feeds


def moved(gradient: onnx.ModelProto, trial: cases.Trial) -> tuple[onnx.ModelProto, Feeds, Feeds]:
    """Append an operator with a float16 kernel (Unsqueeze) to the forward outputs, so that they are rounded."""
    model = copy_of(gradient)
    graph = model.graph
    graph.initializer.append(numpy_helper.from_array(np.array([0]), "front"))
    for output in graph.output:
        if output.name in trial.read:
            graph.node.append(helper.make_node("Unsqueeze", [output.name, "front"], [f"{output.name}.moved"]))
            output.name = f"{output.name}.moved"
            output.type.tensor_type.ClearField("shape")
    return model, trial.feeds, trial.feeds


def computed(gradient: onnx.ModelProto, trial: cases.Trial) -> tuple[onnx.ModelProto, Feeds, Feeds]:
    """Compute each input as three times its feed, unrounded for readers in float32; outputs are as in ``moved``."""
    model, _, _ = moved(gradient, trial)
    feeds, seen = {**trial.feeds}, {**trial.feeds}
    products = []
    model.graph.initializer.append(numpy_helper.from_array(np.array(3.0, np.float16), "three"))
    for x in model.graph.input:
        if x.name in trial.wrt and x.type.tensor_type.elem_type == TensorProto.FLOAT16:
            third = np.asarray(trial.feeds[x.name] / np.float16(3.0), np.float16)
            products.append(helper.make_node("Mul", [f"{x.name}.third", "three"], [x.name]))
            del feeds[x.name]
            feeds[f"{x.name}.third"], seen[x.name] = third, np.asarray(third.astype(np.float64) * 3.0)
            x.name = f"{x.name}.third"
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*products, *nodes])
    return model, feeds, seen


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


FORMS: dict[str, Form] = {"plain": plain, "moved": moved, "computed": computed}
