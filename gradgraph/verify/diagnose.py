"""Diagnosis of all problems of a model in one run: a node that causes an error is masked, and the passes run again.

A masked node becomes a node of an unknown domain, without inputs and attributes. So its problems are reported once, and
the shapes and types of its outputs are unknown.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from gradgraph.autodiff.path import carries
from gradgraph.autodiff.select import find_path, select, trainable
from gradgraph.errors import Finding, GradgraphError, UnsupportedOperatorError
from gradgraph.files.models import Source, load_model, read_message
from gradgraph.files.path_kinds import model_of
from gradgraph.files.protos import attribute_findings, message_findings, proto_nodes
from gradgraph.graph.checks import FINDINGS_LIMIT, malformed_nodes
from gradgraph.graph.node_forms import described
from gradgraph.passes.normal import normalise

_ASIDE = "gradgraph.aside"
_ROUNDS = 20
_NODE = re.compile(r"(?:node|the node that computes) '[^']*' \([^)]*\)")


def diagnose(model: Source, wrt: str | Sequence[str] | None = None, output: str | None = None) -> list[Finding]:
    """Return everything that prevents the gradients of ``model`` from being computed.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt, output: the tensors that need gradients, and the output to differentiate, as for ``check_gradients``.

    Raises:
        ModelError: if the file does not exist, or cannot be parsed.
    """
    work, base = _message(model)
    found = [*itertools.islice(message_findings(work), FINDINGS_LIMIT)]
    malformed = [*itertools.islice(attribute_findings(work), FINDINGS_LIMIT)]
    found += [finding for _, finding in malformed]
    if len(found) > len(malformed):  # with damaged names or tensors, only the form of nodes can be checked
        with contextlib.suppress(ir.serde.SerdeError):
            found += itertools.islice(malformed_nodes(ir.from_proto(work)), FINDINGS_LIMIT)
        return found
    _name_nodes(work)
    for node in {id(n): n for n, _ in malformed}.values():
        _set_aside(work, node)
    for _ in range(_ROUNDS):
        try:
            _differentiable(normalise(load_model(work, base), parameters=wrt), wrt, output)
            break
        except GradgraphError as error:
            news = error.findings or (Finding("", error.problem, "", error.remedy or ""),)
        bodies = (work.graph.node, *(f.node for f in work.functions))
        whole = (n for body in bodies for n in proto_nodes(body) if n.domain != _ASIDE)
        nodes = {described(n.name, n.domain, n.op_type, n.output): n for n in whole}
        named = (_NODE.findall(f.subject) or _NODE.findall(str(f))[:1] for f in news)
        stuck = {id(nodes[name]): nodes[name] for names in named for name in names if name in nodes}
        found += [f for f in news if _ASIDE not in str(f)]
        if not stuck or len(found) >= FINDINGS_LIMIT:
            break
        for node in stuck.values():
            _set_aside(work, node)
    return [*dict.fromkeys(found)]


def _message(model: Source) -> tuple[onnx.ModelProto, Path | None]:
    """Return a copy of the model as a ``ModelProto``, and the folder of its external data."""
    if isinstance(model, ir.Model):
        return ir.to_proto(model), None
    if not isinstance(model, onnx.ModelProto):
        path = model_of(model)
        return read_message(path), Path(os.path.realpath(path)).parent
    own = onnx.ModelProto()
    own.CopyFrom(model)
    return own, None


def _name_nodes(model: onnx.ModelProto) -> None:
    """Make node names unique as the normal form does, so that findings match; nodes without a name stay unnamed."""
    taken: set[str] = set()
    for node in proto_nodes(model.graph.node):
        name = stem = node.name or node.op_type
        for i in itertools.count(1):
            if name not in taken:
                break
            name = f"{stem}_{i}"
        node.name = name if node.name else ""
        taken.add(name)


def _set_aside(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.domain = _ASIDE
    del node.input[:]
    del node.attribute[:]
    for imports in (model.opset_import, *(f.opset_import for f in model.functions)):
        if all(o.domain != _ASIDE for o in imports):
            imports.append(onnx.helper.make_opsetid(_ASIDE, 1))


def _differentiable(model: ir.Model, wrt: str | Sequence[str] | None, output: str | None) -> None:
    """Raise UnsupportedOperatorError if operators on the path from ``wrt`` to the outputs have no gradient rule."""
    graph = model.graph
    targets = [v for v in graph.outputs if carries(v) and output in (None, v.name)]
    inputs = [v for v in graph.inputs if carries(v) and not v.is_initializer()]
    chosen = select(graph, wrt, targets, inner=False) if wrt is not None else [*inputs, *trainable(graph, targets)]
    try:
        find_path(model, targets, chosen, allow_unused=True)
    except UnsupportedOperatorError:
        raise
    except GradgraphError:  # an invalid ``wrt`` or ``output``, which is not a problem of the model
        return
