"""The settings of a tokenizer in the files next to its ``tokenizer.json``, as ``AutoTokenizer`` reads them.

``tokenizer_config.json`` and ``special_tokens_map.json`` name special tokens. The sides of padding and truncation in
``tokenizer_config.json`` take precedence over those in ``tokenizer.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.contained_paths import is_inside, path_inside
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
_TOKEN = "_token"  # the end of the keys of special tokens
_SIDES = {"left": True, "right": False}
# classes of transformers 5 that pad on the left unless a file says otherwise
_LEFT = frozenset({"CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer", "Siglip2Tokenizer",
                   "XLNetTokenizer"})  # fmt: skip


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of a tokenizer in the files next to it.

    Attributes:
        tokens: special tokens, such as ``{"eos_token": "</s>"}``.
        pads_left, cuts_left: the sides of padding and truncation; None if no file sets them.
        pads_left_by_class: whether the tokenizer's class pads on the left if no file sets the side.
    """

    tokens: Mapping[str, str] = field(default_factory=dict)
    pads_left: bool | None = None
    cuts_left: bool | None = None
    pads_left_by_class: bool = False


def settings_in(folder: Path, linked: Path | None = None) -> TokenizerSettings:
    """Return the settings in a folder; empty ones if it has none of the files.

    Args:
        folder: the folder.
        linked: a file passed by the user; if it is a symlink, files next to its target are read, too.

    Raises:
        DataError: a file cannot be read, is a link out of the folder, or has another side than left and right.
    """
    config = table_in(folder, CONFIG, linked)
    named = str(config.get("tokenizer_class")).removesuffix("Fast")
    pads_left, cuts_left = (_side(config, name, folder) for name in ("padding_side", "truncation_side"))
    return TokenizerSettings(_special_tokens(config, folder, linked), pads_left, cuts_left, named in _LEFT)


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens in a folder, such as ``{"eos_token": "</s>"}``; empty if there are none."""
    return _special_tokens(table_in(folder, CONFIG), folder)


def _special_tokens(config: Mapping[str, Any], folder: Path, linked: Path | None = None) -> dict[str, str]:
    # transformers no longer reads the map if the configuration also lists the added tokens
    mapped = {} if "added_tokens_decoder" in config else table_in(folder, MAP, linked)
    found = {name: value for name, value in {**config, **mapped}.items() if name.endswith(_TOKEN)}
    texts = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _side(config: Mapping[str, Any], name: str, folder: Path) -> bool | None:
    value = config.get(name)
    if value is not None and not (isinstance(value, str) and value in _SIDES):
        raise DataError(f"'{shown(folder / CONFIG)}' has the {name} '{shown(value)}'; write left or right")
    return None if value is None else _SIDES[value]


def table_in(folder: Path, name: str, linked: Path | None = None) -> Mapping[str, Any]:
    """Return the content of a JSON file of a folder; empty if the file does not exist.

    Raises:
        DataError: the file cannot be read, or is a link out of the folder.
    """
    try:
        value = json_of(regular_bytes(path_inside(folder, name, linked))) if is_inside(folder, name) else None
    except UnreadableError as error:
        raise DataError(f"'{shown(folder / name)}' cannot be read ({error}); download it again") from None
    return value if isinstance(value, Mapping) else {}
