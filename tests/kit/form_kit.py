"""Checks that each form of a lowering table computes the same numbers as the portable form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.autodiff.append import append_vjp
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import lower
from gradgraph.backends.forms import Form
from gradgraph.backends.functions import write_inline
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_operators import CONTRIB, kernel
from gradgraph.files.models import to_proto
from gradgraph.graph.builder import Builder
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.passes.normal import normalise
from gradgraph.rules.named_operators import DOMAIN, OPERATORS, operator_of
from gradgraph.rules.registry import RULES, Case, Draw, Rule, key_of
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle

Feeds = dict[str, np.ndarray]


def problems_of_form(backend: Backend, form: Form) -> list[str]:
    """Return the problems of one form, one sentence each; a form must be applicable to at least one of its cases."""
    own = OPERATORS[form.op_type].cases if form.domain == DOMAIN else ()
    found, served = [], 0
    for i, case in enumerate((*form.cases, *own)):
        for unknown in (False, True):
            model, feeds = one_call(form.domain, form.op_type, case, unknown)
            lowered = lowered_with(model, backend, form)
            if lowered is not None:
                served += 1
                found += [f"{form.name}, case {i}: {s}" for s in differences(portable(model), lowered, feeds)]
    return found or ([] if served else [f"{form.name} serves none of its cases"])


def differences(reference: onnx.ModelProto, lowered: onnx.ModelProto, feeds: Feeds) -> list[str]:
    """Return one sentence for each output of two models that differs in onnxruntime by more than float32 rounding.

    A model with native kernels requires the compiled library.
    """
    rows = zip(reference.graph.output, _run(reference, feeds), _run(lowered, feeds), strict=True)
    return [f"{y.name} is {b}, not {a}" for y, a, b in rows if not _close(a, b)]


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=1.0)) if a.dtype.kind == "f" else 1.0
    return bool(np.allclose(a, b, rtol=2e-5, atol=2e-5 * scale, equal_nan=True))


def _run(model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    if any(imported.domain == library.DOMAIN for imported in model.opset_import):
        library.here().add_to(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {v.name for v in session.get_inputs()}
    return list(session.run(None, {k: v for k, v in feeds.items() if k in wanted}))


def _runs(model: onnx.ModelProto, feeds: Feeds) -> bool:
    try:
        _run(model, feeds)
    except Exception as error:
        if any(word in str(error) for word in ("NOT_IMPLEMENTED", "Type Error", "does not support double")):
            return False
        raise
    return True


# --- models -----------------------------------------------------------------------------------------------


def portable(model: ir.Model) -> onnx.ModelProto:
    return to_proto(write_inline(model.clone()))


def lowered_with(model: ir.Model, backend: Backend, form: Form) -> onnx.ModelProto | None:
    """Return ``model`` lowered with ``form`` wherever it is applicable; None if it is applicable nowhere."""
    key = (form.domain, form.op_type)
    served: list[bool] = []

    def write(op: Builder, *inputs: Any, **attrs: Any) -> Any:
        written = form.write(op, *inputs, **attrs)
        served.append(written is not None)
        return written

    watched = replace(form, write=write)
    work = lower(model.clone(), backend, lambda call, _: [watched] if key_of(call.node) == key else [])
    return to_proto(work) if any(served) else None


def one_call(domain: str, op_type: str, case: Case, unknown: bool) -> tuple[ir.Model, Feeds]:
    """Return the model of a case and its feeds: one node with literals as initializers, or the case's graph.

    For a named operator, that graph computes what it is the gradient of.
    """
    if case.graph and domain == DOMAIN:
        trial, gradient = gradient_of(RULES["", "Identity"], case, unknown=unknown)  # a rule in name only
        return gradient, trial.feeds | _cotangents(trial, gradient, np.float32)
    if case.graph:
        trial = cases.trial(RULES[domain, op_type], case, unknown=unknown, dtype=np.float32)
        return normalise(trial.model, parameters=trial.wrt), trial.feeds
    rng = np.random.default_rng(0)
    op = Builder(named_operators=True)
    feeds: Feeds = {}
    inputs: list[ir.Value] = []
    operands: list[Any] = []
    for i, spec in enumerate(case.inputs):
        if not isinstance(spec, Draw):
            operands.append(None if spec is None else op.const(np.asarray(spec)))
            continue
        array = cases.draw(spec, rng)
        feeds[f"x{i}"] = np.asarray(array, np.float32) if array.dtype.kind == "f" else array
        dims = [f"x{i}_{axis}" for axis in range(array.ndim)] if unknown else array.shape
        dtype = ir.DataType.from_numpy(feeds[f"x{i}"].dtype)
        inputs.append(ir.Value(name=f"x{i}", type=ir.TensorType(dtype), shape=ir.Shape(dims)))
        operands.append(op.wrap(inputs[-1]))
    if domain == DOMAIN:
        results = OPERATORS[op_type].call(op, *operands, **case.attrs)
    elif domain == CONTRIB:
        results = kernel(op, op_type, domain, operands, None, **case.attrs)
    else:
        results = op.emit(op_type, *operands, domain=domain, outputs=case.outputs, **case.attrs)
    outputs = [r.value for r in (results if isinstance(results, tuple) else (results,))]
    graph = ir.Graph(inputs, outputs, nodes=(), name="call", opset_imports={"": OPSET})
    op.finish(graph)
    return ir.Model(graph, ir_version=IR_VERSION), feeds


# --- every rule, lowered ------------------------------------------------------------------------------------


def gradient_of(
    rule: Rule, case: Case, dtype: type[np.floating[Any]] = np.float32, unknown: bool = False
) -> tuple[cases.Trial, ir.Model]:
    """Return the trial of a case, and its gradient model before lowering."""
    trial = cases.trial(rule, case, dtype=dtype, unknown=unknown and not case.known_shapes)
    forward = normalise(trial.model, parameters=trial.wrt)
    return trial, append_vjp(forward, trial.read, trial.wrt, allow_unused=True, named_operators=True)


def problems_of_rule(
    rule: Rule,
    case: Case,
    backend: Backend,
    every: bool = False,
    dtype: type[np.floating[Any]] = np.float32,
    unknown: bool = False,
) -> list[str]:
    """Return one sentence for each difference of a rule's gradient, lowered for ``backend``, from its portable form.

    Args:
        rule, case: the rule and its case.
        backend: the backend to lower for.
        every: test each applicable form in turn, not only the one that the backend selects.
        dtype: the element type; in float64, a gradient for which onnxruntime has no kernels counts as right.
        unknown: make the sizes of inputs unknown, unless the case requires known ones.
    """
    trial, model = gradient_of(rule, case, dtype, unknown)
    count = max((len(backend.forms_of(n)) for n in model.graph), default=0)
    if not count and not any(operator_of(n) for n in model.graph):
        return []
    feeds = trial.feeds | _cotangents(trial, model, dtype)
    if dtype is np.float64 and not _runs(portable(model), feeds):
        return []
    choices: list[Callable[..., Any] | None] = [None]
    if every:
        choices = [lambda call, forms, i=i: forms[i : i + 1] for i in range(count)]
    found = []
    for choose in choices:
        found += differences(portable(model), to_proto(lower(model.clone(), backend, choose)), feeds)
    return found


def _cotangents(trial: cases.Trial, gradient: ir.Model, dtype: type[np.floating[Any]]) -> Feeds:
    rng = np.random.default_rng(0)
    ys = Oracle(trial.model)(trial.feeds)
    sizes = {f"{y}.cotangent": _sizes(gradient, f"{y}.cotangent", ys[y]) for y in trial.read}
    return {name: rng.uniform(-1, 1, shape).astype(dtype) for name, shape in sizes.items()}


def _sizes(model: ir.Model, name: str, like: np.ndarray) -> list[int]:
    """Return the declared sizes of an input, with unknown sizes from ``like``."""
    declared = next(x.shape for x in model.graph.inputs if x.name == name)
    return [d if isinstance(d, int) else n for d, n in zip(declared or like.shape, like.shape, strict=True)]
