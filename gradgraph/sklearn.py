"""Estimators of scikit-learn that train an ONNX model: in pipelines, searches and cross-validation (extra ``sklearn``).

::

    from gradgraph.sklearn import Classifier
    search = GridSearchCV(make_pipeline(StandardScaler(), Classifier()), {"classifier__learning_rate": [1e-3, 1e-2]})
    search.fit(X, y).best_estimator_[-1].export("best.onnx")
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.building.pipeline import build
from gradgraph.building.terms import SAMPLE_WEIGHT
from gradgraph.errors import BuildError, RuntimeUnavailableError, listed
from gradgraph.files.models import load_model
from gradgraph.frontend import export, manual_seed, nn
from gradgraph.optim import by_name
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.data_names import DataNames
from gradgraph.step.step import Step

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise RuntimeUnavailableError(
        f"gradgraph.sklearn needs scikit-learn 1.6 or newer ({error}); pip install 'onnx-gradgraph[sklearn]'"
    ) from None

__all__ = ["Classifier", "Regressor"]

Array = np.ndarray[Any, Any]
Self = TypeVar("Self", bound="_Estimator")


class _Trained:
    """A step and where its training stands. It can be pickled and copied, which a Trainer cannot."""

    def __init__(self, step: Step, seed: int, device: Any, options: RuntimeOptions, names: DataNames) -> None:
        self.step, self._seed, self._device, self._options, self._names = step, seed, device, options, names
        self._values: dict[str, Array] | None = None
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            self._trainer = Trainer(self.step, device=self._device, seed=self._seed, options=self._options)
            self._trainer.names = self._names
            if self._values is not None:
                self._trainer.load_state_dict(self._values)
                self._values = None
        return self._trainer

    def __getstate__(self) -> dict[str, Any]:
        values = self._values if self._trainer is None else self._trainer.state_dict()
        return {**vars(self), "_values": values, "_trainer": None}


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """The part that both estimators have in common."""

    _loss: str
    _is_integer = False  # whether labels are numbers of classes

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto | None = None,
        *,
        hidden: Sequence[int] = (64,),
        loss: str | None = None,
        optimizer: str = "adamw",
        learning_rate: float = 1e-2,
        optimizer_options: Mapping[str, Any] | None = None,
        epochs: int = 50,
        batch_size: int = 32,
        train: str | Sequence[str] = "*",
        fit_options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        threads: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.hidden = hidden
        self.loss = loss
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.optimizer_options = optimizer_options
        self.epochs = epochs
        self.batch_size = batch_size
        self.train = train
        self.fit_options = fit_options
        self.device = device
        self.threads = threads
        self.random_state = random_state

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The trained model as plain ONNX, whose output is what the model computes: scores of classes, or values."""
        check_is_fitted(self)
        return self.trained_.trainer.export(path)

    def _checked(self, X: Any, y: Any, reset: bool) -> Any:
        options: dict[str, Any] = {"dtype": np.float32, "allow_nd": self.model is not None, "reset": reset}
        if y is None:
            return validate_data(self, X, **options)
        return validate_data(self, X, y, multi_output=True, y_numeric=not self._is_integer, **options)

    def _begin(self, X: Array, outputs: int, weighs: bool) -> None:
        """A new model, or the one that was given, as a step; ``weighs``: samples have weights."""
        seed = int(check_random_state(self.random_state).randint(1 << 31))
        model, self._gives_probabilities = self.model, False
        if model is not None:
            found = probabilities(load_model(model).graph.outputs[0])
            self._gives_probabilities = found is not None and found.kind == "Softmax"
        else:
            manual_seed(seed)
            sizes = [X.shape[1], *self.hidden, outputs]
            layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
            model = export(nn.Sequential(*layers[:-1]), {"x": ("batch", X.shape[1])})
        options = dict(self.optimizer_options or {})
        step = build(model, loss=self.loss or self._loss, train=self.train, seed=seed, sample_weight=weighs,
                     optimizer=by_name(self.optimizer, lr=self.learning_rate, **options))  # fmt: skip
        if len(step.manifest.inputs) != 1 or len(step.manifest.targets) != 1 + weighs:
            raise BuildError("an estimator takes a model with one input, and a loss with one target; use gg.Trainer")
        width = step.manifest.targets[0].classes if self._is_integer else None
        if width is not None and width != outputs:
            raise BuildError(f"the model has {width} classes, and y has {outputs}; give it a head with as many")
        self.trained_ = _Trained(step, seed, self.device, RuntimeOptions(threads=self.threads), self._names(step))

    def _names(self, step: Step) -> DataNames:
        """The names of columns and classes, for the model that is exported.

        Raises:
            ValueError: the model was trained on these columns in another order.
        """
        x, target = step.manifest.inputs[0].name, step.manifest.targets[0].name
        columns = tuple(map(str, getattr(self, "feature_names_in_", ())))
        known = step.manifest.data.columns.get(x, columns)
        if columns != known and sorted(columns) == sorted(known):
            raise ValueError(f"X has the columns {listed(columns)}, and the model was trained on {listed(known)}; "
                             "give them in the order of the model")  # fmt: skip
        classes = [str(name) for name in getattr(self, "classes_", ())]
        are_names = len(set(classes)) == len(classes) > 0
        return DataNames({x: columns} if columns else {}, {target: classes} if are_names else {})

    def _train(self, X: Array, y: Array, weights: Any, epochs: int) -> None:
        m = self.trained_.step.manifest
        data = {m.inputs[0].name: X, m.targets[0].name: y}
        if SAMPLE_WEIGHT in {t.name for t in m.targets}:
            data[SAMPLE_WEIGHT] = _check_sample_weight(weights, X, dtype=np.float32)  # ones, if there are none
        elif weights is not None:
            raise ValueError("the first call of partial_fit had no sample_weight; give it one, too, such as ones")
        options = {"progress": False, "resume": False, **dict(self.fit_options or {})}
        self.history_ = dict(self.trained_.trainer.fit(data, epochs, self.batch_size, **options))

    def _outputs(self, X: Any) -> Array:
        check_is_fitted(self)
        X = self._checked(X, None, reset=False)
        found = self.trained_.trainer.predict(X, max(self.batch_size, 256))
        made: Array = next(iter(found.values())) if isinstance(found, dict) else found
        return made

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "trained_")


class Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A classifier of scikit-learn.

    Args:
        model: an ONNX model with one input, whose first output has a score for each class; its weights are where
            training begins. By default a perceptron with ReLU.
        hidden: the sizes of its hidden layers.
        loss, optimizer: names of ``gg.losses`` and ``gg.optim``; the loss is cross-entropy by default.
        learning_rate, optimizer_options: arguments of the optimizer.
        epochs, batch_size: as for ``Trainer.fit``.
        train: which weights of ``model`` are trained: names or globs.
        fit_options: further arguments of ``Trainer.fit``.
        device: as for ``Trainer``.
        threads: within one operator; 1 is best where a search has processes of its own (``n_jobs``).
        random_state: of weights, the order of samples, and random operators.

    Attributes:
        classes_: the labels, sorted.
        history_: the history of the last fit.
        trained_: the step (``trained_.step``) and its trainer (``trained_.trainer``).
    """

    _loss = "cross_entropy"
    _is_integer = True

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Classifier:
        """Train anew on X [samples, features] and labels y [samples] of any kind, which may have weights [samples]."""
        X, labels = self._labelled(X, y, reset=True)
        self.classes_ = np.unique(labels)
        return self._fit(X, labels, sample_weight)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Classifier:
        """Train on for one epoch; the first call says which ``classes`` there are, if y does not have all."""
        first = not hasattr(self, "trained_")
        X, labels = self._labelled(X, y, reset=first)
        if first:
            self.classes_ = np.unique(labels if classes is None else classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError("classes are not those of the first call of partial_fit")
        if len(unknown := np.setdiff1d(labels, self.classes_)):
            raise ValueError(f"y has labels that are not among the classes: {list(unknown[:9])}")
        return self._fit(X, labels, sample_weight, None if first else self.trained_, 1)

    def _labelled(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        X, y = self._checked(X, _present(y), reset)
        labels: Array = column_or_1d(y, warn=True)
        check_classification_targets(labels)
        return X, labels

    def _fit(
        self, X: Array, labels: Array, weights: Any, going_on: _Trained | None = None, epochs: int | None = None
    ) -> Classifier:
        if going_on is None:
            if len(self.classes_) < 2:
                raise ValueError(f"y has one class only, {self.classes_[0]!r}; a classifier needs two")
            self._begin(X, len(self.classes_), weights is not None)
        self._train(X, np.searchsorted(self.classes_, labels).astype(np.int64), weights, epochs or self.epochs)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Probabilities [samples, classes]: the softmax of the model's scores, unless it ends in one itself."""
        scores = self._outputs(X).astype(np.float64)
        if self._gives_probabilities:
            return np.asarray(scores / scores.sum(axis=1, keepdims=True))
        e = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(e / e.sum(axis=1, keepdims=True))

    def predict(self, X: Any) -> Array:
        """The label of each sample, of the highest score."""
        labels: Array = self._outputs(X).argmax(axis=1)
        return np.asarray(self.classes_[labels])


class Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A regressor of scikit-learn, of one value or several; the arguments are those of :class:`Classifier`.

    The loss is the mean squared error by default. Scale y, as with ``TransformedTargetRegressor``, if it is large.
    """

    _loss = "mse"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:
        """Train anew on X [samples, features] and y [samples] or [samples, values]; samples may have weights."""
        X, y = self._checked(X, _present(y), reset=True)
        return self._fit(X, y, sample_weight, self.epochs, True)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:
        """Train on for one epoch."""
        first = not hasattr(self, "trained_")
        X, y = self._checked(X, _present(y), reset=first)
        return self._fit(X, y, sample_weight, 1, first)

    def _fit(self, X: Array, y: Array, weights: Any, epochs: int, anew: bool) -> Regressor:
        y = np.asarray(y, np.float32)
        if anew:
            self._is_flat = y.ndim == 1
            self._begin(X, 1 if self._is_flat else y.shape[1], weights is not None)
        narrow = len(self.trained_.step.manifest.targets[0].shape) == 1
        self._train(X, y if narrow or y.ndim > 1 else y[:, None], weights, epochs)
        return self

    def predict(self, X: Any) -> Array:
        """The values, [samples] if y was that."""
        found = self._outputs(X).astype(np.float64)
        return found.reshape(len(found)) if self._is_flat else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _present(y: Any) -> Any:
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None")
    return y
