"""Advice on objects of other libraries passed in place of gradgraph's own, recognised by class name without imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradgraph.errors import shown

LIBRARIES = frozenset({
    "accelerate", "albumentations", "catboost", "datasets", "flax", "jax", "keras", "lightning", "lightgbm", "optax",
    "peft", "pytorch_lightning", "sklearn", "tensorflow", "tf_keras", "torch", "torchmetrics", "torchvision",
    "transformers", "xgboost",
})  # fmt: skip
# class: advice for an instance of it or of a subclass
ADVICE = {
    ("datasets", "DatasetDict"): "give one of its splits, such as data['train'], and another one as validation",
    ("keras", "Model"): "model.export('model.onnx', format='onnx') writes a file of it",
    ("lightning", "LightningModule"): "gradgraph.frontend.from_torch(module, example) makes a model of it",
    ("peft", "PeftConfig"): "its settings are arguments of gradgraph.lora(model, target=…, rank=…)",
    ("sklearn", "BaseEstimator"): "skl2onnx.to_onnx(estimator, x[:1]) makes a model of it",
    ("torch", "LRScheduler"): "pass a schedule as the learning rate: gradgraph.optim.adamw(gradgraph.optim.cosine(…))",
    ("torch", "Module"): "gradgraph.frontend.from_torch(module, example) makes a model of it",
    ("torch", "Optimizer"): "gradgraph.optim makes optimizers, such as gradgraph.optim.adamw(1e-3)",
    ("transformers", "PreTrainedModel"): "gradgraph.frontend.from_torch(module, example) makes a model of it",
    ("transformers", "TrainingArguments"): "its settings are arguments of gradgraph.build and gradgraph.Trainer.fit",
}  # fmt: skip


def library_of(value: Any) -> str:
    """Return the library that an object, a class or a function comes from; "" unless it is in ``LIBRARIES``."""
    classes = [value] if callable(value) and hasattr(value, "__name__") else []
    for one in (*classes, *_classes(value)):
        root = str(getattr(one, "__module__", "") or "").partition(".")[0]
        if root in LIBRARIES:
            return root
    return ""


def name_in_library(value: Any) -> str:
    """Return the name of ``value`` if it is a class or function, else the name of its class."""
    return str(getattr(value, "__name__", None) or type(value).__name__)


def advice_on(value: Any) -> str:
    """Return "; " and advice on an object of another library; "" if there is no advice."""
    known: Mapping[tuple[str, str], str] = ADVICE
    for one in _classes(value):
        root = str(getattr(one, "__module__", "") or "").partition(".")[0]
        if found := known.get((root.replace("tf_keras", "keras").replace("pytorch_", ""), one.__name__)):
            return f"; {found}"
    return ""


def _classes(value: Any) -> tuple[type, ...]:
    return value.__mro__ if isinstance(value, type) else type(value).__mro__


def described_foreign(value: Any) -> str:
    """Return a description of an object of another library, such as ``MSELoss of torch``."""
    return f"{shown(name_in_library(value))} of {library_of(value)}"
