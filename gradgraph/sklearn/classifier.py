"""A scikit-learn classifier that trains an ONNX model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import issparse
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d

from gradgraph.data.arrays.batch import Array
from gradgraph.errors import BuildError
from gradgraph.sklearn.estimator import Estimator, present
from gradgraph.step.step import Step


@dataclass(eq=False, repr=False, kw_only=True)
class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A scikit-learn classifier for two or more classes, or for multilabel data.

    Args:
        model: an ONNX model with one input, whose first output has one score per class or label. Training starts from
            its weights. By default a multilayer perceptron with ReLU.
        hidden: the sizes of the hidden layers of the default model.
        loss, optimizer: names of ``gg.losses`` and ``gg.optim``. The default loss is cross-entropy, or
            ``bce_with_logits`` for multilabel data. With a binary loss, two classes may have a single score.
        learning_rate, optimizer_options: arguments of the optimizer.
        epochs, batch_size: as for ``Trainer.fit``.
        class_weight: a dict of weights by label, or "balanced" for weights inversely proportional to class frequencies.
        early_stopping: stop after ``n_iter_no_change`` epochs in which the validation score (on a stratified
            ``validation_fraction``) has not improved by more than ``tol``, and restore the best weights.
        validation_fraction, n_iter_no_change, tol: see ``early_stopping``.
        warm_start: let ``fit`` continue training the fitted model instead of starting anew.
        train: names or globs of the weights of ``model`` to train.
        fit_options: further arguments of ``Trainer.fit``.
        device: as for ``Trainer``.
        threads: threads within one operator; 1 is best for a search with several processes (``n_jobs``).
        random_state: seed of weights, sample order and random operators.

    Attributes:
        classes_: the labels, sorted; for multilabel data, the indices of the labels.
        n_iter_: number of epochs so far.
        loss_curve_, loss_, best_loss_: the losses of all epochs, the loss of the last epoch, and the lowest loss.
        validation_scores_, best_validation_score_: with ``early_stopping``, the validation accuracies of all epochs,
            and the highest.
        history_: the history of the last fit.
        trained_: the step (``trained_.step``) and its trainer (``trained_.trainer``).
    """

    _are_labels = True
    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Classifier:
        """Train a new model, or with ``warm_start`` continue to train the fitted one.

        Args:
            X: inputs [samples, features].
            y: labels of any type, [samples]; for multilabel data, [samples, labels] of 0 and 1, dense or sparse.
            sample_weight: weights of the samples; None for equal weights.
        """
        anew = not self._goes_on
        X, labels = self._labelled(X, y, reset=anew)
        weights = self._weights(X, labels, sample_weight)
        return self._fit(X, labels, weights, self.epochs, anew, self._metric)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Classifier:
        """Train for one more epoch; the first call requires ``classes`` unless y contains all of them."""
        self._refuse_early_stopping()
        if self.class_weight == "balanced":
            raise ValueError("partial_fit does not support class_weight='balanced', since it gets only a part of the "
                             "data; pass a dict (sklearn.utils.class_weight.compute_class_weight)")  # fmt: skip
        first = not hasattr(self, "trained_")
        X, labels = self._labelled(X, y, first, classes)
        if not first and classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError("classes differ from the first call of partial_fit; pass the same classes, or None")
        return self._fit(X, labels, self._weights(X, labels, sample_weight), 1, first)

    def _labelled(self, X: Any, y: Any, reset: bool, classes: Any = None) -> tuple[Any, Array]:
        """Return validated inputs and labels: [samples], or for multilabel data [samples, labels] of 0 and 1.

        With ``reset``, determine the classes, and whether the data are multilabel, anew.
        """
        y = present(y)
        X, y = self._checked(X, y.toarray() if issparse(y) else y, reset)
        check_classification_targets(y)
        is_multilabel = type_of_target(y) == "multilabel-indicator"
        labels: Array = np.asarray(y) if is_multilabel else column_or_1d(y, warn=True)
        if reset:
            self._is_multilabel = is_multilabel
            self.classes_ = (
                np.arange(y.shape[1]) if is_multilabel else np.unique(labels if classes is None else classes)
            )
        if is_multilabel != self._is_multilabel or (is_multilabel and labels.shape[1] != len(self.classes_)):
            raise ValueError("y differs in form from the first call (multilabel or not, or the number of labels); "
                             "pass y in the same form")  # fmt: skip
        if not is_multilabel and len(unknown := np.setdiff1d(labels, self.classes_)):
            raise ValueError(f"y has labels that are not among the classes: {list(unknown[:9])}")
        if not is_multilabel and len(self.classes_) < 2:
            raise ValueError(f"y has one class only, {self.classes_[0]!r}; a classifier needs at least two")
        return X, labels

    def _weights(self, X: Any, labels: Array, weights: Any) -> Any:
        """Return the sample weights, multiplied by the class weights of the samples."""
        if self.class_weight is None:
            return weights
        of_classes = compute_sample_weight(self.class_weight, labels)
        return of_classes * _check_sample_weight(weights, X)

    @property
    def _metric(self) -> str:
        return "exact_match" if self._is_multilabel else "accuracy"

    def _fit(self, X: Any, labels: Array, weights: Any, epochs: int, anew: bool, metric: str = "") -> Classifier:
        if anew:
            loss = "bce_with_logits" if self._is_multilabel else "cross_entropy"
            self._begin(X, len(self.classes_), weights is not None, loss, metric)
        target = self.trained_.step.manifest.targets[0]
        numbers = labels if self._is_multilabel else np.searchsorted(self.classes_, labels)
        y = numbers.astype(target.dtype)
        if y.ndim < len(target.shape):
            y = y[:, None]
        self._train(X, y, weights, epochs, metric, None if self._is_multilabel else numbers)
        return self

    def _check_head(self, step: Step, outputs: int) -> None:
        target = step.manifest.targets[0]
        by_class = target.dtype == "int64"
        self._has_one_score = not by_class and not self._is_multilabel
        width = target.classes if by_class else target.shape[-1] if len(target.shape) == 2 else 1
        if by_class and self._is_multilabel:
            raise BuildError("y has several labels per sample, but the loss expects one; use loss='bce_with_logits'")
        if self._has_one_score and outputs == 2 and width == 1:
            return
        if (width is not None and width != outputs) or self._has_one_score:
            raise BuildError(f"the model has {width} classes, but y has {outputs}; use a model with {outputs} outputs")

    def predict_proba(self, X: Any) -> Array:
        """Return class probabilities [samples, classes].

        They are the Softmax of the model's scores, or the Sigmoid for multilabel data; if the model itself ends in one
        of these, its outputs.
        """
        scores = self._outputs(X).astype(np.float64)
        if self._is_multilabel or self._has_one_score:
            yes = scores if self._probable == "Sigmoid" else expit(scores)
            return yes if self._is_multilabel else np.stack([1.0 - yes.ravel(), yes.ravel()], 1)
        if self._probable == "Softmax":
            return np.asarray(scores / scores.sum(axis=1, keepdims=True))
        return np.asarray(softmax(scores, axis=1))

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of :meth:`predict_proba`."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> Array:
        """Predict the label with the highest score; for multilabel data, 1 for probabilities above one half."""
        check_is_fitted(self)
        if self._is_multilabel:
            return (self.predict_proba(X) > 0.5).astype(np.int64)
        if self._has_one_score:
            return np.asarray(self.classes_[self.predict_proba(X).argmax(axis=1)])
        return np.asarray(self.classes_[self._outputs(X).argmax(axis=1)])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags
