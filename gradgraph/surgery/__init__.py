"""Surgery: changes to a finished model that its framework would make in source code, made in the file.

Each function takes a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` and returns an ordinary model of that kind (a
path gives a ``ModelProto``): opset, metadata, doc strings and all names that still mean something are kept. With
``out=`` the result is written there, and weights that nothing changed are read from where they lie.
"""

from __future__ import annotations

from gradgraph.surgery.adapter_files import load_adapter as load_adapter
from gradgraph.surgery.adapter_files import save_adapter as save_adapter
from gradgraph.surgery.adapters import lora as lora
from gradgraph.surgery.adapters import use_adapters as use_adapters
from gradgraph.surgery.axes import open_axes as open_axes
from gradgraph.surgery.cuts import below as below
from gradgraph.surgery.cuts import cut as cut
from gradgraph.surgery.embeddings import resize_embedding as resize_embedding
from gradgraph.surgery.floats import in_float32 as in_float32
from gradgraph.surgery.forgotten import forget_sizes as forget_sizes
from gradgraph.surgery.heads import new_head as new_head
from gradgraph.surgery.language_models import language_model as language_model
from gradgraph.surgery.language_models import next_tokens as next_tokens
from gradgraph.surgery.merged import merge_adapters as merge_adapters
from gradgraph.surgery.naming import name_weights as name_weights
from gradgraph.surgery.ort_adapters import switchable as switchable
from gradgraph.surgery.quantised_training import qat as qat
from gradgraph.surgery.teachers import distill as distill
from gradgraph.surgery.untied import untie_weights as untie_weights
from gradgraph.surgery.weights import load_weights as load_weights
from gradgraph.surgery.weights import reset_weights as reset_weights
from gradgraph.surgery.weights import tie_weights as tie_weights
