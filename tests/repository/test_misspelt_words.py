"""Words that nobody would listen to are refused: misspelt keywords, callbacks that ``fit`` never calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import pytest

import gradgraph as gg
from gradgraph.errors import ArgumentError, GradgraphError
from tests.kit.command_line import arrays, mlp

MODULES = (
    "gg",
    "augment",
    "optim",
    "losses",
    "metrics",
    "surgery",
    "export",
    "extend",
    "vision",
    "frontend.nn",
    "frontend.functional",
)
# their further keywords are what users name: arguments for the manifest, attributes of an operator, sizes that
# gg.build looks up (tried below); PyTorch's Identity takes anything
FREE = {"optim.stateless", "extend.case", "extend.point", "gg.Recompute", "frontend.nn.Identity"}
# no callables of ours: a protocol, types for annotations
NOT_CALLED = {"optim.Context", "extend.Gradients", "extend.Reads", "extend.Better", "extend.Messages"}
DATA = arrays(32)


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public callable: functions and classes of the public modules, methods of Trainer and Step."""
    for name in MODULES:
        module = gg if name == "gg" else attrgetter(name)(gg)
        for entry in getattr(module, "__all__", None) or dir(module):
            value = getattr(module, entry)
            if callable(value) and not entry.startswith("_") and f"{name}.{entry}" not in FREE | NOT_CALLED:
                yield f"{name}.{entry}", value
    for owner in (gg.Trainer, gg.Step):
        for entry in dir(owner):
            if callable(value := getattr(owner, entry)) and not entry.startswith("_"):
                yield f"{owner.__name__}.{entry}", value


PUBLIC = dict(public())


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """What the callables need that take words of the user's own, such as the sizes of a model: ``batch=32``."""
    folder = tmp_path_factory.mktemp("given")
    step = gg.build(mlp())
    trainer = gg.Trainer(step, device="cpu")
    trainer.save(folder / "run.ckpt")
    return {
        "gg.finetune": (folder, [], folder / "tuned"),
        "gg.explain": (mlp(), "gradient"),
        "gg.memory": (step,),
        "vision.detections": ("detr", []),
        "vision.read": ("annotations.json",),
        "export.save_page": (step, folder / "page.html"),
        "optim.by_name": ("adamw",),
        "losses.by_name": ("huber",),
        "metrics.by_name": ("f1",),
        "Trainer.fit": (trainer, DATA),
        "Trainer.overfit": (trainer, DATA),
        "Trainer.profile": (trainer, DATA),
        "Trainer.step": (trainer, DATA),
        "Trainer.find_nonfinite": (trainer, DATA),
        "Trainer.expect": (trainer, {}),
        "Trainer.state_dict": (trainer,),
        "Trainer.close_sessions": (trainer,),
        "Trainer.resume": (step, folder / "run.ckpt"),
        "Step.summary": (step,),
    }


def misspelt(parameters: Mapping[str, inspect.Parameter]) -> str:
    """The name of the last argument that has one, without a letter in its middle."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [n for n, p in parameters.items() if p.kind in kinds and len(n) > 3 and n != "self"]
    name = named[-1] if named else "misspelt"
    return name[: len(name) // 2] + name[len(name) // 2 + 1 :]


def needed(parameters: Mapping[str, inspect.Parameter]) -> list[object]:
    """Something for each argument that a callable cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [object() for p in parameters.values() if p.default is p.empty and p.kind in kinds]


def only_by_keyword(parameters: Mapping[str, inspect.Parameter]) -> dict[str, object]:
    return {n: object() for n, p in parameters.items() if p.default is p.empty and p.kind is p.KEYWORD_ONLY}


@pytest.mark.sweep(0.02)
@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_callable_refuses_a_misspelt_keyword(name: str, given: dict[str, tuple[Any, ...]]) -> None:
    called = PUBLIC[name]
    parameters = inspect.signature(called).parameters
    takes_words = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert takes_words <= (name in given), "say in `given` with what it is called"
    word = misspelt(parameters)
    with pytest.raises((TypeError, GradgraphError)) as raised:
        called(*given.get(name, needed(parameters)), **only_by_keyword(parameters), **{word: 1})
    said = str(raised.value)
    assert f"'{word}'" in said
    assert isinstance(raised.value, GradgraphError) or "unexpected keyword argument" in said


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda t: gg.optim.adamw(1e-3, weight_decy=0.5),
         "adamw has no argument 'weight_decy'; did you mean 'weight_decay'?"),
        (lambda t: gg.optim.sgd(0.1, no_decy="*bias"), "did you mean 'no_decay'"),
        (lambda t: gg.build(mlp(), optimiser="adam"), "build has no argument 'optimiser'; did you mean 'optimizer'"),
        (lambda t: gg.vjp(mlp(), wtr="*"), "vjp has no argument 'wtr'; did you mean 'wrt'"),
        (lambda t: gg.losses.by_name("cross_entropy", label_smothing=0.1), "did you mean 'label_smoothing'"),
        (lambda t: gg.losses.LOSSES["huber"](dleta=0.1), "huber has no argument 'dleta'; did you mean 'delta'"),
        (lambda t: gg.frontend.nn.MSELoss(redction="sum"),
         "MSELoss has no argument 'redction'; did you mean 'reduction'"),
        (lambda t: gg.Trainer(t.definition, devices="cpu"), "Trainer has no argument 'devices'; did you mean 'device'"),
        (lambda t: t.fit(DATA, epoch=1), "did you mean 'epochs'"),
        (lambda t: t.fit(DATA, learning_rte=1), "did you mean 'learning_rate'"),
        (lambda t: t.overfit(DATA, stps=1), "did you mean 'steps'"),
        (lambda t: t.profile(DATA, stps=1), "did you mean 'steps'"),
        (lambda t: t.evaluate(DATA, batchsize=1),
         "Trainer.evaluate has no argument 'batchsize'; did you mean 'batch_size'"),
        (lambda t: gg.build(mlp(), recompute=gg.Recompute("sqrt", n=4)),
         "no input has a dimension called 'n'; did you mean 'N'"),
    ],
)  # fmt: skip
def test_the_word_that_was_meant_is_named(call: Callable[[Any], Any], meant: str) -> None:
    with pytest.raises(GradgraphError) as raised:
        call(gg.Trainer(gg.build(mlp()), device="cpu"))
    assert meant in str(raised.value)


def test_steps_of_several_name_the_argument_of_fit_that_was_meant() -> None:
    step = gg.build(mlp(), steps={"a": gg.StepOptions(train="first.*"), "b": gg.StepOptions(train="last.*")})
    with pytest.raises(GradgraphError, match=r"has no hyperparameter 'epoch'.*; did you mean 'epochs'"):
        gg.Trainer(step, device="cpu").fit(DATA, epoch=1)


# --- callbacks --------------------------------------------------------------------------------------------------


class Hookless:
    def on_epoch_end(self, trainer: Any, row: Any) -> None: ...


class Hooked:
    def on_epoch(self, trainer: Any, row: Any) -> None: ...


class NotAMethod:
    on_step = 3


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (Hookless(), "has no method that fit calls, but has 'on_epoch_end'; did you mean 'on_epoch'"),
        (Hookless, "the callback, the class Hookless, has no method that fit calls"),
        (Hooked, "the callback is the class Hooked; give an instance of it"),
        (lambda trainer, row: None, r"has no method that fit calls; give an object with any of on_step\("),
        (print, "the callback, the function print, has no method"),
        (NotAMethod(), "has no method that fit calls"),
        (None, "the callback, None, has no method"),
        ("on_step", "the callback, 'on_step', has no method"),
    ],
)
def test_a_callback_that_fit_would_never_call_is_refused(callback: object, says: str) -> None:
    trainer = gg.Trainer(gg.build(mlp()), device="cpu")
    with pytest.raises(ArgumentError, match=says):
        trainer.fit(DATA, callbacks=[Hooked(), callback], progress=False)
    assert trainer.progress.steps == 0


def test_one_hook_is_enough() -> None:
    gg.Trainer(gg.build(mlp()), device="cpu").fit(DATA, callbacks=[Hooked()], progress=False)
