"""What training needs, made from a model: training, eval and optimizer models, and a checkpoint."""

from gradgraph.compat.onnxruntime_training.artifacts.generating import LossType, OptimType, generate_artifacts

__all__ = ["LossType", "OptimType", "generate_artifacts"]
