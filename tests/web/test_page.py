"""The page that trains in the browser, used in headless Chromium as people use it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.cli import digits
from tests.runtimes.browsing import PACKAGES, missing

ROOT = Path(__file__).parents[2]
WITHIN_S = 240

pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")]


def _maker() -> Any:
    spec = importlib.util.spec_from_file_location("web_page", ROOT / "examples" / "web" / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = _maker()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The page as it is made, and the address at which it is served."""
    folder = tmp_path_factory.mktemp("web") / "site"
    MAKER.make_site(folder)
    with served(folder) as address:
        yield folder, address


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server for these files."""
    server = MAKER.serve(folder, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def use(site: tuple[Path, str], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Plays a scenario of page.mjs; gives what was seen."""

    def played(scenario: str, address: str = site[1]) -> dict[str, Any]:
        script = Path(__file__).with_name("page.mjs")
        command = ["node", str(script), address, str(PACKAGES), str(tmp_path), scenario]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen

    return played


def test_people_draw_train_stop_go_on_save_and_load(use: Any, site: tuple[Path, str], tmp_path: Path) -> None:
    seen = use("people")
    assert seen["errors"] == []
    assert seen["isolated"]  # so that threads could be used
    assert seen["before"] < 0.3 < 0.95 < seen["after"]
    assert seen["own"] == "1"
    assert seen["firstGuess"] is not None  # it follows the drawing before any training
    assert seen["still"] and seen["stopped"] > 20
    assert seen["chart"].startswith("Loss: 0.") and seen["chart"].endswith(f"after {seen['stopped']} steps")
    assert seen["anew"] < 0.3
    assert seen["loaded"] == seen["restored"] == seen["after"]
    assert seen["restoredSteps"] == seen["stopped"]
    assert seen["refusal"].startswith("notes.onnx: the model cannot be read")

    _, held_out = digits.split()
    session = ort.InferenceSession(seen["model"], providers=["CPUExecutionProvider"])
    said = session.run(["logits"], {"x": held_out["x"]})[0].argmax(1)
    assert np.mean(said == held_out["target"]) == pytest.approx(seen["after"], abs=0.0006)
    drawn = np.array(seen["drawn"], np.float32).reshape(1, 1, 8, 8)
    assert str(session.run(["logits"], {"x": drawn})[0].argmax()) == seen["lastGuess"] == "7"

    trainer = gg.Trainer.resume(site[0] / "steps" / "wasm", seen["checkpoint"], device="cpu")
    assert trainer.progress.steps == seen["stopped"]
    assert trainer.evaluate(held_out)["accuracy"] == pytest.approx(seen["after"], abs=0.0006)
    assert trainer.predict({"x": drawn}).argmax() == 7
    keep_picture(tmp_path / "web.png", "web.png")


@pytest.mark.sweep(0)
def test_it_works_without_a_network_after_the_first_load(use: Any) -> None:
    seen = use("offline")
    assert seen["said"] == "Works offline from here on"
    assert seen["network"] == "none"  # the network was really away
    assert seen["far"] > 0.8


@pytest.mark.sweep(0)
def test_it_works_by_keyboard_alone(use: Any) -> None:
    seen = use("keyboard")
    assert seen["errors"] == []
    assert seen["first"] == "Skip to training"
    assert seen["outline"] == "solid"
    assert seen["rate"] == "0.0018"
    assert (seen["canvas"], seen["pen"], seen["own"]) == ("canvas", "Pen up", "1")
    assert seen["seen"] == "1"  # a line from top to bottom
    assert seen["unnamed"] == 0


@pytest.mark.sweep(0)
def test_it_fits_a_phone(use: Any, tmp_path: Path) -> None:
    seen = use("phone")
    assert seen["errors"] == []
    assert seen["wide"] == [375, 375]  # nothing to scroll to the side
    assert seen["small"] == []
    keep_picture(tmp_path / "phone.png", "web-phone.png")


@pytest.mark.sweep(0)
def test_it_computes_with_webgpu(use: Any) -> None:
    seen = use("webgpu")
    assert seen["device"] == "Computes with WebGPU", seen["message"]
    assert seen["before"] < 0.3 < 0.6 < seen["reached"]
    assert seen["after"] > 0.6


@pytest.mark.sweep(0)
def test_the_lines_in_the_docs_train(site: tuple[Path, str], use: Any, tmp_path: Path) -> None:
    """The page of docs/how-to/web.md, with batches, and the files where it looks for them."""
    text = (ROOT / "docs" / "how-to" / "web.md").read_text()
    [block] = re.findall(r"^```html\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shown = "globalThis.trained = { bytes: bytes.length, logits: logits.dims, steps: trainer.steps };\n</script>"
    numbers = "const images = new Float32Array(128), batches = [1, 2, 3].map(() => ({ images, digits: [3, 5] }));"
    folder = tmp_path / "docs"
    for name, source in {"ort": "ort", "gradgraph": "gradgraph", "step": "steps/wasm"}.items():
        shutil.copytree(site[0] / source, folder / name)
    (folder / "index.html").write_text(f"<script>{numbers}</script>\n{block.replace('</script>', shown)}")
    with served(folder) as address:
        seen = use("docs", address)
    assert seen["errors"] == []
    assert (seen["logits"], seen["steps"]) == ([2, 10], 3)
    assert seen["bytes"] > 100_000


def keep_picture(path: Path, name: str) -> None:
    """In build/, where people find it."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    shutil.copy(path, folder / name)
