"""Runs an ONNX graph of the classic vision networks in PyTorch, node by node, so that torch's autograd is the judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper

Tensor = torch.Tensor


def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    strides: Any = 1,
    pads: Any = (0, 0, 0, 0),
    group: int = 1,
    **_: Any,
) -> Tensor:
    return F.conv2d(padded(x, pads), w, b, stride=strides, groups=group)


def padded(x: Tensor, pads: Any, value: float = 0.0) -> Tensor:
    top, left, bottom, right = pads
    return F.pad(x, (left, right, top, bottom), value=value) if any(pads) else x


def max_pool(x: Tensor, *, kernel_shape: Any, strides: Any = 1, pads: Any = (0, 0, 0, 0), **_: Any) -> Tensor:
    return F.max_pool2d(padded(x, pads, -torch.inf), kernel_shape, strides)


def average_pool(x: Tensor, *, kernel_shape: Any, strides: Any = 1, pads: Any = (0, 0, 0, 0), **_: Any) -> Tensor:
    assert not any(pads)
    return F.avg_pool2d(x, kernel_shape, strides)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | float = 0.0,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    return alpha * (a.T if transA else a) @ (b.T if transB else b) + beta * c


def reshape(x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([int(d) or x.shape[i] for i, d in enumerate(shape)])


def unsqueeze(x: Tensor, *, axes: list[int]) -> Tensor:
    for axis in sorted(axes):
        x = x.unsqueeze(axis)
    return x


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "AveragePool": average_pool,
    "Concat": lambda *xs, axis: torch.cat(xs, axis),
    "Conv": conv,
    "Gemm": gemm,
    "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
    "MaxPool": max_pool,
    "Mul": torch.mul,
    "Relu": F.relu,
    "Reshape": reshape,
    "Softmax": lambda x, axis=1: F.softmax(x, axis),
    "Sum": lambda *xs: sum(xs[1:], xs[0]),
    "Unsqueeze": unsqueeze,
    "Dropout": lambda x, **_: x,
}


class InTorch:
    """Calls the graph.

    Args:
        model: its initializers become float tensors of ``dtype``; those named in ``trained`` require gradients.
        training: batch normalisation uses the statistics of the batch.
    """

    def __init__(self, model: onnx.ModelProto, trained: list[str], dtype: torch.dtype, training: bool) -> None:
        self.graph, self.dtype, self.training = model.graph, dtype, training
        arrays = {t.name: torch.tensor(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
        self.weights = {k: v.to(dtype) if v.is_floating_point() else v for k, v in arrays.items()}
        self.trained = [self.weights[n].requires_grad_() for n in trained]

    def __call__(self, output: str, **inputs: Tensor) -> Tensor:
        values: dict[str, Tensor | None] = {
            "": None,
            **self.weights,
            **{k: v.to(self.dtype) for k, v in inputs.items()},
        }
        for node in self.graph.node:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            arguments = [values[n] for n in node.input]
            if node.op_type == "BatchNormalization":
                values[node.output[0]] = self._batch_norm(*arguments, attributes.get("epsilon", 1e-5))
            else:
                values[node.output[0]] = OPERATORS[node.op_type](*arguments, **attributes)
        result = values[output]
        assert result is not None
        return result

    def _batch_norm(self, x: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float) -> Tensor:
        # clones: torch updates running statistics in place
        return F.batch_norm(x, mean.clone(), var.clone(), scale, bias, training=self.training, eps=epsilon)


def split_inputs(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {k: torch.tensor(v) for k, v in arrays.items()}
