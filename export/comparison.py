"""Comparison of an exported model with its source: outputs on the same data, operators and size."""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import GradgraphError, shown
from gradgraph.export.artifacts import Path, Weights, opened_trainer
from gradgraph.files.models import Source, load_model, to_proto
from gradgraph.graph.shapes import OPSET
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step
from gradgraph.verify.feeds import Feeds, candidates

__all__ = ["Compared", "ExportReport", "compared", "drawn", "export_report"]

Outputs = Mapping[str, np.ndarray[Any, Any]]
_ROUNDING = 1e-5  # relative to the largest number: rounding of float32 sums in another order
_ROWS = 16  # rows of a random table
_MOST_SHOWN = 6  # operators listed


@dataclass(frozen=True)
class Compared:
    """The comparison of one output of two models on the same data.

    Attributes:
        largest: the largest absolute difference; infinite if shapes differ.
        relative: the same, relative to the largest number in the first model's output.
        same_class: the share of samples whose largest entry is the same; None unless [samples, classes].
    """

    largest: float
    relative: float
    same_class: float | None = None

    def __str__(self) -> str:
        if self.relative <= _ROUNDING:
            return f"is equal up to rounding ({self.relative:.2g} of its largest number)"
        said = f"differs by {self.largest:.2g} at most, {self.relative:.2g} of its largest number"
        return said if self.same_class is None else f"{said}, and has the same class for {self.same_class:.1%}"


@dataclass(frozen=True, repr=False)
class ExportReport:
    """The result of ``export_report``.

    Attributes:
        opset, ir_version: of the exported model.
        operators_before, operators_after: operator counts in the evaluation graph, and in the exported model.
        bytes: of the exported model.
        input_shapes, output_shapes: of the exported model, by name.
        compared: the comparison of each output with the step's evaluation, on a random batch; empty if no random batch
            fits the model.
    """

    opset: int
    ir_version: int
    operators_before: Mapping[str, int]
    operators_after: Mapping[str, int]
    bytes: int
    input_shapes: Mapping[str, list[int | str | None]]
    output_shapes: Mapping[str, list[int | str | None]]
    compared: Mapping[str, Compared]

    @property
    def as_data(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        found = {name: vars(one) for name, one in self.compared.items()}
        return {**vars(self), "compared": found}

    def __str__(self) -> str:
        before, after = (sum(ops.values()) for ops in (self.operators_before, self.operators_after))
        most = sorted(self.operators_after.items(), key=lambda item: (-item[1], item[0]))
        names = [f"{count} {shown(name)}" for name, count in most[:_MOST_SHOWN]]
        more = f" and {len(most) - _MOST_SHOWN} more kinds" if len(most) > _MOST_SHOWN else ""
        said = "; ".join(f"'{shown(name)}' {one}" for name, one in self.compared.items())
        return (
            f"opset {self.opset}, {self.bytes:,} bytes; {after:,} nodes (evaluation graph: {before:,}): "
            f"{', '.join(names)}{more}\n"
            + (f"compared with the evaluation graph, on a random batch: {said}" if said else "no random batch fits it")
        )


def export_report(
    model: Source,
    step: Step | Path,
    checkpoint: Path | None = None,
    *,
    averaged: bool = True,
    weights: Weights | None = None,
) -> ExportReport:
    """Compare an exported model with the step's evaluation, on a random batch.

    Args:
        model: a file, or a model, exported from the step, with the same ``checkpoint``, ``averaged`` and ``weights``;
            in float16 or int8, differences include the rounding.
        step, checkpoint, averaged, weights: as for ``inference_model``.

    Raises:
        ModelError, CheckpointError: as for ``inference_model``.
    """
    trainer = opened_trainer(step, checkpoint, weights, RuntimeOptions(pack_weights=False))  # for a report on each
    return report_of(model, trainer, averaged=averaged)


def report_of(model: Source, trainer: Trainer, *, averaged: bool = True) -> ExportReport:
    """Compare as ``export_report``, with a trainer that has the exported weights."""
    exported = load_model(model)
    after = Predictor(exported, device="cpu", packs=False)
    names = [o.name for o in trainer.definition.eval.graph.output]

    plan = after.names.preprocess
    takes_columns = plan is not None and plan.stands_before(
        {name: len(spec.shape) for name, spec in after.specs.items()}
    )

    def before(feeds: Feeds) -> Outputs:
        given = plan.arrays(feeds) if plan is not None and takes_columns else feeds
        found = trainer.predict(given, averaged=averaged)
        return found if isinstance(found, Mapping) else {name: found for name in after.outputs if name in names}

    last: list[Outputs] = []  # of both on the last batch that runs in both

    def run(feeds: Feeds) -> None:
        last[:] = after(feeds), before(feeds)

    if plan is not None and takes_columns:
        run(plan.drawn(np.random.default_rng(0), after.fixed_rows or _ROWS))
        is_run = True
    else:
        is_run = drawn(exported, run) is not None
    held = compared(lambda _: last[1], lambda _: last[0], [None]) if is_run else {}
    graph = trainer.definition.eval.graph
    return ExportReport(
        opset=exported.opset_imports.get("", OPSET),
        ir_version=exported.ir_version,
        operators_before=dict(Counter(n.op_type for n in graph.node)),
        operators_after=dict(Counter(n.op_type for n in exported.graph)),
        bytes=_bytes(model, exported),
        input_shapes={name: list(spec.shape) for name, spec in after.specs.items()},
        output_shapes={v.name or "": _sizes(v) for v in exported.graph.outputs},
        compared=held,
    )


def _bytes(model: Source, opened: ir.Model) -> int:
    """Return the size of a file, without its external data, or of a model in memory."""
    if isinstance(model, str | os.PathLike):
        return pathlib.Path(model).stat().st_size
    proto = model if isinstance(model, onnx.ModelProto) else to_proto(opened)
    return int(proto.ByteSize())


def _sizes(value: ir.Value) -> list[int | str | None]:
    return [d if isinstance(d, int) else d.value for d in value.shape or ()]


def drawn(model: ir.Model, run: Callable[[Feeds], object] | None = None) -> Feeds | None:
    """Return the first random batch that the model accepts; None if there is none."""
    run = Predictor(model, device="cpu") if run is None else run
    try:
        for feeds in candidates(model.graph, np.random.default_rng(0)):
            try:
                run(feeds)
            except GradgraphError:
                continue
            return feeds
    except GradgraphError:  # an input is too large for random data
        return None
    return None


def compared(
    before: Callable[[Any], Outputs], after: Callable[[Any], Outputs], batches: Iterable[Any]
) -> dict[str, Compared]:
    """Compare the outputs of two models on the same batches, by name, as far as both have them."""
    largest: dict[str, float] = {}
    scale: dict[str, float] = {}
    classes: dict[str, list[np.ndarray[Any, Any]]] = {}
    for batch in batches:
        old, new = before(batch), after(batch)
        for name, a in old.items():
            if (b := new.get(name)) is None or a.dtype.kind not in "fiub":
                continue
            largest[name] = max(largest.get(name, 0.0), _difference(a, b))
            scale[name] = max(scale.get(name, 0.0), float(np.abs(a.astype(np.float64)).max(initial=0.0)))
            if a.ndim == 2 and a.shape[1] > 1 and a.shape == b.shape and a.dtype.kind == "f":
                classes.setdefault(name, []).append(a.argmax(1) == b.argmax(1))
    same = {name: float(np.concatenate(rows).mean()) for name, rows in classes.items()}
    return {name: Compared(far, far / (scale[name] or 1.0), same.get(name)) for name, far in largest.items()}


def _difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    if a.shape != b.shape:
        return float("inf")
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
