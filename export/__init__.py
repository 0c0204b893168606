"""Export of trained models, and artifacts of a step for other runtimes and training loops.

The functions turn a step and trained weights into inference models, weight files, flat buffers, files in ORT format and
HTML pages, and steps into C. They do not depend on how a step is built.
"""

from gradgraph.export.artifacts import fixed_sizes, inference_model, save_inference, save_weights, weights
from gradgraph.export.c.door import c
from gradgraph.export.comparison import Compared, ExportReport, compared, drawn, export_report
from gradgraph.export.flat import FlatWeights, Place, flat_models, flat_weights
from gradgraph.export.frozen_layers import save_split
from gradgraph.export.image_input import with_image_input
from gradgraph.export.mistakes import save_mistakes
from gradgraph.export.ort_format import ort_model, required_operators, save_ort, save_required_operators
from gradgraph.export.step_page import save_page
from gradgraph.export.storage import Float16Storage, float16_storage
from gradgraph.export.temperature import Calibration, with_temperature

__all__ = [
    "Calibration",
    "Compared",
    "ExportReport",
    "FlatWeights",
    "Float16Storage",
    "Place",
    "c",
    "compared",
    "drawn",
    "export_report",
    "fixed_sizes",
    "flat_models",
    "flat_weights",
    "float16_storage",
    "inference_model",
    "ort_model",
    "required_operators",
    "save_inference",
    "save_mistakes",
    "save_ort",
    "save_page",
    "save_required_operators",
    "save_split",
    "save_weights",
    "weights",
    "with_image_input",
    "with_temperature",
]


def __dir__() -> list[str]:
    return sorted(__all__)
