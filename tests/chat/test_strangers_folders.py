"""A language model's folder may be anybody's: nothing leads out of it, and no link is followed when it is copied."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph import surgery
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.prompts import stop_tokens
from gradgraph.chat.tokens import Encoder
from gradgraph.data.texts.tokenizer import Tokenizer
from gradgraph.errors import DataError, GradgraphError, ModelError
from gradgraph.files.untrusted.contained_paths import bytes_inside, check_relative, path_inside
from gradgraph.files.untrusted.regular import UnreadableError

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder

LEADING_OUT = ["../x", "a/../../x", "/etc/passwd", "//host/share/x", "\\\\host\\x", "C:\\x", "c:x", "..\\x",
               "a\\..\\..\\x",
               ".. /x", "", "x\0y", "file:///etc/passwd"]  # fmt: skip


@pytest.mark.parametrize("name", LEADING_OUT)
def test_names_that_lead_out_are_refused_on_every_system(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        check_relative(name)
    with pytest.raises(UnreadableError):
        path_inside(tmp_path, name)


@pytest.mark.parametrize("name", ["x", "a/b.c", "..x", "a..b/c", "x.", "...", "-x", "~/x"])
def test_names_within_are_taken(name: str) -> None:
    assert check_relative(name) == name


def _link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _relative_link(path: Path, secret: Path) -> None:
    path.symlink_to(os.path.relpath(secret, path.parent))


def _hard_link(path: Path, secret: Path) -> None:
    os.link(secret, path)


def _link_to_link(path: Path, secret: Path) -> None:
    (path.parent / "between").symlink_to(secret)
    path.symlink_to("between")


WAYS = [_link, _relative_link, _hard_link, _link_to_link]


@pytest.mark.parametrize("way", WAYS)
def test_links_out_are_refused_and_links_within_are_followed(way: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    folder = tmp_path / "llm"
    folder.mkdir()
    way(folder / "a", tmp_path / "secret")
    with pytest.raises(UnreadableError, match="link"):
        path_inside(folder, "a")
    (folder / "own").write_text("o")
    (folder / "b").symlink_to("own")
    (tmp_path / "to").symlink_to(folder)  # the folder itself is a user's to name
    assert bytes_inside(folder, "b") == bytes_inside(tmp_path / "to", "b") == b"o"
    assert bytes_inside(folder, "c") is None


def test_the_store_of_a_cache_of_downloads_is_within(tmp_path: Path) -> None:
    revision = tmp_path / "snapshots" / "abc"
    (revision / "onnx").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "12").write_text("o")
    (revision / "a").symlink_to("../../blobs/12")
    (revision / "onnx" / "b").symlink_to("../../../blobs/12")
    assert bytes_inside(revision, "a") == bytes_inside(revision, "onnx/b") == b"o"
    (tmp_path / "secret").write_text("s")
    (tmp_path / "blobs" / "34").symlink_to("../secret")
    (revision / "c").symlink_to("../../blobs/34")
    with pytest.raises(UnreadableError, match="symlink"):
        path_inside(revision, "c")


# --- the folder of a language model ------------------------------------------------------------------------------


@pytest.fixture
def llm(tmp_path: Path) -> Path:
    (tmp_path / "secret").mkdir()
    shutil.copyfile(small_folder.MODEL, tmp_path / "secret" / "model.onnx")
    return small_folder.write(tmp_path / "llm")


PLACES: list[tuple[Any, ...]] = [("decoder", "filename"), ("embedding", "filename"), ("vision", "config_filename"),
    ("speech", "adapter_filename"), ("encoder", "filename"), ("decoder", "pipeline", 0, "part", "filename"),
    ("decoder", "session_options", "ep_context_file_path"), ("decoder", "session_options", "enable_profiling"),
    ("vision", "lora", 0, "adapter_filename")]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda p: ".".join(map(str, p)))
@pytest.mark.parametrize(
    "named", ["../secret/model.onnx", "ABSOLUTE", "C:\\model.onnx", "..\\secret\\model.onnx", "link"]
)
def test_no_part_of_a_model_lies_elsewhere(place: tuple[Any, ...], named: str, llm: Path) -> None:
    if named == "ABSOLUTE":
        named = str(llm.parent / "secret" / "model.onnx")
    if named == "link":
        (llm / "link").symlink_to("../secret/model.onnx")
    config = json.loads((llm / "genai_config.json").read_text())
    entry: Any = named
    for key in reversed(place[1:]):
        entry = [entry] if isinstance(key, int) else {key: entry}
    config["model"][place[0]] = {**config["model"].get(place[0], {}), **entry}
    (llm / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="folder") as caught:
        ModelFolder.of(llm)
    assert named in str(caught.value).replace("\\\\", "\\")


def test_no_library_is_named(llm: Path) -> None:
    config = json.loads((llm / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"]["custom_ops_library"] = "evil.so"
    (llm / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"library 'evil\.so'"):
        ModelFolder.of(llm)


def _everything(folder: Path) -> None:
    """Read all that is read of a folder."""
    base = ModelFolder.of(folder)
    base.decoder()
    encoder = Encoder(folder)
    encoder.template_for("messages")
    stop_tokens(base, encoder)
    base.beside()


FILES = ["model.onnx", "genai_config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "notes.txt",
         "special_tokens_map.json", "chat_template.jinja", "generation_config.json", "spiece.model"]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", WAYS[:1] + WAYS[2:3])
def test_no_file_of_a_folder_is_a_link_out(way: Callable[..., None], name: str, llm: Path) -> None:
    _everything(llm)
    secret = llm.parent / "secret" / name
    if (llm / name).exists():
        shutil.move(llm / name, secret)
    else:
        secret.write_text("{}")
    if name == "config.json":
        (llm / "genai_config.json").unlink()
    way(llm / name, secret)
    with pytest.raises(GradgraphError, match="link") as caught:
        _everything(llm)
    assert name in str(caught.value) and isinstance(caught.value, ModelError | DataError)


def test_what_leads_out_is_not_copied(llm: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("secret")
    copied = ModelFolder.of(llm).copy_beside(tmp_path / "out")
    assert sorted(copied) == sorted(p.name for p in (tmp_path / "out").iterdir()) and "tokenizer.json" in copied
    (llm / "notes.txt").symlink_to("../secret/key.txt")
    with pytest.raises(ModelError, match=r"'notes\.txt'"):
        ModelFolder.of(llm).copy_beside(tmp_path / "out")
    assert not (tmp_path / "out" / "notes.txt").exists()


# --- adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_lies_in_its_folder_and_is_whole(name: str, llm: Path, tmp_path: Path) -> None:
    surgery.save_adapter(surgery.lora(llm / "model.onnx", "*attn*", rank=2), tmp_path / "adapter")
    shutil.move(tmp_path / "adapter" / name, tmp_path / "secret")
    with pytest.raises(DataError, match=name):
        surgery.load_adapter(llm / "model.onnx", tmp_path / "adapter")
    (tmp_path / "adapter" / name).symlink_to(f"../secret/{name}")
    with pytest.raises(DataError, match=f"{name}: it is a symlink"):
        surgery.load_adapter(llm / "model.onnx", tmp_path / "adapter")


@pytest.mark.parametrize("lacks", ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"])
@pytest.mark.parametrize("all_of_them", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("names", ["own", "llama"])
def test_an_adapter_with_a_missing_half_is_a_sentence(
    lacks: str, all_of_them: bool, names: str, llm: Path, tmp_path: Path
) -> None:
    import safetensors.numpy

    adapted = surgery.lora(llm / "model.onnx", "*attn*", rank=2, kind="dora")
    surgery.save_adapter(adapted, tmp_path / "adapter", family=None if names == "own" else names)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    gone = [key for key in arrays if key.endswith(lacks)][: None if all_of_them else 1]
    safetensors.numpy.save_file({k: np.ascontiguousarray(a) for k, a in arrays.items() if k not in gone}, path)
    with pytest.raises(DataError) as caught:
        surgery.load_adapter(llm / "model.onnx", tmp_path / "adapter")
    assert lacks.removesuffix(".weight") in str(caught.value)


# --- tokenizers --------------------------------------------------------------------------------------------------


def _replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


LONG = [_replacing({"String": "a"}, "a" * 100)] * 5
SPECIAL = {"x": {"id": "x", "ids": [0] * 3000, "tokens": ["a"] * 3000}}
PUT = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
TWO = [*PUT, {"Sequence": {"id": "B", "type_id": 0}}]
GREEDY = {
    "again and again": {"normalizer": {"type": "Sequence", "normalizers": LONG}},
    "behind each character": {"normalizer": _replacing({"Regex": ""}, "b" * 100_000)},
    "in front": {"normalizer": {"type": "Prepend", "prepend": "b" * 100_000}},
    "in a sequence": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": LONG}]}},
    "around": {"post_processor": {"type": "TemplateProcessing", "single": PUT, "pair": TWO, "special_tokens": SPECIAL}},
    "in answers": {"decoder": {"type": "Sequence", "decoders": LONG}},
}
SLOW = {
    "split": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
                                "invert": False}},
    "replace": {"normalizer": _replacing({"Regex": "(a|aa)+$"}, "b")},
}  # fmt: skip


def _with(part: dict[str, Any], folder: Path) -> Path:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **part}))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("name", GREEDY)
def test_no_tokenizer_makes_texts_of_any_length(name: str, llm: Path) -> None:
    with pytest.raises(DataError, match="1,000 times longer"):
        Tokenizer(_with(GREEDY[name], llm))


@pytest.mark.parametrize("name", SLOW)
def test_a_pattern_that_takes_ages_is_a_sentence(name: str, llm: Path) -> None:
    slow = Tokenizer(_with(SLOW[name], llm))
    with pytest.raises(DataError, match="the tokenizer failed"):
        list(slow.spans(["a" * 40 + "b"], special=False))
