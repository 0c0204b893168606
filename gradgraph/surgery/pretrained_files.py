"""Weights as Hugging Face stores them: safetensors, in one file or in shards with an index, and ``config.json``.

Tensors are mapped from their files, not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gradgraph.errors import DataError, listed, shown
from gradgraph.files.path_kinds import Kind, kind_of
from gradgraph.files.untrusted.array_files import safetensors_mapped
from gradgraph.files.untrusted.contained_paths import is_inside, path_inside
from gradgraph.files.untrusted.documents import LARGEST, Fields, json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.surgery.operation import Array

Path = str | os.PathLike[str]

CONFIG, GENAI, INDEX = "config.json", "genai_config.json", ".safetensors.index.json"
_WHOLE = "model.safetensors"
_ADAPTER = "adapter_model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_TIES = "tie_word_embeddings"
_TEXT_PARTS = ("text_config", "llm_config", "language_config")  # of Gemma 3 and most, InternVL, DeepSeek-VL
# types of models whose normalisation layers multiply by 1 + weight
_OFFSET_BY_ONE = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "nemotron", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
    | {"qwen3_5_text", "qwen3_next", "recurrent_gemma", "t5gemma", "t5gemma2", "vaultgemma"}
)
# settings of a computation that no weight shows, by key of config.json: those that change the outputs of the same
# weights in the families of transformers 4.57 and 5.23
_SETTINGS = (
    "activation", "activation_function", "alibi", "apply_residual_connection_post_layernorm", "attention_heads",
    "attention_layers", "attention_multiplier", "attention_types", "attn_logit_softcapping",
    "classifier_activation", "classifier_pooling", "clip_qkv", "decoder_attention_heads", "dense_act_fn",
    "do_layer_norm_before", "do_stable_layer_norm", "embedding_multiplier", "encoder_attention_heads",
    "feed_forward_proj", "final_logit_softcapping", "global_attn_every_n_layers", "global_rope_theta", "head_dim",
    "hidden_act", "hidden_activation", "is_decoder", "layer_norm_eps", "layer_norm_epsilon", "layer_types",
    "local_attention", "local_rope_theta", "logit_scale", "logits_scaling", "max_relative_positions",
    "mlp_hidden_act", "n_group", "n_head", "n_heads", "no_rope_layers", "norm_eps", "norm_epsilon",
    "norm_topk_prob", "num_attention_heads", "num_experts_per_tok", "num_heads", "num_hidden_layers",
    "num_key_value_heads", "partial_rotary_factor", "pooler_hidden_act", "position_buckets",
    "query_pre_attn_scalar", "relative_attention_max_distance", "residual_multiplier", "rms_norm_eps",
    "rope_interleave", "rope_local_base_freq", "rope_scaling", "rope_theta", "rotary_dim", "rotary_emb_base",
    "rotary_pct", "routed_scaling_factor", "scale_attn_by_inverse_layer_idx", "scale_attn_weights",
    "scale_embedding", "scoring_func", "sliding_window", "swiglu_limit", "topk_group", "topk_method",
    "use_bidirectional_attention", "use_parallel_residual", "window_size",
)  # fmt: skip
_ROTARY = ("rope_theta", "partial_rotary_factor")  # also in rope_parameters of transformers 5
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")  # have their own rope_parameters in some families
_OPTIONAL = frozenset({"attn_logit_softcapping", "clip_qkv", "final_logit_softcapping", "rope_scaling",
                       "sliding_window"})  # null: not computed  # fmt: skip
_SYNONYMS = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu", "gelu_python": "gelu"}  # names of the same function
_SCALED_IF_TIED = frozenset({"t5", "mt5", "umt5", "longt5", "pop2piano", "switch_transformers"})  # types of models
_IN_GENAI = {"num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_key_value_heads",
             "head_size": "head_dim"}  # fmt: skip
_SHORTEST = 4  # characters of a family's name that its types have in common: qwen2, qwen2_5_vl


@dataclass(frozen=True)
class Pretrained:
    """The weights of a model in Hugging Face's format.

    Attributes:
        tensors: arrays by name, mapped from their files.
        where: the path, for messages.
        config: the content of ``config.json``; empty if there is none.
    """

    tensors: Mapping[str, Array]
    where: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def types(self) -> frozenset[str]:
        """The types of the model and of its text model, as in ``config.json``."""
        found = (table.get("model_type") for table in (self.config, flat(self.config)))
        return frozenset(kind for kind in found if isinstance(kind, str))

    @property
    def norm_offset(self) -> float:
        """The number that the model adds to the weights of its normalisation layers: 1 for Gemma, otherwise 0."""
        return float(not _OFFSET_BY_ONE.isdisjoint(self.types))

    @property
    def is_tied(self) -> bool:
        """Whether the configuration says that the embedding and the last layer have the same weight."""
        return flat(self.config).get(_TIES) is True

    @property
    def is_untied(self) -> bool:
        """Whether the configuration says that the embedding and the last layer have different weights."""
        return flat(self.config).get(_TIES) is False


def is_pretrained(path: Path) -> bool:
    """Whether ``path`` is an index of shards, or a folder that is neither a step nor a run."""
    return os.fspath(path).endswith(INDEX) or kind_of(path) is Kind.FOLDER


def read_pretrained(path: Path) -> Pretrained:
    """Return the weights at ``path``: a folder, an index of shards, or a safetensors file.

    Raises:
        DataError: there are no safetensors, a shard or a tensor of the index is missing, or a file is damaged.
    """
    given = FilePath(os.fspath(path))
    folder, name = (given, _main_file(given)) if given.is_dir() else (given.parent, given.name)
    try:
        tensors = _of_index(folder, name) if name.endswith(INDEX) else _tensors_in(folder, name)
        config = _config_in(folder)
    except UnreadableError as error:
        raise DataError(f"cannot read the weights in '{shown(path)}': {error}; download the folder again") from None
    if not tensors:
        raise DataError(f"there are no tensors in '{shown(path)}'; download the folder again")
    return Pretrained(tensors, os.fspath(path), config)


def check_family(folder: Path, source: Pretrained) -> None:
    """Raise DataError if the configuration of a model in ``folder`` differs from that of the weights.

    Only what both configurations contain is compared: the type of model, and settings that no weight shows.
    """
    try:
        own = _own_settings(FilePath(os.fspath(folder)))
    except UnreadableError:
        return
    _check_settings(own, source)


def check_same_settings(exported: Pretrained, source: Pretrained) -> None:
    """Raise DataError if weights have another configuration than those from which the model was exported."""
    _check_settings(flat(exported.config), source)


def _check_settings(own: Mapping[str, Any], source: Pretrained) -> None:
    own, theirs = (_with_default_ties(with_older_keys(table)) for table in (own, flat(source.config)))
    kinds = [str(table.get("model_type", "")) for table in (own, theirs)]
    short = [re.sub("[^a-z0-9]", "", kind.lower())[:_SHORTEST] for kind in kinds]
    if all(short) and short[0] != short[1]:
        raise DataError(
            f"'{shown(source.where)}' contains weights of type {shown(kinds[1])}, but the model has type "
            f"{shown(kinds[0])}; pass weights of the same family"
        )
    for key in (*_SETTINGS, *([_TIES] if own.get("model_type") in _SCALED_IF_TIED else [])):
        values = [_setting(table, key) for table in (own, theirs)]
        are_known = None not in values or (key in _OPTIONAL and key in own and key in theirs)
        if are_known and _differ(*values):
            raise DataError(
                f"'{shown(source.where)}' has {key} {shown(values[1])} in {CONFIG}, but the model has "
                f"{shown(values[0])}, which weights cannot change; export the new weights instead"
            )


def with_older_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with transformers 4's keys for rotary positions in place of ``rope_parameters``.

    They are dropped if other kinds of layers than full and sliding attention have their own.
    """
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return config
    found = {key: value for key, value in config.items() if key != "rope_parameters"}
    full, local = (given, None) if "rope_theta" in given else (given.get(kind) for kind in _KINDS_OF_LAYERS)
    if not {*given} <= {*_KINDS_OF_LAYERS} and full is not given:
        return found
    if isinstance(full, Mapping):
        found |= {"rope_scaling": full} | {key: full[key] for key in _ROTARY if key in full}
    if isinstance(local, Mapping) and "rope_theta" in local:
        found |= {"rope_local_base_freq": local["rope_theta"]}
    return found


def _with_default_ties(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration of T5 with the default of its setting that also scales hidden states of the decoder."""
    return {_TIES: True, **config} if config.get("model_type") in _SCALED_IF_TIED else config


def _differ(one: Any, other: Any) -> bool:
    """Whether two settings differ; of two tables, in the kind or in a setting that both have."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return bool(one != other)
    kinds = [table.get("rope_type", table.get("type")) for table in (one, other)]
    return kinds[0] != kinds[1] or any(one[key] != other[key] for key in one if key in other and key != "type")


def _setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting; None for a window or a scaling of rotary positions that changes nothing."""
    value = config.get(key)
    if isinstance(value, str):
        return _SYNONYMS.get(value, value)
    if key == "sliding_window" and config.get("use_sliding_window") is False:
        return None
    if key == "rope_scaling" and isinstance(value, Mapping):
        return None if value.get("rope_type", value.get("type", "default")) == "default" else value
    return value


def _own_settings(folder: FilePath) -> Mapping[str, Any]:
    """Return the settings of an exported model under the keys of ``config.json``; empty if there are none."""
    if not is_inside(folder, GENAI):
        return flat(_config_in(folder))
    found = json_of(regular_bytes(path_inside(folder, GENAI), LARGEST))
    model = found.get("model") if isinstance(found, Mapping) else None
    decoder = model.get("decoder") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(decoder, Mapping):
        return {}
    return {"model_type": model.get("type", "")} | {ours: decoder.get(key) for key, ours in _IN_GENAI.items()}


def flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the settings of its text model."""
    inner = [config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)]
    return {**config, **(inner[0] if inner else {})}


def _main_file(folder: FilePath) -> str:
    """Return the name of the index, or of the only safetensors file, of a folder."""
    names = sorted(entry.name for entry in folder.iterdir())
    if _ADAPTER in names and any(name.endswith((INDEX, ".safetensors")) for name in {*names} - {_ADAPTER}):
        raise DataError(
            f"'{shown(folder)}' contains weights of a model and an adapter, and the weights may lack it; pass the path "
            "of the .safetensors file or index if the adapter is merged into these weights"
        )
    if _WHOLE in names:  # preferred to an index, as by transformers
        return _WHOLE
    indices = [name for name in names if name.endswith(INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    for found in (indices, files):
        usual = [name for name in found if name.startswith("model.")]
        if len(usual or found) == 1 and (usual or found) != [_ADAPTER]:
            return (usual or found)[0]
    if files == [_ADAPTER]:
        raise DataError(
            f"'{shown(folder)}' contains an adapter, not the weights of a model",
            remedy="add it with gg.surgery.load_adapter",
            shell="add it with --adapter",
        )
    pickled = next((name for name in names if name.endswith(_PICKLED)), None)
    what = f"has {listed(indices or files, 4)}" if indices or files else "has no .safetensors file"
    remedy = "pass the path of one of them" if indices or files else "pass a folder with model.safetensors"
    if pickled and not files:
        what += f", and '{shown(pickled)}' is a pickle, which is never loaded"
        remedy = "save the model again with save_pretrained(folder)"
    raise DataError(f"the folder '{shown(folder)}' {what}; {remedy}")


def _tensors_in(folder: FilePath, name: str) -> dict[str, Array]:
    try:
        return safetensors_mapped(path_inside(folder, name))[0]
    except UnreadableError as error:
        raise UnreadableError(f"{shown(name)}: {error}") from None


def _of_index(folder: FilePath, name: str) -> dict[str, Array]:
    table = Fields(json_of(regular_bytes(path_inside(folder, name), LARGEST)), shown(name)).table("weight_map")
    places = {key: table.text(key) for key in table.keys()}  # noqa: SIM118 - not a dict
    shards = {shard: _tensors_in(folder, shard) for shard in sorted({*places.values()})}
    missing = [(key, shard) for key, shard in places.items() if key not in shards[shard]]
    if missing:
        key, shard = missing[0]
        raise UnreadableError(f"{shown(shard)} lacks '{shown(key)}', which {shown(name)} lists")
    found = {key: shards[shard][key] for key, shard in places.items()}
    for shard, tensors in shards.items():  # like transformers, which also reads those that the index does not list
        for key, array in tensors.items():
            if (same := found.setdefault(key, array)) is not array and not np.array_equal(same, array):
                raise UnreadableError(
                    f"'{shown(key)}' is in several shards, and in {shown(shard)} it has other numbers"
                )
    return found


def _config_in(folder: FilePath) -> Mapping[str, Any]:
    if not is_inside(folder, CONFIG):
        return {}
    found = json_of(regular_bytes(path_inside(folder, CONFIG), LARGEST))
    return found if isinstance(found, Mapping) else {}
