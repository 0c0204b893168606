"""scikit-learn estimators that train an ONNX model, and the export of pipelines around them as one file.

This package implements scikit-learn's estimator interface on top of ``gg.build`` and ``Trainer``; no other package
imports it. Other steps of a pipeline are converted by skl2onnx, which ``pipelines.py`` calls.
"""

from gradgraph.errors import RuntimeUnavailableError

try:
    from gradgraph.sklearn.classifier import Classifier
    from gradgraph.sklearn.pipelines import export
    from gradgraph.sklearn.regressor import Regressor
except ImportError as error:
    raise RuntimeUnavailableError(
        f"gradgraph.sklearn needs scikit-learn 1.6 or newer ({error}); pip install 'scikit-learn>=1.6'"
    ) from None

__all__ = ["Classifier", "Regressor", "export"]
