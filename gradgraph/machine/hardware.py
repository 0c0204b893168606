"""Features of this machine's processor on which files and forms depend.

The environment variable GRADGRAPH_CPU hides processor features from gradgraph's own code, so that a machine can run the
code for older ones. onnxruntime still uses all features.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import numpy as np
import onnx.parser

from gradgraph.errors import RuntimeUnavailableError, shown

VARIABLE = "GRADGRAPH_CPU"
# levels of x86 features that kernels are written for, each in addition to those before it; names as in /proc/cpuinfo
LEVELS = {
    "x86-64-v2": {"ssse3", "sse4_2", "popcnt"},
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "amx": {"amx_bf16"},
}

_PROBE = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft.nchwc" : 1]>
probe (float[1, 64, 1, 2] x) => (float[1, 64, 1, 2] y) { y = com.microsoft.nchwc.ReorderInput (x) }"""


@functools.cache
def nchwc_block() -> int:
    """Return the channel block size of onnxruntime's NCHWc layout here, such as 16 with AVX512; 0 if it has none."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        model = onnx.parser.parse_model(_PROBE).SerializeToString()
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        blocks = np.asarray(session.run(None, {"x": np.arange(128, dtype=np.float32).reshape(1, 64, 1, 2)})[0])
    except Exception:  # any error of a runtime without this layout
        return 0
    # [C/block, H·W, block]: the second pixel of channel 0, which is 1, follows the first block of channels
    block = int(np.flatnonzero(blocks.reshape(-1) == 1.0)[0])
    return block if block > 1 else 0


def processor() -> str:
    """Return the name of the processor, or its architecture if unknown, and the level in GRADGRAPH_CPU, if set."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    level = hidden_above()
    return f"{name} as {level}" if level else name


def instructions() -> str:
    """Return the processor's instruction-set extensions as the system names them; an empty string if unknown."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def is_x86() -> bool:
    """Return whether this is an x86 processor, of 32 or 64 bits."""
    return platform.machine().lower() in ("amd64", "i386", "i686", "x86", "x86_64")


def saturates() -> bool:
    """Return whether onnxruntime's sums of 8-bit products may saturate at 16 bits: on x86 processors without VNNI.

    An x86 processor whose instructions are unknown counts as one without.
    """
    return is_x86() and {"avx512_vnni", "avx_vnni"}.isdisjoint(instructions().split())


def levels() -> list[str]:
    """Return the names in LEVELS that this processor supports, as the system reports them; the highest is last."""
    listed, found = set(instructions().split()), []
    for name, features in LEVELS.items():
        if not features <= listed:
            break
        found.append(name)
    return found


def levels_in_use() -> list[str]:
    """Return the levels that gradgraph's own code uses, up to the one in GRADGRAPH_CPU; the highest is last.

    Raises:
        RuntimeUnavailableError: as for :func:`hidden_above`.
    """
    found, highest = levels(), hidden_above()
    return found if highest is None else found[: found.index(highest) + 1]


def hidden_above() -> str | None:
    """Return the level in GRADGRAPH_CPU, the highest that gradgraph's own code uses; ``None`` if it is not set.

    Raises:
        RuntimeUnavailableError: if there is no such level, or this processor does not support it.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return None
    if asked in levels():
        return asked
    fault = "which this processor lacks" if asked in LEVELS else "which is not one of " + ", ".join(LEVELS)
    remedy = f"set it to {' or '.join(levels())}, or unset it" if levels() else "unset it here"
    raise RuntimeUnavailableError(f"the environment variable {VARIABLE} is '{shown(asked)}', {fault}; {remedy}")


@functools.cache
def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")
