"""What the machine at hand is like, as far as files and forms depend on it."""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path

import numpy as np
import onnx.parser

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
        blocks = session.run(None, {"x": np.arange(128, dtype=np.float32).reshape(1, 64, 1, 2)})[0]
    except Exception:  # whatever a runtime without that layout says
        return 0
    # [C/block, H·W, block]: the second pixel of channel 0, which is 1, follows the first block of channels
    block = int(np.flatnonzero(blocks.reshape(-1) == 1.0)[0])
    return block if block > 1 else 0


def processor() -> str:
    """The name of the processor, as far as the system tells."""
    return _told("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """The extensions that it has, as the system lists them; empty where it does not."""
    return _told("flags") or _told("Features")


@functools.cache
def _told(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")


def cache_folder() -> Path:
    """``gradgraph`` in the user's cache folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "gradgraph"
