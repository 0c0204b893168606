"""Splitting texts into words inside a model, as ``str.split`` does."""

from __future__ import annotations

import numpy as np

from gradgraph.graph.builder import Builder, Var

# white space according to str.isspace: tabs and line ends, file separators, no-break and ideographic spaces, …
SPACES = (*range(0x09, 0x0E), *range(0x1C, 0x21), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F,
          0x205F, 0x3000)  # fmt: skip


def words_of(op: Builder, texts: Var) -> Var:
    """Emit nodes that split texts, [rows], into words: [rows, most words], padded with "".

    They use onnxruntime's ``Tokenizer``, since ONNX's StringSplit only splits at U+0020.
    """
    import onnx_ir as ir

    separator = "[" + "".join(f"\\x{{{space:X}}}" for space in SPACES) + "]+"
    attributes = [ir.AttrInt64("mark", 0), ir.AttrInt64("mincharnum", 1), ir.AttrString("pad_value", ""),
                  ir.AttrStrings("separators", [separator])]  # fmt: skip
    empty = op.Constant(value_strings=[""])
    empty.value.type = texts.value.type
    given = op.Concat(empty, texts, axis=0)  # without texts, the node returns no matrix
    given.value.type = texts.value.type
    node = ir.Node("com.microsoft", "Tokenizer", [given.value], attributes, name=op.fresh_in(op.scope, "Tokenizer"))
    node.outputs[0].name, node.outputs[0].type = node.name, texts.value.type
    op.nodes.append(node)
    words = op.Slice(op.wrap(node.outputs[0]), np.array([1]), np.array([np.iinfo(np.int64).max]), np.array([0]))
    words.value.type = texts.value.type
    return words
