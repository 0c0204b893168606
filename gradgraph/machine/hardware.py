"""The machine at hand, as far as files and forms depend on it.

The environment variable GRADGRAPH_CPU hides features of the processor from gradgraph's own code: so one machine can run
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
# features of x86 processors that kernels are written for, each with those before it, and how the system lists them
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
    """Channels in a block of onnxruntime's NCHWc layout on this processor (16 with AVX512); 0 where it has none."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        model = onnx.parser.parse_model(_PROBE).SerializeToString()
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        blocks = np.asarray(session.run(None, {"x": np.arange(128, dtype=np.float32).reshape(1, 64, 1, 2)})[0])
    except Exception:  # whatever a runtime without that layout says
        return 0
    # [C/block, H·W, block]: the second pixel of channel 0, which is 1, follows the first block of channels
    block = int(np.flatnonzero(blocks.reshape(-1) == 1.0)[0])
    return block if block > 1 else 0


def processor() -> str:
    """The name of the processor, as far as the system tells, and what it is taken for."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    level = hidden_above()
    return f"{name} as {level}" if level else name


def instructions() -> str:
    """The extensions that it has, as the system lists them; empty where it does not."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def levels() -> list[str]:
    """The LEVELS that this processor has, as far as the system tells; the last one is its own."""
    listed, found = set(instructions().split()), []
    for name, features in LEVELS.items():
        if not features <= listed:
            break
        found.append(name)
    return found


def levels_in_use() -> list[str]:
    """The levels that gradgraph's own code uses: those that GRADGRAPH_CPU does not hide, the highest last.

    Raises:
        RuntimeUnavailableError: as ``hidden_above`` does.
    """
    found, highest = levels(), hidden_above()
    return found if highest is None else found[: found.index(highest) + 1]


def hidden_above() -> str | None:
    """The level that GRADGRAPH_CPU names: what is above it is hidden from gradgraph's own code. ``None`` without it.

    Raises:
        RuntimeUnavailableError: there is no such level, or not here.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return None
    if asked in levels():
        return asked
    what = "which this processor lacks" if asked in LEVELS else "which is none of " + ", ".join(LEVELS)
    has = f"let it be {' or '.join(levels())}, or leave it out" if levels() else "leave it out here"
    raise RuntimeUnavailableError(f"the environment variable {VARIABLE} is '{shown(asked)}', {what}; {has}")


@functools.cache
def _cpuinfo(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")
