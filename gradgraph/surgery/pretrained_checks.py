"""Checks of weights before they are matched: they must not be quantised, nor contain adapters that are not merged."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from gradgraph.errors import DataError, shown
from gradgraph.surgery.operation import Array

# tensors of quantised layers: GPTQ and AWQ, compressed-tensors, bitsandbytes, HQQ
_QUANTISED = re.compile(r".*\.(qweight|qzeros|weight_packed|SCB|W_q|scale_weight)")
# what belongs to a tensor of the remaining name: scales of FP8, zero points, states of bitsandbytes, scales of MXFP4
_BELONGING = re.compile(r"(.*(?:weight|_proj))(_scale(?:_inv|_2|s)?|_zero_point|\.(?:absmax|quant_\w+)(?:\..*)?)")
_ADAPTERS = frozenset({"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})  # modules of PEFT


def check_plain(tensors: Mapping[str, Array], where: str, own: Collection[str]) -> None:
    """Raise DataError if weights are quantised, or changed by adapters, even if only some of them are to be loaded.

    Args:
        tensors: the weights.
        where: their path, for the message.
        own: names of the model's tensors, which may be scales, integers or adapters themselves.
    """
    for key, array in tensors.items():
        if key in own:
            continue
        if because := _why_quantised(key, array, tensors):
            raise DataError(
                f"'{shown(where)}' contains quantised weights, which are not supported: {because}; save them "
                "dequantised, as float32, float16 or bfloat16"
            )
        owner, _, part = key.rpartition(".")
        is_state = owner in own and part != "weight"  # of the optimizer, such as "lora_A.exp_avg"
        if not is_state and not _ADAPTERS.isdisjoint(key.split(".")):
            raise DataError(
                f"'{shown(where)}' contains an adapter that is not merged ('{shown(key)}')",
                remedy="merge it with PEFT's merge_and_unload, or pass an adapter folder to gg.surgery.load_adapter",
                shell="merge it with PEFT's merge_and_unload, or add an adapter folder with --adapter",
            )


def _why_quantised(key: str, array: Array, tensors: Mapping[str, Array]) -> str:
    """Return why a tensor shows that weights are quantised; "" if it does not."""
    if _QUANTISED.fullmatch(key):
        return f"'{shown(key)}' belongs to a quantised layer"
    found = _BELONGING.fullmatch(key)
    owner = found and next((name for name in (found[1], f"{found[1]}_blocks") if name in tensors), None)
    if owner:
        return f"'{shown(key)}' belongs to '{shown(owner)}'"
    is_small = array.dtype.itemsize == 1 and array.dtype.kind != "b" and array.ndim > 1
    if is_small and (array.dtype.name.startswith("float") or key.endswith(("weight", "_proj"))):
        return f"'{shown(key)}' has dtype {array.dtype}"
    return ""
