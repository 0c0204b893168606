"""Estimators of scikit-learn that train an ONNX model, and pipelines round them as one file (extra ``sklearn``).

They know scikit-learn's contract, ``gg.build`` and ``Trainer``; nothing imports them. A new layer of preprocessing is
skl2onnx's business, which ``pipelines.py`` asks.
"""

from __future__ import annotations

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
