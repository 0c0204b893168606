"""Surgery: edits to a model file that would otherwise need its source code.

Each function takes a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` and returns an ordinary model of that kind (a
path gives a ``ModelProto``). Opset, metadata, doc strings and names are kept. With ``out=`` the result is written to
that path, and unchanged weights are copied from their file.
"""

from __future__ import annotations

from gradgraph.surgery.adapter_files import save_adapter
from gradgraph.surgery.adapter_reading import load_adapter
from gradgraph.surgery.adapters import lora, use_adapters
from gradgraph.surgery.axes import open_axes
from gradgraph.surgery.cuts import below, cut
from gradgraph.surgery.declared_sizes import forget_sizes
from gradgraph.surgery.embeddings import resize_embedding
from gradgraph.surgery.fixed_inputs import fix_inputs
from gradgraph.surgery.floats import in_float32
from gradgraph.surgery.heads import new_head
from gradgraph.surgery.integer_model import Quantized, quantize
from gradgraph.surgery.language_models import language_model, next_tokens
from gradgraph.surgery.loaded_weights import load_weights
from gradgraph.surgery.merged import merge_adapters
from gradgraph.surgery.naming import name_weights
from gradgraph.surgery.ort_adapters import switchable
from gradgraph.surgery.pair_models import answer_pairs, pair_model, reference
from gradgraph.surgery.quantised_training import qat
from gradgraph.surgery.teachers import distill
from gradgraph.surgery.untied import untie_weights
from gradgraph.surgery.weights import reset_weights, tie_weights

__all__ = [
    "Quantized",
    "answer_pairs",
    "below",
    "cut",
    "distill",
    "fix_inputs",
    "forget_sizes",
    "in_float32",
    "language_model",
    "load_adapter",
    "load_weights",
    "lora",
    "merge_adapters",
    "name_weights",
    "new_head",
    "next_tokens",
    "open_axes",
    "pair_model",
    "qat",
    "quantize",
    "reference",
    "reset_weights",
    "resize_embedding",
    "save_adapter",
    "switchable",
    "tie_weights",
    "untie_weights",
    "use_adapters",
]


def __dir__() -> list[str]:
    return sorted(__all__)
