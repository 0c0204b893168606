"""Comparison of an exported model with its step: outputs on the same data, operators and size."""

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
_ROUNDING = 1e-5  # a difference, relative to the largest number, that rounding of float32 sums can cause
_ROWS = 16  # rows of a random table
_MOST_SHOWN = 6  # operators listed


@dataclass(frozen=True)
class Compared:
    """The difference of one output between two models on the same data.

    Attributes:
        largest: the largest absolute difference; infinite if shapes differ.
        relative: the largest absolute difference over the largest absolute number in the first model's output.
        same_class: for an output [samples, classes], the share of samples with the same predicted class; else None.
    """

    largest: float
    relative: float
    same_class: float | None = None

    def __str__(self) -> str:
        if self.relative <= _ROUNDING:
            return f"is equal up to rounding (relative difference {self.relative:.2g})"
        said = f"differs by at most {self.largest:.2g} (relative difference {self.relative:.2g})"
        return said if self.same_class is None else f"{said}, and has the same class for {self.same_class:.1%}"


@dataclass(frozen=True, repr=False)
class ExportReport:
    """The result of ``export_report``.

    Attributes:
        opset, ir_version: the opset and IR version of the exported model.
        operators_before, operators_after: the number of nodes by operator in eval.onnx and in the exported model.
        bytes: the size of the exported model in bytes, without external data.
        input_shapes, output_shapes: the shapes of the exported model's inputs and outputs, by name.
        compared: the comparison of each output with the output of eval.onnx on a random batch, by name; empty if the
            model accepts no random batch.
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
        """The report as plain data for JSON."""
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
            + (
                f"compared with the evaluation graph, on a random batch: {said}"
                if said
                else "not compared with the evaluation graph, as the model accepts no random batch"
            )
        )


def export_report(
    model: Source,
    step: Step | Path,
    checkpoint: Path | None = None,
    *,
    averaged: bool = True,
    weights: Weights | None = None,
) -> ExportReport:
    """Return a report that compares an exported model with eval.onnx of its step, on a random batch.

    Args:
        model: the exported model, or its file. It must have been exported with the same ``checkpoint``, ``averaged``
            and ``weights``. For float16 or int8, differences include the rounding of weights.
        step, checkpoint, averaged, weights: as for ``inference_model``.

    Raises:
        ModelError, CheckpointError: as for ``inference_model``.
    """
    trainer = opened_trainer(step, checkpoint, weights, RuntimeOptions(pack_weights=False))  # runs only one batch
    return report_of(model, trainer, averaged=averaged)


def report_of(model: Source, trainer: Trainer, *, averaged: bool = True) -> ExportReport:
    """Return the report of ``export_report`` for a model exported from ``trainer``."""
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

    last: list[Outputs] = []  # the outputs of both models on the last batch that both accepted

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
        output_shapes={
            v.name or "": [d if isinstance(d, int) else d.value for d in v.shape or ()] for v in exported.graph.outputs
        },
        compared=held,
    )


def _bytes(model: Source, opened: ir.Model) -> int:
    """Return the size in bytes of a model file, without its external data, or of a model in memory."""
    if isinstance(model, str | os.PathLike):
        return pathlib.Path(model).stat().st_size
    proto = model if isinstance(model, onnx.ModelProto) else to_proto(opened)
    return int(proto.ByteSize())


def drawn(model: ir.Model, run: Callable[[Feeds], object] | None = None) -> Feeds | None:
    """Return the first random batch that ``run`` accepts; None if there is none, or an input is too large.

    Args:
        model: the model.
        run: a function that is called with a batch, and raises GradgraphError to reject it; by default, it runs the
            model.
    """
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
    """Return the comparison of each numeric output that two models have in common, by name.

    Args:
        before, after: functions that return the outputs of each model for a batch.
        batches: the batches.
    """
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
