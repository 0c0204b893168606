"""A scikit-learn regressor that trains an ONNX model."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin

from gradgraph.data.arrays.batch import Array
from gradgraph.sklearn.estimator import Estimator, present


class Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A scikit-learn regressor for one or several values.

    Arguments are as for :class:`Classifier`, without ``class_weight``. The loss is the mean squared error by default,
    and early stopping monitors R². Scale large y, for example with ``TransformedTargetRegressor``.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:
        """Train a new model, or with ``warm_start`` continue to train the fitted one.

        Args:
            X: inputs [samples, features].
            y: target values [samples] or [samples, values].
            sample_weight: weights of the samples; None for equal weights.
        """
        anew = not self._goes_on
        X, y = self._checked(X, present(y), reset=anew)
        return self._fit(X, y, sample_weight, self.epochs, anew, "r2")

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:
        """Train for one more epoch."""
        self._refuse_early_stopping()
        first = not hasattr(self, "trained_")
        X, y = self._checked(X, present(y), reset=first)
        return self._fit(X, y, sample_weight, 1, first)

    def _fit(self, X: Any, y: Array, weights: Any, epochs: int, anew: bool, metric: str = "") -> Regressor:
        y = np.asarray(y, np.float32)
        if anew:
            self._is_flat = y.ndim == 1
            self._begin(X, 1 if self._is_flat else y.shape[1], weights is not None, "mse", metric)
        narrow = len(self.trained_.step.manifest.targets[0].shape) == 1
        self._train(X, y if narrow or y.ndim > 1 else y[:, None], weights, epochs, metric)
        return self

    def predict(self, X: Any) -> Array:
        """Predict values, with the shape of y: [samples] or [samples, values]."""
        found = self._outputs(X).astype(np.float64)
        return found.reshape(len(found)) if self._is_flat else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
