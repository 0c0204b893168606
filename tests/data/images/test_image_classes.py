"""Classes of image folders are matched by name, and images are read as in training, along the whole path of a model."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.images.labelled_images import Images
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import DataError
from gradgraph.frontend import nn

pytestmark = pytest.mark.any_kernels

Image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")

CLASSES = ["ant", "bee", "cat"]
SUBSETS = [list(some) for n in (1, 2, 3) for some in itertools.combinations(CLASSES, n)]


def _folder(path: Path, classes: list[str]) -> Path:
    """Two images of each class, the same in every folder."""
    for name in classes:
        (path / name).mkdir(parents=True)
        for i in range(2):
            rng = np.random.default_rng([*name.encode("utf-8", "replace"), i])
            Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)).save(path / name / f"{i}.png")
    return path


def _model() -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    layers = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    return gg.frontend.export(layers, {"x": ("n", 3, 8, 8)})


def _fitted(data: Any) -> gg.Trainer:
    step = gg.build(_model(), loss="cross_entropy", optimizer=gg.optim.sgd(0.1), metrics=["confusion_matrix"])
    trainer = gg.Trainer(step, device="cpu", seed=1)
    trainer.fit(data, 2, 2, progress=False)
    return trainer


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory.mktemp("photos") / "all", CLASSES)


def _arrays(folder: Images, size: tuple[int, int] = (8, 8), **form: Any) -> dict[str, np.ndarray]:
    """The images of a folder, with the labels that their classes have among all."""
    read = gg.image_folder(folder.path, size, **form)
    labels = [CLASSES.index(read.classes[label]) for label in read.labels]
    return {"x": np.stack([read[i][0] for i in range(len(read))]), "target": np.array(labels)}


def _goes_on(trainer: gg.Trainer, data: Any, folder: Path) -> Any:
    trainer.save(folder / "run.ckpt")
    again = gg.Trainer.resume(trainer.definition, folder / "run.ckpt", device="cpu")
    again.fit(data, 3, 2, shuffle=False, progress=False)
    return again.parameters


USES: dict[str, Callable[[gg.Trainer, Any, Path], Any]] = {
    "evaluate": lambda trainer, data, folder: trainer.evaluate(data),
    "worst": lambda trainer, data, folder: [(one.index, one.value, one.label) for one in trainer.worst(data, 3)],
    "per_class": lambda trainer, data, folder: str(trainer.per_class(data)),
    "predict": lambda trainer, data, folder: trainer.predict(data),
    "goes on": _goes_on,
}


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("classes", SUBSETS, ids="-".join)
def test_a_class_that_is_missing_shifts_no_labels(classes: list[str], use: str, photos: Path, tmp_path: Path) -> None:
    trainer, folder = _fitted(photos), gg.image_folder(_folder(tmp_path / "some", classes))
    expected = USES[use](trainer, _arrays(folder), tmp_path)
    for data in (folder, folder.path):
        np.testing.assert_equal(USES[use](trainer, data, tmp_path), expected)


@pytest.mark.parametrize("new", ["aardvark", "bat", "dog"])
def test_a_class_that_is_new_is_refused_but_where_labels_are_not_read(new: str, photos: Path, tmp_path: Path) -> None:
    trainer, folder = _fitted(photos), _folder(tmp_path / "more", [*CLASSES, new])
    for use in ("evaluate", "worst", "per_class", "goes on"):
        with pytest.raises(DataError, match=f"more' has the new class '{new}'; the model has 'ant', 'bee', 'cat'"):
            USES[use](trainer, folder, tmp_path)
    assert len(trainer.predict(folder)) == 8


def test_folders_whose_names_are_no_text_are_no_classes(tmp_path: Path) -> None:
    try:
        folder = _folder(tmp_path / "odd", ["b\udcff", "cat"])
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    with pytest.raises(DataError, match=r"has the folders 'b\\udcff', whose names are not valid UTF-8; rename them"):
        _fitted(folder)


def test_images_are_read_as_in_training(photos: Path, tmp_path: Path) -> None:
    form: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "shorter": 9}
    trainer = _fitted(gg.image_folder(photos, (8, 8), **form))
    assert trainer.names.images == {"x": {"size": (8, 8), **form}}
    expected = trainer.evaluate(_arrays(gg.image_folder(photos), **form))
    np.testing.assert_equal(trainer.evaluate(photos), expected)
    other = {**form, "mean": (0.0, 0.0, 0.0)}  # what is said is done
    np.testing.assert_equal(
        trainer.predict(gg.image_folder(photos, (8, 8), mean=other["mean"])),
        trainer.predict(_arrays(gg.image_folder(photos), mean=other["mean"], std=form["std"])["x"]),
    )


def test_pictures_of_the_worst(photos: Path) -> None:
    trainer = _fitted(photos)
    found = trainer.worst(trainer.prepare(photos, 2), 6)  # shuffled, for training
    folder = gg.image_folder(photos)
    for one in found:
        assert one.file == str(folder.files[one.index])
        assert one.label == CLASSES[folder.labels[one.index]] == Path(one.file).parent.name
        assert one.called == CLASSES[one.outputs["output"].argmax()]
        assert f"file '{one.file}', is '{one.label}', called '{one.called}', x float32[3, 8, 8]" in str(one)
    page = found._repr_html_()
    assert page.count('<img src="data:image/png;base64,') == 6 and page.count("<th>picture</th>") == 1
    assert found.as_data()[0]["file"] == found[0].file


# --- in the shell ------------------------------------------------------------------------------------------------


def _shell(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    code = run(list(words))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.fixture
def ran(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a run on all images, which were read with a mean, and ``some`` of them."""
    monkeypatch.chdir(tmp_path)
    onnx.save(_model(), "model.onnx")
    _folder(tmp_path / "some", ["bee", "cat"])
    _shell(capsys, "train", "model.onnx", "--data", str(photos), "--run", "run", "--epochs", "3", "--lr", "0.1",
           "--image", "mean=[0.5,0.5,0.5]", "--metric", "confusion_matrix")  # fmt: skip
    return tmp_path


@pytest.mark.sweep(0)
def test_names_go_through_a_run_folder(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = DataNames(classes={"target": CLASSES}, images={"x": {"mean": (0.5, 0.5, 0.5)}}, softmax=["target"])
    assert gg.Step.load("run/step").manifest.data == names
    assert gg.Trainer.resume("run/step", "run/run.ckpt").names == names
    exported = onnx.load("run/trained.onnx")
    assert DataNames.read_from({p.key: p.value for p in exported.metadata_props}) == names
    trainer = gg.Trainer.resume("run/step", "run/run.ckpt", device="cpu")
    data = _arrays(gg.image_folder("some"), mean=(0.5, 0.5, 0.5))
    found = json.loads(_shell(capsys, "evaluate", "run/step", "--data", "some", "--json"))
    assert found["scores"]["loss"] == pytest.approx(trainer.evaluate(data)["loss"], rel=1e-6)
    assert found["class_names"] == CLASSES
    text = _shell(capsys, "evaluate", "run/step", "--data", "some", "--per-class", "--worst", "1")
    assert "confusion_matrix  ant  bee  cat\n" in text and "file 'some/" in text
    assert _shell(capsys, "train", "run/recipe.toml", "--data", "some", "--resume", "--epochs", "4")
    assert run(["train", "run/recipe.toml", "--data", str(_folder(ran / "new", ["bee", "elk"])), "--resume"]) == 1
    assert "the new class 'elk', and lacks the classes 'ant', 'cat'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("model", [("run/trained.onnx",), ("run/step",)])
def test_predictions_have_files_classes_and_probabilities(
    model: tuple[str, ...], ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = gg.Trainer.resume("run/step", "run/run.ckpt", device="cpu")
    scores = trainer.predict(_arrays(gg.image_folder("some"), mean=(0.5, 0.5, 0.5))["x"]).astype(float)
    probabilities = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    head, *rows = csv.reader(_shell(capsys, "predict", *model, "--data", "some", "-o", "-").splitlines())
    assert head == [*(f"output[{i}]" for i in range(3)), "class", *(f"probability[{c}]" for c in CLASSES), "file"]
    np.testing.assert_allclose(np.array([row[:3] for row in rows], float), scores, rtol=1e-4, atol=1e-5)
    assert [row[3] for row in rows] == [CLASSES[i] for i in scores.argmax(1)]
    np.testing.assert_allclose(np.array([row[4:7] for row in rows], float), probabilities, rtol=1e-4, atol=1e-5)
    assert [row[7] for row in rows] == [str(Path("some", c, f"{i}.png")) for c in ("bee", "cat") for i in range(2)]
    facts = json.loads(_shell(capsys, "predict", *model, "--data", "some", "--batch-size", "3", "--json"))
    assert facts["classes"] == {"target": CLASSES}
    with np.load("predictions.npz") as found:
        assert found["class"].tolist() == [row[3] for row in rows] and found["file"].tolist() == [
            row[7] for row in rows
        ]
        np.testing.assert_allclose(found["probability"], probabilities, rtol=1e-4, atol=1e-5)


def test_probabilities_that_the_model_computes_itself_are_taken_as_they_are(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3), nn.Softmax(1))
    onnx.save(gg.frontend.export(layers, {"x": ("n", 3, 8, 8)}), "model.onnx")
    _shell(capsys, "train", "model.onnx", "--data", str(photos), "--export", "trained.onnx", "--epochs", "1")
    _shell(capsys, "predict", "trained.onnx", "--data", str(photos))
    with np.load("predictions.npz") as found:
        np.testing.assert_array_equal(found["probability"], found["output"])


def test_a_name_that_an_output_has_is_left_to_it(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = _fitted(photos).export()
    model.graph.node[-1].output[0] = model.graph.output[0].name = "class"
    onnx.save(model, "named.onnx")
    _shell(capsys, "predict", "named.onnx", "--data", str(photos))
    with np.load("predictions.npz") as found:
        assert list(found) == ["class", "class_1", "probability", "file"]
        assert found["class"].shape == (6, 3) and found["class_1"].tolist()[0] in CLASSES
