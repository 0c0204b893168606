"""The common base class of classifier and regressor, which builds the step, trains it and predicts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import onnx
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.building.pipeline import build
from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.classes import ClassNumbers
from gradgraph.data.record.column_assignment import SAMPLE_WEIGHT
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import BuildError, listed
from gradgraph.files.models import load_model
from gradgraph.frontend import export, manual_seed, nn
from gradgraph.optim import by_name
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.sklearn.kept_step import KeptStep
from gradgraph.sklearn.sparse_rows import SparseRows
from gradgraph.step.step import Step


@dataclass(eq=False, repr=False)
class Estimator(BaseEstimator):  # type: ignore[misc]
    """The base class of classifier and regressor; arguments and attributes are documented in :class:`Classifier`."""

    _are_labels = False  # whether targets are class indices

    model: str | os.PathLike[str] | onnx.ModelProto | None = None
    _: KW_ONLY
    hidden: Sequence[int] = (64,)
    loss: str | None = None
    optimizer: str = "adamw"
    learning_rate: float = 2e-3
    optimizer_options: Mapping[str, Any] | None = None
    epochs: int = 50
    batch_size: int = 32
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 1e-4
    warm_start: bool = False
    train: str | Sequence[str] = "*"
    fit_options: Mapping[str, Any] | None = None
    device: str = "cpu"
    threads: int | None = None
    random_state: Any = None

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """Export the trained model as plain ONNX with its raw outputs: class scores, or values.

        ``gradgraph.sklearn.export`` includes labels and probabilities, and the steps of a pipeline.
        """
        check_is_fitted(self)
        return self.trained_.trainer.export(path)

    # --- inputs ----------------------------------------------------------------------------------------------

    def _checked(self, X: Any, y: Any, reset: bool) -> Any:
        options: dict[str, Any] = {
            "dtype": np.float32, "accept_sparse": "csr", "allow_nd": self.model is not None, "reset": reset
        }  # fmt: skip
        if y is None:
            return validate_data(self, X, **options)
        return validate_data(self, X, y, multi_output=True, y_numeric=not self._are_labels, **options)

    def _data(self, X: Any, y: Array, weights: Any) -> dict[str, Any]:
        m = self.trained_.step.manifest
        data = {m.inputs[0].name: X, m.targets[0].name: y.view(ClassNumbers) if self._are_labels else y}
        if SAMPLE_WEIGHT in {t.name for t in m.targets}:
            data[SAMPLE_WEIGHT] = _check_sample_weight(weights, X, dtype=np.float32)  # None becomes ones
        elif weights is not None:
            raise ValueError("sample_weight is given, but was not in the first call of partial_fit (or of fit with "
                             "warm_start); pass it in the first call, too, such as ones")  # fmt: skip
        return data

    # --- training --------------------------------------------------------------------------------------------

    @property
    def _goes_on(self) -> bool:
        """Whether ``fit`` continues to train the fitted model: with ``warm_start``, after a first fit."""
        return self.warm_start and hasattr(self, "trained_")

    def _begin(self, X: Any, outputs: int, weighs: bool, loss: str, metric: str) -> None:
        """Build the step from the user's model, or from a new multilayer perceptron, and store it in ``trained_``.

        ``outputs`` is the number of scores or values per sample; ``loss`` is the default loss, ``metric`` the metric
        for early stopping.
        """
        seed = int(check_random_state(self.random_state).randint(1 << 31))
        model, self._probable = self.model, ""
        if model is not None:
            found = probabilities(load_model(model).graph.outputs[0])
            self._probable = "" if found is None else found.kind
        else:
            manual_seed(seed)
            sizes = [X.shape[1], *self.hidden, outputs]
            layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
            model = export(nn.Sequential(*layers[:-1]), {"x": ("batch", X.shape[1])})
        options = dict(self.optimizer_options or {})
        step = build(model, loss=self.loss or loss, train=self.train, seed=seed, sample_weight=weighs,
                     metrics=metric if self.early_stopping else None,
                     optimizer=by_name(self.optimizer, lr=self.learning_rate, **options))  # fmt: skip
        if len(step.manifest.inputs) != 1 or len(step.manifest.targets) != 1 + weighs:
            raise BuildError("an estimator requires a model with one input, and a loss with one target; use gg.Trainer "
                             "for others")  # fmt: skip
        self._check_head(step, outputs)
        self.trained_ = KeptStep(step, seed, self.device, RuntimeOptions(threads=self.threads), self._names(step))
        self.n_iter_, self.loss_curve_ = 0, list[float]()
        self.validation_scores_ = list[float]() if self.early_stopping else None

    def _check_head(self, step: Step, outputs: int) -> None:
        """Raise BuildError if the model does not have ``outputs`` outputs per sample; this base class accepts all."""

    def _names(self, step: Step) -> DataNames:
        """Return the column names of X and the class names, for the exported model.

        Raises:
            ValueError: if the user's model was trained on these columns in a different order.
        """
        x, target = step.manifest.inputs[0].name, step.manifest.targets[0]
        columns = tuple(map(str, getattr(self, "feature_names_in_", ())))
        known = step.manifest.data.columns.get(x, columns)
        if columns != known and sorted(columns) == sorted(known):
            raise ValueError(f"X has the columns {listed(columns)}, but the model was trained on {listed(known)}; "
                             "reorder them")  # fmt: skip
        classes = [str(name) for name in getattr(self, "classes_", ())] if target.dtype == "int64" else []
        are_names = len(set(classes)) == len(classes) > 0
        return DataNames({x: columns} if columns else {}, {target.name: classes} if are_names else {})

    def _train(self, X: Any, y: Array, weights: Any, epochs: int, metric: str = "", stratify: Any = None) -> None:
        """Train the step and update the attributes about losses and scores.

        ``y`` has the type and shape of the step's target. With ``metric``, early stopping uses a validation split,
        stratified by the labels ``stratify`` unless that is None.
        """
        data, options = self._data(X, y, weights), {"progress": False, "resume": False, **dict(self.fit_options or {})}
        stops = bool(metric) and self.early_stopping
        if stops:
            options |= {"patience": self.n_iter_no_change, "monitor": f"val_{metric}", "mode": "max",
                        "min_delta": self.tol}  # fmt: skip
            data, options["validation"] = self._held_out(data, stratify)
        history = self.trained_.trainer.fit(_as_data(data), epochs, self.batch_size, **options)
        self.history_ = dict(history)
        self.n_iter_ += len(history["loss"])
        self.loss_curve_ += history["loss"]
        self.loss_ = self.loss_curve_[-1]
        self.best_loss_ = None if stops else min(self.loss_curve_)
        if stops and self.validation_scores_ is not None:
            self.validation_scores_ += history[f"val_{metric}"]
        self.best_validation_score_ = max(self.validation_scores_) if self.validation_scores_ else None

    def _held_out(self, data: Mapping[str, Any], stratify: Any) -> tuple[dict[str, Any], Any]:
        """Return training and validation data for early stopping, split at random or stratified by ``stratify``."""
        seed = check_random_state(self.random_state).randint(1 << 31)
        parts = train_test_split(*data.values(), test_size=self.validation_fraction, stratify=stratify,
                                 random_state=seed)  # fmt: skip
        return dict(zip(data, parts[::2], strict=True)), _as_data(dict(zip(data, parts[1::2], strict=True)))

    def _refuse_early_stopping(self) -> None:
        if self.early_stopping:
            raise ValueError("partial_fit does not support early_stopping, since it gets only a part of the data; "
                             "remove early_stopping")  # fmt: skip

    # --- outputs ---------------------------------------------------------------------------------------------

    def _outputs(self, X: Any) -> Array:
        check_is_fitted(self)
        X = self._checked(X, None, reset=False)
        alone = X.shape[0] == 1  # doubled below: for a single row, another kernel is used, which rounds differently
        X = X[[0, 0]] if alone else X
        rows = SparseRows({self.trained_.step.manifest.inputs[0].name: X}) if issparse(X) else X
        found = self.trained_.trainer.predict(rows, max(self.batch_size, 256))
        made: Array = next(iter(found.values())) if isinstance(found, dict) else found
        return made[:1] if alone else made

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "trained_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _as_data(arrays: Mapping[str, Any]) -> Any:
    return SparseRows(arrays) if any(map(issparse, arrays.values())) else arrays


def present(y: Any) -> Any:
    """Return ``y``; raise ValueError if it is None."""
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None")
    return y
