"""The processor of this machine, as far as files and forms depend on it.

The environment variable GRADGRAPH_CPU hides processor features from gradgraph's own code, so that one machine can run
the code of older ones. onnxruntime sees the processor as it is.
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
# x86 features that kernels are written for, each including those before it, and the names that the system lists
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
    """Return the channel block size of onnxruntime's NCHWc layout on this processor (16 with AVX512); 0 if it has
    none.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        model = onnx.parser.parse_model(_PROBE).SerializeToString()
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        blocks = np.asarray(session.run(None, {"x": np.arange(128, dtype=np.float32).reshape(1, 64, 1, 2)})[0])
    except Exception:  # any error of a runtime without that layout
        return 0
    # [C/block, H·W, block]: the second pixel of channel 0, which is 1, follows the first block of channels
    block = int(np.flatnonzero(blocks.reshape(-1) == 1.0)[0])
    return block if block > 1 else 0


def processor() -> str:
    """Return the name of the processor, as far as the system reports it, and the level in use."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    level = hidden_above()
    return f"{name} as {level}" if level else name


def instructions() -> str:
    """Return its instruction-set extensions, as listed by the system; empty if unavailable."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def levels() -> list[str]:
    """Return the LEVELS that this processor supports, as far as the system reports; the last one is the highest."""
    listed, found = set(instructions().split()), []
    for name, features in LEVELS.items():
        if not features <= listed:
            break
        found.append(name)
    return found


def levels_in_use() -> list[str]:
    """Return the levels that gradgraph's own code uses: those that GRADGRAPH_CPU does not hide, the highest last.

    Raises:
        RuntimeUnavailableError: as ``hidden_above`` does.
    """
    found, highest = levels(), hidden_above()
    return found if highest is None else found[: found.index(highest) + 1]


def hidden_above() -> str | None:
    """Return the level in GRADGRAPH_CPU, above which gradgraph's own code uses nothing; ``None`` if it is not set.

    Raises:
        RuntimeUnavailableError: there is no such level, or this processor lacks it.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return None
    if asked in levels():
        return asked
    what = "which this processor lacks" if asked in LEVELS else "which is none of " + ", ".join(LEVELS)
    has = f"set it to {' or '.join(levels())}, or unset it" if levels() else "unset it here"
    raise RuntimeUnavailableError(f"the environment variable {VARIABLE} is '{shown(asked)}', {what}; {has}")


@functools.cache
def _cpuinfo(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")
