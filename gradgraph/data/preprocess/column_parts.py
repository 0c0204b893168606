"""Nodes and tensor types shared by several column kinds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradgraph.data.preprocess.frames import GAP_WORDS, Array

if TYPE_CHECKING:
    from gradgraph.graph.builder import Builder, Var

ML = "ai.onnx.ml"


def type_of(dtype: Any) -> Any:
    import onnx_ir as ir

    return ir.TensorType(ir.DataType.STRING if dtype is object else ir.DataType.from_numpy(np.dtype(dtype)))


def int64() -> Any:
    return type_of(np.int64).dtype


def float64() -> Any:
    return type_of(np.float64).dtype


def float32() -> Any:
    return type_of(np.float32).dtype


def tensor_of(array: Array) -> Any:
    import onnx_ir as ir

    return ir.Tensor(array)


def as_float(x: Var) -> Var:
    return x.op.Cast(x, to=float32())


def text_constant(op: Builder, text: str) -> Var:
    constant = op.Constant(value_string=text)
    constant.value.type = type_of(object)
    return constant


def split_at(op: Builder, x: Var, sign: str | None, most: int | None) -> Var:
    parts, _ = op.StringSplit(x, delimiter=sign, maxsplit=most, outputs=2)
    parts.value.type = type_of(object)
    return parts


def word_hashes(op: Builder, words: Var) -> Var:
    """Emit a node that hashes words by MurmurHash3 to int32; only onnxruntime has this operator."""
    import onnx_ir as ir

    attributes = [ir.AttrInt64("seed", 0), ir.AttrInt64("positive", 0)]
    node = ir.Node("com.microsoft", "MurmurHash3", [words.value], attributes, name=op.fresh_in(op.scope, "MurmurHash3"))
    node.outputs[0].name, node.outputs[0].type = node.name, type_of(np.int32)
    op.nodes.append(node)
    return type(words)(op, node.outputs[0])


def column_at(op: Builder, x: Var, i: int) -> Var:
    return op.Gather(x, np.array(i), axis=1)


def side_by_side(op: Builder, columns: Sequence[Var]) -> Var:
    """Stack columns, [rows] each, to [rows, columns]."""
    made = [op.Unsqueeze(column, np.array([1])) for column in columns]
    return made[0] if len(made) == 1 else op.Concat(*made, axis=1)


def is_missing(op: Builder, x: Var) -> Var:
    """Emit a node that computes whether each text is a word for a missing value (``GAP_WORDS``)."""
    return op.RegexFullMatch(x, pattern=f"({'|'.join(map(re.escape, GAP_WORDS))})")


def zeros_unless(op: Builder, bad: Var, why: str) -> Var:
    """Emit a node that returns zeros, int64 [rows], but fails if a row is ``bad``; ``why`` is part of its name."""
    return op.emit("Gather", op.const(np.array([0])), op.Cast(bad, to=int64()), axis=0, name=f"{op.scope}/{why}")
