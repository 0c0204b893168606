"""The page that teaches a language model, used in headless Chromium as people use it."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.prompts import Prompts
from tests.chat import small_folder
from tests.runtimes.browsing import PACKAGES, missing
from tests.web.test_page import MAKER, keep_picture, served

ROOT = Path(__file__).parents[2]
CHAT = ROOT / "examples" / "web" / "chat.js"
WITHIN_S = 280
RATE, BATCH = 10**-2.5, 5  # that the page begins with


def why_not() -> str:
    """What is not installed, and how it is; empty if all is there."""
    if missing() or (PACKAGES / "@huggingface" / "tokenizers").is_dir():
        return missing()
    return "Hugging Face's packages for JavaScript are not installed: make browser"


pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(why_not()), reason=why_not() or "all is there")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The page as it is made, and the address at which it is served."""
    folder = tmp_path_factory.mktemp("teach") / "site"
    MAKER.make_common(folder)
    MAKER.make_teach(folder / MAKER.TEACH)
    with served(folder) as address:
        yield folder / MAKER.TEACH, address


@pytest.fixture
def use(site: tuple[Path, str], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Plays a scenario of teach.mjs; gives what was seen."""

    def played(scenario: str) -> dict[str, Any]:
        script = Path(__file__).with_name("teach.mjs")
        command = ["node", str(script), site[1], str(PACKAGES), str(tmp_path), scenario]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        assert seen["errors"] == []
        return seen

    return played


def losses_in(path: str) -> list[float]:
    with Path(path).open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def batches(folder: Path, rows: str, epochs: int, where: Path) -> Iterator[dict[str, np.ndarray]]:
    """Those that the page makes of the rows, epoch after epoch."""
    jobs = [{"folder": str(folder), "rows": rows, "batches": {"batchSize": BATCH, "seed": e}} for e in range(epochs)]
    (where / "jobs.json").write_text(json.dumps(jobs))
    command = ["node", str(Path(__file__).with_name("chat.mjs")), str(CHAT), str(PACKAGES), str(where / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for line in done.stdout.splitlines():
        for batch in json.loads(line)["batches"]:
            yield {name: np.reshape(v["data"], v["dims"]).astype(np.int64) for name, v in batch.items()}


def losses_of_python(folder: Path, rows: str, steps: int, where: Path) -> list[float]:
    trainer = gg.Trainer(folder, device="cpu")
    given = itertools.islice(batches(folder, rows, steps, where), steps)
    return [float(trainer.step(batch, learning_rate=RATE)["loss"]) for batch in given]


def written(model: Any, question: str) -> str:
    """The likeliest characters behind a question, by a model with adapters."""
    trainer = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu")
    known = [1, *(ord(letter) - ord(" ") + 3 for letter in f"Q: {question} A: ")]
    start = len(known)
    while len(known) < start + 48 and (len(known) == start or known[-1] != 2):
        known.append(int(trainer.predict({"input_ids": np.array([known])})[0, -1].argmax()))
    return "".join(chr(number - 3 + ord(" ")) for number in known[start:] if number >= 3)


def shortfalls(folder: Path, adapter: Path, question: str, answer: str, most: int) -> np.ndarray:
    """By how much the logit of each token of an answer falls short of the largest: 0 where it is the likeliest.

    Two backends may choose differently where logits are tied, as they are after few steps; so texts are not compared.
    """
    model = surgery.load_adapter(surgery.language_model(folder / "model.onnx"), adapter)
    trainer = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu")
    prompts = Prompts(ModelFolder.of(folder))
    asked, said = prompts.tokens_of(question), [small_folder.WORDS[letter] for letter in answer]
    if len(said) < most:
        said.append(small_folder.WORDS["</s>"])
    logits = trainer.predict({"input_ids": np.array([asked + said])})[0, len(asked) - 1 : -1]
    return np.asarray(logits.max(axis=-1) - np.take_along_axis(logits, np.array(said)[:, None], -1)[:, 0])


def test_people_teach_save_come_back_and_load(use: Any, site: tuple[Path, str], tmp_path: Path) -> None:
    seen = use("people")
    rows = [json.loads(line) for line in seen["examples"].splitlines()]
    assert len(rows) == 10 and seen["counted"].startswith("10 examples of ")
    assert seen["marked"] == [f"{row['completion']}</s>" for row in rows[:3]]
    losses = losses_in(seen["files"][0])
    assert len(losses) == seen["steps"] >= 120
    expected = losses_of_python(site[0] / "model", seen["examples"], 12, tmp_path)
    np.testing.assert_allclose(losses[:12], expected, rtol=1e-4)
    assert losses[-1] < 0.2 and seen["answer"] == rows[2]["completion"]
    assert seen["chart"].endswith(f"after {seen['steps']} steps") and len(seen["samples"]) == 4
    assert "WebAssembly" in seen["memory"] and float(seen["kept"].split(":")[1].split()[0]) > 0.3

    base = surgery.language_model(MAKER.LANGUAGE_MODEL)
    assert {Path(path).name for path in seen["files"][1:3]} == {"adapter_config.json", "adapter_model.safetensors"}
    assert seen["answer"] == written(surgery.load_adapter(base, tmp_path), "Say hello.")
    modules = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert "model.layers.0.self_attn.q_proj" in modules and "lm_head" in modules  # names of Hugging Face's Llama
    assert len(ort.AdapterFormat.read_adapter(seen["files"][3]).get_parameters()) == 22

    assert seen["again"] == {
        "message": f"Ready, from step {seen['steps']} of the last visit.",
        "answer": seen["answer"],
    }
    assert seen["fetched"] == []  # what the browser has kept is not loaded again
    assert seen["anew"]["steps"] == "0" and seen["anew"]["answer"] != seen["answer"]
    assert seen["loaded"] == [seen["answer"]] * 2
    assert seen["refusal"].startswith("the adapter cannot be used: it is not an .onnx_adapter")
    assert seen["wrong"].startswith("line 1: it has neither ")
    keep_picture(tmp_path / "teach.png", "web-teach.png")


@pytest.mark.sweep(0)
def test_a_folder_of_your_own_is_taught(use: Any, tmp_path: Path) -> None:
    """As the page says how to make one; what was learnt answers in Python as there."""
    folder = small_folder.write(tmp_path / "llm")
    (tmp_path / "half").mkdir()
    adapted = gg.lora(folder / "model.onnx", "*attn*", rank=4, kind="rslora")
    model = surgery.language_model(adapted)
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.adam(1e-2), seed=0, backend="web")
    step.save(folder / "step")
    step.save(tmp_path / "half" / "step")
    seen = use("folder")
    assert seen["model"].startswith("The folder llm: ") and seen["model"].endswith("with adam.")
    assert (seen["again"], seen["kept"], seen["device"]) == (seen["model"], True, "Computes with WebAssembly")
    assert seen["refusal"] == "the folder has no tokenizer.json; pick a folder with a step and the model's tokenizer"
    before, after = (shortfalls(folder, tmp_path, "Say hello.", seen[key], 48) for key in ("before", "answer"))
    assert before.max() > 0.1 and after.max() < 1e-2
    shutil.copytree(folder / "step", folder, dirs_exist_ok=True)
    expected = losses_of_python(folder, seen["examples"], 12, tmp_path)
    np.testing.assert_allclose(losses_in(seen["losses"])[:12], expected, rtol=1e-4)


@pytest.mark.sweep(0)
def test_it_fits_a_phone(use: Any, tmp_path: Path) -> None:
    seen = use("phone")
    assert seen["wide"] == [375, 375]  # nothing to scroll to the side
    assert (seen["small"], seen["unnamed"]) == ([], 0)
    keep_picture(tmp_path / "teach-phone.png", "web-teach-phone.png")
