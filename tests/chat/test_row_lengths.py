"""Texts, prompts and rows that are longer than a model, or its teacher, takes: they are refused before it trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat import Recipe
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.preferences import IDS, Pair, PairBatches
from gradgraph.chat.row_lengths import limit_of
from gradgraph.chat.text_pairs import truncated
from gradgraph.data.record.specs import TensorSpec
from gradgraph.data.texts.tokenizer import NOWHERE
from gradgraph.errors import DataError
from gradgraph.surgery.pair_models import LABELS

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which no file beside the model says how many tokens it takes."""
    folder = small_folder.write(tmp_path_factory.mktemp("bare"))
    (folder / "genai_config.json").unlink()
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose model takes 16 tokens."""
    folder = small_folder.write(tmp_path_factory.mktemp("short"))
    told = {**small_folder.GENAI, "model": {**small_folder.GENAI["model"], "context_length": 16}}
    (folder / "genai_config.json").write_text(json.dumps(told))
    return folder


def test_a_table_of_positions_says_what_a_model_takes(bare: Path, short: Path) -> None:
    assert [ModelFolder.of(folder).context for folder in (bare, short)] == [128, 16]


def test_a_model_for_texts_of_one_length_takes_no_longer_ones(tmp_path: Path) -> None:
    folder = small_folder.write(tmp_path)
    model = surgery.language_model(onnx.load(small_folder.MODEL))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 24
    onnx.save(model, folder / "model.onnx")
    assert ModelFolder.of(folder).context == 24


LONG = {"prompt": "a" * 140, "completion": "b"}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a text": ({"data": [LONG]}, r"1 of 9 rows have more than 128 tokens, .*and the model has a context length of 128; "
               "pass long='drop'",
               "; pass --long drop"),
    "a prompt": ({"sample": "a" * 130}, "but the context length is 128; shorten it", "shorten it"),
    "rows": ({"length": 4096}, "length is 4,096, but the model has a context length of 128; lower length", "lower"),
    "a teacher": ({"teacher": "short"},
                  r"8 of 8 rows have more than 16 tokens, .* the teacher '.*' has a context length of 16",
                  "drop"),
    "rows of a teacher": ({"teacher": "short", "length": 64},
                          "length is 64, but the teacher '.*' has a context length of 16",
                        "lower"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_too_long_is_refused_before_training(what: str, bare: Path, short: Path, tmp_path: Path) -> None:
    options, words, in_shell = REFUSED[what]
    rows: list[Any] = [{"prompt": f"Say {i}", "completion": f"{i} and {i}"} for i in range(8)]
    given = {**options, "teacher": short} if "teacher" in options else dict(options)
    with pytest.raises(DataError, match=words) as caught:
        gg.finetune(bare, [*rows, *given.pop("data", [])], tmp_path / "out", progress=False, **given)
    assert in_shell in caught.value.in_shell() and not (tmp_path / "out").exists()


def test_packed_rows_may_be_longer_than_their_texts(bare: Path) -> None:
    found = limit_of(ModelFolder.of(bare), Recipe(pack=True, length=512))
    assert (found.tokens, found.row) == (128, 512)


def test_pairs_are_not_filled_up_beyond_what_a_model_takes(bare: Path) -> None:
    (tokens,) = gg.chat.Encoder(bare)(gg.chat.read([{"prompt": "a", "completion": "b" * 20}]))
    batches = PairBatches([Pair(tokens, tokens)], length=len(tokens) + 1)
    assert len(tokens) % 16 not in (0, 15) and batches.longest == len(tokens) + 1


def test_pairs_have_the_length_that_a_model_was_exported_for(bare: Path) -> None:
    (tokens,) = gg.chat.Encoder(bare)(gg.chat.read([{"prompt": "a", "completion": "b" * 20}]))
    batches = PairBatches([Pair(tokens, tokens)])

    def shapes(length: int) -> list[tuple[int, ...]]:
        specs = {name: TensorSpec(name, "int64", ("pairs", 2, length)) for name in (IDS, LABELS)}
        return [batch[name].shape for batch in batches.load(iter([[0]]), specs, (0,)) for name in specs]

    assert shapes(41) == [(1, 2, 41)] * 2
    with pytest.raises(DataError, match="tokens, but the model was exported for texts of 9"):
        shapes(9)


def test_the_digest_of_a_folder_is_that_of_all_its_numbers(bare: Path, tmp_path: Path) -> None:
    shutil.copytree(bare, tmp_path / "copy")
    model = onnx.load(tmp_path / "copy" / "model.onnx")
    apart: dict[str, Any] = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": 0}
    onnx.save(model, tmp_path / "copy" / "model.onnx", **apart)
    first = ModelFolder.of(tmp_path / "copy").digest
    data = tmp_path / "copy" / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    assert (
        first != ModelFolder.of(tmp_path / "copy").digest != ModelFolder.of(bare).digest == ModelFolder.of(bare).digest
    )


def test_a_truncated_text_keeps_its_last_special_tokens() -> None:
    spans = [NOWHERE, (0, 1), (1, 2), (2, 3), NOWHERE]
    assert truncated([1, 5, 6, 7, 2], spans, 3) == [1, 5, 2]
    assert truncated([1, 5, 6, 7, 2], spans, 5) == [1, 5, 6, 7, 2]
    assert truncated([5, 6, 7], spans[1:4], 2) == [5, 6]
