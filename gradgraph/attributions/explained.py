"""Attributions for samples: the class that is explained, the attributions by unit, and their sanity checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.attributions.sanity import Checks, check
from gradgraph.attributions.units import Units, joined, units_of
from gradgraph.autodiff.select import target_of
from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.errors import BuildError, UnknownNameError, listed, shown, suggestion
from gradgraph.explaining.explaining_model import explain
from gradgraph.explaining.methods import METHODS
from gradgraph.graph.shapes import as_dims
from gradgraph.runtime.execution.joining import filled
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.runtime.execution.scores import Scores, scores_in
from gradgraph.runtime.execution.session import Device

SUFFIX, ERROR = ".attribution", "completeness.error"
BATCH = 8  # samples at once; methods that average over points need memory for each of them
OF_ALL = ("chunk", "unroll")  # options of explain, besides those of its methods
MOST_TOP = 8  # units of a sample in JSON


@dataclass(frozen=True)
class Sample:
    """A sample with its prediction.

    Attributes:
        index: position in the data, from 0.
        file, text: its file and its text; empty if it has none.
        called: the name of the predicted class; the predicted number for regression.
        target: the name of the class that is explained; empty for an output of one number.
        score: the value of the explained output for this class.
        probability: the probability of this class; None if the scores do not determine it.
        values: the text of each column's value in the data, by name, if the data are a table.
    """

    index: int
    file: str
    text: str
    called: str
    target: str
    score: float
    probability: float | None
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Explained:
    """Samples with attributions to their inputs.

    Attributes:
        method, output: the method, and the output that is explained.
        samples: the samples.
        inputs: the values of the inputs, [samples, …] each.
        attributions: the attributions to the inputs, as the method returns them.
        units, sums: the units of each input with attributions, and the attributions by unit, [samples, units].
        tokens: for each input of tokens, the text of each token of each sample; without padding.
        names: the record of the model's data.
        completeness: the completeness error of each sample; None if the method has none.
        checks: the sanity checks; None if they were skipped.
    """

    method: str
    output: str
    samples: Sequence[Sample]
    inputs: Mapping[str, Array]
    attributions: Mapping[str, Array]
    units: Mapping[str, Units]
    sums: Mapping[str, Array]
    tokens: Mapping[str, Sequence[Sequence[str]]]
    names: DataNames = NO_NAMES
    completeness: Array | None = None
    checks: Checks | None = None

    @property
    def others(self) -> list[str]:
        """Inputs without attributions, such as integers that no embedding reads; masks of texts do not count."""
        return [] if self.names.texts else [name for name in self.inputs if name not in self.units]

    @property
    def warnings(self) -> list[str]:
        """One sentence for each reason not to trust the attributions."""
        if not all(np.isfinite(found).all() for found in self.sums.values()):
            return ["Some attributions are NaN or infinite; check the data, the baseline and the model."]
        return [] if self.checks is None else self.checks.warnings

    def bars(self, name: str, row: int, most: int) -> list[tuple[str, str, float]]:
        """Return the units of an input with the largest attributions: their names, values in the data, attributions."""
        units, values = self.units[name], self.sums[name][row]
        array, known = self.inputs[name][row], self.samples[row].values
        own = [f"{v:.6g}" for v in array.reshape(-1).tolist()] if units.count == array.size else []
        order: list[int] = np.argsort(-np.abs(values), kind="stable")[:most].tolist()
        called = [units.names[i] for i in order]
        return [
            (name, known.get(name, own[i] if own else ""), float(values[i]))
            for i, name in zip(order, called, strict=True)
        ]

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON: predictions, the units with the largest attributions, and the checks."""
        samples = []
        for row, one in enumerate(self.samples):
            facts = {"sample": one.index, "file": one.file, "text": one.text, "predicted": one.called,
                     "target": one.target, "score": one.score, "probability": one.probability}  # fmt: skip
            kept = {name: value for name, value in facts.items() if value not in ("", None)}
            samples.append({**kept, "attributions": {name: self._top(name, row) for name in self.units}})
        found: dict[str, Any] = {"method": self.method, "output": self.output, "samples": samples}
        if self.others:
            found["inputs_without_attributions"] = self.others
        found["warnings"] = self.warnings
        return found if self.checks is None else {**found, "checks": self.checks.as_data()}

    def _top(self, name: str, row: int) -> list[dict[str, Any]]:
        """Return all tokens in order, or the other units with the largest attributions."""
        values = self.sums[name][row].tolist()
        if name in self.tokens:
            return [{"token": t, "attribution": v} for t, v in zip(self.tokens[name][row], values, strict=True) if t]
        if self.units[name].names:
            found = self.bars(name, row, MOST_TOP)
            return [{"name": unit, "value": value, "attribution": v} for unit, value, v in found]
        order = np.argsort(-np.abs(values), kind="stable")[:MOST_TOP]
        return [{"unit": int(i), "attribution": values[i]} for i in order]


class Explainer:
    """A model with the model that explains its predictions.

    Args:
        model: the model.
        method, options: the method of ``gg.explain`` and its options.
        output: the output to explain; by default the first that depends on an input.
        device: where to run both models.

    Raises:
        UnknownNameError: if the model has no such output.
        BuildError: if the output has several scores per class.
    """

    def __init__(
        self, model: ir.Model, method: str, options: Mapping[str, Any], output: str | None, device: Device
    ) -> None:
        explained = target_of(model.graph, output)
        self.model, self.method, self.options = model, method, dict(options)
        self._device: Device = device
        self.output = explained.name or ""
        self.predictor = Predictor(model, [self.output], device)
        if explained.shape is not None and len(explained.shape) > 2:
            raise BuildError(
                f"the output '{shown(self.output)}' of shape {list(as_dims(explained.shape))} has several scores per "
                "class, but one is explained per sample; choose another output, or explain it in Python"
            )
        self.classes: Scores | None = None
        self._explains: Predictor | None = None
        self.target: str | None = None
        self.inputs = list[str]()

    def prepare(self, inputs: Mapping[str, Array]) -> None:
        """Build the explaining model; the samples are the background of a method that needs one.

        Raises:
            BuildError, UnknownNameError, DifferentiationError: as for ``gg.explain``.
            BuildError: if the method attributes to something other than the model's inputs, or samples have several
                texts.
        """
        method = METHODS.named(self.method)
        for name in self.options:
            if name not in (*method.options, *OF_ALL):
                raise BuildError(
                    f"the method {shown(self.method)} has no option '{shown(name)}'{suggestion(name, method.options)}"
                )
        several = [name for name, x in inputs.items() if x.dtype.kind == "i" and x.ndim > 2]
        if several:
            raise BuildError(
                f"the input '{shown(several[0])}' has several texts per sample, which cannot be explained; use a model "
                "that reads one text per sample"
            )
        if "baselines" in method.options and "baselines" not in self.options:
            self.options["baselines"] = {name: x for name, x in inputs.items() if x.dtype.kind == "f"}
        self._explains = made = self._explaining()
        new = [name for name in made.specs if name not in self.predictor.specs]
        self.target = next(iter(new), None)
        self.inputs = [name for name in self.predictor.specs if f"{name}{SUFFIX}" in made.outputs]
        if len(new) > 1 or (self.target is not None and made.specs[self.target].dtype != "int64"):
            raise BuildError(f"the method {self.method} needs {listed(new)} besides the data; explain it in Python")
        if not self.inputs:
            raise BuildError(
                f"the method {shown(self.method)} returns {listed(made.outputs[1:])}, not attributions to the inputs, "
                "so there is nothing to show; explain it in Python"
            )

    def _explaining(self) -> Predictor:
        texts = [name for name in self.predictor.names.texts if name in self.predictor.specs]  # not masks, not types
        made = explain(self.model, self.method, output=self.output, inputs=texts or None, **self.options)
        assert isinstance(made, ir.Model)  # as self.model is
        return Predictor(made, device=self._device)

    def scores(self, inputs: Mapping[str, Array], targets: Array | None) -> Array:
        """Return the probability of each sample's target, or its score if probabilities are unknown: [samples]."""
        found = _run(self.predictor, inputs)[self.output]
        if targets is None or self.classes is None or not self.classes.has_probabilities:
            return _picked(found, targets).astype(np.float64)
        return self.classes.probabilities(found)[np.arange(len(found)), targets].astype(np.float64)

    def attributions(self, inputs: Mapping[str, Array], targets: Array | None, again: bool = False) -> dict[str, Array]:
        """Return the outputs of the explaining model; with ``again``, for the present weights of the model."""
        predictor = self._explaining() if again or self._explains is None else self._explains
        extra = {} if self.target is None or targets is None else {self.target: targets}
        found = _run(predictor, {**inputs, **extra})
        return found | {f"{name}{SUFFIX}": _all_tables(found, f"{name}{SUFFIX}") for name in self.inputs}

    def targets(self, outputs: Mapping[str, Array], asked: str | None) -> Array | None:
        """Return the class to explain for each sample: the one asked for, or the predicted one; None if there is none.

        Raises:
            UnknownNameError: if there is no such class.
            BuildError: if the output has one number per sample, so that there is no class to choose.
        """
        known = scores_in(self.predictor.names, outputs, self.predictor.probable)
        self.classes = next((one for one in known if one.output == self.output), None)
        scores = outputs[self.output]
        if self.target is None:
            if asked is not None:
                raise BuildError(
                    f"the output '{shown(self.output)}' has one number per sample, so there is no class",
                    remedy="omit target",
                    shell="omit --class",
                )
            return None
        names = self.class_names(scores.shape[1])
        if asked is None:
            predicted: Array = np.argmax(scores, axis=1).astype(np.int64)
            return predicted
        if asked not in names and not (asked.isdecimal() and int(asked) < len(names)):
            raise UnknownNameError(f"there is no class '{shown(asked)}'{suggestion(asked, names)}")
        return np.full(len(scores), names.index(asked) if asked in names else int(asked), np.int64)

    def class_names(self, count: int) -> list[str]:
        """Return the names of the classes; their indices if they have no names."""
        return list(self.classes.classes) if self.classes is not None else [str(i) for i in range(count)]


def explain_samples(
    explainer: Explainer,
    inputs: Mapping[str, Array],
    described: Sequence[Mapping[str, Any]],
    *,
    target: str | None = None,
    tokenizer: Any = None,
    checks: bool = True,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Explained:
    """Explain the predictions for samples.

    Args:
        explainer: the model and the method.
        inputs: the values of the model's inputs, [samples, …] each.
        described: ``index``, ``file``, ``text`` and ``values`` of each sample, as for ``Sample``.
        target: name or index of the class to explain; by default each sample's predicted class.
        tokenizer: the tokenizer of the texts, if any.
        checks: whether to run the sanity checks.
        advance: called with the number of finished and of all rounds of the checks.

    Raises:
        UnknownNameError, BuildError, DataError: see ``Explainer`` and ``Units.sums``.
    """
    explainer.prepare(inputs)
    outputs = _run(explainer.predictor, inputs)
    targets = explainer.targets(outputs, target)
    found = explainer.attributions(inputs, targets)
    names, baseline = explainer.predictor.names, explainer.options.get("baseline")
    units = {name: units_of(name, inputs[name], names, _base(baseline, name, inputs[name]), _blank(tokenizer))
             for name in explainer.inputs}  # fmt: skip

    def by_unit(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {name: each.sums(name, outputs[f"{name}{SUFFIX}"]) for name, each in units.items()}

    sums = by_unit(found)
    there = {name: _present(name, inputs, tokenizer) for name, each in units.items() if each.shown == "tokens"}
    tokens = {name: _tokens(inputs[name], mask, tokenizer) for name, mask in there.items()}
    present = joined({name: there.get(name, np.ones(sums[name].shape, bool)) for name in units})
    error = found.get(ERROR)
    checked = None
    if checks:
        checked = check(explainer, inputs, targets, units, present, by_unit, sums, error, advance)
    samples = _samples(explainer, outputs, targets, described)
    own = {name: found[f"{name}{SUFFIX}"] for name in units}
    return Explained(
        explainer.method, explainer.output, samples, inputs, own, units, sums, tokens, names, error, checked
    )


def _samples(
    explainer: Explainer, outputs: Mapping[str, Array], targets: Array | None, described: Iterable[Mapping[str, Any]]
) -> list[Sample]:
    scores, known = outputs[explainer.output], explainer.classes
    picked = _picked(scores, targets)
    names = explainer.class_names(scores.shape[1]) if targets is not None else []
    if known is not None:
        called = [str(name) for name in known.called(scores)]
    else:
        called = [names[i] for i in scores.argmax(1)] if targets is not None else [f"{v:.6g}" for v in picked]
    shares = known.probabilities(scores) if known is not None and known.has_probabilities else None
    explained = targets if targets is not None else np.full(len(picked), 1 if known is not None else -1)
    return [
        Sample(called=called[row], target=str((known.classes if known else names)[i]) if i >= 0 else "",
               score=float(picked[row]), probability=None if shares is None or i < 0 else float(shares[row, i]), **one)
        for row, (one, i) in enumerate(zip(described, explained, strict=True))
    ]  # fmt: skip


def _run(predictor: Predictor, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs for all samples, in batches; a model with a fixed batch size gets padded ones."""
    rows, size = len(next(iter(arrays.values()))), predictor.fixed_rows or BATCH
    parts = []
    for first in range(0, rows, size):
        batch = {name: a[first : first + size] for name, a in arrays.items() if name in predictor.specs}
        whole, count = filled(batch, size if predictor.fixed_rows else 0)
        parts.append({name: np.asarray(a)[:count] for name, a in predictor(whole).items() if np.ndim(a)})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _base(baseline: Any, name: str, x: Array) -> Array:
    """Return the baseline of a sample of the input ``name``, in its shape; 0 by default and for tokens."""
    given = baseline.get(name, 0.0) if isinstance(baseline, Mapping) else 0.0 if baseline is None else baseline
    found = np.asarray(given, np.float64) if x.dtype.kind == "f" else np.zeros(())
    found = found[0] if found.ndim == x.ndim and len(found) == 1 else found
    return np.broadcast_to(found if found.ndim < x.ndim else 0.0, x.shape[1:])


def _all_tables(found: Mapping[str, Array], name: str) -> Array:
    """Return the attributions called ``name``; side by side, if several tables embed the same tokens."""
    parts = [found[name]]
    while (another := f"{name}_{len(parts)}") in found and found[another].shape[:-1] == parts[0].shape[:-1]:
        parts.append(found[another])
    return np.concatenate(parts, axis=-1)


def _picked(scores: Array, targets: Array | None) -> Array:
    found: Array = scores.reshape(len(scores)) if targets is None else scores[np.arange(len(scores)), targets]
    return found


def _blank(tokenizer: Any) -> int:
    """Return the token that replaces a deleted one: the mask token, an unknown token, or padding."""
    if tokenizer is None:
        return 0
    numbers = (tokenizer.number_of(token) for token in ("[MASK]", "<mask>", "[UNK]", "<unk>"))
    return next((number for number in numbers if number is not None), int(tokenizer.pad))


def _present(name: str, inputs: Mapping[str, Array], tokenizer: Any) -> Array:
    """Return which tokens are not padding: bool [samples, tokens]."""
    ids = inputs[name].reshape(len(inputs[name]), -1)
    mask = inputs.get("attention_mask")
    if mask is not None and mask.reshape(len(ids), -1).shape == ids.shape:
        return mask.reshape(ids.shape) > 0
    if tokenizer is None:
        return np.ones(ids.shape, bool)
    own = ids != tokenizer.pad
    if tokenizer.pads_left:
        return np.logical_or.accumulate(own, axis=1)
    found: Array = np.logical_or.accumulate(own[:, ::-1], axis=1)[:, ::-1]
    return found


def _tokens(ids: Array, present: Array, tokenizer: Any) -> list[list[str]]:
    """Return the text of each token; padding is empty text."""
    decode = str if tokenizer is None else lambda number: tokenizer.decode([number])
    rows = ids.reshape(len(ids), -1).tolist()
    return [
        [decode(n) if own else "" for n, own in zip(row, mask, strict=True)]
        for row, mask in zip(rows, present, strict=True)
    ]
