"""The folder of a language model, as written by onnxruntime-genai's builder or optimum."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from gradgraph import surgery
from gradgraph.chat.run_place import create
from gradgraph.chat.template import FURTHER
from gradgraph.data.texts.tokenizer_files import table_in
from gradgraph.errors import ModelError, listed, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.digest import Digest
from gradgraph.files.external import stored_values
from gradgraph.files.mapped import pieces_of
from gradgraph.files.models import load_model
from gradgraph.files.untrusted.contained_paths import check_relative, is_inside, path_inside
from gradgraph.files.untrusted.regular import UnreadableError, open_regular
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.weights.roles import rotary_tables
from gradgraph.surgery.language_models import USE_CACHE, fixed_length
from gradgraph.surgery.operation import as_model
from gradgraph.surgery.pretrained_files import flat
from gradgraph.surgery.two_decoders import is_merged

GENAI, CONFIG = "genai_config.json", "config.json"
ENCODER = "encoder_model.onnx"  # next to a decoder of optimum
_USUAL = ("model.onnx", "decoder_model.onnx", "onnx/model.onnx", "onnx/decoder_model.onnx", "decoder_model_merged.onnx",
          "onnx/decoder_model_merged.onnx")  # fmt: skip
_CONTEXT = (
    "context_length",
    "max_position_embeddings",
    "n_positions",
    "seq_length",
)  # keys of genai, most models, GPT-2 and Falcon
_HEAD, _WIDTH, _HEADS = ("head_size", "head_dim"), ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")

_PATHS = frozenset({"filename", "file", "path", "dir", "directory", "folder", "profiling"})  # substrings of keys
BESIDE = (".json", ".txt", ".jinja", ".model")  # files that belong to a model
# by the type in genai_config.json or config.json; other types have the layer names of llama
_PEFT_FAMILY = {"phi3": "phi3", "phi3small": "phi3", "phi": "phi", "lfm2": "lfm2", "lfm2_moe": "lfm2",
                "granitemoehybrid": "granitemoehybrid", "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5",
                "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5"}  # fmt: skip


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a language model.

    Attributes:
        path: the folder.
        model: the path of the decoder's ONNX file.
        described: the section ``model`` of ``genai_config.json``, or the content of ``config.json``; empty without
            both files.
    """

    path: Path
    model: Path
    described: Mapping[str, Any]

    @classmethod
    def of(cls, given: str | os.PathLike[str]) -> ModelFolder:
        """Return the model folder at a path (a folder, or a model file in it), with its configuration.

        Raises:
            ModelError: the folder or the model is missing, or the folder contains several models.
            DataError: the configuration cannot be read.
        """
        path = Path(given)
        if path.is_file() and path.suffix.lower() != ".onnx":
            raise ModelError(f"'{shown(path)}' is a file, but not an .onnx; pass the folder of a language model")
        if path.is_file():
            return cls(path.parent, path, _described(path.parent))
        if not path.is_dir():
            raise ModelError(
                f"there is no folder '{shown(path)}'; pass the folder of a language model, with its tokenizer"
            )
        described = _described(path)
        decoder = described.get("decoder")
        named = decoder.get("filename") if isinstance(decoder, Mapping) else None
        if isinstance(named, str):
            check_inside(path, named, f"the model that '{shown(path / GENAI)}' names")
            return cls(path, path / named, described)
        usual = next((name for name in _USUAL if is_inside(path, name)), None)
        files = sorted(file.name for file in path.glob("*.onnx"))
        if usual is None and len(files) != 1:
            what = f"has {listed(files)}" if files else "has no .onnx file"
            raise ModelError(f"the folder '{shown(path)}' {what}; pass the path of the model file in this folder")
        check_inside(path, usual or files[0], "the model")
        return cls(path, path / (usual or files[0]), described)

    @functools.cached_property
    def context(self) -> int | None:
        """The context length, from the configuration or the position table, or a smaller one for which the model was
        exported; None if it is unknown.
        """
        model = load_model(self.model)
        known = [_first(self.described, _CONTEXT) or _positions_in(model), fixed_length(model)]
        return min((length for length in known if length is not None), default=None)

    @property
    def digest(self) -> str:
        """The digest of the model file and its external data."""
        found, stored = Digest(), stored_values(load_model(self.model))
        beside = {Path(v.const_value.path) for v in stored if isinstance(v.const_value, ir.ExternalTensor)}
        for path in [self.model, *sorted(beside - {self.model})]:
            try:
                with open_regular(path) as file:
                    for piece in pieces_of(file):
                        found.update(piece)
            except (OSError, UnreadableError) as error:
                raise ModelError(f"'{shown(path)}' cannot be read ({error}); check the file") from None
        return found.text()

    @property
    def vocabulary(self) -> int | None:
        """The vocabulary size; None if it is unknown."""
        return _first(self.described, ("vocab_size",))

    @property
    def head_size(self) -> int | None:
        """The head size, from the configuration or derived from it; None if it is unknown."""
        decoder = self.described.get("decoder")  # of genai_config.json
        told = decoder if isinstance(decoder, Mapping) else self.described
        own, width, heads = (_first(told, names) for names in (_HEAD, _WIDTH, _HEADS))
        if own is not None:  # for Gemma and Qwen 3, it differs from width / heads
            return own
        return width // heads if width and heads else None

    @property
    def family(self) -> str:
        """The family of Hugging Face's layer names, as for :func:`gradgraph.surgery.save_adapter`."""
        kind = self.described.get("type", self.described.get("model_type"))
        return _PEFT_FAMILY.get(str(kind), "llama")

    def encoder(self) -> Path:
        """Return the real path of the encoder next to the decoder; raise ModelError without one."""
        return check_inside(self.path, str(self.model.parent.relative_to(self.path) / ENCODER), "the encoder")

    def decoder(self) -> ir.Model:
        """Load the model that adapters are added to; for a merged decoder of optimum, the branch without a cache."""
        model = load_model(self.model)
        return as_model(surgery.fix_inputs(model, {USE_CACHE: False})) if is_merged(model) else model

    def beside(self) -> dict[str, Path]:
        """Return the real paths of the files that belong to the model (tokenizer, configuration), by name.

        Raises:
            ModelError: a path leads out of the folder.
        """
        files = [*self.path.iterdir(), *(self.path / FURTHER).glob("*.jinja")]
        named = sorted(f.relative_to(self.path).as_posix() for f in files if f.suffix.lower() in BESIDE)
        found = [name for name in named if (self.path / name).is_symlink() or (self.path / name).is_file()]
        return {name: check_inside(self.path, name, "a file of the model") for name in found}

    def copy_beside(self, folder: Path) -> list[str]:
        """Copy the files that belong to the model to another folder; return their names.

        Raises:
            ModelError: as for :meth:`beside`.
        """
        found = self.beside()
        for name, file in found.items():
            create((folder / name).parent)
            with open_regular(file) as content:
                write_atomically(folder / name, content.read())
        return [*found]


def _positions_in(model: ir.Model) -> int | None:
    """Return the number of positions in the smallest rotary table that attention nodes read; None if there is none."""
    read = [value for node in nodes_of(model) for value in rotary_tables(node) or ()]
    shapes = [shape_of(value) for value in read if value is not None and value.is_initializer()]
    return min((s[0] for s in shapes if s and len(s) == 2 and isinstance(s[0], int) and s[0] > 0), default=None)


def _first(described: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first positive number under one of these names; None if there is none."""
    found = (described.get(name) for name in names)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def check_inside(folder: Path, name: str, what: str) -> Path:
    """Return the real path of a file in a folder; raise ModelError if it is missing or outside."""
    try:
        return path_inside(folder, name)
    except UnreadableError as error:
        raise ModelError(f"{what}, '{shown(name)}' in '{shown(folder)}', cannot be read: {error}") from None


def _described(folder: Path) -> Mapping[str, Any]:
    for name, key in ((GENAI, "model"), (CONFIG, None)):
        if not is_inside(folder, name):
            continue
        found = table_in(folder, name)
        if name == GENAI:
            _check_names(found, folder)
        described = found.get(key) if key else found
        return _of_texts(described) if isinstance(described, Mapping) else {}
    return {}


def _check_names(config: Any, folder: Path) -> None:
    """Raise ModelError if ``genai_config.json`` refers to a file outside the folder, or to a library."""
    file, left = folder / GENAI, [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, Mapping):
            left += [(str(name), item) for name, item in value.items()]
        elif isinstance(value, list):
            left += [(key, item) for item in value]
        elif isinstance(value, str) and value:
            words = re.split(r"[._]", key.lower())
            if "library" in words:
                raise ModelError(
                    f"'{shown(file)}' names the library '{shown(value)}' in '{shown(key)}', but libraries of a model "
                    "folder are never loaded; remove that entry"
                )
            if _PATHS.isdisjoint(words):
                continue
            try:
                check_relative(value)
                if (folder / value).is_file():  # a missing file raises an error when it is opened
                    path_inside(folder, value)
            except UnreadableError as error:
                raise ModelError(
                    f"'{shown(file)}' names '{shown(value)}' in '{shown(key)}', which cannot be read: {error}"
                ) from None


def _of_texts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a multimodal model's configuration."""
    ends = config.get("eos_token_id")
    return flat(config) if ends is None else {**flat(config), "eos_token_id": ends}
