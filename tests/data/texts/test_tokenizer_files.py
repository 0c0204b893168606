"""The files next to a tokenizer decide on its special tokens and sides as in transformers' AutoTokenizer.

``make shipped-models`` runs the comparison.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gradgraph.data.record.data_names import DataNames
from gradgraph.data.texts.tokenizer import Tokenizer, tokenizer_beside
from gradgraph.errors import DataError
from tests.kit import tiny_bert

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")

FILE, CONFIG, MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
PAD, UNK, CLS, SEP = range(4)
ADDED = {"1": {"content": "[UNK]", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}}
# whether padding is on the left in tokenizer.json; tokenizer_config.json; special_tokens_map.json; what follows
CASES: dict[str, tuple[bool, dict[str, Any] | None, dict[str, Any] | None, dict[str, Any]]] = {
    "no other file": (True, None, None, {"pads_left": True, "cuts_left": False, "pad": PAD}),
    "an empty configuration": (True, {}, None, {"pads_left": True, "pad": PAD}),
    "the side of the configuration": (True, {"padding_side": "right"}, None, {"pads_left": False}),
    "another side of the configuration": (False, {"padding_side": "left"}, None, {"pads_left": True}),
    "the side of truncation": (False, {"truncation_side": "left"}, None, {"pads_left": False, "cuts_left": True}),
    "a padding token": (True, {"pad_token": "[SEP]"}, None, {"pad": SEP, "pads_left": True}),
    "a token that is an object": (False, {"pad_token": {"__type": "AddedToken", **ADDED["1"]}}, None, {"pad": UNK}),
    "tokens in the map": (False, {"pad_token": "[SEP]"}, {"pad_token": "[UNK]"}, {"pad": UNK}),
    "a map that is no longer read": (False, {"pad_token": "[SEP]", "added_tokens_decoder": ADDED},
                                     {"pad_token": "[UNK]"}, {"pad": SEP}),
    "a class that pads on the left": (False, {"tokenizer_class": "XLNetTokenizerFast", "pad_token": "[PAD]"}, None,
                                      {"pads_left": True}),
    "a class whose file says otherwise": (False, {"tokenizer_class": "XLNetTokenizer", "padding_side": "right"}, None,
                                          {"pads_left": False}),
}  # fmt: skip


def folder_of(case: str, path: Path) -> Path:
    left, config, mapped, _ = CASES[case]
    tiny_bert.tokenizer(path / FILE, left=left)
    for name, content in ((CONFIG, config), (MAP, mapped)):
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("case", CASES)
def test_what_the_files_say(case: str, tmp_path: Path) -> None:
    made = Tokenizer(folder_of(case, tmp_path) / FILE)
    for name, value in CASES[case][3].items():
        assert getattr(made, name) == value, name
    copy = Tokenizer(made.save(tmp_path / "model.tokenizer.json"))  # next to a trained model, without the other files
    assert (copy.pad, copy.pads_left, copy.cuts_left, copy.digest) == (
        made.pad, made.pads_left, made.cuts_left, made.digest)  # fmt: skip
    assert (
        copy.encode(["the fox is bright"] * 2, 5).ids.tolist() == made.encode(["the fox is bright"] * 2, 5).ids.tolist()
    )


@pytest.mark.parametrize("case", [case for case in CASES if "class" not in case])
def test_transformers_reads_them_alike(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="in no extra; `make shipped-models` runs this test")
    folder = folder_of(case, tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder / FILE)
    assert (theirs.padding_side == "left", theirs.truncation_side == "left") == (ours.pads_left, ours.cuts_left)
    assert theirs.pad_token_id in (ours.pad, None)
    named = {name: str(token) for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
    assert named.items() >= ours.special_tokens.items()


def test_a_model_that_was_trained_without_these_files_keeps_its_tokenizer(tmp_path: Path) -> None:
    folder = folder_of("another side of the configuration", tmp_path)
    (tmp_path / "before").mkdir()
    shutil.copy(folder / FILE, tmp_path / "before" / FILE)
    for trained in (Tokenizer(tmp_path / "before" / FILE), Tokenizer(folder / FILE)):
        found = tokenizer_beside(folder, DataNames(texts={"input_ids": {"tokenizer": trained.digest}}))
        assert found is not None and found.pads_left == trained.pads_left
    assert trained.pads_left


@pytest.mark.parametrize("side", ["Left", 1, ["left"]])
def test_another_side_is_refused(side: Any, tmp_path: Path) -> None:
    tiny_bert.tokenizer(tmp_path / FILE)
    (tmp_path / CONFIG).write_text(json.dumps({"padding_side": side}))
    with pytest.raises(DataError, match=r"tokenizer_config.json' has the padding_side '.*'; write left or right"):
        Tokenizer(tmp_path / FILE)
