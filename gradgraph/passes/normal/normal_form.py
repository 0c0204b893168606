"""Bring models to normal form, and expand operators within it; ``order.py`` lists the passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

import onnx_ir as ir

from gradgraph.errors import GradgraphError, ModelError
from gradgraph.files.models import Source, load_model
from gradgraph.graph.checks import describe
from gradgraph.graph.marks import COMPUTED
from gradgraph.graph.shapes import OPSET
from gradgraph.machine.garbage_collection import paused_collection
from gradgraph.passes.normal.edit import Editor, nodes_of
from gradgraph.passes.normal.functions.function_bodies import instantiate_body
from gradgraph.passes.normal.functions.inline import inline_functions
from gradgraph.passes.normal.opsets.opset import convert_old
from gradgraph.passes.normal.opsets.upgrade import FULLY_INFERRED
from gradgraph.passes.normal.order import AT_ONE_OPSET, quantization, reading
from gradgraph.passes.normal.sizes.infer import infer_shapes, objection
from gradgraph.passes.normal.spelling.names import make_names_unique, write_one_domain
from gradgraph.passes.rewrites import run

_BLOCKED = "com.microsoft.nchwc"


@paused_collection()
def normalise(
    model: Source,
    parameters: str | Iterable[str] | None = None,
    keep_quantization: bool = False,
    look: Callable[[ir.Model], object] = lambda read: None,
) -> ir.Model:
    """Return a copy of ``model`` in normal form; its inputs, outputs and initializers keep their names.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not modified, and weights are shared.
        parameters: names that the caller selected; these are parameters, even if they look like constants.
        keep_quantization: skip ``pass_quantization``, which the caller may apply later.
        look: a function that is called with the model as read, before any change.

    Raises:
        ModelError: the model is malformed, a node has inputs that its operator does not accept, or an operator has no
            equivalent at opset 21.
    """
    read = load_model(model)
    _refuse_blocks(read)
    look(read)
    read.meta[COMPUTED] = {value.name for node in read.graph for value in node.outputs}
    named = {parameters} if isinstance(parameters, str) else set(parameters or ())
    with blaming(model):
        run((*reading(named), *AT_ONE_OPSET), read)
    if not keep_quantization:
        pass_quantization(read)
    return read


def load_plain(source: Source) -> ir.Model:
    """Read a model as ``load_runnable`` does; all its weights have ONNX's layout.

    Raises:
        ModelError: channels are stored in blocks.
    """
    model = load_runnable(source)
    _refuse_blocks(model)
    return model


def _refuse_blocks(model: ir.Model) -> None:
    """Raise ModelError for onnxruntime's NCHWc layout: the file does not contain its block size."""
    for node in nodes_of(model):
        if node.domain == _BLOCKED:
            raise ModelError(
                f"{describe(node)} stores channels in blocks whose size depends on the processor that wrote the file; "
                "save the model at onnxruntime's level 'extended' (ORT_ENABLE_EXTENDED), or use the original model"
            )


def load_runnable(source: Source) -> ir.Model:
    """Read a model as ``load_model`` does, but convert opsets 1-6, which onnxruntime does not run, to opset 21.

    Functions are inlined if one of them, or the model, has such an opset.
    """
    model = load_model(source)
    write_one_domain(model)
    imports = [model.opset_imports, *(function.opset_imports for function in model.functions.values())]
    if any(one.get("", OPSET) < FULLY_INFERRED for one in imports) and inline_functions(model):
        make_names_unique(model)
    convert_old(model)
    return model


@contextlib.contextmanager
def blaming(model: Source) -> Iterator[None]:
    """Return a context that replaces unexpected errors with the error that ONNX shape inference reports for ``model``.

    Raises:
        ModelError: the code in the context raised an error other than a GradgraphError, and ONNX shape inference
            rejects the model.
    """
    try:
        yield
    except GradgraphError:
        raise
    except Exception as error:
        if (words := objection(load_model(model))) is None:
            raise
        raise ModelError(f"ONNX finds a fault in the model: {words}; correct it, or export it again") from error


def pass_quantization(model: ir.Model, trained: Collection[str] | None = None) -> None:
    """Rewrite QuantizeLinear and DequantizeLinear as arithmetic, in place, if ``straight_through`` is requested.

    With ``trained``, only pairs that depend on these weights are rewritten: no gradient passes through the others.
    """
    run(quantization(trained), model)


def expand(model: ir.Model, nodes: Iterable[ir.Node]) -> bool:
    """Replace ``nodes`` in place with their function bodies, in normal form; return True if all of them had one."""
    editor = Editor(model)
    done = []
    for node in nodes:
        outputs = instantiate_body(editor.op, node)
        done.append(outputs is not None)
        if outputs is not None:
            for new in editor.replace(node, *outputs):
                new.version = None
    if any(done):
        make_names_unique(model)
        infer_shapes(model)
        run(AT_ONE_OPSET, model)
    return all(done)
