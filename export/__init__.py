"""Export after training, and artifacts of a step for other ways to train and to run it.

``inference_model`` gives the model as it was before loss and optimizer were appended, with the trained weights inside
and BatchNormalization and Dropout in evaluation form; ``weights`` gives them as arrays under the model's own names,
``flat_weights`` as one vector. ``fixed_sizes`` and ``float16_storage`` change how a model is written; ``ort_model``,
``save_ort`` and ``required_operators`` are for small builds of onnxruntime. ``save_page`` shows a step in a browser.
"""

from gradgraph.export.artifacts import fixed_sizes, inference_model, save_inference, save_weights, weights
from gradgraph.export.flat import FlatWeights, Place, flat_models, flat_weights
from gradgraph.export.ort_format import ort_model, required_operators, save_ort, save_required_operators
from gradgraph.export.step_page import save_page
from gradgraph.export.storage import Float16Storage, float16_storage

__all__ = [
    "FlatWeights",
    "Float16Storage",
    "Place",
    "fixed_sizes",
    "flat_models",
    "flat_weights",
    "float16_storage",
    "inference_model",
    "ort_model",
    "required_operators",
    "save_inference",
    "save_ort",
    "save_page",
    "save_required_operators",
    "save_weights",
    "weights",
]
