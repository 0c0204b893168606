"""ONNX's own node tests as models to differentiate: in float32, with feeds in float64."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gradgraph.verify.reference import in_precision

Array = np.ndarray[Any, Any]
Value = Array | list[Array] | None  # a tensor, a sequence of them, an optional without one

OPERATORS = (Path(__file__).with_name("differentiable_operators.txt")).read_text().split()
# beside the operators of ai.onnx: those of other domains, and two that were superseded
FURTHER = ["ArrayFeatureExtractor", "FlexAttention", "Scatter", "Upsample"]

# floating inputs that choose a behaviour: positions by operator
SETTINGS = {
    "Dropout": [1],  # ratio
    "OneHot": [0, 1],  # indices and depth are integers, whatever their type
    "Range": [1],  # limit
    "Resize": [1, 2],  # roi, scales
    "Upsample": [1],  # scales
}
# inputs whose shapes are known even where shapes are unknown: positions by operator or name
KNOWN = {
    "CausalConvWithState": [0, 1],  # the number of channels is an attribute of Conv
    "Col2Im": [1],  # whose length is the number of axes
    "Resize": [1, 2, 3],  # onnxruntime takes an unknown number of sizes for 0
    "test_convtranspose_autopad_same": [1],  # automatic pads depend on the shape of the kernel
    "test_convtranspose_kernel_shape": [0, 1],  # and those for an output_shape on the sizes of the input
    "test_convtranspose_output_shape": [0, 1],
}


@dataclass(frozen=True)
class NodeCase:
    """One node test.

    Attributes:
        operator: of its first node.
        model: its half-precision and double tensors are float32; input shapes are known.
        feeds: floating ones in float64.
        wrt: the floating inputs that are no settings.
        known: the inputs whose shapes are known even where shapes are unknown.
    """

    name: str
    operator: str
    model: onnx.ModelProto
    feeds: dict[str, Value]
    wrt: tuple[str, ...]
    known: tuple[str, ...]

    def nudged(self, distance: float) -> NodeCase:
        """The same, a little beside its data: off kinks, ties and integers, and finite."""
        rng = np.random.default_rng(1)

        def moved(x: Array) -> Array:
            nudge = rng.uniform(0.5, 1.5, x.shape) * rng.choice([-distance, distance], x.shape)
            return np.asarray(np.where(np.isfinite(x), x, 0.5) + nudge)

        feeds = {k: each(moved, v) if k in self.wrt else v for k, v in self.feeds.items()}
        return replace(self, feeds=feeds)


def each(f: Any, value: Value) -> Value:
    """``f`` of a tensor, or of each tensor of a sequence."""
    if value is None:
        return None
    return [f(x) for x in value] if isinstance(value, list) else f(value)


@functools.cache
def node_cases() -> dict[str, list[NodeCase]]:
    """By operator: those with floating inputs and outputs; the same ones as function bodies are left out."""
    found: dict[str, list[NodeCase]] = {op: [] for op in (*OPERATORS, *FURTHER)}
    for case in _collected():
        if "_expanded" not in case.name and (operator := case.model.graph.node[0].op_type) in found:
            found[operator] += _converted(case, operator)
    return found


def _collected() -> Sequence[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about the overflows that some cases are about
        return collect_testcases(None)


def _converted(case: Any, operator: str) -> Iterator[NodeCase]:
    model = in_precision(case.model, onnx.TensorProto.FLOAT)
    graph = model.graph
    if not any(map(is_floating, graph.output)):
        return
    data, _ = case.data_sets[0]
    feeds = {info.name: _wide(value) for info, value in zip(graph.input, data, strict=False)}
    names = graph.node[0].input
    settings = [names[i] for i in SETTINGS.get(operator, []) if i < len(names)]
    known = [names[i] for i in KNOWN.get(case.name, KNOWN.get(operator, [])) if i < len(names)]
    wrt = tuple(i.name for i in graph.input if is_floating(i) and i.name not in settings and feeds[i.name] is not None)
    if wrt:
        yield NodeCase(case.name, operator, model, feeds, wrt, tuple(known))


def is_floating(info: onnx.ValueInfoProto) -> bool:
    kind = info.type
    while (held := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, held).elem_type
    return bool(kind.tensor_type.elem_type == onnx.TensorProto.FLOAT)


def _wide(value: Any) -> Value:
    def wide(x: Any) -> Array:
        x = onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else np.asarray(x)
        return x.astype(np.float64) if x.dtype.name in ("float16", "float32", "bfloat16") else x

    if isinstance(value, onnx.SequenceProto):
        value = onnx.numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        value = onnx.numpy_helper.to_optional(value)
    return each(wide, value)
