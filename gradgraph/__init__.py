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

    from gradgraph import chat as chat
    from gradgraph import errors as errors
    from gradgraph import export as export
    from gradgraph import extend as extend
    from gradgraph import frontend as frontend
    from gradgraph import losses as losses
    from gradgraph import metrics as metrics
    from gradgraph import optim as optim
    from gradgraph import sound as sound
    from gradgraph import surgery as surgery
    from gradgraph import tables as tables
    from gradgraph import text as text
    from gradgraph import vision as vision
    from gradgraph.autodiff.recomputation import Recompute as Recompute
    from gradgraph.building.pgd import PGD as PGD
    from gradgraph.building.pipeline import build as build
    from gradgraph.building.step_options import StepOptions as StepOptions
    from gradgraph.chat.finetuning import finetune as finetune
    from gradgraph.data import augment as augment
    from gradgraph.data import preprocess as preprocess
    from gradgraph.data.arrays.padded import Padded as Padded
    from gradgraph.data.images.labelled_images import image_folder as image_folder
    from gradgraph.data.images.labelled_images import image_table as image_table
    from gradgraph.data.record.data_names import DataNames as DataNames
    from gradgraph.data.shards.shards import shards as shards
    from gradgraph.errors import GradgraphError as GradgraphError
    from gradgraph.explaining.along import along as along
    from gradgraph.explaining.explaining_model import explain as explain
    from gradgraph.explaining.gradient_norm import gradient_norm as gradient_norm
    from gradgraph.explaining.iterate import iterate as iterate
    from gradgraph.explaining.laplace import laplace as laplace
    from gradgraph.explaining.solve import solve as solve
    from gradgraph.explaining.tracin import tracin as tracin
    from gradgraph.export.temperature import calibrate as calibrate
    from gradgraph.parallel.data_parallel import DataParallel as DataParallel
    from gradgraph.passes.autocast import Precision as Precision
    from gradgraph.reduction.reduced import reduce as reduce
    from gradgraph.runs.run_options import Run as Run
    from gradgraph.runs.run_recipes import read_run as read_run
    from gradgraph.runs.training import train as train
    from gradgraph.runtime.execution.memory import memory as memory
    from gradgraph.runtime.execution.session import RuntimeOptions as RuntimeOptions
    from gradgraph.runtime.saved.checkpoint import CheckpointKeeper as CheckpointKeeper
    from gradgraph.runtime.trainer import Trainer as Trainer
    from gradgraph.step.step import Step as Step
    from gradgraph.surgery.adapters import lora as lora
    from gradgraph.surgery.heads import new_head as new_head
    from gradgraph.surgery.integer_model import quantize as quantize
    from gradgraph.surgery.quantised_training import qat as qat
    from gradgraph.surgery.teachers import distill as distill
    from gradgraph.transforms import hessian as hessian
    from gradgraph.transforms import hvp as hvp
    from gradgraph.transforms import jacobian as jacobian
    from gradgraph.transforms import jvp as jvp
    from gradgraph.transforms import per_sample_gradients as per_sample_gradients
    from gradgraph.transforms import value_and_grad as value_and_grad
    from gradgraph.transforms import vjp as vjp
    from gradgraph.verify.check_backend import check_backend as check_backend
    from gradgraph.verify.check_gradients import check_gradients as check_gradients

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
_FACES = "chat errors export extend frontend losses metrics optim sound surgery tables text vision"
_MODULES = {"augment": "data.augment", "preprocess": "data.preprocess", **{name: name for name in _FACES.split()}}

if not TYPE_CHECKING:
    __all__ = [*_HOMES, *_MODULES]


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
    return sorted({"__version__", *_HOMES, *_MODULES})
