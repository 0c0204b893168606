"""Tables that name images: the same numbers as the folder of the same images, whatever the kind of table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.frontend import nn
from tests.kit.command_line import Cli, Ran

Image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")
pandas = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seven images of two classes, in a folder for each, and a table of them in another order."""
    for i, name in enumerate(["ant/a", "ant/b", "ant/c", "bee/a", "bee/b", "bee/c", "bee/d"]):
        path = tmp_path / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        made = np.random.default_rng(i).integers(0, 256, (9 + i, 12, 3), dtype=np.uint8)
        Image.fromarray(made).save(path)
    return tmp_path / "photos"


def frame(photos: Path, order: Any = (6, 0, 3, 1, 5, 2, 4)) -> Any:
    files = sorted(photos.glob("*/*.png"))
    rows = [(files[i].relative_to(photos.parent).as_posix(), files[i].parent.name) for i in order]
    return pandas.DataFrame(rows, columns=["path", "label"])


def step(classes: int = 2, loss: str = "cross_entropy") -> gg.Step:
    gg.frontend.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, classes))
    return gg.build(gg.frontend.export(head, {"x": ("N", 3, 8, 8)}), loss=loss, optimizer=gg.optim.sgd(0.1))


def trainer(*given: Any) -> gg.Trainer:
    return gg.Trainer(step(*given), device="cpu", seed=1)


SAVED = {
    "csv": lambda table, path: table.to_csv(path, index=False),
    "tsv": lambda table, path: table.to_csv(path, index=False, sep="\t"),
    "jsonl": lambda table, path: table.to_json(path, orient="records", lines=True),
}


@pytest.mark.parametrize("kind", [*SAVED, "frame"])
def test_a_table_is_as_good_as_a_folder(kind: str, photos: Path) -> None:
    """Its classes are those of the folder, also where it lacks some, or has a new one."""

    def given(table: Any) -> Any:
        if kind == "frame":
            return gg.image_table(table, root=photos.parent)
        SAVED[kind](table, photos.parent / f"table.{kind}")
        return photos.parent / f"table.{kind}"

    first, second = trainer(), trainer()
    first.fit(photos, 2, 7, shuffle=False, progress=False)
    second.fit(given(frame(photos, range(7))), 2, 7, shuffle=False, progress=False)
    for name, value in first.state_dict().items():
        np.testing.assert_array_equal(second.state_dict()[name], value)
    assert second.names.classes == first.names.classes == {"target": ("ant", "bee")}
    assert first.evaluate(given(frame(photos))) == pytest.approx(first.evaluate(photos), rel=1e-6)
    only = first.evaluate(given(frame(photos, [4, 5])))
    arrays = gg.image_folder(photos, (8, 8))
    assert only == first.evaluate({"x": np.stack([arrays[i][0] for i in (4, 5)]), "target": np.array([1, 1])})
    np.testing.assert_allclose(first.predict(given(frame(photos, [2, 6]))), first.predict(photos)[[2, 6]], rtol=1e-6)
    assert Path(first.worst(given(frame(photos)), 1)[0].file).parent.parent == photos
    with pytest.raises(gg.errors.DataError, match="the new class 'cow'"):
        first.evaluate(given(frame(photos).replace("bee", "cow")))


def test_labels_of_every_kind(photos: Path) -> None:
    table = frame(photos, range(7))
    numbered = table.assign(label=[0, 0, 0, 1, 1, 1, 1])
    by_name, by_number = (trainer().evaluate(gg.image_table(t, root=photos.parent)) for t in (table, numbered))
    assert by_name == by_number
    value = table.assign(label=np.linspace(-1, 1, 7))
    images = gg.image_table(value, root=photos.parent)
    regression = trainer(1, "mse")
    folder = gg.image_folder(photos, (8, 8))
    arrays = {
        "x": np.stack([folder[i][0] for i in range(7)]),
        "target": np.linspace(-1, 1, 7, dtype=np.float32)[:, None],
    }
    assert regression.evaluate(images) == pytest.approx(regression.evaluate(arrays), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "call", "says"),
    [
        (lambda t: t.assign(label=[None] * 2 + ["a"] * 5), {}, "lacks 2 of 7 labels"),
        (lambda t: t.assign(path=[None, *t.path[1:]]), {"path": "path"}, "has no path in the row at index 0"),
        (lambda t: t.assign(path=["no.png"] * 7), {}, "no.png' cannot be read"),
        (lambda t: t.drop(columns="label"), {}, "none of the columns of the table (only paths) is clearly"),
        (lambda t: t.rename(columns={"label": "a"}).assign(b=1), {}, "is clearly the target 'target'"),
        (lambda t: t.assign(mask=t.path), {}, "is clearly the column of image paths"),
        (lambda t: t, {"label": "labl"}, "has no column 'labl'; did you mean 'label'"),
        (lambda t: t, {"path": "pth"}, "has no column 'pth'; did you mean 'path'"),
        (lambda t: t.assign(label=list("abcdefg")), {}, "has 7 classes"),
    ],
)
def test_what_does_not_fit_is_said(change: Any, call: dict[str, str], says: str, photos: Path) -> None:
    with pytest.raises(gg.errors.DataError) as raised:
        trainer().fit(gg.image_table(change(frame(photos)), **call, root=photos.parent), progress=False)
    assert says in str(raised.value)


@pytest.fixture
def cli(photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(photos.parent)
    gg.frontend.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    onnx.save(gg.frontend.export(head, {"x": ("N", 3, 8, 8)}), "model.onnx")

    def call(*words: str) -> Ran:
        capsys.readouterr()
        code = run(words)
        return Ran(code, *capsys.readouterr())

    return call


def test_from_the_shell(cli: Cli, photos: Path) -> None:
    frame(photos).rename(columns={"label": "species"}).assign(size=[3] * 7).to_csv("labels.csv", index=False)
    words = ["--target", "species", "--augment", "flip", "--epochs", "1", "--image", "mean=[0.5,0.5,0.5]"]
    ran = cli("train", "model.onnx", "--data", "labels.csv", *words, "--export", "trained.onnx", "-o", "step",
              "--checkpoint", "run.ckpt")  # fmt: skip
    assert ran.code == 0, ran.err
    ran = cli("predict", "trained.onnx", "--data", "labels.csv", "-o", "-")
    lines = ran.out.splitlines()
    assert ran.code == 0 and len(lines) == 8 and "probability[ant]" in lines[0]
    assert lines[1].endswith("photos/bee/d.png") and ("ant" in lines[1] or "bee" in lines[1])
    ran = cli("evaluate", "step", "--checkpoint", "run.ckpt", "--data", "labels.csv", "--worst", "2")
    assert ran.code == 0 and "photos/" in ran.out, ran.err
