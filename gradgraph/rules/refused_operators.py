"""Operators of onnxruntime without a gradient rule (com.microsoft and its internal layouts), each with the reason.

Those with a gradient are rewritten with standard operators first (``passes/normal/dialects``), and are not in these
tables. A refused operator off the path to the loss runs as it is.
"""

from functools import partial

from gradgraph.rules import registry

DOMAIN = "com.microsoft"
BLOCKED = "com.microsoft.nchwc"
CHANNELS_LAST = "com.ms.internal.nhwc"

_no_gradient = partial(registry.no_gradient, domain=DOMAIN)
_refuse = partial(registry.refuse, domain=DOMAIN)

# --- the derivative is zero, or there are no numbers to derive by -------------------------------------------------

_no_gradient(
    "its outputs are tokens", "BifurcationDetector", "GreedySearch", "NGramHashMapping", "VarlenNGramHashMapping"
)
_no_gradient("it splits strings", "Tokenizer")
_no_gradient("a hash", "MurmurHash3")
_no_gradient("its output is the indices of a path", "DynamicTimeWarping")
_no_gradient("a truth value", "IsAllFinite")
_no_gradient("rounded to integers, hence piecewise constant", "QuantizeBFP", "QuantizeWithOrder")
_no_gradient("its inputs are integers", "DequantizeBFP", "QEmbedLayerNormalization")
_no_gradient(
    "integer arithmetic",
    "MatMulInteger16",
    "MulInteger",
    "QGemm",
    "QLinearAdd",
    "QLinearAveragePool",
    "QLinearConcat",
    "QLinearConv",
    "QLinearGlobalAveragePool",
    "QLinearLeakyRelu",
    "QLinearMul",
    "QLinearReduceMean",
    "QLinearSigmoid",
    "QLinearSoftmax",
    "QLinearWhere",
    "QOrderedAttention",
    "QOrderedGelu",
    "QOrderedLayerNormalization",
    "QOrderedLongformerAttention",
    "QOrderedMatMul",
    "ReduceSumInteger",
)

# --- there is a derivative, but no rule --------------------------------------------------------------------------

_LOGITS = "export the model without generation, so that its output is the logits"
_ORIGINAL = "use the original model, or freeze the weights before it"
_FLOAT = "use the float model, or freeze the weights before it"

_refuse(
    "it generates token sequences in a loop of its own",
    _LOGITS,
    "BeamSearch",
    "Sampling",
    "WhisperBeamSearch",
)
_refuse("it excludes tokens while text is generated", _LOGITS, "NGramRepeatBlock")
_refuse(
    "it contains a part of the model that is compiled for one device",
    "use the ONNX model that it was compiled from",
    "EPContext",
    "Snpe",
)
_refuse(
    "it rounds its input to 8-bit integers, and rounding has no derivative",
    "use the float model, gradgraph.qat, or freeze the weights before it",
    "DynamicQuantizeMatMul",
)
_refuse(
    "it computes in 8-bit integers, and rounding has no derivative",
    _FLOAT,
    "DynamicQuantizeLSTM",
    "MatMulIntegerToFloat",
    "QAttention",
)
_refuse(
    "its weights are stored in a layout that only onnxruntime's kernel reads",
    _FLOAT,
    "DequantizeWithOrder",
    "MatMulFpQ4",
)
_refuse("it multiplies 8-bit floats with the scales of NVIDIA's kernels", _FLOAT, "GemmFloat8")
_refuse("its first input is a sparse tensor", "use a dense matrix and MatMul", "SparseToDenseMatMul")
_refuse("it is an internal operator of one model", _ORIGINAL, "AttnLSTM", "MaxpoolWithMask")
_refuse(
    "it is an attention with a cache for generation, which only onnxruntime's GPU kernels compute",
    "export the model for training, without its cache",
    "DecoderAttention",
    "DecoderMaskedSelfAttention",
)
_refuse(
    "its keys and values are in a cache in pages, and only onnxruntime's GPU kernels compute it",
    "export the model for training, with GroupQueryAttention",
    "SparsePagedAttention",
)
_refuse(
    "it selects keys by their scores, and only onnxruntime's GPU kernels compute it",
    _ORIGINAL,
    "DynamicSparseAttention",
    "PackedSparseAttentionIndexer",
    "SparseAttentionIndexer",
)
_refuse(
    "only onnxruntime's GPU kernels compute it",
    _ORIGINAL,
    "Irfft",
    "LongformerAttention",
)
_refuse(
    "its matrices have more than 8 rows or an unknown size (smaller ones are inverted by determinants)",
    "declare the size of the matrices, or freeze the weights before it",
    "Inverse",
)

# --- layouts that onnxruntime writes into optimised files --------------------------------------------------------

registry.refuse(
    "it stores channels in blocks whose size depends on the processor that wrote the file",
    "save the model at onnxruntime's level 'extended' (ORT_ENABLE_EXTENDED), or use the original model",
    "AveragePool",
    "Conv",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "MaxPool",
    "ReorderInput",
    "ReorderOutput",
    "Upsample",
    domain=BLOCKED,
)
registry.refuse(
    "it has the channels-last layout of one execution provider",
    "save the model with the CPU provider at onnxruntime's level 'extended', or use the original model",
    "AveragePool",
    "BatchNormalization",
    "Conv",
    "ConvTranspose",
    "DepthToSpace",
    "GlobalAveragePool",
    "GlobalLpPool",
    "GlobalMaxPool",
    "GridSample",
    "InstanceNormalization",
    "LRN",
    "LpPool",
    "MaxPool",
    "MaxUnpool",
    "QLinearAveragePool",
    "QLinearConv",
    "QLinearConvTranspose",
    "Resize",
    "SpaceToDepth",
    domain=CHANNELS_LAST,
)
