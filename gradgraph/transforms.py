"""The public transforms: functions that take a model and return one that also computes derivatives.

Reverse mode (``autodiff/append.py``), forward mode (``autodiff/forward.py``) and Hessian-vector products
(``autodiff/higher.py``) work on the normal form; the backend (``gradgraph.backends``) determines the operators of the
result.

New inputs and outputs have the names in the docstrings. If the model already uses such a name (as in a second
derivative of the result of a transform), the next free name is used: ``x.grad``, then ``x.grad_1``, ``x.grad_2``, …
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
Append = Callable[..., ir.Model]  # (model in normal form, named_operators=)
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


def transform(**kinds: Kind) -> Callable[[Callable[P, Append]], Callable[P, Result]]:
    """Return a decorator that makes a public transform from a function that returns an ``Append`` function.

    The decorated function takes the arguments of the transform, and returns an ``Append`` function. The transform
    checks its arguments (``kinds``, in addition to ``_KINDS``), converts the model to normal form, calls the ``Append``
    function on it, and writes the result in standard nodes or in the forms of ``backend``. It returns the same kind of
    model as it was given, or writes the model to ``out``.
    """

    def decorate(choose: Callable[P, Append]) -> Callable[P, Result]:
        signature = inspect.signature(choose)

        @checked(**_KINDS, **kinds)
        @paused_collection()
        @functools.wraps(choose)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
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
            work = normalise(model, parameters=options.get("wrt"))
            named_operators = backend != "portable"
            own = list(work.graph.inputs)
            with blaming(model):
                append(work, named_operators=named_operators)
            align_product_ranks(write_missing_kernels(work))
            if named_operators:
                write_for(work, chosen)
            compare_sizes(work, own, chosen.takes)
            mark(work, chosen)
            write_at(work, written_at)
            if out is not None:
                save_model(work, out)
            return work if out is not None or isinstance(model, ir.Model) else to_proto(work)

        call.__annotations__ = choose.__annotations__ | {"return": "Result"}
        call.__signature__ = signature.replace(return_annotation="Result")  # type: ignore[attr-defined]
        return call

    return decorate


@transform()
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
        output: name of the floating-point output (or any inner tensor) to differentiate, with exactly one element; by
            default the first output that depends on an input.
        wrt: names and globs (``"head.*"``) of inputs, initializers and inner values, such as a layer's output; a glob
            that matches inputs or initializers matches no inner values. By default every trainable initializer: a
            floating-point one that ``output`` depends on, except running statistics and buffers.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising an error.
        backend: the runtime of the result. ``"portable"`` writes standard nodes, which run anywhere and can be
            transformed again. ``"ort-cpu"`` and ``"ort-cuda"`` write the fastest forms for onnxruntime on a processor
            like this one, or on CUDA. ``"ort-cpu-native"`` uses the kernels of ``gradgraph native build``, for sessions
            with ``RuntimeOptions(native_kernels=True).session_options()``. ``"auto"``, ``"web"`` and ``"openvino"`` are
            as for ``gradgraph.build``.
        opset: opset of the result, from 17 to 21, with a matching IR version; by default 21, or the newest that the
            runtime supports.
        recompute: recompute activations instead of storing them, as for ``gradgraph.build``; a number of bytes includes
            weights, inputs and outputs.
        out: path to write the result to. If the weights exceed 1.5 GB in total, they are copied to ``<out>.data``, as
            are external weights of 64 MiB or more. Required for models of more than 2 GB, the limit of a
            ``ModelProto``.

    Returns:
        The same kind of model as ``model`` (for a path, a ``ModelProto``; with ``out``, an ``onnx_ir.Model``). Its
        outputs are ``output``, then ``"<name>.grad"`` for each name in the order of ``wrt``, with shape and element
        type of that tensor. (If the model already uses this name, as in a second derivative, the next free one is
        used: ``"<name>.grad_1"``, ``"<name>.grad_2"``, …)

    Raises:
        UnknownNameError: if ``output``, or a name or glob in ``wrt``, matches nothing.
        DifferentiationError: if the output is not a floating scalar, or does not depend on a name.
        UnsupportedOperatorError: if operators on the path have no rule; the message lists all of them.
        BuildError: if there is no such backend, or an operator needs a newer opset.
        ModelError: if the result is too large for a ``ModelProto``.
        OutputError: if ``out`` cannot be written.
    """
    return partial(append_gradients, output=output, wrt=wrt, allow_unused=allow_unused,
                   recompute=as_recompute(recompute))  # fmt: skip


@transform()
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
    """Return a model that also computes the vector-Jacobian product of its outputs.

    ``<name>.grad = Σ J(output, name)ᵀ · <output>.cotangent``, summed over all ``outputs``.

    Args:
        model, backend, opset, recompute, out: as for ``value_and_grad``.
        outputs: names and globs of floating-point outputs; all of them by default. For each, the result has a new input
            ``"<output>.cotangent"`` with the output's shape and type.
        wrt: names and globs of inputs, initializers and inner values, as for ``value_and_grad``; by default the
            trainable initializers, or every floating-point input if the model has none.
        allow_unused: return zeros for names that no output depends on, instead of raising an error.

    Returns:
        The same kind of model as ``model``, with the original outputs, then ``"<name>.grad"`` for each name (or the
        next free name, as for ``value_and_grad``).

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return partial(append_vjp, outputs=outputs, wrt=wrt, allow_unused=allow_unused, recompute=as_recompute(recompute))


@transform()
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
    """Return a model that also computes the Jacobian-vector product of its outputs.

    ``<output>.tangent = Σ J(output, name) · <name>.tangent``, summed over all names in ``wrt``.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        outputs: names and globs of floating-point outputs; all of them by default.
        wrt: names and globs of inputs, initializers and inner values, as for ``value_and_grad``; by default the
            trainable initializers, or every floating-point input if the model has none. For each, the result has a new
            input ``"<name>.tangent"`` with the tensor's shape and type.
        allow_unused: accept names that no output depends on; their tangents are ignored.

    Returns:
        The same kind of model as ``model`` (for a path, a ``ModelProto``), with the original outputs, then
        ``"<output>.tangent"`` for each output, with its shape and type. The tangent of an output that depends on none
        of the names is zero. (If a name is already used, the next free one, as for ``value_and_grad``.)

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return partial(append_jvp, outputs=outputs, wrt=wrt, allow_unused=allow_unused)


@transform()
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
    """Return a model that also computes the Hessian-vector product of a scalar.

    ``<name>.hvp = Σ H(name, other) · <other>.tangent``, summed over all tensors ``other`` in ``wrt``.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the floating-point output (or any inner value) to differentiate twice, with exactly one element; by
            default the first output that depends on an input.
        wrt: names and globs of inputs, initializers and inner values, as for ``value_and_grad``. For each, the result
            has a new input ``"<name>.tangent"`` with the tensor's shape and type.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising an error.

    Returns:
        The same kind of model as ``model`` (for a path, a ``ModelProto``), with the original outputs, then
        ``"<name>.hvp"`` for each name, with the tensor's shape and type (or the next free names, as for
        ``value_and_grad``).

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return partial(append_hvp, output=output, wrt=wrt, allow_unused=allow_unused)


@transform(mode=_MODE, per_sample=FLAG)
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
    """Return a model that also computes the Jacobian of an output.

    ``<name>.jacobian[i…, k…] = ∂ output[i…] / ∂ name[k…]``, where i… and k… are the indices of the output and of the
    tensor. The result contains a Scan over unit vectors: the forward pass runs once, then the backward pass once for
    each element of ``output`` (or forward mode once for each element of ``wrt``). Memory must hold the Jacobian once or
    twice. If only products with vectors are needed, ``vjp`` and ``jvp`` take one pass.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the floating-point output (or any inner value) to differentiate, of any shape; by default the first
            output that depends on an input.
        wrt: names and globs of inputs, initializers and inner values, as for ``value_and_grad``; by default the
            trainable initializers, or every floating-point input if the model has none.
        mode: ``"reverse"`` (a backward pass for each element of ``output``), ``"forward"`` (a tangent for each element
            of ``wrt``), or ``"auto"``: forward mode if ``wrt`` is known to have fewer elements.
        per_sample: differentiate each sample of ``output`` with respect to the same sample of inputs only, for all
            samples at once, with one pass for each element of a sample. Rows of ``output`` and of ``wrt`` are samples.
            A model that mixes samples, or might, raises DifferentiationError.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising an error.

    Returns:
        The same kind of model as ``model`` (for a path, a ``ModelProto``), with the original outputs, then
        ``"<name>.jacobian"`` for each name. Its shape is the shape of ``output`` followed by the shape of the tensor
        (with ``per_sample``, of a row of it). (If a name is already used, the next free one, as for
        ``value_and_grad``.)

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
        ArgumentError: if there is no such mode.
    """
    return partial(append_jacobian, output=output, wrt=wrt, mode=mode, per_sample=bool(per_sample),
                   allow_unused=allow_unused)  # fmt: skip


@transform(per_sample=FLAG)
def hessian(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    per_sample: bool = False,
    allow_unused: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that also computes the Hessian of a scalar, the second derivatives with respect to ``wrt``.

    ``<name>.hessian[i…, k…] = ∂²output / ∂name[i…] ∂name[k…]``, where i… and k… are indices of elements of the tensor.
    The result contains a Scan over unit vectors: the gradient is computed once, then its tangent (as in ``hvp``) once
    for each element of ``wrt``. For n elements in total, this takes n Hessian-vector products and returns n² numbers,
    so restrict ``wrt``. ``hvp`` computes single products.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the floating-point output (or any inner value) to differentiate twice, with exactly one element
            (unless ``per_sample``); by default the first output that depends on an input.
        wrt: names and globs of inputs, initializers and inner values, as for ``value_and_grad``.
        per_sample: compute the Hessian of each sample's number in ``output`` (of shape [batch] or [batch, 1]) with
            respect to the same sample of inputs, for all samples at once. A model that mixes samples, or might, raises
            DifferentiationError.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising an error.

    Returns:
        The same kind of model as ``model`` (for a path, a ``ModelProto``), with the original outputs, then one for each
        pair of names: ``"<name>.<other>.hessian"``, with the shape of the first tensor followed by the shape of the
        second (with ``per_sample``, of a row of it). The output for a name paired with itself is ``"<name>.hessian"``.
        (If a name is already used, the next free one, as for ``value_and_grad``.)

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return partial(append_hessian, output=output, wrt=wrt, per_sample=bool(per_sample), allow_unused=allow_unused)


@transform(inputs=NAMES.or_none(), independent=FLAG)
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

    The result for a sample equals that of ``value_and_grad`` for a batch of that sample alone. The model contains a
    Scan over the samples, which needs the time and memory of single samples, plus the stacked gradients. A model that
    mixes samples before ``output`` (BatchNormalization in training mode, a contrastive loss) is rejected, since the
    gradient of a sample alone differs from its gradient in the batch; so are operators that might mix samples. Sums and
    means at the end, including weighted ones, are split into samples. The ``jacobian`` of a vector of losses is correct
    for every model, at the cost of a pass over the whole batch for each sample.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the floating-point output (or any inner value) to differentiate: one element, or one for each sample; by
            default the first output that depends on an input.
        wrt: names and globs of inputs and initializers, as for ``value_and_grad``.
        inputs: names and globs of the inputs whose first axis is the batch, with a symbolic size; by default all inputs
            whose first dimension has the same symbolic name as the first dimension of the first such input.
        independent: assume that samples are not mixed, and skip the check.
        allow_unused: return zeros for names that ``output`` does not depend on, instead of raising an error.

    Returns:
        The same kind of model as ``model`` (for a path, a ``ModelProto``), with outputs ``"<output>.per_sample"`` of
        shape [n], and ``"<name>.per_sample_grad"`` for each name: of shape [n, …] with the shape of the tensor, or the
        shape of the input itself if its rows are the samples. (If a name is already used, the next free one, as for
        ``value_and_grad``.)

    Raises:
        UnknownNameError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
        DifferentiationError: as for ``value_and_grad``; also if samples are mixed, or no input has a symbolic batch
            axis.
    """
    return partial(append_per_sample, output=output, wrt=wrt, inputs=inputs, independent=bool(independent),
                   allow_unused=allow_unused)  # fmt: skip
