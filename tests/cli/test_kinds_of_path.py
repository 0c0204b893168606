"""Every command with every kind of path: it works, or one sentence says what the path is and what to give."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.errors import GradgraphError
from gradgraph.export import inference_model, save_weights, weights
from gradgraph.files.path_kinds import Kind, kind_of
from tests.kit.command_line import Ran, arrays, mlp

DATA = ("--data", "train.npz")
PATHS = {
    "a model": "model.onnx",
    "a step": "step",
    "a run": "runs/one",
    "the step of a run": "runs/one/step",
    "a run of a step elsewhere": "runs/two",
    "a run that has not begun": "runs/none",
    "a checkpoint": "runs/one/run.ckpt",
    "a recipe": "runs/one/recipe.toml",
    "a folder": "runs",
    "data": "train.npz",
    "nothing": "nowhere",
}
RUNS = {"a run", "a run of a step elsewhere"}
STEPS = {*RUNS, "a run that has not begun", "a step", "the step of a run"}
COMMANDS = {  # words, and the kinds of path with which it works
    "evaluate": (("evaluate", "P", *DATA), {*RUNS, "the step of a run"}),
    "evaluate untrained": (("evaluate", "P", *DATA, "--untrained"), STEPS),
    "checkpoint": (("evaluate", "step", *DATA, "--checkpoint", "P"), {*RUNS, "a checkpoint"}),
    "predict": (("predict", "P", *DATA, "-o", "p.npz"), {*RUNS, "a model", "the step of a run"}),
    "export": (("export", "P", "-o", "e.onnx"), {*RUNS, "a step", "the step of a run"}),
    "export weights": (("export", "P", "-o", "e.safetensors"), {*RUNS, "a step", "the step of a run"}),
    "inspect": (("inspect", "P"), {*STEPS, "a model"}),
    "inspect --html": (("inspect", "P", "--html", "x.html"), {*STEPS, "a model"}),
    "train": (("train", "P", *DATA, "--max-steps", "1", "--export", "t.onnx"),
              {"a model", "a step", "the step of a run"}),
    "train --resume": (("train", "P", *DATA, "--resume", "--epochs", "2"), {*RUNS, "a recipe"}),
    "train --weights": (("train", "model.onnx", *DATA, "--max-steps", "1", "--export", "t.onnx", "--weights", "P"),
                        {*RUNS, "a model", "a checkpoint"}),
    "build": (("build", "P", "-o", "built", "--force"), {*RUNS, "a model", "a recipe"}),
    "check": (("check", "P"), {*RUNS, "a model"}),
    "grad": (("grad", "P", "--vjp", "-o", "g.onnx"), {*RUNS, "a model"}),
    "surgery": (("surgery", "P", "--lora", "last.weight", "-o", "s.onnx"), {*RUNS, "a model"}),
    "tune": (("tune", "P", "--batch-size", "8"), STEPS),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    onnx.save(mlp(), folder / "model.onnx")
    np.savez(folder / "train.npz", **arrays(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["build", "model.onnx", "-o", "step", "--quiet"]) == 0
        for name, model in {"one": "model.onnx", "two": "step"}.items():
            words = ("train", model, *DATA, "--epochs", "1", "--lr", "0.1", "--run", f"runs/{name}", "--quiet")
            assert run(words if model != "step" else [w for w in words if w not in ("--lr", "0.1")]) == 0
        shutil.copytree("runs/one", "runs/none")
        for name in ("run.ckpt", "trained.onnx"):
            Path("runs/none", name).unlink()
    return folder


@pytest.mark.sweep(0.01)
@pytest.mark.parametrize("command", COMMANDS)
def test_it_works_or_one_sentence(
    command: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for recipe in Path().rglob("recipe.toml"):  # whose paths are absolute
        recipe.write_text(recipe.read_text().replace(str(made), str(Path.cwd())))
    words, works = COMMANDS[command]
    for kind, path in PATHS.items():
        ran = call(capsys, *(path if word == "P" else word for word in words))
        if kind in works:
            assert ran.code == 0, (kind, ran.err)
            continue
        errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
        assert ran.code in (1, 2) and len(errors) == 1, (kind, ran)
        assert "bug" not in errors[0] and ("damaged" not in errors[0] or kind == "data"), (kind, errors)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> Ran:
    capsys.readouterr()
    code = run(words)
    return Ran(code, *capsys.readouterr())


@pytest.mark.sweep(0)
def test_a_run_stands_for_what_it_has_learnt(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python as in the shell: the step, the checkpoint or the model, whichever is asked for."""
    monkeypatch.chdir(made)
    x = arrays(8)
    for name, step in {"one": "runs/one/step", "two": "step"}.items():
        path = f"runs/{name}"
        trained = gg.Trainer.resume(step, f"{path}/run.ckpt")
        for same in (gg.Trainer(path), gg.Trainer.resume(path), gg.Trainer.resume(step, path)):
            assert same.progress.steps == trained.progress.steps == 1
            np.testing.assert_array_equal(same.predict(x["x"]), trained.predict(x["x"]))
        other = gg.Trainer(gg.Step.load(path))
        other.load_state_dict(path, strict=False)
        np.testing.assert_array_equal(other.predict(x["x"]), trained.predict(x["x"]))
        expected = weights(step, f"{path}/run.ckpt")
        for n, v in weights(path).items():
            np.testing.assert_array_equal(v, expected[n])
        assert inference_model(path) == inference_model(step, f"{path}/run.ckpt")
        save_weights(path, "w.safetensors")
        gg.vjp(path), gg.build(path)  # its trained model


DOORS = (gg.Trainer, gg.Trainer.resume, gg.build, gg.vjp, gg.Step.load, gg.check_gradients, inference_model)


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__qualname__)
def test_python_doors_refuse_what_they_do_not_take(door: object, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    refused = ["a recipe", "a checkpoint", "a folder", "data", "nothing"]
    refused += ["a run that has not begun"] if door != gg.Step.load else []
    for kind in refused:
        with pytest.raises(GradgraphError) as error:
            door(PATHS[kind])  # type: ignore[operator]
        assert "\n" not in str(error.value), kind


def test_the_kinds(made: Path) -> None:
    found = {kind: kind_of(made / path) for kind, path in PATHS.items()}
    assert found == {
        "a model": Kind.MODEL, "a step": Kind.STEP, "a run": Kind.RUN, "the step of a run": Kind.STEP,
        "a run of a step elsewhere": Kind.RUN, "a run that has not begun": Kind.RUN, "a checkpoint": Kind.CHECKPOINT,
        "a recipe": Kind.RECIPE, "a folder": Kind.FOLDER, "data": Kind.FILE, "nothing": Kind.NOTHING,
    }  # fmt: skip
    assert kind_of("x" * 5000) is Kind.NOTHING
