"""Sanity checks of attributions: randomised weights, completeness, deletion and insertion.

Julius Adebayo et al., Sanity Checks for Saliency Maps, arXiv:1810.03292; Vitali Petsiuk et al., RISE, arXiv:1806.07421.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from gradgraph.attributions.units import Units, joined
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.select import trainable
from gradgraph.data.arrays.batch import Array
from gradgraph.passes.normal import normalise

MOST = 8  # samples that are checked
STAGES = 5  # models with random weights: each has a fifth more layers randomised than the one before
POINTS = 10  # steps of the deletion and insertion curves
SEED = 0  # of random weights and of random orders
# Rank correlation above which a picture counts as unchanged. On the CNN of `gradgraph demo`, guided backpropagation,
# which is known to depend little on weights, has 0.71, Grad-CAM 0.38, and all other methods less than 0.13.
SIMILAR = 0.5
INCOMPLETE = 0.05  # share of the change of the score
_STORED = ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT8", "UINT8")

Sums = Mapping[str, Array]


@dataclass(frozen=True)
class Randomised:
    """The rank correlation of attributions with those of the model whose last layers have random weights.

    Attributes:
        layer: the weight of the first randomised layer.
        layers: the number of randomised layers.
        correlation: the mean of Spearman's coefficients of the samples; NaN if attributions are constant.
    """

    layer: str
    layers: int
    correlation: float


@dataclass(frozen=True)
class Curve:
    """The mean score as units are deleted or inserted, by attribution and in random order, and the areas below.

    Attributes:
        by_attribution, at_random: the mean score at 0, 10, …, 100 % of the units.
    """

    by_attribution: Sequence[float]
    at_random: Sequence[float]

    @property
    def areas(self) -> tuple[float, float]:
        """The areas below both curves, between 0 and 1 for probabilities."""
        each = (np.asarray(curve) for curve in (self.by_attribution, self.at_random))
        one, other = (float((c[1:] + c[:-1]).mean() / 2) for c in each)
        return one, other


@dataclass(frozen=True)
class Checks:
    """The results of all checks.

    Attributes:
        samples: the number of checked samples.
        randomised: one result per stage, with more layers each; empty if the model has no weights to randomise.
        curves: "deletion" and "insertion".
        incompleteness: the mean of |completeness error| / |change of the score|; None without a completeness error.
    """

    samples: int
    randomised: Sequence[Randomised]
    curves: Mapping[str, Curve]
    incompleteness: float | None

    @property
    def warnings(self) -> list[str]:
        """One sentence for each check that failed."""
        found = []
        last = self.randomised[-1].correlation if self.randomised else 0.0
        if np.isnan(last):
            found.append("All attributions of a sample are equal, so they explain nothing.")
        if last > SIMILAR:
            found.append(
                f"The attributions hardly depend on the model: with shuffled weights in all layers they would look the "
                f"same (rank correlation {last:.2f})."
            )
        deletion, insertion = (self.curves[name].areas for name in ("deletion", "insertion"))
        if deletion[0] >= deletion[1] and insertion[0] <= insertion[1]:
            found.append(
                "The order of the attributions does not matter to the model: deleting and inserting in a random order "
                "changes the score at least as fast."
            )
        if self.incompleteness is not None and not self.incompleteness <= INCOMPLETE:
            found.append(
                f"The attributions miss {self.incompleteness:.0%} of the change of the score from the baseline; "
                "increase the number of points (n)."
            )
        return found

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        curves = {
            name: {**asdict(curve), "area": curve.areas[0], "area_at_random": curve.areas[1]}
            for name, curve in self.curves.items()
        }
        return {"samples": self.samples, "randomised": [asdict(one) for one in self.randomised], **curves,
                "incompleteness": self.incompleteness}  # fmt: skip


class _Explainer(Protocol):
    model: ir.Model

    def scores(self, inputs: Mapping[str, Array], targets: Array | None) -> Array: ...

    def attributions(
        self, inputs: Mapping[str, Array], targets: Array | None, again: bool = False
    ) -> dict[str, Array]: ...


def check(
    explainer: _Explainer,
    inputs: Mapping[str, Array],
    targets: Array | None,
    units: Mapping[str, Units],
    present: Array,
    by_unit: Callable[[Mapping[str, Array]], Sums],
    sums: Sums,
    error: Array | None,
    advance: Callable[[int, int], None],
) -> Checks:
    """Run all checks on the first ``MOST`` samples.

    Args:
        explainer: computes scores, and attributions again after its model's weights have changed.
        inputs, targets: the samples, and their explained classes.
        units: the units of the inputs.
        present: the units that are not padding, of all inputs side by side: bool [samples, units].
        by_unit: returns the attributions by unit from the outputs of the explaining model.
        sums: the attributions by unit.
        error: the completeness error of each sample, if any.
        advance: called with the number of finished and of all rounds.
    """
    few, own = {name: x[:MOST] for name, x in inputs.items()}, None if targets is None else targets[:MOST]
    values, here = joined(sums)[:MOST], present[:MOST]
    rounds = STAGES + 4

    def curve(ranking: Array, inserts: bool) -> list[float]:
        """Return the mean score as units are deleted, or inserted, from the largest ``ranking`` to the least."""
        order = np.argsort(-np.where(here, ranking, -np.inf), axis=1, kind="stable")
        place = np.argsort(order, axis=1, kind="stable")  # of each unit in the order
        means = []
        for step in range(POINTS + 1):
            taken = place < np.round(here.sum(axis=1) * step / POINTS)[:, None]
            gone, first, changed = (~taken if inserts else taken) & here, 0, dict(few)
            for name, each in units.items():
                changed[name] = each.deleted(few[name], gone[:, first : first + each.count])
                first += each.count
            means.append(float(explainer.scores(changed, own).mean()))
        return means

    found = []
    for i, (layer, layers) in enumerate(random_weights(explainer.model, np.random.default_rng(SEED))):
        other = joined(by_unit(explainer.attributions(few, own, again=True)))
        found.append(Randomised(layer, layers, _similarity(values, other, here)))
        advance(i + 1, rounds)
    orders = {"by_attribution": values, "at_random": np.random.default_rng(SEED).random(values.shape)}
    curves, done = {}, STAGES
    for kind in ("deletion", "insertion"):
        drawn = {}
        for name, ranking in orders.items():
            drawn[name] = curve(ranking, kind == "insertion")
            advance(done := done + 1, rounds)
        curves[kind] = Curve(**drawn)
    return Checks(len(values), found, curves, None if error is None else _incompleteness(joined(sums), error))


def _incompleteness(values: Array, error: Array) -> float:
    change = np.abs(values.sum(axis=1) - error).mean()
    return float(np.abs(error).mean() / change) if change else 0.0


def random_weights(model: ir.Model, generator: np.random.Generator) -> Iterator[tuple[str, int]]:
    """Shuffle the weights of the last layers, of more layers each time; yield the first of them and their number.

    Layers are the weights of :func:`weights_of`. They are restored at the end, also if the caller stops early or raises
    an exception.
    """
    layers = weights_of(model)
    kept = {value: value.const_value for value in layers}
    stages = sorted({-(-len(layers) * (i + 1) // STAGES) for i in range(STAGES)} - {0})
    with contextlib.ExitStack() as stack:
        stack.callback(_restore, kept)
        done = 0
        for count in stages:
            for value in reversed(layers[len(layers) - count : len(layers) - done]):
                tensor = kept[value]
                assert tensor is not None
                array = tensor.numpy()
                shuffled = generator.permutation(array.reshape(-1)).reshape(array.shape)
                value.const_value = ir.Tensor(shuffled, dtype=tensor.dtype, name=value.name)
            done = count
            yield layers[-count].name or "", count


def _restore(kept: Mapping[ir.Value, ir.TensorProtocol | None]) -> None:
    for value, tensor in kept.items():
        value.const_value = tensor


def weights_of(model: ir.Model) -> list[ir.Value]:
    """Return the weights of at least two axes, in the order in which they are read; not constants of formulas."""
    work = normalise(model)
    learned = {value.name for value in trainable(work.graph, work.graph.outputs)}
    fixed = {value.name for value in work.graph.initializers.values() if carries(value)} - learned
    found: dict[ir.Value, None] = {}
    for node in model.graph:
        for value in node.inputs:
            tensor = None if value is None or not value.is_initializer() else value.const_value
            if value is not None and tensor is not None and len(tensor.shape) > 1 and tensor.dtype.name in _STORED:
                found[value] = None
    return [value for value in found if value.name not in fixed]


def _similarity(values: Array, others: Array, present: Array) -> float:
    """Return the mean over samples of Spearman's rank correlation of the units that are present; NaN if undefined."""
    rows = [(a[own], b[own]) for a, b, own in zip(values, others, present, strict=True) if own.any()]
    found = [spearman(a, b) for a, b in rows]
    known = [one for one in found if not np.isnan(one)]
    constant = all(np.ptp(a) == 0 for a, _ in rows)
    return float("nan") if constant else float(np.mean(known)) if known else 0.0


def spearman(a: Array, b: Array) -> float:
    """Return Spearman's rank correlation; ties have their mean rank. NaN if all values of a vector are equal."""
    one, other = (_ranks(values) for values in (a, b))
    one, other = one - one.mean(), other - other.mean()
    scale = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float((one * other).sum()) / scale if scale else float("nan")


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - (counts - 1) / 2)[inverse.reshape(-1)]
    return ranks
