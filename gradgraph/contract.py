"""Manifest against graphs: every name, element type and shape that a manifest gives is looked up in the models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from gradgraph.errors import ModelError, shown
from gradgraph.manifest import Manifest, TensorSpec, dtype_name
from gradgraph.shapes import clash


def check_against_graphs(
    manifest: Manifest, train: onnx.ModelProto, init: onnx.ModelProto, eval_: onnx.ModelProto
) -> None:
    """A forged or stale manifest must not steer a run: every name, dtype and shape is looked up in the graphs."""
    fed: dict[str, TensorSpec] = {s.name: s for s in (*manifest.inputs, *manifest.targets, *manifest.state)}
    scalars = {name: TensorSpec(name, "float32", ()) for name in manifest.hyperparameters}
    next_of = {s.next: TensorSpec(s.next, s.dtype, s.shape) for s in manifest.state}
    results: dict[str, TensorSpec | None] = dict.fromkeys([manifest.loss_output, *manifest.metrics])
    results |= {m.sums: TensorSpec(m.sums, "float32", m.shape) for m in manifest.measures}

    _check_values("train.onnx", "input", train.graph.input, fed | scalars, exact=True)
    reports = {name: TensorSpec(name, "float32", ()) for name in manifest.reports}
    _check_values("train.onnx", "output", train.graph.output, results | reports | next_of)
    _check_values("init.onnx", "input", init.graph.input, {}, exact=True)
    _check_values("init.onnx", "output", init.graph.output, {s.name: s for s in manifest.state}, exact=True)
    known = {v.name: fed.get(v.name) for v in eval_.graph.input}
    for name, spec in known.items():
        if spec is None:
            raise ModelError(
                f"eval.onnx has the input '{shown(name)}', which the manifest does not list; build the step again"
            )
    _check_values("eval.onnx", "input", eval_.graph.input, known)
    _check_values("eval.onnx", "output", eval_.graph.output, results | dict.fromkeys(manifest.outputs))


def _check_values(
    file: str, what: str, values: Any, expected: Mapping[str, TensorSpec | None], exact: bool = False
) -> None:
    found = {v.name: v for v in values}
    for name in expected:
        if name not in found:
            raise ModelError(f"{file} has no {what} '{shown(name)}', which the manifest lists; build the step again")
    if exact:
        for name in found:
            if name not in expected:
                raise ModelError(
                    f"{file} has the {what} '{shown(name)}', which the manifest does not list; build the step again"
                )
    for name, spec in expected.items():
        tensor = found[name].type.tensor_type
        if spec is None:
            continue
        if dtype_name(tensor.elem_type) != spec.dtype:
            raise ModelError(
                f"the {what} '{shown(name)}' of {file} is {dtype_name(tensor.elem_type)}, but the manifest says "
                f"{spec.dtype}; build the step again"
            )
        if tensor.HasField("shape") and not _compatible(tensor.shape, spec.shape):
            raise ModelError(
                f"the {what} '{shown(name)}' of {file} has another shape than the manifest's {list(spec.shape)}; "
                "build the step again"
            )


def _compatible(shape: onnx.TensorShapeProto, spec: tuple[int | str | None, ...]) -> bool:
    """Same rank, and no two numbers that differ (a named dimension may stand for any number)."""
    dims = [d.dim_value if d.HasField("dim_value") else None for d in shape.dim]
    return len(dims) == len(spec) and not clash(dims, spec)
