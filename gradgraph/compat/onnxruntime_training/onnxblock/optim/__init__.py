"""Blocks of AdamW and SGD with gradient clipping.

They append operators of onnxruntime-training; the resulting optimizer model has standard nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.compat.onnxruntime_training.graphs.optimizer_graph import DOMAIN, ParameterSpec, optimizer_graph
from gradgraph.compat.onnxruntime_training.onnxblock import blocks
from gradgraph.compat.onnxruntime_training.onnxblock.onnxblock import ForwardBlock
from gradgraph.errors import CompatibilityError

BOOL, INT64 = onnx.TensorProto.BOOL, onnx.TensorProto.INT64


class ClipGradNorm(blocks.Block):
    """Gradient clipping by the joint L2 norm of all gradients.

    Args:
        max_norm: the maximum norm.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self._max_norm = max_norm

    def build(self, gradients_name: str) -> str:
        result = self._node(
            "InplaceClipGradNorm", [gradients_name], "clip_grad_norm_output", domain=DOMAIN, max_norm=self._max_norm
        )
        self.base.graph.value_info.append(
            onnx.helper.make_tensor_sequence_value_info(result, onnx.TensorProto.FLOAT, None)
        )
        return result


class SGDOptimizer(blocks.Block):
    """A block that appends onnxruntime-training's operator of SGD."""

    def build(self, learning_rate_name: str, params_name: str, gradients_name: str) -> str:
        inputs = [learning_rate_name, params_name, gradients_name]
        return self._node("SGDOptimizerV2", inputs, "update_completed", domain=DOMAIN)


class AdamWOptimizer(blocks.Block):
    """A block that appends onnxruntime-training's operator of AdamW."""

    def __init__(
        self,
        bias_correction: bool | None = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = 1e-6,
        weight_decay: float | None = 0.0,
    ) -> None:
        super().__init__()
        self._attributes = {
            "alpha": betas[0],
            "beta": betas[1],
            "epsilon": eps,
            "weight_decay": weight_decay,
            "correct_bias": int(bool(bias_correction)),
            "adam_mode": 1,  # weight decay after the update
        }

    def build(self, *input_names: str) -> str:
        return self._node("AdamWOptimizer", input_names, "adamw.updated_flag", domain=DOMAIN, **self._attributes)


class _Optimizer(ForwardBlock):
    """A block of an optimizer model, called with the result of ``TrainingBlock.parameters()``."""

    _moments: Sequence[str] = ("first_order_moments",)

    def __init__(self, clip_grad: blocks.Block | None = None) -> None:
        super().__init__()
        self._clip_grad = clip_grad
        self._trained: list[ParameterSpec] = []

    def build(self, parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]) -> str:
        trained, _ = parameters
        if not trained:
            raise CompatibilityError("no parameters to train; pass names in requires_grad")
        self._trained = [ParameterSpec(t.name, ir.DataType(t.data_type), tuple(t.dims)) for t in trained]
        graph, kind = self.base.graph, trained[0].data_type
        graph.input.extend(
            [
                onnx.helper.make_tensor_value_info("learning_rate", onnx.TensorProto.FLOAT, [1]),
                onnx.helper.make_tensor_value_info("step", INT64, [1]),
                *(
                    onnx.helper.make_tensor_sequence_value_info(name, kind, None)
                    for name in ("params", "gradients", *self._moments)
                ),
            ]
        )
        gradients = "gradients" if self._clip_grad is None else self._clip_grad("gradients")
        flag = self._update(gradients)
        graph.output.append(onnx.helper.make_tensor_value_info(flag, BOOL, [1]))
        return flag

    def _update(self, gradients: str) -> str:
        raise NotImplementedError

    def to_model_proto(self) -> onnx.ModelProto:
        """Return the optimizer model in standard nodes.

        Raises:
            CompatibilityError: if the block has not been called, or has nodes without a standard form.
        """
        return optimizer_graph(super().to_model_proto(), self._trained)


class AdamW(_Optimizer):
    """AdamW, with weight decay after the update.

    Args:
        bias_correction: whether to correct the bias of both moments.
        betas, eps, weight_decay: hyperparameters; eps is added to the square root of the uncorrected second moment.
        clip_grad: the gradient clipping, such as ``ClipGradNorm(1.0)``; by default none.
    """

    _moments = ("first_order_moments", "second_order_moments")

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: blocks.Block | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self._adamw = AdamWOptimizer(bias_correction, betas, eps, weight_decay)

    def _update(self, gradients: str) -> Any:
        return self._adamw("learning_rate", "step", "params", gradients, *self._moments)


class SGD(_Optimizer):
    """Gradient descent without momentum.

    Args:
        clip_grad: the gradient clipping, such as ``ClipGradNorm(1.0)``; by default none.
    """

    def __init__(self, clip_grad: blocks.Block | None = None) -> None:
        super().__init__(clip_grad)
        self._sgd = SGDOptimizer()

    def _update(self, gradients: str) -> Any:
        return self._sgd("learning_rate", "params", gradients)
