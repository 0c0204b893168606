"""Every file of a step, with every option of ``gg.build`` and for every backend, is one that a strict reader takes."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.backends import step_backends
from gradgraph.errors import GradgraphError
from tests.kit.command_line import arrays, mlp

MODEL = mlp()
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "loss": {"loss": {"logits": ("cross_entropy", 0.5)}},
    "several loss": {"loss": {"logits": [("cross_entropy", 0.5), ("focal", 0.5)]}, "separate": True},
    "loss of sums": {"loss": gg.losses.by_name("cross_entropy", reduction="sum"), "separate": True},
    "optimizer": {"optimizer": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(1e-3, 10)))},
    "optimizer: schedule_free": {"optimizer": optim.schedule_free_adamw()},
    "optimizer: lookahead": {"optimizer": optim.lookahead(optim.sgd(0.1, momentum=0.9))},
    "optimizer: sam": {"optimizer": optim.sam(optim.sgd(0.1))},
    "optimizer: plateau": {"optimizer": optim.sgd(optim.constant(0.1), groups={"last.*": {"start": 2}})},
    "train": {"train": "last.*"},
    "freeze": {"freeze": "first.*"},
    "freeze_below": {"freeze_below": "r"},
    "output": {"output": "logits"},
    "target_name": {"target_name": "labels"},
    "sample_weight": {"sample_weight": True},
    "sample_weight, separate": {"sample_weight": True, "separate": True},
    "metrics": {"metrics": ["accuracy", "f1", "confusion_matrix"]},
    "grad_norm": {"grad_norm": True},
    "grad_norm, clipped": {"grad_norm": True, "optimizer": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))},
    "grad_norm, accumulate": {"grad_norm": True, "accumulate": True},
    "adversarial": {"adversarial": gg.PGD(0.1, n=2, clean=0.5), "separate": True},
    "ema": {"ema": 0.9},
    "accumulate": {"accumulate": True},
    "seed": {"seed": 3},
    "recompute": {"recompute": "sqrt"},
    "opset": {"opset": 20},
    "precision": {"precision": "float16", "grad_norm": True},
    "steps": {"steps": {"a": gg.StepOptions(train="first.*", grad_norm=True), "b": gg.StepOptions(train="last.*")}},
    "separate": {"separate": True},
    "separate, grad_norm": {"separate": True, "grad_norm": True, "metrics": ["accuracy"]},
    "sizes": {"sizes": {"N": 4}, "separate": True, "grad_norm": True},
}  # fmt: skip
ELSEWHERE = {"model", "backend", "targets", "mask"}  # of other losses; ``backend`` is the other axis here
# what these runtimes do not take, or take wrong
REFUSED = {
    *(
        (option, backend)
        for option in ("sample_weight", "sample_weight, separate")
        for backend in ("iree", "tract", "tvm")
    ),
    *((option, "tract") for option in ("accumulate", "grad_norm, accumulate", "precision")),
}


def test_every_option_is_here() -> None:
    assert {word for options in OPTIONS.values() for word in options} == {
        *inspect.signature(gg.build).parameters
    } - ELSEWHERE


def files(step: gg.Step) -> dict[str, onnx.ModelProto]:
    trains = {f"train {name}": model for name, model in step.trains.items()}
    return {"init": step.init, "eval": step.eval, **trains, **step.separate}


@pytest.mark.sweep(0.015)
@pytest.mark.parametrize("backend", step_backends())
@pytest.mark.parametrize("options", OPTIONS)
def test_the_checker_takes_every_file(options: str, backend: str) -> None:
    try:
        step = gg.build(MODEL, **OPTIONS[options], backend=backend)
    except GradgraphError:
        assert (options, backend) in REFUSED
        return
    assert (options, backend) not in REFUSED
    for name, model in files(step).items():
        for value in (*model.graph.input, *model.graph.output):
            kind = value.type.tensor_type
            assert kind.elem_type and kind.HasField("shape"), f"{value.name} of {name}"
        onnx.checker.check_model(model, full_check=True)


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("options", [name for name in OPTIONS if "separate" in OPTIONS[name] or "grad" in name])
def test_the_shapes_that_are_declared_are_those_that_come(options: str) -> None:
    step = gg.build(MODEL, **OPTIONS[options], backend="portable")
    ready = {name: ort.InferenceSession(m.SerializeToString()) for name, m in files(step).items() if name != "eval"}
    known: dict[str, Any] = dict(
        zip([o.name for o in ready["init"].get_outputs()], ready["init"].run(None, {}), strict=True)
    )
    known |= arrays(4) | {
        h: np.array(v, np.float32) for part in step.manifest.parts.values() for h, v in part.hyperparameters.items()
    }
    known |= {s.name: np.ones(4, s.dtype) for s in step.manifest.targets if s.name not in known}
    for name, session in ready.items():
        if name == "init":
            continue
        given = session.run(None, {i.name: known[i.name] for i in session.get_inputs()})
        outputs = dict(zip(session.get_outputs(), given, strict=True))
        known |= {o.name: value for o, value in outputs.items() if o.name.endswith(".grad")}
        for o, value in outputs.items():
            assert len(o.shape) == value.ndim, o.name
            assert all(d in (size, "N") or isinstance(d, str) for d, size in zip(o.shape, value.shape, strict=True)), (
                o.name
            )
