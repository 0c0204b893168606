"""Arguments of the wrong kind: every public function answers with one short sentence, never from inside a library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.arguments import described
from gradgraph.errors import DataError, GradgraphError
from gradgraph.export import inference_model, save_inference, save_weights
from gradgraph.frontend import nn
from gradgraph.losses import LOSSES
from gradgraph.optim.recipes import RECIPES
from gradgraph.optim.schedules import SCHEDULES
from tests.kit.command_line import arrays, mlp

MODEL, DATA = mlp(), arrays(64)
BIG = np.zeros((1000, 4), np.float32)
WRONG: dict[str, Any] = {
    "None": None, "whole": 3, "negative": -1, "number": 2.5, "nan": float("nan"), "truth": True, "empty": "",
    "text": "nonsense", "bytes": b"bytes", "function": max, "class": int, "object": object(), "array": BIG,
    "scalar": np.float32(3), "words": np.array(["a", "b"]), "list": [1], "listed None": [None],
    "listed function": [max], "nested": [[BIG]], "dict": {"a": 1}, "pair": (1, 2), "long": "x" * 100_000,
}  # fmt: skip
TRANSFORMS = (gg.value_and_grad, gg.vjp, gg.jvp, gg.hvp, gg.jacobian, gg.hessian, gg.per_sample_gradients)
LAYER = gg.frontend.nn.Linear(4, 3)
OPTIMIZER = gg.optim.adamw(1e-3)

Call = Callable[[Any], Any]


def keywords(function: Callable[..., Any], names: str, *given: Any, **fixed: Any) -> Iterator[tuple[str, Call]]:
    """One call for each of ``names``, which gets the value."""
    for name in names.split():
        label = f"{getattr(function, '__qualname__', function)}({name})"
        yield label, lambda value, name=name: function(*given, **{**fixed, name: value})


NAMED = [*RECIPES.values(), *SCHEDULES.values(), *LOSSES.values(), gg.optim.clip_by_value, gg.optim.clip_by_global_norm,
         gg.optim.add_decayed_weights]  # fmt: skip
USUAL = {"lr": 0.1, "total_steps": 9, "gamma": 0.9, "step_size": 9, "steps": 9, "then": gg.optim.constant(0.1),
         "first": 9, "warmup_steps": 9, "milestones": [9], "schedules": [gg.optim.constant(0.1)] * 2,
         "rate": lambda step: 0.1}  # fmt: skip


def needed(function: Callable[..., Any]) -> dict[str, Any]:
    """Usual values of the arguments that a function cannot do without; 9 where none is usual."""
    return {
        k: USUAL.get(k, 9)
        for k, p in inspect.signature(function).parameters.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Call]:
    """Public functions, each as a function of one argument."""
    folder, photos = tmp_path_factory.mktemp("arguments"), tmp_path_factory.mktemp("photos")
    (photos / "a.png").touch()
    step = gg.build(MODEL)
    trainer = gg.Trainer(step, device="cpu")
    options = "loss optimizer train freeze output target_name metrics seed backend opset ema accumulate grad_norm"
    options += " adversarial"
    fit = "epochs batch_size validation learning_rate callbacks checkpoint checkpoint_every max_steps max_time limit"
    fit += " accumulate"
    table = [
        *keywords(gg.build, f"{options} model"),
        *keywords(gg.build, options, MODEL),
        *keywords(gg.value_and_grad, "output wrt allow_unused backend", MODEL),
        *keywords(gg.hvp, "output wrt allow_unused backend", MODEL),
        *keywords(gg.jacobian, "output wrt mode per_sample allow_unused backend", MODEL),
        *keywords(gg.hessian, "output wrt allow_unused backend", MODEL),
        *keywords(gg.per_sample_gradients, "output wrt inputs independent allow_unused backend", MODEL),
        *keywords(gg.vjp, "outputs wrt allow_unused backend", MODEL),
        *keywords(gg.jvp, "outputs wrt allow_unused backend", MODEL),
        *(pair for f in TRANSFORMS for pair in keywords(f, "model")),
        *keywords(gg.check_backend, "model", backend="coreml"),
        *keywords(gg.check_backend, "backend", MODEL),
        *keywords(gg.check_gradients, "model"),
        *keywords(gg.check_gradients, "feeds wrt output seed progress", MODEL),
        *keywords(gg.Trainer, "step"),
        *keywords(gg.Trainer, "providers device seed options check_loss check_inputs tune", step),
        ("fit(data)", lambda v: trainer.fit(v, progress=False)),
        ("fit(x, y)", lambda v: trainer.fit(DATA["x"], v, progress=False)),
        *keywords(trainer.fit, fit, DATA, progress=False, max_steps=1),
        ("step(batch)", lambda v: trainer.step(v)),
        ("step(x)", lambda v: trainer.step({"x": v, "target": DATA["target"]})),
        ("step(target)", lambda v: trainer.step({"x": DATA["x"], "target": v})),
        ("step(learning_rate)", lambda v: trainer.step(DATA, learning_rate=v)),
        ("step(unknown)", lambda v: trainer.step(DATA, momentum=v)),
        *keywords(trainer.evaluate, "data"),
        *keywords(trainer.evaluate, "batch_size limit stop averaged", DATA),
        *keywords(trainer.predict, "x"),
        *keywords(trainer.predict, "batch_size averaged per_batch", DATA["x"]),
        *keywords(
            gg.image_folder, "path size mean std layout shorter resample order scale augment threads", path=photos
        ),
        *keywords(
            gg.image_table, "path label root size mean std layout resample order scale augment threads", table="t.csv"
        ),
        *keywords(gg.shards, "path names buffer size mean std layout shorter order scale augment threads", path=photos),
        *keywords(trainer.load_state_dict, "values"),
        *keywords(trainer.save, "path"),
        *keywords(trainer.load, "path"),
        *keywords(gg.Trainer.resume, "path", step),
        *keywords(trainer.export, "averaged"),
        ("export(path)", lambda v: trainer.export(v)),
        *keywords(step.save, "folder"),
        *keywords(gg.Step.load, "folder"),
        *keywords(save_inference, "step checkpoint", step=step, path=folder / "m.onnx"),
        *keywords(save_inference, "path", step=step),
        *keywords(save_weights, "step checkpoint", step=step, path=folder / "w.safetensors"),
        *(pair for f in NAMED for pair in keywords(f, " ".join(inspect.signature(f).parameters), **needed(f))),
        *keywords(gg.optim.by_name, "name"),
        *keywords(gg.optim.reduce_on_plateau, "lr factor patience threshold cooldown min_lr mode monitor", lr=0.1),
        *keywords(gg.optim.master_weights, "optimizer"),
        *keywords(gg.optim.ema, "optimizer"),
        *keywords(gg.optim.ema, "decay warmup", OPTIMIZER),
        *keywords(gg.optim.lookahead, "k alpha", OPTIMIZER),
        *keywords(gg.optim.sam, "rho adaptive", OPTIMIZER),
        *keywords(gg.optim.magnitude_pruning, "sparsity begin end every target scope", OPTIMIZER),
        *keywords(gg.optim.clip_by_unit_norm, "clipping eps"),
        ("chain", lambda v: gg.optim.chain(v)),
        ("chain, then", lambda v: gg.optim.chain(gg.optim.clip_by_value(1.0), v, OPTIMIZER)),
        *keywords(gg.losses.by_name, "name"),
        *keywords(gg.frontend.export, "net inputs outputs name", net=LAYER, inputs={"x": ("N", 4)}),
    ]  # fmt: skip
    made = dict(table)
    # what an optimizer or a loss was given may be refused where it is built into a step
    for label in [n for n in made if n.split("(")[0] in LATER]:
        made[label] = lambda v, make=made[label]: build_with(make(v))
    return made


LATER = {"chain", *(f.__name__ for f in NAMED if f.__name__ not in SCHEDULES)}


# what goes wrong within a user's function is that function's own error
TAKE_FUNCTIONS = {"fit(data)", "Trainer.evaluate(data)", "Trainer.predict(x)", "Trainer.fit(learning_rate)",
                  "Trainer.fit(validation)", "Trainer.evaluate(stop)", "check_gradients(progress)",
                  "export(net)", "function(rate)"}  # fmt: skip


def build_with(made: Any) -> Any:
    if isinstance(made, gg.losses.Loss):
        return gg.build(MODEL, made)
    return gg.build(MODEL, optimizer=gg.optim.chain(made, gg.optim.sgd(0.1)))


@pytest.mark.sweep(0)
def test_every_argument_of_the_wrong_kind_is_a_sentence(
    calls: dict[str, Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = [f"{label} of {name}: {what}" for label, call in calls.items() for name, value in WRONG.items()
             if not (callable(value) and label in TAKE_FUNCTIONS)
             and (what := fault(call, value)) is not None]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def fault(call: Call, value: Any) -> str | None:
    """What is wrong with the answer; working is none, as None or a number may well be right."""
    try:
        call(value)
    except GradgraphError as error:
        sentence = str(error)
        if len(sentence) > 600 or "\n" in sentence or "array(" in sentence or "[[" in sentence:
            return f"says {sentence[:200]!r}"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


@pytest.mark.parametrize(
    ("value", "words"),
    [(BIG, "an array of shape [1000, 4]"), (max, "the function max"), (int, "the class int"), (None, "None"),
     ("a\x1bb", "'a\\x1bb'"), ([max], "a list of builtin_function_or_method"), ({}, "a dict"), (2.5, "2.5")],
)  # fmt: skip
def test_values_are_described_in_a_few_words(value: Any, words: str) -> None:
    assert described(value) == words


def test_one_metric_may_be_given_by_its_name() -> None:
    assert (
        gg.build(MODEL, metrics="accuracy").manifest.metrics == gg.build(MODEL, metrics=["accuracy"]).manifest.metrics
    )
    for wrong in (max, [max]):
        with pytest.raises(gg.errors.BuildError, match="has two parameters"):
            gg.build(MODEL, metrics=wrong)


def test_two_arrays_in_a_row_are_told_how_to_be_one_argument() -> None:
    trainer = gg.Trainer(gg.build(MODEL), device="cpu")
    said = r"batch_size must be .*, but is an array of shape \[64\]; pass inputs and targets as one argument"
    with pytest.raises(DataError, match=said):
        trainer.prepare(DATA["x"], DATA["target"])
    trainer.prepare((DATA["x"], DATA["target"]))


class Frame:
    """What pandas and polars have in common."""

    def __init__(self, **columns: Any) -> None:
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, name: str) -> Any:
        return Column(self._columns[name])

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def to_numpy(self) -> Any:
        return np.stack(list(self._columns.values()), axis=1)


class OneNumber(gg.frontend.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = gg.frontend.nn.Linear(1, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x.reshape(-1, 1))


class Column:
    def __init__(self, values: Any) -> None:
        self._values = values

    def to_numpy(self) -> Any:
        return self._values


def test_a_table_is_read_by_the_names_of_its_columns() -> None:
    """Or says which columns to choose, where an input takes several."""
    x = DATA["x"][:, 0].copy()
    net = gg.frontend.export(OneNumber(), {"x": ("N",)})
    narrow = gg.Trainer(gg.build(net), device="cpu")
    plain = gg.Trainer(gg.build(net), device="cpu")
    assert dict(narrow.fit(Frame(x=x, id=x, target=DATA["target"]), progress=False)) == dict(
        plain.fit({"x": x, "target": DATA["target"]}, progress=False)
    )
    wide = gg.Trainer(gg.build(MODEL), device="cpu")
    with pytest.raises(DataError, match=r"columns 'a', 'target', .*: \{'x': frame\[\[…\]\].to_numpy\(\), 'target'"):
        wide.fit(Frame(a=x, target=DATA["target"]), progress=False)
    columns = {f"c{i}": column for i, column in enumerate(DATA["x"].T)}
    whole = gg.Trainer(gg.build(MODEL), device="cpu")
    assert dict(wide.fit(Frame(**columns, target=DATA["target"]), progress=False)) == dict(
        whole.fit(DATA, progress=False)
    )


def test_one_name_is_a_list_of_it() -> None:
    """Outputs are names, and one is never taken apart into letters, whatever number of letters it has."""
    model = gg.frontend.export(nn.Linear(2, 3), {"x": ("batch", 2)}, "ab")
    step = gg.build(model, "mse")
    for made in (model, inference_model(step, outputs="ab"), gg.Trainer(step).export(outputs="ab")):
        assert [o.name for o in made.graph.output] == ["ab"]

    def two(x: gg.frontend.Tensor) -> tuple[gg.frontend.Tensor, ...]:
        return x + 1, x * 2

    with pytest.raises(gg.errors.ModelError, match="pass the same number of different output names, not 'ab'"):
        gg.frontend.export(two, {"x": ("batch", 2)}, outputs="ab")
