"""The settings in ``adapter_config.json``: every field is used, known to have no effect, or rejected by name.

Fields have their meaning in PEFT 0.21. Fields added by later versions are rejected if set.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.documents import Fields
from gradgraph.files.untrusted.regular import reason_of
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.prefix_files import TYPE as PREFIX_TYPE

CONFIG = "adapter_config.json"
# longer patterns, or nested repetition, take time that grows with a high power of a name's length
_REPEATS, _MOST_REPEATS, _LONGEST_PATTERN = re.compile(r".?[*+?{]", re.DOTALL), 3, 500
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Settings:
    """The validated settings of an adapter.

    Attributes:
        all: all fields of the file.
        ranks, alphas: exceptions from ``rank`` and ``alpha``, by pattern of layer names.
        inward: patterns of the IA3 layers whose input is multiplied.
        parameters: the names of the parameters of experts that have adapters (``target_parameters``).
        version: the version of PEFT that wrote the file; empty if it is not recorded.
        blocks, shares: for adapters of packed layers that were joined from several (``Adapter.blocks``), by layer.
    """

    all: Fields
    peft_type: str
    rank: int
    alpha: float
    dropout: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    inward: tuple[str, ...]
    is_dora: bool
    is_rslora: bool
    parameters: tuple[str, ...] = ()
    version: str = ""
    blocks: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def settings_of(table: Fields) -> Settings:
    """Return the settings in ``table``, the untrusted content of ``adapter_config.json``.

    Raises:
        UnreadableError: a field has the wrong type.
    """
    ranks, alphas = table.table("rank_pattern"), table.table("alpha_pattern")
    inward = "feedforward_modules"
    return Settings(
        all=table,
        peft_type=table.text("peft_type", ""),
        rank=table.whole("r", 8, least=1),  # PEFT's own defaults
        alpha=table.number("lora_alpha", 8),
        dropout=table.number("lora_dropout", 0.0),
        ranks={key: ranks.whole(key, least=1) for key in ranks.keys()},  # noqa: SIM118 - not a dict
        alphas={key: alphas.number(key) for key in alphas.keys()},  # noqa: SIM118 - not a dict
        inward=(table.text(inward),) if isinstance(table.value(inward), str) else table.texts(inward, ()),
        is_dora=table.flag("use_dora", False),
        is_rslora=table.flag("use_rslora", False),
        parameters=table.texts("target_parameters", ()),
        version=table.text("peft_version", ""),
    )


# --- supported settings --------------------------------------------------------------------------------------------

_READ = frozenset(
    {"alpha_pattern", "feedforward_modules", "lora_alpha", "lora_dropout", "peft_type", "r"}
    | {"rank_pattern", "target_parameters", "use_dora", "use_rslora"}
    # of prefixes
    | {"num_attention_heads", "num_layers", "num_transformer_submodules", "num_virtual_tokens", "token_dim"}
)
_SAID_BY_TENSORS = frozenset(  # the tensors determine which modules have an adapter or were fully fine-tuned, and how
    {"exclude_modules", "fan_in_fan_out", "layers_pattern", "layers_to_transform", "modules_to_save", "target_modules"}
)
_OF_TRAINING = frozenset(  # initialisation, provenance, hardware: no effect on a trained adapter
    {"auto_mapping", "base_model_name_or_path", "encoder_hidden_size", "eva_config", "inference_mode"}
    | {"init_ia3_weights", "init_weights", "megatron_core", "peft_version", "prefix_projection", "qalora_group_size"}
    | {"revision", "runtime_config", "task_type"}
)
_BEGINNINGS = frozenset({"eva", "gaussian", "orthogonal", "true"})  # initialisations that leave the base unchanged
_IN_THE_BASE = ("corda_config", "loftq_config", "lora_ga_config")  # settings of initialisations that change the base


def check_settings(settings: Settings, where: str) -> str:
    """Return the name of the adapter kind, a key of ``KINDS``, for the settings of a file.

    Raises:
        DataError: the type is not supported; or an unsupported field that may change the result is set.
    """
    kinds = {name.upper(): name for name, kind in KINDS.items() if kind.peft is None} | {"LORA": "lora", "IA3": "ia3"}
    kinds[PREFIX_TYPE] = "prefix"
    found = kinds.get(settings.peft_type)
    if found is None:
        raise DataError(
            f"{where} has the type {shown(settings.peft_type)}, which is not supported; LORA, IA3 and {PREFIX_TYPE} are"
        )
    _check_beginning(settings.all, where)
    harmless = _READ | _SAID_BY_TENSORS | _OF_TRAINING | {"init_lora_weights", *_IN_THE_BASE}
    unknown = [key for key in settings.all.keys() if key not in harmless and _is_set(settings.all.value(key))]  # noqa: SIM118 - not a dict
    if unknown:
        raise DataError(
            f"{where} has {listed(unknown, 3)}, which may change the result and is not supported; merge the adapter "
            "into its model in PEFT (merge_and_unload), and export the merged model"
        )
    if settings.is_dora and settings.is_rslora:
        raise DataError(f"{where} has use_dora and use_rslora, a combination that is not supported; train one of them")
    if found == "lora":
        return "dora" if settings.is_dora else "rslora" if settings.is_rslora else "lora"
    return found


def _is_set(value: Any) -> bool:
    return value not in (None, False, "none") and value not in ([], {}, "")


def _check_beginning(table: Fields, where: str) -> None:
    """Raise DataError if ``init_lora_weights`` is a method that changes the base model's weights on loading."""
    begun = table.value("init_lora_weights")
    if begun in (None, True, False) or str(begun).lower() in _BEGINNINGS:
        return
    remedy = "merge the adapter into its model in PEFT (merge_and_unload), and export the merged model"
    if str(begun).lower().startswith(("corda", "olora", "pissa")):
        remedy = "save it in PEFT with path_initial_model_for_weight_conversion, which makes it plain LoRA"
    raise DataError(
        f"{where} has init_lora_weights '{shown(begun)}', with which PEFT may change the model's own weights, so the "
        f"adapter does not fit the original model; {remedy}"
    )


# --- patterns ------------------------------------------------------------------------------------------------------


def own_number(patterns: Mapping[str, N], module: str, usual: N) -> N:
    """Return the number (a rank or alpha) of the first pattern that matches a module, otherwise ``usual``."""
    return next((n for key, n in patterns.items() if fits(module, [key])), usual)


def exact_pattern(module: str) -> str:
    """Return a pattern that matches the module of this name only."""
    return f"^{re.escape(module)}"


def pattern_of(module: str, others: Iterable[str]) -> str:
    """Return a pattern that matches ``module`` and none of ``others``: its name, if that is unambiguous."""
    is_plain = re.fullmatch(r"[\w.]+", module) is not None
    is_clear = is_plain and not any(other != module and fits(other, [module]) for other in others)
    return module if is_clear else exact_pattern(module)


def fits(module: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a module as in PEFT: as the end of its name after a dot, or as a regular expression."""
    return any(module == p or module.endswith(f".{p}") or _expression(p).fullmatch(module) for p in patterns)


def left_out_by(table: Fields, module: str) -> str | None:
    """Return the field because of which PEFT would not adapt a module; None if it would, or if that is unknown.

    It is unknown for ``"all-linear"``, which depends on the model, and for expressions that could take long to match.
    """
    target = table.value("target_modules")
    if _is_among(module, table.value("exclude_modules")):
        return "exclude_modules"
    if any(f".{saved}." in f".{module}." for saved in _texts(table.value("modules_to_save"))):
        return "modules_to_save"
    if target in (None, "all-linear") or _is_among(module, target) is not False:
        is_in_layers = isinstance(target, str) or module in _texts(target) or _is_in_layers(table, module)
        return None if is_in_layers else "layers_to_transform"
    return "target_modules"


def _is_among(module: str, names: Any) -> bool | None:
    """Whether names, which may be the ends of longer ones, or an expression include a module; None if unknown."""
    if not isinstance(names, str):
        return any(module == name or module.endswith(f".{name}") for name in _texts(names))
    if not names or _is_slow(names):
        return None if names else False
    try:
        return re.fullmatch(names, module) is not None
    except (re.error, RecursionError, OverflowError):
        return None


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _is_in_layers(table: Fields, module: str) -> bool:
    """Whether the number of a module's layer is in ``layers_to_transform``."""
    wanted, patterns = table.value("layers_to_transform"), table.value("layers_pattern")
    if wanted is None or wanted == []:
        return True
    named = [patterns] if isinstance(patterns, str) and patterns else _texts(patterns)
    where = [rf"(?:^|.*?\.){re.escape(each)}" for each in named] or [r".*?\.[^.]*"]
    found = next(filter(None, (re.match(rf"{each}\.([0-9]{{1,9}})\.", module) for each in where)), None)
    return found is not None and int(found[1]) in (wanted if isinstance(wanted, list) else [wanted])


@functools.lru_cache(1024)
def _expression(pattern: str) -> re.Pattern[str]:
    """Return an untrusted regular expression, compiled; raise DataError if matching could take very long."""
    if len(pattern) > _LONGEST_PATTERN or _is_slow(pattern):
        why = "could take very long to match"
    else:
        try:
            return re.compile(rf"(.*\.)?({pattern})")
        except (re.error, RecursionError, OverflowError) as error:
            why = f"is not a regular expression ({reason_of(error)})"
    raise DataError(f"the pattern '{shown(pattern)}' in {CONFIG} {why}; write out the names of the layers instead")


def _is_slow(pattern: str) -> bool:
    """Whether an expression has so many repetitions, or nested ones, that matching could take very long."""
    repeats = _REPEATS.findall(pattern.replace("(?:", "("))
    return len(repeats) > _MOST_REPEATS or any(r.startswith(")") for r in repeats)
