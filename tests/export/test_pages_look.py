"""All pages have one look: nothing overflows on a phone, and colours follow the browser's scheme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.export import save_mistakes, save_page
from gradgraph.export.runs_page import save_runs
from gradgraph.frontend import nn
from gradgraph.runtime.saved.compared_runs import runs_in
from tests.kit.command_line import arrays
from tests.kit.in_chromium import WIDTHS, chromium, in_a_browser, in_a_frame
from tests.kit.lowered_networks import exported

KEPT = Path(__file__).parents[2] / "build" / "pages-seen"  # screenshots, for people
LONG = "a_name_of_a_run_that_goes_on_and_on_" * 3


def of_a_model(page: Path) -> None:
    onnx.save(exported("transformer", "batch"), page.with_name("m.onnx"))
    save_page(page.with_name("m.onnx"), page)


def of_a_step(page: Path) -> None:
    save_page(gg.build(exported("residual", "batch"), "cross_entropy", "adamw"), page, batch=4)


def of_runs(page: Path) -> None:
    from gradgraph.cli.app import run

    gg.frontend.manual_seed(0)
    folder = page.parent
    onnx.save(gg.frontend.export(nn.Linear(4, 3), {"x": ("N", 4)}, "logits"), folder / "m.onnx")
    np.savez(folder / "t.npz", **arrays(32))
    for name in ("one", LONG):
        words = ["train", folder / "m.onnx", "--data", folder / "t.npz", "--epochs", 2, "--run", folder / "runs" / name]
        assert run([*map(str, words), "--quiet"]) == 0
    save_runs(runs_in(folder / "runs"), page)


def of_mistakes(page: Path) -> None:
    """Of a classifier of many classes, whose matrix is wider than a phone."""
    gg.frontend.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 30))
    trainer = gg.Trainer(gg.build(gg.frontend.export(net, {"x": ("N", 3, 4, 4)}), "cross_entropy"), device="cpu")
    rng = np.random.default_rng(0)
    data = {"x": rng.random((90, 3, 4, 4), np.float32), "target": rng.integers(0, 30, 90)}
    trainer.names = gg.DataNames(classes={"target": [f"class_{i}" for i in range(30)]})
    save_mistakes(trainer, data, page)


def of_explanations(page: Path) -> None:
    """Of pictures, columns with long names and tokens, with a warning and the checks."""
    from gradgraph.attributions.attribution_page import page as page_of
    from gradgraph.attributions.explained import Explainer, explain_samples
    from gradgraph.data.record.data_names import DataNames

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(64 + 8 + 4, 3)

        def forward(self, x: Any, row: Any, ids: Any) -> Any:
            parts = [x.flatten(1), row, self.words(ids).mean(1)]
            return self.head(gg.frontend.functional.cat(parts, 1))

    gg.frontend.manual_seed(0)
    shapes = {"x": ("N", 1, 8, 8), "row": ("N", 8), "ids": gg.frontend.Input(("N", 30), "int64")}
    model = ir.from_proto(gg.frontend.export(Net(), shapes, "logits"))
    model.metadata_props.update(DataNames(columns={"row": [f"{LONG}{i}" for i in range(8)]}).as_metadata())
    rng = np.random.default_rng(0)
    inputs = {"x": rng.random((3, 1, 8, 8), np.float32), "row": rng.random((3, 8), np.float32),
              "ids": rng.integers(0, 9, (3, 30))}  # fmt: skip
    described = [{"index": i, "file": f"{LONG}.png", "text": ""} for i in range(3)]
    found = explain_samples(Explainer(model, "input-x-gradient", {}, None, "cpu"), inputs, described)
    page.write_text(page_of(LONG, found, {"model": LONG}), "utf-8")


PAGES: dict[str, Callable[[Path], None]] = {
    "model": of_a_model, "step": of_a_step, "runs": of_runs, "mistakes": of_mistakes,
    "explanations": of_explanations,
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> Callable[[str], Path]:
    """Each page, written once."""
    folder = tmp_path_factory.mktemp("pages")

    def page(name: str) -> Path:
        path: Path = folder / name / "page.html"
        if not path.exists():
            path.parent.mkdir()
            PAGES[name](path)
        return path

    return page


@pytest.mark.sweep(0.11)
@in_a_browser
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(name: str, width: int, written: Callable[[str], Path]) -> None:
    found = in_a_frame(written(name), width, """return {
        wide: d.documentElement.scrollWidth, title: d.querySelector("h1").textContent,
        unnamed: [...d.querySelectorAll("img:not([alt]), button, [role=img]")]
            .filter((e) => !(e.alt || e.textContent.trim() || e.getAttribute("aria-label"))).length };""")  # fmt: skip
    assert found["wide"] <= width and found["title"] and found["unnamed"] == 0, found


@pytest.mark.sweep(0.29)
@in_a_browser
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_scheme(name: str, scheme: str, written: Callable[[str], Path]) -> None:
    """Screenshots are kept for people; here, their corner has the colour of the page."""
    from matplotlib import image

    KEPT.mkdir(parents=True, exist_ok=True)
    picture = KEPT / f"{name}-{scheme}.png"
    picture.unlink(missing_ok=True)
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    chromium(written(name), f"--screenshot={picture}", "--window-size=1200,900", *dark)
    corner = image.imread(picture)[-1, 0, :3]
    assert (corner.mean() > 0.5) == (scheme == "light")
