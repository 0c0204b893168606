"""The transforms that users call: a model in, a model out, written for one backend.

Reverse mode (``autodiff/append.py``), forward mode (``autodiff/forward.py``) and Hessian-vector products
(``autodiff/higher.py``) work on the normal form; a backend (``gradgraph.backends``) is what the result is written for.

An input or output gets the name that the docstring says, or, where the model has that name already (a second derivative
of one that a transform has returned), the next free one: ``x.grad``, then ``x.grad_1``, ``x.grad_2``, …
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

import onnx
import onnx_ir as ir

from gradgraph.arguments import FLAG, NAMES, PATH, TEXT, checked
from gradgraph.atomic import check_writable
from gradgraph.autodiff.append import append_gradients, append_vjp
from gradgraph.autodiff.forward import append_jvp
from gradgraph.autodiff.higher import append_hvp
from gradgraph.autodiff.select import Names
from gradgraph.backends import named
from gradgraph.backends.demands import mark
from gradgraph.backends.engine import write_for
from gradgraph.collector import paused_collection
from gradgraph.files import Source, save_model, to_proto
from gradgraph.normal import blaming, normalise

Result: TypeAlias = onnx.ModelProto | ir.Model


@checked(output=TEXT.or_none(), wrt=NAMES.or_none(), allow_unused=FLAG, backend=TEXT, out=PATH.or_none())
def value_and_grad(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    out: str | os.PathLike[str] | None = None,
) -> Result:
    """A model that returns a scalar and its gradients.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        output: the floating output (or any inner value) to differentiate, with exactly one element; by default the
            first output.
        wrt: names and globs (``"head.*"``) of inputs and initializers; by default every trainable initializer:
            floating, on the way to ``output``, neither running statistic nor buffer.
        allow_unused: give zeros for names that ``output`` does not depend on, instead of an error.
        backend: what the result is written for. ``"portable"``: standard nodes, which run anywhere and can be
            transformed again. ``"ort-cpu"``, ``"ort-cuda"``: the forms that are fastest in onnxruntime on a processor
            like this one, or on CUDA; ``"ort-cpu-native"`` with the kernels of ``gradgraph native build``, for
            sessions with ``RuntimeOptions(native_kernels=True).session_options()``. Or ``"auto"``, ``"web"``,
            ``"openvino"``, as for ``gradgraph.build``.
        out: write the result to this path; weights of more than 1.5 GB go to ``<out>.data`` beside it, read from where
            they lie. The way for models that exceed 2 GB, which no ``ModelProto`` holds.

    Returns:
        The same kind of model (a path gives a ``ModelProto``; with ``out``, an ``onnx_ir.Model``) with outputs
        ``output``, then ``"<name>.grad"`` for each name, in the order of ``wrt``: shape and element type are those of
        the tensor. (Of a name that the model has already, as in a second derivative, the next free one:
        ``"<name>.grad_1"``, ``"<name>.grad_2"``, …)

    Raises:
        UnknownNameError: ``output`` or a name or glob in ``wrt`` matches nothing.
        DifferentiationError: the target is no floating scalar, or a name does not lead to it.
        UnsupportedOperatorError: operators on the path have no rule; all of them are listed.
        BuildError: there is no such backend.
        ModelError: a ``ModelProto`` cannot hold the result.
        OutputError: ``out`` cannot be written.
    """
    return _transformed(append_gradients, model, output, wrt, allow_unused, backend, out)


@checked(outputs=NAMES.or_none(), wrt=NAMES.or_none(), allow_unused=FLAG, backend=TEXT, out=PATH.or_none())
def vjp(
    model: Source,
    *,
    outputs: Names = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    out: str | os.PathLike[str] | None = None,
) -> Result:
    """A model that also returns the vector-Jacobian product: ``<name>.grad = Σ J(output, name)ᵀ · cotangent``.

    Args:
        model, backend, out: as for ``value_and_grad``.
        outputs: names and globs of floating outputs; all of them by default. For each, the result has a new input
            ``"<output>.cotangent"`` of the output's shape and type.
        wrt: names and globs of inputs and initializers; by default the trainable initializers, or, in a model
            without any, every floating input.
        allow_unused: give zeros for names that no output depends on, instead of an error.

    Returns:
        The same kind of model: the original outputs, then ``"<name>.grad"`` for each name (or the next free one, as
        for ``value_and_grad``).

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return _transformed(append_vjp, model, outputs, wrt, allow_unused, backend, out)


@checked(outputs=NAMES.or_none(), wrt=NAMES.or_none(), allow_unused=FLAG, backend=TEXT, out=PATH.or_none())
def jvp(
    model: Source,
    *,
    outputs: Names = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    out: str | os.PathLike[str] | None = None,
) -> Result:
    """A model that also returns the Jacobian-vector product: ``<output>.tangent = Σ J(output, name) · tangent``.

    Args:
        model, backend, out: as for ``value_and_grad``.
        outputs: names and globs of floating outputs; all of them by default.
        wrt: names and globs of inputs and initializers; by default the trainable initializers, or, in a model
            without any, every floating input. For each, the result has a new input ``"<name>.tangent"`` of the
            tensor's shape and type.
        allow_unused: accept names that no output depends on, whose tangents count for nothing.

    Returns:
        The same kind of model (a path gives a ``ModelProto``): the original outputs, then ``"<output>.tangent"`` for
        each output, in its shape and type; zeros for an output that depends on none of the names. (Or the next free
        names, as for ``value_and_grad``.)

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return _transformed(append_jvp, model, outputs, wrt, allow_unused, backend, out)


@checked(output=TEXT.or_none(), wrt=NAMES.or_none(), allow_unused=FLAG, backend=TEXT, out=PATH.or_none())
def hvp(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    allow_unused: bool = False,
    backend: str = "portable",
    out: str | os.PathLike[str] | None = None,
) -> Result:
    """A model that also returns the Hessian-vector product of a scalar: ``<name>.hvp = Σ H(name, other) · tangent``.

    Args:
        model, backend, out: as for ``value_and_grad``.
        output: the floating output (or any inner value) to differentiate twice, with exactly one element; by default
            the first output.
        wrt: names and globs of inputs and initializers, as for ``value_and_grad``. The sum runs over all of them; for
            each the result has a new input ``"<name>.tangent"`` of the tensor's shape and type.
        allow_unused: give zeros for names that ``output`` does not depend on, instead of an error.

    Returns:
        The same kind of model (a path gives a ``ModelProto``): the original outputs, then ``"<name>.hvp"`` for each
        name, in its tensor's shape and type (or the next free names, as for ``value_and_grad``).

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError, BuildError: as for ``value_and_grad``.
    """
    return _transformed(append_hvp, model, output, wrt, allow_unused, backend, out)


@paused_collection()
def _transformed(
    append: Callable[..., ir.Model],
    model: Source,
    of: Names,
    wrt: Names,
    allow_unused: bool,
    backend: str,
    out: str | os.PathLike[str] | None,
) -> Result:
    """``append`` to the normal form of ``model``, in standard nodes or lowered for ``backend``; written to ``out``."""
    chosen = named(backend)
    if out is not None:
        check_writable(out)
    work = normalise(model, parameters=wrt)
    with blaming(model):
        append(work, of, wrt, allow_unused=allow_unused, named_operators=backend != "portable")
    if backend != "portable":  # without named operators there is nothing to write
        write_for(work, chosen)
    mark(work, chosen)
    if out is not None:
        save_model(work, out)
    return work if out is not None or isinstance(model, ir.Model) else to_proto(work)
