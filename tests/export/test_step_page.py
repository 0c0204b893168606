"""The page of a step: one file, true figures, and in a browser what it promises."""

from __future__ import annotations

import functools
import html
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.cli.app import run as command
from gradgraph.export import save_page
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn
from tests.kit.in_chromium import BROWSER, WIDTHS, chromium, in_a_browser, in_a_frame
from tests.kit.lowered_networks import batches, exported

KEPT = Path(__file__).parents[2] / "build" / "step-page"  # screenshots, for people


@functools.cache
def step_of(name: str) -> gg.Step:
    return gg.build(exported(name, "batch"), "cross_entropy", "adamw")


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, image: Any) -> dict[str, Any]:
        made = self.generator(F.randn(image.shape[0], 3))
        return {"made": made, "of_real": self.discriminator(image), "of_made": self.discriminator(made)}


def gan() -> gg.Step:
    frontend.manual_seed(0)
    telling = lambda out, batch: F.softplus(-out["of_real"]).mean() + F.softplus(out["of_made"]).mean()  # noqa: E731
    return gg.build(frontend.export(Gan(), {"image": ("rows", 2)}), steps={
        "discriminator": gg.StepOptions(telling, gg.optim.adam(1e-3), train="discriminator.*"),
        "generator": gg.StepOptions(lambda out, batch: F.softplus(-out["of_made"]).mean(), gg.optim.adam(1e-3),
                                    train="generator.*")})  # fmt: skip


def page_of(step: Any, folder: Path, **options: Any) -> Path:
    save_page(step, folder / "page.html", **options)
    return folder / "page.html"


def data_in(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"))
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


# --- without a browser ---------------------------------------------------------------------------------------


@pytest.mark.sweep(0.11)
@pytest.mark.parametrize("name", ["residual", "transformer", "lstm"])
def test_it_says_what_is_in_the_step(name: str, tmp_path: Path) -> None:
    step = step_of(name)
    data = data_in(page_of(step, tmp_path, batch=4))
    (graph,) = data["graphs"]
    assert [node["n"] for node in graph["nodes"]] == [node.name for node in step.train.graph.node]
    names = {node["n"] for node in graph["nodes"]} | {node.name for node in step.eval.graph.node}
    assert all(node["f"] in names for node in graph["nodes"] if data["parts"][node["p"]] == "backward")
    assert {node.get("w") for node in graph["nodes"]} >= set(step.manifest.trainable)
    trained = [w for w in data["weights"] if w["k"] == "trained"]
    assert {w["n"] for w in trained} == set(step.manifest.trainable)
    assert sum(w["x"] for w in trained) == 2 * sum(w["b"] for w in trained)  # AdamW's two moments
    memory = gg.memory(step, batch=4)
    assert max(sum(moment[2:]) for moment in graph["moments"]) <= memory.peak
    assert max(sum(moment[2:]) for moment in graph["moments"]) >= 0.9 * memory.peak  # bodies of loops have more
    assert sum(moment[0] >= 0 for moment in graph["moments"]) > 0.9 * len(graph["moments"])


def test_it_needs_nothing_beside_it(tmp_path: Path) -> None:
    text = page_of(step_of("residual"), tmp_path).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|\bsrc=|\bhref=|url\(|@import|\bfetch\(|XMLHttp|/\* (page|data)", text)


@pytest.mark.sweep(0)
def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[batch, 4] x) => (float[batch, 4] y) { y = MatMul (x, w) }""")
    hostile = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>'
    model.graph.node[0].name = hostile
    model.graph.initializer.append(onnx.helper.make_tensor("w", 1, (4, 4), [0.1] * 16))
    page = page_of(gg.build(model, "mse", "adam"), tmp_path, title=hostile)
    assert "<img" not in page.read_text("utf-8") and page.read_text("utf-8").count("<script") == 2
    assert data_in(page)["title"] == hostile
    if BROWSER:
        assert "<title>taken" not in seen(page)


@pytest.mark.sweep(0)
def test_several_steps_and_their_times(tmp_path: Path) -> None:
    step = gan()
    trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(threads=1))
    batch = {"image": np.ones((8, 2), np.float32)}
    profiles = {name: trainer.profile(name, batch, steps=2) for name in step.manifest.steps}
    data = data_in(page_of(step, tmp_path, profiles=profiles, rows=8))
    assert [graph["name"] for graph in data["graphs"]] == ["discriminator", "generator"]
    assert all(w["x"] == 2 * w["b"] for w in data["weights"] if w["k"] == "trained")  # each by one of the two
    for graph in data["graphs"]:
        assert {node["w"] for node in graph["nodes"] if "w" in node} == set(
            step.manifest.steps[graph["name"]].trainable
        )
        profile = profiles[graph["name"]]
        assert sum(graph["times"]["nodes"].values()) == pytest.approx(sum(n.seconds for n in profile.nodes))
        assert {graph["nodes"][int(i)]["p"] for i in graph["times"]["nodes"] if int(i) >= 0} == {0, 1, 2, 3}
    with pytest.raises(gg.GradgraphError, match="no dynamic dimension 'batch'"):
        page_of(step, tmp_path, batch=2)


def test_a_page_of_a_model_and_of_a_folder(tmp_path: Path) -> None:
    onnx.save(exported("residual", "batch"), tmp_path / "model.onnx")
    data = data_in(page_of(tmp_path / "model.onnx", tmp_path))
    assert data["title"] == "model.onnx"
    assert {node["p"] for node in data["graphs"][0]["nodes"]} == {0}
    assert "stem.0" in {node.get("m") for node in data["graphs"][0]["nodes"]}
    step_of("residual").save(tmp_path / "step")
    assert data_in(page_of(tmp_path / "step", tmp_path))["title"] == "step"
    gradient = gg.value_and_grad(gan().eval, output="discriminator.loss", wrt="discriminator.0.weight")
    onnx.save(gradient, tmp_path / "gradient.onnx")
    nodes = data_in(page_of(tmp_path / "gradient.onnx", tmp_path))["graphs"][0]["nodes"]
    assert len({node.get("f") for node in nodes if node["p"] == 2}) > 3


@pytest.mark.sweep(0)
def test_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, page = tmp_path / "step", tmp_path / "page.html"
    step_of("residual").save(step)
    (batch,) = batches("residual", 8, 1)
    np.savez(tmp_path / "train.npz", **{k: np.asarray(v) for k, v in batch.items()})
    timed = ["--profile", "--data", str(tmp_path / "train.npz")]
    assert command(["inspect", str(step), "--html", str(page), "--batch-size", "4", *timed]) == 0
    data = data_in(page)
    assert data["graphs"][0]["times"]["steps"] == 10
    assert ["memory for", "batch=4"] in data["facts"]
    for wrong in (["--html", str(page), "--profile"], timed, ["--html", str(page), "--data", "train.npz"]):
        assert command(["inspect", str(step), *wrong]) == 2
        assert "requires --html and --data; give all three" in capsys.readouterr().err
    onnx.save(exported("residual", "batch"), tmp_path / "model.onnx")
    assert command(["inspect", str(tmp_path / "model.onnx"), "--html", str(page), *timed]) == 2
    assert "--profile requires a step" in capsys.readouterr().err
    assert command(["inspect", str(tmp_path / "model.onnx"), "--html", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(page)}


def test_sizes_of_every_open_dimension_are_said_in_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory goes with the length of texts; a length that nobody gave is 1, and that is said."""
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    folder = str(tmp_path / "step")
    gg.build(frontend.export(net, {"x": ("batch", "time", 4)}), gg.losses.cross_entropy(axis=-1)).save(folder)
    peaks = []
    for length in (1, 64):
        assert command(["inspect", folder, "--json", "--batch-size", "8", "--size", f"time={length}"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["memory"]["peak"])
    assert peaks[1] > 20 * peaks[0]
    page = tmp_path / "page.html"
    assert command(["inspect", folder, "--batch-size", "8", "--html", str(page)]) == 0
    assert "'time' is assumed to be 1; set --size time=" in capsys.readouterr().err
    assert ["memory for", "batch=8, time=1"] in data_in(page)["facts"]
    assert command(["inspect", folder, "--size", "tme=8"]) == 1
    assert "did you mean 'time'" in capsys.readouterr().err


# --- in a browser --------------------------------------------------------------------------------------------


def seen(page: Path, script: str = "", fragment: str = "") -> str:
    """The page after its script has run, and after one of the test's, whose ``tell(...)`` is shown in the title."""
    told = "const tell = (x) => { document.title = JSON.stringify(x); };"
    tried = page.with_name("tried.html")
    tried.write_text(page.read_text("utf-8").replace("</body>", f"<script>{told}{{{script}}}</script></body>"), "utf-8")
    return chromium(tried, "--dump-dom", fragment=fragment)


def told(page: Path, script: str, fragment: str = "") -> Any:
    found = re.search("<title>(.*?)</title>", seen(page, script, fragment), re.DOTALL)
    assert found
    return json.loads(html.unescape(found[1]))


@pytest.mark.sweep(0)
@in_a_browser
def test_a_gradient_points_at_what_it_is_the_gradient_of(tmp_path: Path) -> None:
    """Chosen by its name in the address: its row is open, both nodes are marked, and the details name each other."""
    page = page_of(step_of("residual"), tmp_path, batch=4)
    found = told(
        page,
        """const found = {
        chosen: [...document.querySelectorAll(".chip.chosen")].map((c) => c.title),
        linked: [...document.querySelectorAll(".chip.linked")].map((c) => c.title),
        details: document.getElementById("details").textContent,
        strong: document.querySelectorAll("path.strong").length};
        document.querySelector("#details dd button.forward").click();
        tell({ ...found, back: [...document.querySelectorAll("#details dt")].map((t) => t.textContent) })""",
        "#grad/stem.0/Conv/ConvGradWeight",
    )
    assert found["chosen"] == ["grad/stem.0/Conv/ConvGradWeight"]
    assert found["linked"] == ["stem.0/Conv"]
    assert "gradient ofstem.0/Conv" in found["details"]
    assert found["strong"] > 0
    assert "its gradient" in found["back"]


@pytest.mark.sweep(0)
@in_a_browser
def test_it_is_used_by_keyboard_and_searched(tmp_path: Path) -> None:
    page = page_of(step_of("transformer"), tmp_path, batch=4)
    found = told(
        page,
        """
        const event = (key) => new KeyboardEvent("keydown", { key, bubbles: true });
        const press = (key) => document.activeElement.dispatchEvent(event(key));
        const rows = () => document.querySelectorAll(".row:not(.head)").length;
        const counts = { first: rows() };
        document.getElementById("close").click(); counts.closed = rows();
        document.getElementById("open").click(); counts.open = rows();
        document.getElementById("close").click();
        document.querySelector(".row[tabindex='0']").focus();
        while (document.activeElement.getAttribute("aria-expanded") !== "false") press("ArrowDown");
        press("ArrowRight"); counts.pressed = rows();
        const expanded = document.activeElement.getAttribute("aria-expanded");
        press("ArrowLeft"); counts.shut = rows();
        press("/"); const search = document.activeElement;
        search.value = "softmax"; search.dispatchEvent(new Event("input"));
        const matches = document.getElementById("found").textContent;
        search.dispatchEvent(event("Enter"));
        const details = document.querySelector("#details h2").textContent;
        press("Escape");
        const after = document.querySelectorAll(".chosen").length;
        tell({ ...counts, expanded, searched: search.id, matches, details, after })""",
    )
    assert found["closed"] < found["first"] < found["open"]
    assert found["pressed"] > found["closed"] == found["shut"]
    assert found["expanded"] == "true" and found["searched"] == "search"
    assert int(found["matches"].split()[0]) > 1
    assert "softmax" in found["details"].lower()
    assert found["after"] == 0


@pytest.mark.sweep(0)
@in_a_browser
def test_every_control_has_a_name_and_rows_say_how_deep_they_lie(tmp_path: Path) -> None:
    found = told(
        page_of(step_of("residual"), tmp_path),
        """tell({
        unnamed: [...document.querySelectorAll("button:not([aria-hidden]), input, [role=img], section")]
            .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length)).length,
        rows: [...document.querySelectorAll(".row:not(.head)")]
            .every((r) => r.getAttribute("aria-level") && r.getAttribute("aria-label")),
        tabs: document.querySelectorAll("#rows [tabindex='0']").length,
        language: document.documentElement.lang})""",
    )
    assert found == {"unnamed": 0, "rows": True, "tabs": 1, "language": "en"}


@pytest.mark.sweep(0.06)
@in_a_browser
@pytest.mark.parametrize("what", ["model", "gradient", "step"])
@pytest.mark.parametrize("width", WIDTHS)
def test_columns_stand_side_by_side(what: str, width: int, tmp_path: Path) -> None:
    """Of everything that has this page, on a phone and on a screen: a row's cells are beside each other."""
    model = exported("residual", "batch")
    if what == "step":
        page = page_of(step_of("residual"), tmp_path, batch=32)
    else:
        onnx.save(model if what == "model" else gg.vjp(model), tmp_path / "m.onnx")
        page = tmp_path / "page.html"
        save_page(tmp_path / "m.onnx", page)
    found = in_a_frame(
        page,
        width,
        """const row = [...d.querySelectorAll(".row")].find((r) => r.querySelector(".chip"));
        const boxes = [...row.children].map((c) => c.getBoundingClientRect()).filter((b) => b.width);
        return { beside: boxes.every((b, i) => i === 0 || b.left >= boxes[i - 1].right - 1),
                 wide: d.documentElement.scrollWidth,
                 parts: [...d.querySelectorAll("#legend li")].map((x) => x.textContent) };""",
    )
    assert found["beside"] and found["wide"] <= width, found
    assert found["parts"] == {"model": ["forward"], "gradient": ["forward", "backward"]}.get(
        what, ["forward", "loss", "backward", "update"]
    )


@pytest.mark.sweep(0)
@in_a_browser
def test_of_several_steps_one_is_shown_at_a_time(tmp_path: Path) -> None:
    page = page_of(gan(), tmp_path, rows=8)
    found = told(
        page,
        """const buttons = [...document.getElementById("steps").children];
        const chips = () => document.querySelectorAll(".chip.update").length;
        const words = document.getElementById("search");
        words.value = "generator.0"; words.dispatchEvent(new Event("input"));
        const found = () => parseInt(document.getElementById("found").textContent), first = found();
        const before = chips(); buttons[1].click();
        tell([buttons.map((b) => b.textContent), buttons.map((b) => b.getAttribute("aria-pressed")),
            before > 0, chips() > 0, found() > first && first > 0])""",
    )
    assert found == [["discriminator", "generator"], ["false", "true"], True, True, True]


@pytest.mark.sweep(0)
@in_a_browser
def test_a_step_of_thousands_of_nodes_opens_soon(tmp_path: Path) -> None:
    """Time goes with the number of nodes: of four times as many it is not ten times as long."""
    taken = []
    for layers in (50, 200):
        nodes = "".join(f"h{i + 1} = MatMul (h{i}, w) r{i} = Relu (h{i + 1}) " for i in range(layers)).replace(
            "h0,", "x,"
        )
        model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
            net (float[batch, 4] x) => (float[batch, 4] h{layers}) {{ {nodes} }}""")
        for i, node in enumerate(model.graph.node):
            node.name = f"body/{i // 8}/{i}/{node.op_type}"
        model.graph.initializer.append(onnx.helper.make_tensor("w", 1, (4, 4), [0.1] * 16))
        page = page_of(gg.build(model, "mse", "adam"), tmp_path)
        taken.append(
            told(
                page,
                """const begin = performance.now(); document.getElementById("open").click();
            tell([performance.now() - begin, document.querySelectorAll(".row").length])""",
            )
        )
    assert taken[1][1] > 3 * taken[0][1]
    assert taken[1][0] < 5_000  # milliseconds, where others are at work, too
    assert taken[1][0] < 10 * taken[0][0] + 200


@pytest.mark.sweep(0)
@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screenshot_is_kept(scheme: str, tmp_path: Path) -> None:
    page = page_of(step_of("residual"), tmp_path, title="A residual network", batch=32)
    KEPT.mkdir(parents=True, exist_ok=True)
    picture = KEPT / f"{scheme}.png"
    picture.unlink(missing_ok=True)
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    begin = time.time()
    chromium(page, f"--screenshot={picture}", "--window-size=1400,1100", *dark)
    from matplotlib import image

    pixels = image.imread(picture)[..., :3]
    assert picture.stat().st_mtime >= begin - 1 and pixels.shape[:2] == (1100, 1400)
    assert (pixels.mean() > 0.7) == (scheme == "light")
    assert len(np.unique((pixels * 255).astype(int).reshape(-1, 3)[::7], axis=0)) > 30  # it is not blank
