"""History and progress lines."""

from __future__ import annotations

import io
import itertools
import math
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from gradgraph.errors import DataError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.loop import reporter as progress
from gradgraph.runtime.loop.course import Course
from gradgraph.runtime.loop.fit import Fit
from gradgraph.runtime.saved.curves import HEIGHT, LEFT, TOP, WIDTH, panels_of, ticks
from gradgraph.runtime.saved.history import History, as_history
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade


def history() -> History:
    h = History()
    h.append({"epoch": 1, "step": 5, "loss": 2.0})
    h.append({"epoch": 2, "step": 10, "loss": 0.1, "val_loss": 1 / 3, "val_accuracy": 0.5})
    return h


def test_rows_and_columns() -> None:
    h = history()
    assert len(h) == 2
    assert h["loss"] == [2.0, 0.1]
    assert math.isnan(h["val_loss"][0])
    assert h.row()["val_loss"] == 1 / 3
    assert not History()
    assert as_history(dict(h)).to_csv() == h.to_csv()


def test_csv(tmp_path: Path) -> None:
    text = history().to_csv(tmp_path / "h.csv")
    lines = ["epoch,step,loss,val_loss,val_accuracy", "1,5,2.0,nan,nan", "2,10,0.1,0.3333333333333333,0.5", ""]
    assert text.split("\n") == lines
    assert (tmp_path / "h.csv").read_text() == text


@pytest.mark.sweep(0)
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are drawn by matplotlib")
    history().plot(tmp_path / "h.png")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match="not an image format"):
        history().plot(tmp_path / "h.wat")
    with pytest.raises(DataError, match="the history is empty"):
        History().plot(tmp_path / "h.png")


def curves() -> History:
    h = History({"epoch": [1, 2, 3], "step": [5, 10, 15], "loss": [2.0, 1.0, 0.5], "val_loss": [2.0, math.nan, 1.5]})
    h |= {"accuracy": [0.1, 0.5, 0.6], "mae": [0.3, 0.2, 0.1], "a.learning_rate": [1e-3, 1e-3, 1e-4], "<b>": [9, 8, 7]}
    h.restored = 1
    return h


def test_each_kind_of_figure_has_a_panel() -> None:
    found = panels_of(curves(), 1)
    assert [(p.title, p.y_label, [c.name for c in p.curves]) for p in found] == [
        ("Losses", "loss", ["loss", "val_loss"]),
        ("Metrics from 0 to 1", "share", ["accuracy"]),
        ("Learning rates", "learning rate", ["a.learning_rate"]),
        ("mae", "mae", ["mae"]),  # an error, which only happens to lie there
        ("<b>", "<b>", ["<b>"]),
    ]
    assert {p.x_label for p in found} == {"epoch"} and {c.kept for p in found for c in p.curves} == {2}
    assert panels_of({"epoch": [1, 1, 2], "step": [2, 4, 6], "loss": [3, 2, 1]})[0].x_label == "step"


def test_a_loss_of_another_scale_has_its_own_panel() -> None:
    history = {"epoch": [1, 2], "loss": [2.0, 1.0], "box_loss": [1.5, 0.7], "price_loss": [4e8, 1e8]}
    history |= {"val_price_loss": [5e8, 2e8]}
    found = {panel.title: [curve.name for curve in panel.curves] for panel in panels_of(history)}
    assert found == {"Losses": ["loss", "box_loss"], "price_loss": ["price_loss", "val_price_loss"]}


def test_a_drawing_without_matplotlib(tmp_path: Path) -> None:
    text = curves().to_svg(tmp_path / "h.svg")
    assert (tmp_path / "h.svg").read_text() == text
    root = ElementTree.fromstring(text)
    names = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    for said in ("Losses", "Metrics from 0 to 1", "epoch", "loss", "<b>", "loss (kept: 1 at 2)"):
        assert said in names
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 5  # val_loss has two points apart: dots
    for shape in root.iter("{http://www.w3.org/2000/svg}polyline"):
        xs, ys = zip(*(map(float, at.split(",")) for at in shape.attrib["points"].split()), strict=True)
        assert min(xs) >= LEFT and max(xs) <= WIDTH and min(ys) >= TOP and max(ys) <= HEIGHT
    with pytest.raises(DataError, match="the history is empty"):
        History().to_svg()


@pytest.mark.parametrize(
    "values", [[0.0, 1.0], [3.0], [-2e-9, 5e-9], [1e9, 1e9 + 3], [0.1234], [-5, 7], [1e-300, 2e-300], []]
)
def test_ticks_are_round_and_hold_all_values(values: list[float]) -> None:
    found = ticks(values)
    assert 2 <= len(found) <= 8 and all(a < b for a, b in itertools.pairwise(found))
    slack = 1e-6 * (found[1] - found[0])
    assert not values or (found[0] <= min(values) + slack and max(values) <= found[-1] + slack)


def test_bar_shows_names_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    screen = io.StringIO()
    bar = progress.Bar(Console(file=screen, force_terminal=True, width=120, color_system=None), Course(3))
    for done in (1, 2):
        bar.step(0, done, 2, 16, {"w[/]": 0.5, "x\x1b[31m": 1.0})
    bar.row({"epoch": 1, "step": 2, "[red]loss": 0.25}, 0, True)
    bar.say("stopped [bold]here[/bold]")
    bar.close()
    text = screen.getvalue()
    for part in (
        "epoch 1/3 ",
        " 2/2  w[/] 0.5",
        "samples/s  0:0",
        "w[/] 0.5",
        "x\\x1b[31m 1",
        "epoch 1/3",
        "[red]loss 0.25",
        "stopped [bold]here[/bold]",
    ):
        assert part in text


def test_a_narrow_bar_keeps_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    seconds = itertools.count()
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    screen = io.StringIO()
    bar = progress.Bar(Console(file=screen, force_terminal=True, width=80, color_system=None), Course(12))
    bar.step(7, 1, 240, 16, {"loss": 0.1234, "accuracy": 0.5})
    bar.step(7, 240, 240, 16, {"loss": 0.1234, "accuracy": 0.5})
    bar.close()
    assert re.search(
        r"epoch 8/12 \S* *240/240  loss 0.1234  accuracy 0.5  \d+ samples/s  0:\d\d left", screen.getvalue()
    )


@pytest.mark.parametrize(
    ("width", "shows", "drops"),
    [
        (120, "epoch 8/12 BAR 120/240  loss 0.1234  accuracy 0.5  f1 0.25  lr 0.001  5 samples/s  54:00 left", []),
        (80, "epoch 8/12 BAR 120/240  loss 0.1234  accuracy 0.5  lr 0.001  54:00 left", ["samples/s", "f1"]),
        (60, "epoch 8/12 BAR 120/240  loss 0.1234  54:00 left", ["lr", "accuracy"]),
        (40, "epoch 8/12 BAR loss 0.1234", ["left", "120/240"]),
    ],
)
def test_a_narrow_line_drops_fields_and_keeps_a_bar(
    width: int, shows: str, drops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    seconds = itertools.count()
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    bar = progress.Bar(console, Course(12), lambda: {"learning_rate": 1e-3})
    for done in (119, 120):
        bar.step(7, done, 240, 16, {"loss": 0.1234, "accuracy": 0.5, "f1": 0.25})
    line = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", screen.getvalue()).split("\r")[-1].rstrip("\n")
    bar.close()
    assert len(line.rstrip()) <= width and len(re.findall("[━╸╺ ]*━[━╸╺ ]*", line)[0]) >= progress.SHORTEST_BAR
    assert re.sub(r" *━[━╸╺ ]*", " BAR ", line).strip() == shows
    assert not any(word in line for word in drops)


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colour(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NO_COLOR: a bar without colours; TERM=dumb: plain lines."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    told = progress.reporter(None, Course(2))
    told.step(0, 1, 2, 16, {"loss": 0.5})
    told.step(0, 2, 2, 16, {"loss": 0.5})
    told.row({"epoch": 1, "step": 2, "loss": 0.5}, 0, True)
    told.close()
    text = capsys.readouterr().err
    assert isinstance(told, progress.Plain if variable == "TERM" else progress.Bar)
    assert not re.search(r"\x1b\[[0-9;]*[34]\d", text)  # no colour
    assert ("\x1b" in text) is (variable != "TERM")


def test_plain_lines_are_rare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    plain = progress.reporter(None, Course(3))
    for done in range(1, 101):
        now += 0.25
        plain.step(0, done, 100, 8, {"loss": 1 / done})
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "epoch 1/3: batch 40/100  loss 0.025  32 samples/s  1:05 left",
        "epoch 1/3: batch 80/100  loss 0.0125  32 samples/s  0:55 left",
    ]


@pytest.mark.parametrize(
    ("course", "begun", "at", "left"),
    [
        ({"epochs": 4}, (0, 1, 10), (1, 1), "0:58 left"),  # 29 of 40 batches, 2 s each
        ({"epochs": 4}, (2, 6, 10), (2, 8), "2:00 left"),  # a resumed run: 2 batches took 20 s
        ({"epochs": 4, "most_steps": 21}, (0, 1, 10), (1, 1), "0:20 left"),
        ({"epochs": 4, "deadline": 25.0}, (0, 1, 10), (1, 1), "0:05 left"),
        ({"epochs": 4, "deadline": 25.0}, (0, 1, None), (1, 1), "0:05 left"),
        ({"epochs": 4, "deadline": 7000.0}, (0, 1, None), (1, 1), "1:56:20 left"),
        ({"epochs": 4}, (0, 1, 10), (0, 1), ""),
        ({"epochs": 4}, (0, 1, None), (1, 1), ""),
        ({"epochs": 4}, (0, 1, 10), (4, 0), "0:00 left"),
    ],
)
def test_what_is_left_of_all_epochs(
    course: dict[str, Any], begun: tuple[int, int, int | None], at: tuple[int, int], left: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    going = Course(**course)
    going.begin(*begun)
    now = 20.0
    assert going.left(*at) == left


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    silent = progress.reporter(False, Course())
    silent.step(0, 1, 1, 1, {})
    silent.row({"epoch": 1, "step": 1}, 0, True)
    silent.say("anything")
    silent.close()
    assert capsys.readouterr() == ("", "")


def patient(tmp_path: Path, progress: bool | None, **options: Any) -> tuple[Trainer, History]:
    """A run whose first epoch is the best: then the learning rate is far too high."""
    t = Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1))
    rate = lambda step: 0.1 if step < 3 else 3.0  # noqa: E731
    data = handmade.points(48)
    return t, t.fit(data, batch_size=16, patience=2, learning_rate=rate, progress=progress, **options)


def test_patience_says_that_it_stopped_and_where_the_weights_are_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t, history = patient(tmp_path, None, epochs=9)
    assert len(history) == 3
    assert history.restored == 0
    said = capsys.readouterr().err.splitlines()[-1]
    best = f"epoch 1, with the best loss ({history['loss'][0]:.6g})"
    assert said == f"stopped early, since loss did not improve for 2 epochs: restored the weights of {best}"
    first, _ = patient(tmp_path, False, epochs=1)
    assert all(np.array_equal(value, first.state_dict()[name]) for name, value in t.state_dict().items())


def test_going_back_at_the_end_is_said_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, history = patient(tmp_path, None, epochs=2)
    assert history.restored == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("restored the weights of epoch 1, with the best loss")
    _, history = patient(tmp_path, None, epochs=1)
    assert history.restored is None
    assert "weights" not in capsys.readouterr().err


@pytest.mark.sweep(0.05)
@pytest.mark.parametrize("silent", [False, True])
def test_a_slow_first_step_is_told(
    silent: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SLOW", 0.05)
    step = Fit._step
    monkeypatch.setattr(Fit, "_step", lambda fit, *args: time.sleep(0.3) or step(fit, *args))
    trainer = Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1))
    trainer.fit(handmade.points(48), batch_size=16, progress=False if silent else None)
    assert capsys.readouterr().err.count("preparing the step") == (0 if silent else 1)
