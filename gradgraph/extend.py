"""Registration of your own losses, metrics, optimizers, schedules, layers, backends, adapters, compressions and rules.

A part registered here works like the package's own: it is available by name in ``gg.build``, on the command line and in
its help, in recipes, error messages and the tables of names::

    from gradgraph import extend, frontend

    @extend.loss("charbonnier")
    def charbonnier(x, target, eps: float = 1e-3, reduction: str = "mean"):
        "√((x − t)² + ε²)"
        return extend.reduced(((x - target).square() + eps * eps).sqrt(), reduction)

    gg.build("model.onnx", "charbonnier", "adamw")     # and: gradgraph build model.onnx --loss charbonnier

To use your parts on the command line, install a package with an entry point in the group ``gradgraph`` that names the
module which registers them.

For gradient rules, this module exports the functions that gradgraph's own rules use, and the kit that tests rules::

    from gradgraph.extend import case, check, operator, real, vjp

    operator("Snake", "my.ops", inputs=["T"], outputs=["T"], attributes={"alpha": 1.0}, shape=lambda x, **_: [x],
             reference=Snake)                      # an onnx.reference OpRun class: what the operator computes

    @vjp("Snake", case(real(2, 3)), case(real(4), alpha=2.0), domain="my.ops")
    def snake(op, dy, y, x, *, alpha):
        return (dy * (1.0 + op.Sin(x * (2.0 * alpha))),)

    check("Snake", "my.ops")                       # raises AssertionError, with a sentence for every disagreement

A rule for an operator of ONNX itself needs no ``operator``; registering a rule replaces gradgraph's own rule.
``gradgraph.rules.registry`` explains how to write rules.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import onnx
import onnxruntime as ort
from onnx.defs import OpSchema
from onnx.reference.op_run import OpRun

import gradgraph.rules.families  # noqa: F401  (imported first, so that rules registered here replace its rules)
from gradgraph.arguments import FLAG, PATH, TEXT, Kind, checked, described, found_at, instance
from gradgraph.backends import register
from gradgraph.backends.backend import Backend, Lowering
from gradgraph.errors import BuildError, ModelError, UnknownNameError, shown
from gradgraph.frontend import nn
from gradgraph.frontend.loss import LIKE_PREDICTION, Spec, Target, named, reduced
from gradgraph.frontend.metric_sums import Better, Reads, Sums
from gradgraph.frontend.metric_sums import metric as add_metric
from gradgraph.frontend.module import Module
from gradgraph.graph import schemas, shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.machine import custom_ops
from gradgraph.optim.schedules import schedule as add_schedule
from gradgraph.optim.weight_groups import recipe
from gradgraph.passes.normal.spelling.fake_quantization import want_arithmetic
from gradgraph.rules.registry import (
    RULES,
    Case,
    Gradients,
    Point,
    boolean,
    case,
    distinct,
    integers,
    no_gradient,
    point,
    positive,
    real,
    uniform,
    vjp,
)
from gradgraph.verify import kit
from gradgraph.verify.gradcheck import directional
from gradgraph.verify.reference import use_kernel

if TYPE_CHECKING:
    from gradgraph.files.model_metadata import Adapter as Adapter
    from gradgraph.parallel.compressions import Compression as Compression
    from gradgraph.parallel.compressions import Messages as Messages
    from gradgraph.surgery.adapter_kinds.kind import Kind as AdapterKind

__all__ = [
    "Adapter",
    "AdapterKind",
    "Backend",
    "Builder",
    "Case",
    "Compression",
    "Gradients",
    "Lowering",
    "Messages",
    "Point",
    "Spec",
    "Sums",
    "Target",
    "Var",
    "adapter_kind",
    "backend",
    "boolean",
    "case",
    "check",
    "compression",
    "directional",
    "distinct",
    "integers",
    "layer",
    "library",
    "loss",
    "metric",
    "no_gradient",
    "operator",
    "optimizer",
    "point",
    "positive",
    "real",
    "reduced",
    "schedule",
    "straight_through",
    "uniform",
    "vjp",
]


_LATER = {
    "Adapter": "files.model_metadata:Adapter",
    "AdapterKind": "surgery.adapter_kinds.kind:Kind",
    "Compression": "parallel.compressions:Compression",
    "Messages": "parallel.compressions:Messages",
}


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        return found_at(_LATER[name])  # importing surgery is slow


_FLOATING = ["tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"]
_ATTRIBUTE_TYPES = {
    int: OpSchema.AttrType.INT,
    float: OpSchema.AttrType.FLOAT,
    str: OpSchema.AttrType.STRING,
    list[int]: OpSchema.AttrType.INTS,
    list[float]: OpSchema.AttrType.FLOATS,
}
_OPTIONS = {"?": OpSchema.FormalParameterOption.Optional, "*": OpSchema.FormalParameterOption.Variadic}

ShapeRule = Callable[..., Sequence[shapes.Shape | None]]


F = TypeVar("F", bound=Callable[..., Any])
L = TypeVar("L", bound=type[Module])
_FUNCTION = Kind("a function with a name", lambda value: inspect.isfunction(value) and value.__name__.isidentifier())
_LAYER = Kind("a layer class, derived from gradgraph.frontend.nn.Module",
              lambda value: isinstance(value, type) and issubclass(value, Module))  # fmt: skip


# --- named parts ------------------------------------------------------------------------------------------


@checked(name=TEXT, binary=FLAG)
def loss(
    name: str,
    *,
    targets: Sequence[Target] = LIKE_PREDICTION,
    reads: Sequence[str] = ("prediction",),
    binary: bool = False,
) -> Callable[[F], F]:
    """Register a function of traced tensors as a loss.

    The arguments of the function are the model outputs that the loss reads, then the targets, then the options of the
    loss, which have defaults. ``reduction`` must be one of the options; ``reduced`` applies it. The docstring of the
    function is the help of the loss.

    Args:
        name: the name of the loss.
        targets: the targets; by default one with the shape and type of the prediction.
        reads: names for the model outputs that the loss reads.
        binary: whether the loss is a binary classification, in which targets above 1/2 and positive predictions mean
            yes.

    Raises:
        BuildError: if the name is taken, or the function has no ``reduction``.
    """

    def register(function: F) -> F:
        options = _options("loss", function)
        if "reduction" not in options:
            raise BuildError(f"the loss {name} has no argument reduction='mean', which every loss must have")
        named(name, function, " ".join(options), tuple(targets), reads=reads, binary=binary)
        return function

    return register


@checked(column=TEXT)
def metric(*, reads: Reads = "classes", better: Better = None, column: str = "") -> Callable[[F], F]:
    """Register a function as a metric with the name of the function.

    Its arguments are prediction, target and mask, then the options of the metric, which have defaults. It returns sums
    over a batch: the result of ``gradgraph.metrics.share(above, below)``, or a ``Sums`` with a finish of
    ``gradgraph.step.finishes``.

    Args:
        reads: the kind of targets: "classes" (or yes and no), "scores" (a score for each class), "sequences" of class
            indices, or "numbers".
        better: whether a lower value is better ("min") or a higher one ("max"), for ``fit(patience=…)``.
        column: the name of the history column, formatted with the options, such as "top_{k}"; by default the name of
            the metric.

    Raises:
        BuildError: if the name is taken, or the function does not have these arguments.
    """
    for name, value, known in (("reads", reads, get_args(Reads)), ("better", better, ("min", "max", None))):
        if value not in known:
            raise BuildError(f"{name} is {described(value)}; it should be one of {', '.join(map(repr, known))}")

    def register(function: F) -> F:
        options = _options("metric", function, 3)
        add_metric(" ".join(options), reads=reads, better=better, column=column)(function)
        return function

    return register


def optimizer(make: F) -> F:
    """Register a function that returns an optimizer: ``def name(lr=1e-3, …): return gradgraph.optim.chain(…)``.

    As for all optimizers, the arguments ``groups``, ``no_decay`` and ``layer_decay`` are added.

    Raises:
        BuildError: if the name is taken, an argument has no default, or there is no argument ``lr``.
    """
    options = _options("optimizer", make, 0)
    if "lr" not in options:
        raise BuildError(f"the optimizer {make.__name__} has no argument lr, the learning rate; add lr=1e-3")
    registered: Any = recipe(make)
    return cast("F", registered)


@checked(make=_FUNCTION)
def schedule(make: F) -> F:
    """Register a function that returns a ``gradgraph.optim.Schedule``, for ``--schedule`` and recipes.

    Raises:
        BuildError: if the name is taken.
    """
    registered: Any = add_schedule()(make)
    return cast("F", registered)


@checked(made=_LAYER)
def layer(made: L) -> L:
    """Register a layer class, which also becomes available in ``gradgraph.frontend.nn``.

    Raises:
        ArgumentError: if the class is not derived from ``gradgraph.frontend.nn.Module``.
        BuildError: if the name is taken.
    """
    nn.LAYERS.add(made.__name__, made)
    setattr(nn, made.__name__, made)
    return made


@checked(made=instance(Backend, "a gradgraph.extend.Backend"))
def backend(made: Backend) -> Backend:
    """Register a backend: a runtime for which steps and models can be built.

    Raises:
        BuildError: if the name is taken.
    """
    return register(made)


@checked(name=TEXT)
def adapter_kind(name: str, kind: AdapterKind) -> AdapterKind:
    """Register a kind of adapter, for ``gradgraph.lora(kind=name)`` and ``gradgraph surgery --kind``.

    Raises:
        ArgumentError: if ``kind`` is not an ``AdapterKind``.
        BuildError: if the name is taken.
    """
    from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, Kind

    instance(Kind, "a gradgraph.extend.AdapterKind").check("kind", kind)
    return KINDS.add(name, kind)


def compression(make: F) -> F:
    """Register a gradient compression for ``DataParallel(compress=…)``, ``--compress`` and recipes.

    The function must return a new :class:`Compression` in each call. ``add_up`` of the compression is called on all
    ranks, for each step and each type of gradients, and must produce the same bits on all ranks. A compression with
    ``remembers = True`` has state from step to step: it reads ``memory`` and returns the new state as ``after``. The
    docstring of the function is the help.

    Raises:
        ArgumentError: if ``make`` is not a named function, or does not return a ``Compression``.
        BuildError: if the name is taken, or an argument has no default.
    """
    from gradgraph.parallel.compressions import Compression
    from gradgraph.parallel.data_parallel import COMPRESSIONS

    _options("compression", make, 0)
    instance(Compression, "a gradgraph.extend.Compression").check(f"the result of {make.__name__}", make())
    COMPRESSIONS.add(make.__name__, make)
    return make


def _options(what: str, function: Any, tensors: int | None = None) -> list[str]:
    """Return the names of a function's options: the arguments after its first ``tensors``, or with default values.

    Raises:
        BuildError: if an option has no default, or there are too few tensors.
    """
    _FUNCTION.check(f"the {what}", function)
    known = list(inspect.signature(function).parameters.values())
    first = next((i for i, p in enumerate(known) if p.default is not p.empty), len(known))
    first = first if tensors is None else tensors
    if len(known) < (1 if tensors is None else tensors) or any(p.default is p.empty for p in known[first:]):
        needs = {
            "metric": "prediction, target and mask, then options",
            "optimizer": "lr and other options",
            "compression": "options",
        }
        raise BuildError(
            f"the arguments of the {what} {function.__name__} must be {needs.get(what, 'tensors, then options')}; give "
            "each option a default value"
        )
    return [p.name for p in known[first:]]


# --- gradient rules -----------------------------------------------------------------------------------------


def check(op_type: str, domain: str = "", session_options: ort.SessionOptions | None = None) -> None:
    """Test a rule on its cases and points with the same kit as the package's own rules.

    Each case is compared with central differences in float64, also with unknown shapes, with literals fed at run
    time and at second order; operators of ONNX itself are run in onnxruntime in float32 too.

    Args:
        op_type: the operator.
        domain: the domain of the operator; "" is ONNX's own.
        session_options: options with a registered custom-op library, to run your own operator in onnxruntime as well;
            alternatively, use ``library``.

    Raises:
        UnknownNameError: if no rule is registered for the operator.
        AssertionError: if the rule is wrong; the message has one line for every disagreement.
    """
    rule = RULES.get((domain, op_type))
    if rule is None:
        raise UnknownNameError(
            f"no gradient rule is registered for '{shown(op_type)}' in domain '{shown(domain)}'; register one with "
            "gradgraph.extend.vjp, or pass the domain of the operator"
        )
    wrong = kit.problems(rule, session_options)
    if wrong:
        raise AssertionError("\n".join(wrong))


def operator(
    op_type: str,
    domain: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, Any] | None = None,
    shape: ShapeRule | None = None,
    reference: type[OpRun] | None = None,
) -> None:
    """Declare an operator of your own domain: its ``onnx.defs`` schema, shape inference and reference implementation.

    Args:
        op_type: the name of the operator.
        domain: the domain of the operator, not "".
        inputs: the type of each input: a variable over floating-point types, such as ``"T"``, or an ONNX type, such as
            ``"tensor(int64)"``. A ``?`` after it makes the input optional; a ``*`` after the last one means any number
            of inputs.
        outputs: the type of each output, written as for inputs.
        attributes: the default value of each attribute, or its type if it has no default (``int``, ``float``, ``str``,
            ``list[int]`` or ``list[float]``). Rules receive attributes by keyword, including defaults.
        shape: a function that returns the shape of each output, or None if unknown. It is called with the shape of each
            input (a tuple of int, symbolic names or None; None if the input is absent or of unknown rank), and with the
            attributes that are set, by keyword. By default the outputs' shapes are unknown, and many gradient rules
            require them.
        reference: a class derived from ``onnx.reference.op_run.OpRun``, with the same name and with
            ``op_domain = domain``, which computes the operator in the precision of its inputs; required by ``check``.

    Raises:
        ModelError: if the domain is ONNX's own, or the reference kernel belongs to another operator.
    """
    if domain in ("", "ai.onnx"):
        raise ModelError(f"'{shown(op_type)}' cannot be declared in ONNX's own domain; use a domain of your own")
    if reference is not None and (reference.__name__, reference.op_domain) != (op_type, domain):
        raise ModelError(
            f"the reference kernel '{reference.__name__}' of domain '{reference.op_domain}' does not match the "
            f"operator '{shown(op_type)}' of '{shown(domain)}'; name the class '{shown(op_type)}' and set op_domain"
        )
    if onnx.defs.has(op_type, domain=domain):
        onnx.defs.deregister_schema(op_type, onnx.defs.get_schema(op_type, domain=domain).since_version, domain)
    onnx.defs.register_schema(_schema(op_type, domain, inputs, outputs, attributes or {}, shape))
    schemas.forget_schemas()
    if reference is not None:
        use_kernel(reference)


@checked(path=PATH)
def library(path: str | os.PathLike[str]) -> None:
    """Load a custom-op library into every session that gradgraph opens from now on: Trainers, ``check``, exports.

    The library is loaded by onnxruntime's ``SessionOptions.register_custom_ops_library``. Its code runs with your
    permissions. For a single Trainer, use ``options=gradgraph.RuntimeOptions(custom_ops=path)`` instead.

    Raises:
        ArgumentError: if ``path`` is not a path.
        RuntimeUnavailableError: if the file does not exist, or onnxruntime cannot load it.
    """
    (found,) = custom_ops.absolute(path)
    custom_ops.register(ort.SessionOptions(), found)
    custom_ops.KNOWN[found] = None


def straight_through(on: bool = True) -> None:
    """Use a straight-through estimator for rounding in models differentiated from now on: quantization-aware training.

    Gradients pass through Round unchanged. A QuantizeLinear followed by its DequantizeLinear (integers of 4, 8 or 16
    bits, the same scale and zero point) is replaced by standard arithmetic with the same results, bit for bit.
    Gradients pass through it within the range of the integers, and are zero beyond. The scale has the gradient of LSQ
    (Esser et al., 2020), and is trained if it is named in full (``train=["*", "scale"]``). In a step built by
    ``gradgraph.build``, only the training graph changes: evaluation and export keep these pairs of nodes.

    Args:
        on: use the estimator; False restores the exact derivative, in which rounding has no gradient.
    """
    want_arithmetic(on)
    if on:
        vjp("Round", point([-1.4, 0.5], gives=[[1.0, 1.0]]))(lambda op, dy, y, x: (dy,))
    else:
        RULES.pop(("", "Round"), None)
        no_gradient("piecewise constant", "Round")


def _schema(
    op_type: str,
    domain: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, Any],
    shape: ShapeRule | None,
) -> OpSchema:
    variables = {t.rstrip("?*") for t in (*inputs, *outputs) if "(" not in t}
    schema = OpSchema(
        op_type,
        domain,
        1,  # since_version of the schema; any number would do
        inputs=[_parameter(f"input{i}", t) for i, t in enumerate(inputs)],
        outputs=[_parameter(f"output{i}", t) for i, t in enumerate(outputs)],
        type_constraints=[(variable, _FLOATING, "") for variable in sorted(variables)],
        attributes=[_attribute(name, default) for name, default in attributes.items()],
    )
    schema.set_type_and_shape_inference_function(_Inference(op_type, inputs, outputs, tuple(attributes), shape))
    return schema


def _parameter(name: str, type_str: str) -> OpSchema.FormalParameter:
    option = _OPTIONS.get(type_str[-1], OpSchema.FormalParameterOption.Single)
    return OpSchema.FormalParameter(name, type_str.rstrip("?*"), param_option=option)


def _attribute(name: str, default: Any) -> OpSchema.Attribute:
    if not isinstance(default, list) and default in _ATTRIBUTE_TYPES:
        return OpSchema.Attribute(name, _ATTRIBUTE_TYPES[default], required=False)
    return OpSchema.Attribute(name, onnx.helper.make_attribute(name, default))


@dataclass(frozen=True)
class _Inference:
    """Type and shape inference of a declared operator, called by onnx."""

    op_type: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Sequence[str]
    shape: ShapeRule | None

    def __call__(self, context: onnx.shape_inference.InferenceContext) -> None:
        given = [context.get_input_type(i) if context.has_input(i) else None for i in range(context.get_num_inputs())]
        elements = {self._variable(i): t.tensor_type.elem_type for i, t in enumerate(given) if t is not None}
        found = self._shapes(context, given)
        for i in range(context.get_num_outputs()):
            type_str = self.outputs[min(i, len(self.outputs) - 1)].rstrip("?*")
            fixed = schemas.FIXED_TYPES.get(type_str)
            element = int(fixed) if fixed is not None else elements.get(type_str)
            if element is not None:
                dims = found[i] if i < len(found) else None
                context.set_output_type(i, onnx.helper.make_tensor_type_proto(element, dims))

    def _variable(self, i: int) -> str:
        return self.inputs[min(i, len(self.inputs) - 1)].rstrip("?*")

    def _shapes(self, context: Any, given: Sequence[onnx.TypeProto | None]) -> Sequence[shapes.Shape | None]:
        if self.shape is None:
            return []
        attributes = {n: context.get_attribute(n) for n in self.attributes}
        plain = {n: onnx.helper.get_attribute_value(a) for n, a in attributes.items() if a is not None}
        try:
            return self.shape(*(shapes.shape_of_type(t) for t in given), **plain)
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise ModelError(
                f"the shape rule of operator '{shown(self.op_type)}' failed: {error}; it is called with one shape (a "
                "tuple, or None) for each input and the attributes that are set, by keyword"
            ) from error
