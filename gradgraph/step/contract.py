"""Checks of a manifest against the models of its step: every name, element type and shape that it declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx

from gradgraph.data.record.specs import TensorSpec, dtype_name
from gradgraph.errors import ModelError, shown
from gradgraph.graph.shapes import clash, shape_of_type
from gradgraph.step.manifest import Manifest, StateSpec, train_file


def check_against_graphs(
    manifest: Manifest, trains: Mapping[str, onnx.ModelProto], init: onnx.ModelProto, eval_: onnx.ModelProto
) -> None:
    """Check every name, dtype and shape of a manifest, which may be forged or outdated, against the graphs.

    ``trains`` are the train graphs of the manifest's ``parts`` by name; ``init`` and ``eval_`` are init.onnx and
    eval.onnx.

    Raises:
        ModelError: if a graph lacks an input or output that the manifest declares, has undeclared ones, or differs in
            an element type or shape.
    """
    batch: dict[str, TensorSpec] = {s.name: s for s in manifest.batch}
    state = {s.name: s for s in manifest.state}
    results: dict[str, TensorSpec | None] = {}
    if trains.keys() != manifest.parts.keys():
        raise ModelError("the steps named in the manifest differ from the train graphs; build the step again")
    for step, part in manifest.parts.items():
        file = train_file(step)
        fed = {name: batch[name] for name in part.inputs} | {name: state[name] for name in part.reads}
        mine: dict[str, TensorSpec | None] = dict.fromkeys([part.loss_output, *part.metrics])
        mine |= {m.sums: TensorSpec(m.sums, "float32", m.shape) for m in part.trained_measures}
        results |= mine
        results |= {m.sums: TensorSpec(m.sums, "float32", (None, *m.shape)) for m in part.measures if m.rows}
        _check_values(file, "input", trains[step].graph.input, fed | _scalars(part.hyperparameters), exact=True)
        given = mine | _scalars(part.reports) | _next_values(state, part.writes)
        _check_values(file, "output", trains[step].graph.output, given)
    _check_values("init.onnx", "input", init.graph.input, {}, exact=True)
    _check_values("init.onnx", "output", init.graph.output, {s.name: s for s in manifest.state}, exact=True)
    known = {v.name: batch.get(v.name) or state.get(v.name) for v in eval_.graph.input}
    for name, spec in known.items():
        if spec is None:
            raise ModelError(
                f"eval.onnx has the input '{shown(name)}', which the manifest does not list; build the step again"
            )
    _check_values("eval.onnx", "input", eval_.graph.input, known)
    _check_values("eval.onnx", "output", eval_.graph.output, results | dict.fromkeys(manifest.outputs))


def check_halves(manifest: Manifest, halves: Mapping[str, onnx.ModelProto]) -> None:
    """Check gradient.onnx and apply.onnx (``halves``) against the manifest; a step has both or neither.

    Raises:
        ModelError: if they do not match the manifest.
    """
    spec = manifest.separate
    if set(halves) != (set() if spec is None else {"gradient", "apply"}):
        raise ModelError("gradient.onnx and apply.onnx do not match the manifest; build the step again")
    if spec is None:
        return
    state = {s.name: s for s in manifest.state}
    if stray := [n for n in spec.gradients if n not in manifest.trainable]:
        raise ModelError(
            f"the manifest has a gradient of '{shown(stray[0])}', which is not trainable; build the step again"
        )
    gradients: dict[str, TensorSpec | None] = dict.fromkeys(spec.gradients.values())
    weight = _scalars([spec.weight] if spec.weight else [])
    batch = {s.name: s for s in manifest.batch}
    results = dict.fromkeys([manifest.loss_output, *manifest.metrics, *(m.sums for m in manifest.trained_measures)])
    for name, half, fed, given in (
        ("gradient", spec.gradient, batch, {**results, **gradients, **weight}),
        ("apply", spec.apply, gradients, dict.fromkeys(manifest.reports)),
    ):
        for unknown in (n for n in (*half.reads, *half.writes) if n not in state):
            raise ModelError(f"{name}.onnx has no state '{shown(unknown)}' to update; build the step again")
        taken = {**fed, **_scalars(half.hyperparameters), **{n: state[n] for n in half.reads}}
        given |= _next_values(state, half.writes)
        _check_values(f"{name}.onnx", "input", halves[name].graph.input, taken, exact=True)
        _check_values(f"{name}.onnx", "output", halves[name].graph.output, given, exact=True)


def _scalars(names: Iterable[str]) -> dict[str, TensorSpec | None]:
    return {name: TensorSpec(name, "float32", ()) for name in names}


def _next_values(state: Mapping[str, StateSpec], names: Iterable[str]) -> dict[str, TensorSpec | None]:
    """Return the specs of the ``next`` outputs (updated values) of state tensors, by output name."""
    return {s.next: TensorSpec(s.next, s.dtype, s.shape) for s in (state[name] for name in names)}


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
        shape = shape_of_type(found[name].type)
        if shape is not None and (len(shape) != len(spec.shape) or clash(shape, spec.shape)):
            raise ModelError(
                f"the {what} '{shown(name)}' of {file} has a different shape from the manifest's {list(spec.shape)}; "
                "build the step again"
            )
