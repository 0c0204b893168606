"""Names of onnxruntime optimizations to disable because they cannot apply to a model.

Each optimization first sorts all nodes of the graph by inserting each node by linear search into a list of ready nodes,
which is long for a training step. For a step of 15,000 nodes, disabling these optimizations saves a fifth of the sorts
and of the time to open its session. The executed graph does not change.

An optimization that would fail on a model is disabled, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from gradgraph.files.protos import proto_graphs, proto_nodes

# optimization → lower-case substrings of operator names, one of which must occur in the graph for it to apply
_STARTS_FROM: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("DoubleQDQPairsRemover", "EnsureUniqueDQForNodeUnit", "QDQFinalCleanupTransformer"),
            *("QDQPropagationTransformer", "QDQS8ToU8Transformer", "QDQSelectorActionTransformer"),
            *("WeightBiasQuantization", "WhereDummyDq"),
        ),
        ("quant",),
    ),
    **dict.fromkeys(("DynamicQuantizeMatMulFusion", "MatMulIntegerToFloatFusion"), ("quant", "integer")),
    "BiasDropoutFusion": ("dropout",),
    **dict.fromkeys(("GeluFusionL1", "GeluFusionL2"), ("erf",)),
    "FastGeluFusion": ("tanh",),
    "QuickGeluFusion": ("sigmoid",),
    "BiasGeluFusion": ("gelu", "erf", "tanh"),  # including the operators from which the fusions above create a Gelu
    **dict.fromkeys(("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion"), ("reducemean",)),
    **dict.fromkeys(
        ("BiasSkipLayerNormFusion", "EmbedLayerNormFusion", "SkipLayerNormFusion"),
        ("layernorm", "rmsnorm", "reducemean"),
    ),
    "SliceConcatToSpaceToDepthFusion": ("slice",),
    "BiasSoftmaxFusion": ("softmax",),
    "GroupQueryAttentionFusion": ("groupqueryattention",),
    "MatMulNBitsFusion": ("quant", "nbits"),
}


def useless_optimizations(model: onnx.ModelProto) -> list[str]:
    """Return the names of onnxruntime optimizations that cannot apply to ``model``.

    Their operators are neither in ``model`` nor created by other optimizations.
    """
    lists = (model.graph.node, *(f.node for f in model.functions))
    operators = " ".join({node.op_type for nodes in lists for node in proto_nodes(nodes)}).lower()
    return [name for name, parts in _STARTS_FROM.items() if not any(part in operators for part in parts)]


def failing_optimizations(model: onnx.ModelProto) -> list[str]:
    """Return the names of onnxruntime optimizations that fail on ``model``, so that its session would not open.

    The fusion of DequantizeLinear and MatMul or Gemm to MatMulNBits fails

    1. in a body of If, Loop or Scan, if the integers, scales or zero points are initializers of an outer graph;
    2. if the result is of another floating-point type than the scales.
    """
    graphs = list(proto_graphs(model))
    types = {tensor.name: tensor.data_type for graph in graphs for tensor in graph.initializer}
    return (
        ["QDQSelectorActionTransformer"]
        if any(_fails(node, graph, types) for graph in graphs for node in _dequantizers(graph))
        else []
    )


def _dequantizers(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the DequantizeLinear nodes of the second factors of products, unless both factors are dequantized.

    Onnxruntime fuses those of two factors to a product of integers.
    """
    found = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[0] not in found and node.input[1] in found:
            yield found[node.input[1]]


def _fails(node: onnx.NodeProto, graph: onnx.GraphProto, types: Mapping[str, int]) -> bool:
    """Whether the fusion of ``node``, a DequantizeLinear, fails; ``types`` are those of all initializers."""
    own = {tensor.name for tensor in graph.initializer}
    made = next((a.i for a in node.attribute if a.name == "output_dtype"), 0)
    return any(name in types and name not in own for name in node.input) or made not in (0, types.get(node.input[1]))
