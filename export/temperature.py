"""Temperature scaling: calibration of a classifier's probabilities by dividing its logits by one number.

The method is that of Guo et al., "On Calibration of Modern Neural Networks" (2017), section 4.2.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.building.outputs import output_of
from gradgraph.data.arrays.batch import Array, on_host
from gradgraph.data.record.column_assignment import MASK, SAMPLE_WEIGHT
from gradgraph.data.record.specs import TargetSpec
from gradgraph.errors import DataError, ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.models import save_model, to_proto
from gradgraph.files.suffixes import check_suffix
from gradgraph.graph.nodes import made_by
from gradgraph.losses import LOSSES
from gradgraph.passes.normal import load_runnable
from gradgraph.runtime.execution.exported import plain
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.finishes import calibration

BINS = 15  # bins of the expected calibration error, as in the metric ece
LEAST, MOST = 0.01, 100.0  # range of temperatures that is searched
TINY = 1e-38  # probabilities are clamped to this before their logarithm


@dataclass(frozen=True, eq=False)
class Temperature:
    """The temperature and its effect, as in ``Calibration``."""

    temperature: float
    nll: tuple[float, float]
    ece: tuple[float, float]
    labels: int

    def __str__(self) -> str:
        nll, ece = (f"{before:.4g} -> {after:.4g}" for before, after in (self.nll, self.ece))
        return f"temperature {self.temperature:.4g}: NLL {nll}, ECE {ece} ({self.labels:,} labels)"

    @property
    def as_data(self) -> dict[str, Any]:
        """The attributes as plain data for JSON."""
        return {"temperature": self.temperature, "nll": self.nll, "ece": self.ece, "labels": self.labels}


@dataclass(frozen=True, eq=False)
class Calibration(Temperature):
    """The result of ``Trainer.calibrate``: a temperature, its effect on the data, and the model. ``str()`` is one line.

    Attributes:
        temperature: the divisor of the logits; above 1 if the model was overconfident.
        nll: the mean negative log-likelihood of the labels before and after.
        ece: the expected calibration error before and after (the metric ``ece``).
        labels: the number of labels that are not ignored.
        model: the exported model, which divides its logits by the temperature.
    """

    model: onnx.ModelProto = field(repr=False)

    def export(self, path: str | os.PathLike[str]) -> onnx.ModelProto:
        """Write the model to a file and return it.

        Raises:
            OutputError: if ``path`` cannot be written, or has the suffix of another format.
        """
        check_suffix(path, ".onnx")
        save_model(self.model, path)
        return self.model


def calibrate(
    trainer: Trainer, data: Any, batch_size: int | None = None, *, output: str | None = None, averaged: bool = True
) -> Calibration:
    """Return the temperature that maximises the likelihood of the labels of ``data``, and the calibrated model.

    Predicted classes do not change, only their probabilities. Masks, ignored labels and sample weights are applied. The
    trainer does not change.

    Args:
        trainer: the trainer of a step with a single loss, on class indices or on binary targets.
        data: held-out data, as for ``Trainer.evaluate``; on its training data, a model is overconfident.
        batch_size: the number of samples per run.
        output: the output that the loss reads; by default the first output.
        averaged: as for ``Trainer.evaluate``.

    Raises:
        DataError: if the data do not match the step, or all labels are ignored.
        ModelError: if the loss has a different kind of target, or the logits of an output of probabilities are unknown.
        UnknownNameError: if the model has no output of that name.
    """
    found, served = temperature_of(trainer, data, batch_size, output=output, averaged=averaged)
    model = trainer.exported(averaged=averaged, preprocess=True)
    put_temperature(model, found.temperature, served)
    return Calibration(**vars(found), model=to_proto(plain(model)))


def temperature_of(
    trainer: Trainer, data: Any, batch_size: int | None = None, *, output: str | None = None, averaged: bool = True
) -> tuple[Temperature, str]:
    """Return the temperature that ``calibrate`` finds, and the name of the exported model's output to scale by it.

    No weights are copied.

    Raises:
        DataError, ModelError, UnknownNameError: as for ``calibrate``.
    """
    m = trainer.manifest
    if len(m.parts) > 1 or not m.targets or not _fits(m.targets[0], m.loss.get("name", "")):
        raise ModelError(
            "calibration requires a step with a single loss on class indices or on binary targets, such as "
            "cross_entropy or bce_with_logits, but this step has a different loss"
        )
    name = output or m.outputs[0]
    if name not in m.outputs:
        raise UnknownNameError(f"the model has no output '{shown(name)}'{suggestion(name, m.outputs)}")
    bare, whole = (trainer.exported(averaged=averaged, preprocess=behind).graph for behind in (False, True))
    end = output_of(bare, name)
    served = whole.outputs[list(bare.outputs).index(end)].name or ""  # differs if a column of a table has that name
    found = probabilities(end)
    rows = list(_rows(trainer, data, batch_size, name, averaged, found is not None))
    logits, hits, weights = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    if not weights.sum() > 0:
        raise DataError("all labels of these data are ignored, so there is no temperature; use other data")
    if not np.isfinite(logits[weights > 0]).all():
        raise DataError(
            "the model returns NaN or infinity for some of these data; find the samples with trainer.worst(data)"
        )
    scores = _Scores(logits[weights > 0], hits[weights > 0], weights[weights > 0])
    temperature = scores.best()
    nll, ece = ((measure(1.0), measure(temperature)) for measure in (scores.nll, scores.ece))
    return Temperature(temperature, nll, ece, len(scores.hits)), served


def _fits(target: TargetSpec, loss: str) -> bool:
    return target.dtype == "int64" or (loss in LOSSES and LOSSES.by_name(loss).binary)


# --- predictions of a model -----------------------------------------------------------------------------------


def _rows(
    trainer: Trainer, data: Any, batch_size: int | None, output: str, averaged: bool, probable: bool
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield for each batch the logits [labels, classes], the true classes [labels], and their weights [labels].

    The two classes of a binary target have the logits 0 and the model's score.
    """
    m = trainer.manifest
    target, arguments = m.targets[0], m.loss.get("arguments", {})
    for batch in trainer.prepare(data, batch_size, shuffle=False).batches(0):
        fed = {name: on_host(feed) for name, feed in dict(batch).items()}
        given = trainer.predict({s.name: fed[s.name] for s in m.inputs}, len(fed[target.name]), averaged=averaged)
        scores = np.asarray(given[output] if isinstance(given, dict) else given, np.float64)
        labels, weights = fed[target.name], np.ones(fed[target.name].shape)
        if target.dtype == "int64":
            axis = 0 if scores.ndim == 1 else arguments.get("axis", 1)
            scores = np.moveaxis(scores, axis, -1)
            scores = np.log(np.maximum(scores, TINY)) if probable else scores
            weights[labels == (-100 if target.ignore_index is None else target.ignore_index)] = 0
        else:
            odds = scores if not probable else np.log(np.maximum(scores, TINY)) - np.log(np.maximum(1 - scores, TINY))
            scores, labels = np.stack([np.zeros_like(odds), odds], -1), labels > 0.5
        for factor in (fed[name] for name in (SAMPLE_WEIGHT, MASK) if name in fed):
            weights *= np.reshape(factor, factor.shape + (1,) * (weights.ndim - factor.ndim))
        flat = labels.ravel().astype(np.int64)
        yield scores.reshape(-1, scores.shape[-1]), np.where(weights.ravel() > 0, flat, 0), weights.ravel()


class _Scores(NamedTuple):
    """Logits [labels, classes], true classes [labels], and weights of the labels [labels]."""

    logits: Array
    hits: Array
    weights: Array

    def _shares(self, temperature: float) -> tuple[Array, Array]:
        """Return the logits divided by the temperature, shifted to a maximum of 0 in each row, and their Softmax."""
        scaled = self.logits / temperature
        scaled -= scaled.max(1, keepdims=True)
        p = np.exp(scaled)
        return scaled, p / p.sum(1, keepdims=True)

    def _true(self, values: Array) -> Array:
        return np.take_along_axis(values, self.hits[:, None], 1)[:, 0]

    def nll(self, temperature: float) -> float:
        scaled = self._shares(temperature)[0]
        losses = np.log(np.exp(scaled).sum(1)) - self._true(scaled)
        return float(np.average(losses, weights=self.weights))

    def ece(self, temperature: float) -> float:
        p = self._shares(temperature)[1]
        sure, right = p.max(1), self.logits.argmax(1) == self.hits
        bins = np.clip(np.ceil(sure * BINS) - 1, 0, BINS - 1).astype(int)
        sums = [np.bincount(bins, weights=self.weights * x, minlength=BINS) for x in (np.ones(len(p)), sure, right)]
        return float(calibration(np.stack(sums)))

    def _slope(self, temperature: float) -> float:
        """Return the derivative of the NLL with respect to ``1 / temperature``, which is monotonic: the mean of
        ``Σ p·z − z[true]`` over labels, with logits z and probabilities p.
        """
        p = self._shares(temperature)[1]
        return float(np.average((p * self.logits).sum(1) - self._true(self.logits), weights=self.weights))

    def best(self) -> float:
        """Return the temperature at the unique minimum of the NLL, found by bisection of its logarithm."""
        low, high = math.log(LEAST), math.log(MOST)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._slope(math.exp(middle)) > 0 else (low, middle)
        return math.exp((low + high) / 2)


# --- division of the logits ----------------------------------------------------------------------------------


def with_temperature(model: onnx.ModelProto, temperature: float, output: str | None = None) -> onnx.ModelProto:
    """Return a copy of an inference model with a Div node that divides its logits by ``temperature``.

    Args:
        model: an inference model.
        temperature: the divisor, positive.
        output: the name of the output with the logits, or with their Softmax, LogSoftmax or Sigmoid; by default the
            first output.

    Raises:
        ModelError: if the output is probabilities whose logits cannot be found.
    """
    changed = load_runnable(model)
    put_temperature(changed, temperature, output)
    return to_proto(changed)


def put_temperature(model: ir.Model, temperature: float, output: str | None = None) -> None:
    """Divide the logits of ``model`` by ``temperature``, as ``with_temperature`` does, in place."""
    graph = model.graph
    end = graph.outputs[0] if output is None else output_of(graph, output)
    logits = _logits_of(end)
    divisor = ir.Value(name=_free(graph, "temperature"), const_value=ir.tensor(
        np.array(temperature, np.float32).astype(logits.dtype.numpy() if logits.dtype else np.float32)))  # fmt: skip
    divisor.const_value.name = divisor.name  # type: ignore[union-attr]
    graph.register_initializer(divisor)
    node = ir.node("Div", [logits, divisor], name=_free(graph, "temperature/Div"))
    made = node.outputs[0]
    made.shape, made.type = logits.shape, logits.type
    is_output = logits.is_graph_output()
    logits.replace_all_uses_with(made, replace_graph_outputs=True)
    node.replace_input_with(0, logits)
    before = logits.producer()
    if before is None:
        graph.insert_before(graph[0], node)
    else:
        graph.insert_after(before, node)
    if is_output:
        made.name, logits.name = logits.name, _free(graph, f"{logits.name}/before_temperature")


def _logits_of(end: ir.Value) -> ir.Value:
    node = made_by(end, "LogSoftmax")
    if node is not None and node.inputs[0] is not None:
        return node.inputs[0]
    found = probabilities(end)
    if found is None:
        return end
    if found.logits is None:
        raise ModelError(
            f"the output '{shown(end.name)}' contains probabilities whose logits cannot be found in the model; export "
            "the model with its logits as an output, and calibrate that output"
        )
    return found.logits


def _free(graph: ir.Graph, base: str) -> str:
    taken = {v.name for node in graph for v in node.outputs} | graph.initializers.keys()
    taken |= {v.name for v in graph.inputs}
    names: Iterator[str] = (base if i == 0 else f"{base}_{i}" for i in range(len(taken) + 1))
    is_free: Callable[[str], bool] = lambda name: name not in taken  # noqa: E731
    return next(filter(is_free, names))
