"""Adapters apart from their model, in the files of Hugging Face's PEFT: adapter_config.json, adapter_model.safetensors.

PEFT's names are ``base_model.model.<module>.lora_A.weight`` of shape (rank, inputs) and ``….lora_B.weight`` of
(outputs, rank); of an embedding ``….lora_embedding_A`` (rank, rows) and ``….lora_embedding_B`` (columns, rank); of IA3
``….ia3_l``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import onnx_ir as ir
import safetensors.numpy

from gradgraph.arguments import PATH, checked
from gradgraph.atomic import says_why, write_atomically
from gradgraph.errors import BuildError, DataError, listed, shown
from gradgraph.files import Source
from gradgraph.surgery.adapters import Adapter, adapters_of, lora
from gradgraph.surgery.operated import Path, Result, array_named, closed, opened, set_numbers, value_named
from gradgraph.surgery.weights import give_weights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
Array = np.ndarray[Any, Any]


@checked(folder=PATH)
def save_adapter(model: Source, folder: Path, weights: Mapping[str, Array] | Path | None = None) -> None:
    """Write the adapters of a model, without the model, as PEFT reads them.

    Args:
        model: the model that :func:`lora` has given.
        folder: where ``adapter_config.json`` and ``adapter_model.safetensors`` go; made if missing.
        weights: what a training run has made of the adapters, as for :func:`merge_adapters`.

    Raises:
        BuildError: the model has no adapters.
        DataError: the weights cannot be read.
        OutputError: the folder cannot be written.
    """
    work = opened(model, None)
    adapters = adapters_of(work)
    if not adapters:
        raise BuildError(
            "the model has no adapters to save",
            remedy="gg.lora(model, target) puts some in",
            shell="gradgraph surgery MODEL --lora GLOB puts some in",
        )
    if weights is not None:
        give_weights(work, weights)
    arrays = {n: a for adapter in adapters for n, a in _as_peft(work, adapter).items()}
    target = FilePath(os.fspath(folder))
    with says_why(folder):
        target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / WEIGHTS, safetensors.numpy.save(arrays, {"format": "pt"}))
    write_atomically(target / CONFIG, (json.dumps(_config(adapters), indent=2) + "\n").encode())


def _as_peft(work: ir.Model, adapter: Adapter) -> dict[str, Array]:
    arrays = [array_named(work, name) for name in adapter.weights]
    names = _peft_names(adapter)
    return dict(zip(names, [_turned(adapter, a) for a in arrays], strict=True))


def _peft_names(adapter: Adapter) -> list[str]:
    if adapter.kind == "ia3":
        parts = ["ia3_l"]
    elif adapter.operator == "Gather":
        parts = ["lora_embedding_A", "lora_embedding_B"]
    else:
        parts = ["lora_A.weight", "lora_B.weight"]
    return [f"{_PREFIX}{adapter.module}.{part}" for part in parts]


def _turned(adapter: Adapter, array: Array) -> Array:
    """From our layout to PEFT's, or back: matrices lie the other way round there."""
    if adapter.kind == "ia3":
        return np.ascontiguousarray(array.reshape(-1, 1))
    return array if adapter.operator == "Conv" else np.ascontiguousarray(array.T)


def _config(adapters: list[Adapter]) -> dict[str, Any]:
    first = adapters[0]
    modules = sorted({a.module for a in adapters})
    common = {"base_model_name_or_path": None, "task_type": None, "bias": "none", "inference_mode": True}
    if first.kind == "ia3":
        return {"peft_type": "IA3", "target_modules": modules, "feedforward_modules": [], **common}
    return {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.kind == "rslora",
        "target_modules": modules,
        **common,
    }


@checked(folder=PATH, out=PATH.or_none())
def load_adapter(model: Source, folder: Path, *, out: Path | None = None) -> Result:
    """The model with the adapters of a folder that :func:`save_adapter` or PEFT has written.

    Args:
        model: the base model, without adapters; its modules have the names that the folder's have.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        out: write the result to this path.

    Raises:
        DataError: the folder cannot be read, holds another kind of adapter, or does not fit the model.
        UnknownNameError: no layer of the model has the name of one in the folder.
        OutputError: ``out`` cannot be written.
    """
    config, arrays = _read(folder)
    kind, options = _options(config, folder)
    modules = sorted({_module(name) for name in arrays})
    work = opened(lora(model, modules, kind=kind, **options), out)
    wanted = {name: value for adapter in adapters_of(work) for name, value in _pairs(adapter)}
    spare, missing = sorted(set(arrays) - set(wanted)), sorted(set(wanted) - set(arrays))
    if spare or missing:
        what = f"no layer for {listed(spare, 3)}" if spare else f"layers without an adapter there: {listed(missing, 3)}"
        raise DataError(f"the adapter in '{shown(folder)}' does not fit the model, which has {what}")
    for name, (adapter, weight) in wanted.items():
        value = value_named(work, weight)
        own = array_named(work, weight)
        given = arrays[name] if adapter.operator == "Conv" and adapter.kind != "ia3" else arrays[name].T
        if given.size != own.size or (adapter.kind != "ia3" and given.shape != own.shape):
            raise DataError(
                f"'{shown(name)}' has shape {list(arrays[name].shape)}, which does not fit the model's layer"
            )
        set_numbers(work, value, np.ascontiguousarray(given.reshape(own.shape)).astype(own.dtype))
    return closed(work, model, out)


def _pairs(adapter: Adapter) -> list[tuple[str, tuple[Adapter, str]]]:
    return [(n, (adapter, w)) for n, w in zip(_peft_names(adapter), adapter.weights, strict=True)]


def _module(name: str) -> str:
    for part in (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B", ".ia3_l"):
        if name.startswith(_PREFIX) and name.endswith(part):
            return name.removeprefix(_PREFIX).removesuffix(part)
    raise DataError(f"'{shown(name)}' is no name of a LoRA or IA3 tensor in PEFT's files")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    path = FilePath(os.fspath(folder))
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        arrays = safetensors.numpy.load_file(path / WEIGHTS)
    except Exception as error:  # json, the file system and safetensors raise their own
        raise DataError(
            f"cannot read an adapter in '{shown(path)}': {shown(error)}; a folder of PEFT holds {CONFIG} and {WEIGHTS}"
        ) from None
    if not isinstance(config, dict):
        raise DataError(f"{CONFIG} in '{shown(path)}' is no table of settings")
    return config, arrays


def _options(config: Mapping[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    peft_type = config.get("peft_type")
    unknown = [key for key in ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern") if config.get(key)]
    if peft_type not in ("LORA", "IA3") or unknown:
        what = f"'{unknown[0]}'" if unknown else f"the type {shown(peft_type)}"
        raise DataError(f"the adapter in '{shown(folder)}' has {what}, which is not supported; LORA and IA3 are")
    if peft_type == "IA3":
        return "ia3", {}
    options = {"rank": int(config["r"]), "alpha": float(config["lora_alpha"]), "dropout": float(config["lora_dropout"])}
    return ("rslora" if config.get("use_rslora") else "lora"), options
