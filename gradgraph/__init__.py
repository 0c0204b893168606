"""Train any ONNX model, anywhere ONNX runs.

Most functions take an ONNX model and return one::

    import gradgraph as gg

    gradients = gg.value_and_grad("model.onnx", output="loss", wrt=["head.*"])   # an ONNX model with gradients
    step = gg.build("model.onnx", loss="cross_entropy", optimizer=gg.optim.adamw(1e-3))
    trainer = gg.Trainer(step)
    trainer.fit({"x": x, "target": labels}, epochs=10)
    trainer.export("trained.onnx")

Names are imported on first use, so that ``import gradgraph`` is fast.
"""

from __future__ import annotations

import logging as _logging
import os as _os
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from gradgraph import (
        chat,
        errors,
        export,
        extend,
        frontend,
        losses,
        metrics,
        optim,
        sound,
        surgery,
        tables,
        text,
        vision,
    )
    from gradgraph.autodiff.recomputation import Recompute
    from gradgraph.building.pgd import PGD
    from gradgraph.building.pipeline import build
    from gradgraph.building.step_options import StepOptions
    from gradgraph.chat.finetuning import finetune
    from gradgraph.data import augment, preprocess
    from gradgraph.data.arrays.padded import Padded
    from gradgraph.data.images.labelled_images import image_folder, image_table
    from gradgraph.data.record.data_names import DataNames
    from gradgraph.data.shards.shards import shards
    from gradgraph.errors import GradgraphError
    from gradgraph.explaining.along import along
    from gradgraph.explaining.explaining_model import explain
    from gradgraph.explaining.gradient_norm import gradient_norm
    from gradgraph.explaining.iterate import iterate
    from gradgraph.explaining.laplace import laplace
    from gradgraph.explaining.solve import solve
    from gradgraph.explaining.tracin import tracin
    from gradgraph.export.temperature import calibrate
    from gradgraph.parallel.data_parallel import DataParallel
    from gradgraph.passes.autocast import Precision
    from gradgraph.reduction.reduced import reduce
    from gradgraph.runs.run_options import Run
    from gradgraph.runs.run_recipes import read_run
    from gradgraph.runs.training import train
    from gradgraph.runtime.execution.memory import memory
    from gradgraph.runtime.execution.session import RuntimeOptions
    from gradgraph.runtime.saved.checkpoint import CheckpointKeeper
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.step import Step
    from gradgraph.surgery.adapters import lora
    from gradgraph.surgery.heads import new_head
    from gradgraph.surgery.integer_model import quantize
    from gradgraph.surgery.quantised_training import qat
    from gradgraph.surgery.teachers import distill
    from gradgraph.transforms import hessian, hvp, jacobian, jvp, per_sample_gradients, value_and_grad, vjp
    from gradgraph.verify.check_backend import check_backend
    from gradgraph.verify.check_gradients import check_gradients

# cli/, export/ and frontend/ are symbolic links here; without links (a zip download, Windows), they are one folder up
if not (_Path(__path__[0]) / "cli").is_dir():
    __path__.append(str(_Path(__path__[0]).parent))

# onnxruntime reads this on import; otherwise it stores an identifier of the machine and collects events to send
_os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# onnx-ir imports sympy, which most code does not need; this makes sympy load on demand
_import_module(f"{__name__}.machine.light_imports")

# onnx-ir logs warnings about files; without logging configuration, Python would print them on stderr
_logging.getLogger("onnx_ir").addHandler(_logging.NullHandler())

_HOMES = {
    "CheckpointKeeper": "runtime.saved.checkpoint",
    "DataNames": "data.record.data_names",
    "DataParallel": "parallel.data_parallel",
    "GradgraphError": "errors",
    "PGD": "building.pgd",
    "Padded": "data.arrays.padded",
    "Precision": "passes.autocast",
    "Recompute": "autodiff.recomputation",
    "Run": "runs.run_options",
    "RuntimeOptions": "runtime.execution.session",
    "Step": "step.step",
    "StepOptions": "building.step_options",
    "Trainer": "runtime.trainer",
    "along": "explaining.along",
    "build": "building.pipeline",
    "calibrate": "export.temperature",
    "check_backend": "verify.check_backend",
    "check_gradients": "verify.check_gradients",
    "distill": "surgery.teachers",
    "explain": "explaining.explaining_model",
    "finetune": "chat.finetuning",
    "gradient_norm": "explaining.gradient_norm",
    "hessian": "transforms",
    "hvp": "transforms",
    "iterate": "explaining.iterate",
    "image_folder": "data.images.labelled_images",
    "image_table": "data.images.labelled_images",
    "jacobian": "transforms",
    "jvp": "transforms",
    "laplace": "explaining.laplace",
    "lora": "surgery.adapters",
    "memory": "runtime.execution.memory",
    "new_head": "surgery.heads",
    "per_sample_gradients": "transforms",
    "qat": "surgery.quantised_training",
    "quantize": "surgery.integer_model",
    "read_run": "runs.run_recipes",
    "reduce": "reduction.reduced",
    "shards": "data.shards.shards",
    "solve": "explaining.solve",
    "tracin": "explaining.tracin",
    "train": "runs.training",
    "value_and_grad": "transforms",
    "vjp": "transforms",
}
__version__: str  # the version of the package; "0" in a checkout that is not installed
_MODULES = {
    "augment": "data.augment",
    "chat": "chat",
    "errors": "errors",
    "export": "export",
    "extend": "extend",
    "frontend": "frontend",
    "losses": "losses",
    "metrics": "metrics",
    "optim": "optim",
    "preprocess": "data.preprocess",
    "sound": "sound",
    "surgery": "surgery",
    "tables": "tables",
    "text": "text",
    "vision": "vision",
}

__all__ = [
    "PGD",
    "CheckpointKeeper",
    "DataNames",
    "DataParallel",
    "GradgraphError",
    "Padded",
    "Precision",
    "Recompute",
    "Run",
    "RuntimeOptions",
    "Step",
    "StepOptions",
    "Trainer",
    "along",
    "augment",
    "build",
    "calibrate",
    "chat",
    "check_backend",
    "check_gradients",
    "distill",
    "errors",
    "explain",
    "export",
    "extend",
    "finetune",
    "frontend",
    "gradient_norm",
    "hessian",
    "hvp",
    "image_folder",
    "image_table",
    "iterate",
    "jacobian",
    "jvp",
    "laplace",
    "lora",
    "losses",
    "memory",
    "metrics",
    "new_head",
    "optim",
    "per_sample_gradients",
    "preprocess",
    "qat",
    "quantize",
    "read_run",
    "reduce",
    "shards",
    "solve",
    "sound",
    "surgery",
    "tables",
    "text",
    "tracin",
    "train",
    "value_and_grad",
    "vision",
    "vjp",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _HOMES:
        value = _module(_MODULES[name]) if name in _MODULES else getattr(_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name == "__version__":
        from gradgraph.step.manifest import package_version

        return package_version()
    raise AttributeError(f"module 'gradgraph' has no attribute '{name}'")


def _module(name: str) -> ModuleType:
    """Import a module of this package.

    Raises:
        ImportError: if the module does not exist. If another project with the same import name is installed, the
            message names it.
    """
    try:
        return _import_module(f"{__name__}.{name}")
    except ImportError as error:
        from onnx_gradgraph import other_project

        if (found := other_project()) is None:
            raise
        raise ImportError(found) from error


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__})
