"""Random operators of a training step: RandomNormal, RandomUniform, their -Like forms, Bernoulli and Multinomial.

A runtime draws their numbers from a generator of its session, which would restart when a run is resumed. In a training
step, each operator is therefore replaced by nodes whose numbers are a function of the seed, the step number and the
operator's place in the graph (``passes/randomness.py``). In a Loop, they also depend on the iteration number, so that a
gradient that recomputes an iteration draws the same numbers. The attribute ``seed`` (also of Dropout) is ignored: the
step's seed is used, and each place has its own stream.

eval.onnx and exports contain the random operators themselves. For evaluation, a Trainer replaces them with draws that
are the same every time (``fixed``), so that losses of different weights are comparable and a resumed run reproduces
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import BuildError
from gradgraph.files.protos import proto_nodes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import DRAWING, WITH_BODIES, describe, has_bodies, subgraphs
from gradgraph.graph.operator_table import OperatorTable
from gradgraph.passes.normal.edit import Editor, attributes, names_of
from gradgraph.passes.normal.opsets.opset import convert_to_opset
from gradgraph.passes.randomness import DOUBLE, FLOAT, RandomSource, initial_state

Turns = Sequence[Var]  # the iteration numbers of the Loops around a place, outermost first
Form = Callable[..., Var]

_FORMS = OperatorTable[Form]()
_DIGITS = {ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8}  # bits per number: with more, rounding could yield 1


def draw_from(source: RandomSource, model: ir.Model, op: Builder) -> None:
    """Replace, in place, every random operator of ``model`` (in normal form) by draws from ``source``.

    Raises:
        BuildError: a random operator is in the body of a Scan, which has no iteration number.
    """
    editor = Editor(model, op)
    for node, turns in list(_draws(model.graph, editor)):
        if turns is None:
            raise BuildError(
                f"{describe(node)} draws random numbers in the body of a Scan, which has no "
                "iteration number, so every iteration would draw the same numbers; draw them outside and pass them to "
                "the Scan as an input, or use a Loop"
            )
        op.scope = node.name or ""
        inputs = [op.wrap(v) for v in node.inputs if v is not None]
        y, like = _FORMS[node.op_type](op, source, turns, *inputs, **attributes(node)), op.wrap(node.outputs[0])
        editor.replace(node, op.like(y, like))


def fixed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model`` with random operators replaced by draws equal in every run; ``model`` itself if it has none."""
    if not any(node.op_type in DRAWING and not node.domain for node in proto_nodes(model.graph.node)):
        return model
    work: ir.Model = ir.from_proto(model)
    convert_to_opset(work)
    op = Builder(names_of(work))
    draw_from(RandomSource(op.const(initial_state(0))), work, op)
    return ir.to_proto(work)


def _draws(root: ir.Graph, editor: Editor) -> Iterator[tuple[ir.Node, Turns | None]]:
    """Yield each random operator with the iteration numbers of the Loops around it, or None inside a Scan."""
    stack: list[tuple[ir.Graph, Turns | None]] = [(root, ())]
    while stack:
        graph, turns = stack.pop()
        for node in graph:
            if node.domain == "" and node.op_type in _FORMS:
                yield node, turns
            elif node.op_type in WITH_BODIES and has_bodies(node):
                stack.extend((body, _inside(node, body, turns, editor)) for body in subgraphs(node))


def _inside(node: ir.Node, body: ir.Graph, turns: Turns | None, editor: Editor) -> Turns | None:
    if node.op_type == "If" or turns is None:
        return turns
    return (*turns, Var(editor.op, body.inputs[0])) if node.op_type == "Loop" else None


@_FORMS("RandomUniform", "RandomUniformLike")
def _uniform(op: Builder, source: RandomSource, turns: Turns, *like: Var, low: float, high: float, **given: Any) -> Var:
    shape, dtype = _asked_for(op, *like, **given)
    drawn = source.uniform(op, shape, turns, _wide(dtype), _DIGITS.get(dtype, 24))
    return op.cast(drawn * (high - low) + low, dtype)


@_FORMS("RandomNormal", "RandomNormalLike")
def _normal(
    op: Builder, source: RandomSource, turns: Turns, *like: Var, mean: float, scale: float, **given: Any
) -> Var:
    shape, dtype = _asked_for(op, *like, **given)
    return op.cast(source.normal(op, shape, turns, _wide(dtype)) * scale + mean, dtype)


def _asked_for(op: Builder, *like: Var, shape: Sequence[int] = (), dtype: int = 0, **_: Any) -> tuple[Var, ir.DataType]:
    """Return the shape and element type of random numbers, from attributes or from the input of a -Like operator."""
    if like:
        return op.shape(like[0]), ir.DataType(dtype or like[0].dtype)
    return op.const(np.array(shape, np.int64)), ir.DataType(dtype)


def _wide(dtype: ir.DataType) -> ir.DataType:
    """Return the element type, float32 or float64, in which random numbers of type ``dtype`` are computed."""
    return DOUBLE if dtype == DOUBLE else FLOAT


@_FORMS("Bernoulli")
def _bernoulli(op: Builder, source: RandomSource, turns: Turns, p: Var, *, dtype: int = 0, **_: Any) -> Var:
    wide = _wide(p.dtype)
    drawn = op.Less(source.uniform(op, op.shape(p), turns, wide), op.cast(p, wide))
    return op.cast(drawn, ir.DataType(dtype or p.dtype))


@_FORMS("Multinomial")
def _multinomial(
    op: Builder, source: RandomSource, turns: Turns, x: Var, *, sample_size: int, dtype: int, **_: Any
) -> Var:
    """Draw a class index: the number of cumulative probabilities less than or equal to a uniform number in [0, sum).

    A class of probability 0 is never drawn. The uniform number has 23 bits, so that rounding never makes it the sum.
    """
    shares = op.CumSum(op.Softmax(op.cast(x, FLOAT), axis=1), op.const(np.int64(1)))
    whole = op.Gather(shares, op.const(np.array([-1], np.int64)), axis=1)
    size = op.Concat(op.dim(x, 0), op.const(np.array([sample_size], np.int64)), axis=0)
    at = op.Unsqueeze(source.uniform(op, size, turns, digits=23) * whole, [2])
    passed = op.Cast(op.LessOrEqual(op.Unsqueeze(shares, [1]), at), to=int(ir.DataType.INT64))
    return op.cast(op.ReduceSum(passed, [2], keepdims=0), ir.DataType(dtype))
