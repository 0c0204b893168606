"""The four losses. Each adds an input for its target, unless the model already has a value of this name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from gradgraph.compat.onnxruntime_training.onnxblock import _graph_utils, blocks
from gradgraph.errors import CompatibilityError, shown
from gradgraph.files.protos import copied


class _Reduced(blocks.Block):
    """The base class of element-wise losses with a reduction."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self._reduce = _reduction(reduction)

    def _target(self, loss_input_name: str, target_name: str) -> str:
        if not _graph_utils.node_arg_exists(self.base, target_name):
            blocks.InputLike(loss_input_name)(target_name)
        return target_name


def _reduction(name: str) -> blocks.Block:
    if name == "none":
        raise CompatibilityError(
            "a loss with reduction 'none' returns several numbers, but training requires one; use 'mean' or 'sum'"
        )
    if name not in ("mean", "sum"):
        raise CompatibilityError(f"there is no reduction '{shown(name)}'; use mean or sum")
    return blocks.ReduceMean(keepdims=False) if name == "mean" else blocks.ReduceSum(keepdims=False)


class _OfDifferences(_Reduced):
    """A loss that applies the block ``of_each`` to the difference of output and target."""

    def __init__(self, reduction: str, of_each: blocks.Block) -> None:
        super().__init__(reduction)
        self._sub, self._of_each = blocks.Sub(), of_each

    def build(self, loss_input_name: str, target_name: str = "target") -> Any:
        target_name = self._target(loss_input_name, target_name)
        return self._reduce(self._of_each(self._sub(loss_input_name, target_name)))


class MSELoss(_OfDifferences):
    """The squared error, ``reduce((output - target)²)``.

    Args:
        reduction: "mean" or "sum".
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction, blocks.Pow(2.0))


class L1Loss(_OfDifferences):
    """The absolute error, ``reduce(|output - target|)``.

    Args:
        reduction: "mean" or "sum".
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction, blocks.Abs())


class CrossEntropyLoss(blocks.Block):
    """Cross entropy of logits with class indices; the last axis of the logits is the class axis.

    Args:
        weight: an array with the weight of each class.
        reduction: "mean" or "sum".
        ignore_index: a class index that is ignored.
    """

    def __init__(
        self, weight: np.ndarray[Any, Any] | None = None, reduction: str = "mean", ignore_index: int | None = None
    ) -> None:
        super().__init__()
        _reduction(reduction)
        self._weight, self._how, self._ignore_index = weight, reduction, ignore_index

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        inputs = [scores_input_name, labels_name]
        if self._weight is not None:
            inputs.append(self._initializer(self._weight, "celoss.weight"))
        if not _graph_utils.node_arg_exists(self.base, labels_name):
            self._add_labels(scores_input_name, labels_name)
        loss = self._node("SoftmaxCrossEntropyLoss", inputs, "loss", reduction=self._how,
                          ignore_index=self._ignore_index)  # fmt: skip
        self.base.graph.node[-1].output.append(_graph_utils.generate_graph_name("log_prob"))
        return loss

    def _add_labels(self, scores: str, name: str) -> None:
        """Add an int64 input of class indices, with the shape of the logits without the last axis."""
        labels = copied(_graph_utils.get_output_from_output_name(self.base, scores))
        labels.name, kind = name, labels.type.tensor_type
        kind.elem_type = onnx.TensorProto.INT64
        if not kind.shape.dim:
            raise CompatibilityError(f"the logits '{shown(scores)}' have no axis of classes; name another output")
        del kind.shape.dim[-1]
        self.base.graph.input.append(labels)


class BCEWithLogitsLoss(_Reduced):
    """The binary cross entropy of logits x.

    It is computed as ``−reduce(weight · (pos_weight · target · log σ(x) + (1 − target) · log(1 − σ(x))))``, with the
    logistic function σ.

    Args:
        weight: an array with the weight of each element.
        reduction: "mean" or "sum".
        pos_weight: an array with the weight of targets that are 1.
    """

    def __init__(
        self,
        weight: np.ndarray[Any, Any] | None = None,
        reduction: str = "mean",
        pos_weight: np.ndarray[Any, Any] | None = None,
    ) -> None:
        super().__init__(reduction)
        self._weight, self._pos_weight = weight, pos_weight
        self._sigmoid, self._log, self._neg = blocks.Sigmoid(), blocks.Log(), blocks.Neg()
        self._sub, self._add, self._mul = blocks.Sub(), blocks.Add(), blocks.Mul()

    def build(self, loss_input_name: str, target_name: str = "target") -> Any:
        pos_weight, weight = (
            None if array is None else self._initializer(array, name)
            for array, name in ((self._pos_weight, "bceloss.pos_weight"), (self._weight, "bceloss.weight"))
        )
        ones = [self._number(1.0, "bceloss.sub_ones") for _ in range(2)]
        target_name = self._target(loss_input_name, target_name)
        chance = self._sigmoid(loss_input_name)
        hit = self._mul(self._log(chance), target_name)
        if pos_weight is not None:
            hit = self._mul(hit, pos_weight)
        miss = self._mul(self._log(self._sub(ones[0], chance)), self._sub(ones[1], target_name))
        loss = self._neg(self._add(hit, miss))
        return self._reduce(loss if weight is None else self._mul(weight, loss))
