"""Export after training: the plain inference model, or the weights by themselves.

``inference_model`` gives the model as it was before loss and optimizer were appended, with the trained weights inside
and BatchNormalization and Dropout in evaluation form; ``weights`` gives them as arrays under the model's own names.
"""

from gradgraph.export.artifacts import inference_model, save_inference, save_weights, weights

__all__ = ["inference_model", "save_inference", "save_weights", "weights"]
