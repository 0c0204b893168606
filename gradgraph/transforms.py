"""The public transforms: a model in, a model out, written for one backend.

Reverse mode (``autodiff/append.py``), forward mode (``autodiff/forward.py``) and Hessian-vector products
(``autodiff/higher.py``) work on the normal form; a backend (``gradgraph.backends``) defines the operators of the
result.

Inputs and outputs have the names given in the docstrings, or, if the model already uses that name (a second derivative
of the result of a transform), the next free one: ``x.grad``, then ``x.grad_1``, ``x.grad_2``, …
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeAlias, get_args

import onnx
import onnx_ir as ir

from gradgraph.arguments import FLAG, NAMES, PATH, TEXT, WHOLE, Kind, checked
from gradgraph.autodiff.append import append_gradients, append_vjp
from gradgraph.autodiff.forward import append_jvp
from gradgraph.autodiff.higher import append_hvp
from gradgraph.autodiff.jacobian import Mode, append_hessian, append_jacobian
from gradgraph.autodiff.per_sample import append_per_sample
from gradgraph.autodiff.recomputation import KEEP, Keep, as_recompute
from gradgraph.autodiff.select import Names
from gradgraph.autodiff.shared_sizes import compare_sizes
from gradgraph.backends import named
from gradgraph.backends.engine import opset_for, write_for
from gradgraph.backends.machine_requirements import mark
from gradgraph.backends.missing_kernels import write_missing_kernels
from gradgraph.files.atomic import check_writable
from gradgraph.files.models import Source, save_model, to_proto
from gradgraph.files.suffixes import check_suffix
from gradgraph.machine.garbage_collection import paused_collection
from gradgraph.passes.half_products import align_product_ranks
from gradgraph.passes.normal import blaming, normalise
from gradgraph.passes.normal.opsets.older import write_at

Result: TypeAlias = onnx.ModelProto | ir.Model

P = ParamSpec("P")
Append = Callable[..., ir.Model]  # (model in normal form, output or outputs, wrt, allow_unused=, named_operators=)
_MODE = Kind("'auto', 'reverse' or 'forward'", lambda value: isinstance(value, str) and value in get_args(Mode))
_KINDS = {
    "output": TEXT.or_none(),
    "outputs": NAMES.or_none(),
    "wrt": NAMES.or_none(),
    "allow_unused": FLAG,
    "backend": TEXT,
    "opset": WHOLE.or_none(),
    "recompute": KEEP,
    "out": PATH.or_none(),
}


def _transform(**kinds: Kind) -> Callable[[Callable[P, Append]], Callable[P, Result]]:
    """Make a transform of a function that returns how nodes are appended to a model in normal form.

    The transform does the common work: it checks its arguments (``kinds``, in addition to ``_KINDS``), brings the model
    into normal form, appends to it in standard nodes or in the forms of ``backend``, and returns the kind of model that
    it got, or writes it to ``out``.
    """

    def decorate(choose: Callable[P, Append]) -> Callable[P, Result]:
        signature = inspect.signature(choose)

        @checked(**_KINDS, **kinds)
        @paused_collection()
        @functools.wraps(choose)
        def transform(*args: P.args, **kwargs: P.kwargs) -> Result:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            options = given.arguments
            model, backend, out = options["model"], options["backend"], options["out"]
            append = choose(*args, **kwargs)
            chosen = named(backend)
            written_at = opset_for(chosen, options["opset"])
            if out is not None:
                check_suffix(out, ".onnx")
                check_writable(out)
            work = normalise(model, parameters=options["wrt"])
            of = options["output"] if "output" in options else options["outputs"]
            named_operators = backend != "portable"
            own = list(work.graph.inputs)
            with blaming(model):
                append(work, of, options["wrt"], allow_unused=options["allow_unused"], named_operators=named_operators)
            align_product_ranks(write_missing_kernels(work))
            if named_operators:
                write_for(work, chosen)
            compare_sizes(work, own, chosen.takes)
            mark(work, chosen)
            write_at(work, written_at)
            if out is not None:
                save_model(work, out)
            return work if out is not None or isinstance(model, ir.Model) else to_proto(work)

        transform.__annotations__ = choose.__annotations__ | {"return": "Result"}
        transform.__signature__ = signature.replace(return_annotation="Result")  # type: ignore[attr-defined]
        return transform

    return decorate


@_transform()
def value_and_grad(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    recompute: Keep = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that computes a scalar and its gradients.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        output: the floating output (or any inner value) to differentiate, with exactly one element; by default the
            first output that depends on an input.
        wrt: names and globs (``"head.*"``) of inputs and initializers; by default every trainable initializer:
            floating, on the way to ``output``, neither running statistic nor buffer.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising. backend: the
            runtime of the result. ``"portable"``: standard nodes, which run anywhere and can be transformed again.
            ``"ort-cpu"``, ``"ort-cuda"``: the fastest forms in onnxruntime on a processor like this one, or on CUDA;
            ``"ort-cpu-native"`` with the kernels of ``gradgraph native build``, for sessions with
            ``RuntimeOptions(native_kernels=True).session_options()``. Or ``"auto"``, ``"web"``, ``"openvino"``, as for
            ``gradgraph.build``.
        opset: of the result, 17 to 21, with a matching IR version; by default 21, or the newest that the runtime
            supports.
        recompute: recompute activations instead of storing them, as for ``gradgraph.build``; a number of bytes includes
            weights, inputs and outputs.
        out: write the result to this path; weights that exceed 1.5 GB in all, and external ones of 64 MiB or more, are
            copied to ``<out>.data``. Required for models of more than 2 GB, the limit of a ``ModelProto``.

    Returns:
        The same kind of model (a path gives a ``ModelProto``; with ``out``, an ``onnx_ir.Model``) with outputs
        ``output``, then ``"<name>.grad"`` for each name, in the order of ``wrt``: shape and element type are those of
        the tensor. (Of a name that the model has already, as in a second derivative, the next free one:
        ``"<name>.grad_1"``, ``"<name>.grad_2"``, …)

    Raises:
        UnknownNameError: ``output`` or a name or glob in ``wrt`` matches nothing.
        DifferentiationError: the output is not a floating scalar, or does not depend on a name.
        UnsupportedOperatorError: operators on the path have no rule; the message lists all of them.
        BuildError: there is no such backend, or an operator needs a newer opset.
        ModelError: a ``ModelProto`` cannot hold the result.
        OutputError: ``out`` cannot be written.
    """
    return partial(append_gradients, recompute=as_recompute(recompute))


@_transform()
def vjp(
    model: Source,
    *,
    outputs: Names = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    recompute: Keep = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that also computes the vector-Jacobian product: ``<name>.grad = Σ J(output, name)ᵀ · cotangent``.

    Args:
        model, backend, opset, recompute, out: as for ``value_and_grad``.
        outputs: names and globs of floating outputs; all of them by default. For each, the result has a new input
            ``"<output>.cotangent"`` of the output's shape and type.
        wrt: names and globs of inputs and initializers; by default the trainable initializers, or, in a model
            without any, every floating input.
        allow_unused: return zeros for names that no output depends on, instead of raising.

    Returns:
        The same kind of model: the original outputs, then ``"<name>.grad"`` for each name (or the next free one, as
        for ``value_and_grad``).

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return partial(append_vjp, recompute=as_recompute(recompute))


@_transform()
def jvp(
    model: Source,
    *,
    outputs: Names = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that also computes the Jacobian-vector product: ``<output>.tangent = Σ J(output, name) ·
    tangent``.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        outputs: names and globs of floating outputs; all of them by default.
        wrt: names and globs of inputs and initializers; by default the trainable initializers, or, in a model
            without any, every floating input. For each, the result has a new input ``"<name>.tangent"`` of the
            tensor's shape and type.
        allow_unused: accept names that no output depends on; their tangents are ignored.

    Returns:
        The same kind of model (a path gives a ``ModelProto``): the original outputs, then ``"<output>.tangent"`` for
        each output, in its shape and type; zeros for an output that depends on none of the names. (Or the next free
        names, as for ``value_and_grad``.)

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return append_jvp


@_transform()
def hvp(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that also computes the Hessian-vector product of a scalar: ``<name>.hvp = Σ H(name, other) ·
    tangent``.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the floating output (or any inner value) to differentiate twice, with exactly one element; by default
            the first output that depends on an input.
        wrt: names and globs of inputs and initializers, as for ``value_and_grad``. The sum runs over all of them; for
            each the result has a new input ``"<name>.tangent"`` of the tensor's shape and type.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising.

    Returns:
        The same kind of model (a path gives a ``ModelProto``): the original outputs, then ``"<name>.hvp"`` for each
        name, in its tensor's shape and type (or the next free names, as for ``value_and_grad``).

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return append_hvp


@_transform(mode=_MODE, per_sample=FLAG)
def jacobian(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    mode: Mode = "auto",
    per_sample: bool = False,
    allow_unused: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that also computes the Jacobian of an output: ``<name>.jacobian[i…, k…] = ∂ output[i…] / ∂
    name[k…]``.

    A Scan over unit vectors: the forward pass runs once, then the backward pass once for each element of ``output``
    (or forward mode once for each element of ``wrt``). Memory holds the matrix once or twice. If only products with
    vectors are needed, ``vjp`` and ``jvp`` cost one pass.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the floating output (or any inner value) to differentiate, of any shape; by default the first output
            that depends on an input.
        wrt: names and globs of inputs and initializers; by default the trainable initializers, or, in a model
            without any, every floating input.
        mode: ``"reverse"`` (a backward pass for each element of ``output``), ``"forward"`` (a tangent for each element
            of ``wrt``), or ``"auto"``: forward mode if ``wrt`` is known to have fewer elements.
        per_sample: differentiate each sample of ``output`` with respect to the same sample of inputs only, for all
            samples at once: a pass for each element of one sample. Rows of ``output`` and of ``wrt`` are samples;
            raises if samples are mixed on the way, or might be.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising.

    Returns:
        The same kind of model (a path gives a ``ModelProto``): the original outputs, then ``"<name>.jacobian"`` for
        each name, of the shape of ``output`` followed by that of the tensor (``per_sample``: of a row of it). (Or
        the next free names, as for ``value_and_grad``.)

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
        ArgumentError: there is no such mode.
    """
    return partial(append_jacobian, mode=mode, per_sample=bool(per_sample))


@_transform()
def hessian(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that also computes the Hessian of a scalar: ``<name>.hessian[i…, k…] = ∂²output / ∂name[i…]
    ∂name[k…]``.

    A Scan over unit vectors: the gradient is computed once, then its tangent (as in ``hvp``) once for each element of
    ``wrt``. With n elements in total this takes n Hessian-vector products and returns n² numbers, so restrict ``wrt``;
    ``hvp`` computes single products.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the floating output (or any inner value) to differentiate twice, with exactly one element; by default
            the first output that depends on an input.
        wrt: names and globs of inputs and initializers, as for ``value_and_grad``.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising.

    Returns:
        The same kind of model (a path gives a ``ModelProto``): the original outputs, then, for each name and each
        other, ``"<name>.<other>.hessian"``, of the shape of the first tensor followed by that of the second; that of a
        name and itself is ``"<name>.hessian"``. (Or the next free names, as for ``value_and_grad``.)

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return append_hessian


@_transform(inputs=NAMES.or_none(), independent=FLAG)
def per_sample_gradients(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    inputs: Names = None,
    independent: bool = False,
    allow_unused: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that computes the loss and the gradients of each sample of a batch, as ``vmap(grad)`` does.

    The result for a sample is that of ``value_and_grad`` for a batch of that sample alone. A Scan over the samples
    takes the time and memory of single samples, plus the stacked gradients. A model that mixes samples on the way to
    ``output`` (BatchNormalization in training mode, a contrastive loss) is rejected, as a sample alone has another
    gradient than in its batch; so are operators that might mix samples. Sums and means at the end, weighted ones
    included, are split into samples. The ``jacobian`` of a vector of losses is right for every model, at the cost of a
    pass over the whole batch for each sample.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the floating output (or any inner value) to differentiate: one element, or one for each sample; by
            default the first output that depends on an input.
        wrt: names and globs of inputs and initializers, as for ``value_and_grad``.
        inputs: names and globs of the inputs whose first axis, of symbolic size, is the batch; by default those whose
            first size has the same symbolic name as that of the first such input.
        independent: assume that samples are not mixed; skips the check.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising.

    Returns:
        The same kind of model (a path gives a ``ModelProto``) with outputs ``"<output>.per_sample"``, of shape (n,),
        and ``"<name>.per_sample_grad"`` for each name: n times the shape of a tensor, or that of an input that holds
        samples. (Or the next free names, as for ``value_and_grad``.)

    Raises:
        UnknownNameError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
        DifferentiationError: likewise; or samples are mixed, or no input has a symbolic batch axis.
    """
    return partial(append_per_sample, inputs=inputs, independent=bool(independent))
