"""Makes an environment whose onnxruntime does not use AVX512, so that a newer processor can measure the level AVX2.

    python -m benchmarks.without_avx512
    export GRADGRAPH_CPU=avx2 XDG_CACHE_HOME=$PWD/.venv-bench/without-avx512/cache
    .venv-bench/without-avx512/bin/python -m gradgraph native build
    .venv-bench/without-avx512/bin/python -m benchmarks.run --peers gradgraph,gradgraph-native
    .venv-bench/without-avx512/bin/python -m benchmarks.kernels --save

``GRADGRAPH_CPU`` alone would compare our kernels for AVX2 with onnxruntime's for AVX512. onnxruntime has no setting for
it, so the copy of its library in the environment is edited: where it tests the AVX512F bit of CPUID, the jump past
AVX512 becomes unconditional. All other packages are those of this environment. Files in the cache of this environment
would have another block size of the NCHWc layout, so the other one needs a cache of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import onnxruntime

from benchmarks.environments import FOLDER
from benchmarks.peer_processes import ROOT

PLACE = FOLDER / "without-avx512"
# test r32, 1 << 16 (AVX512F in EBX of CPUID leaf 7); je past; …; test al, 0xe0 (the system saves AVX512's registers)
_ASKS = re.compile(rb"(\x41?\xf7[\xc0-\xc7]\x00\x00\x01\x00)\x74(..{0,12}?\xa8\xe0)", re.DOTALL)
_NEVER = b"\\1\xeb\\2"  # jmp


def main() -> None:
    venv.create(PLACE, clear=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(PLACE), "platbase": str(PLACE)}))
    edited = packages / "onnxruntime"
    shutil.copytree(Path(onnxruntime.__file__).parent, edited, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (library,) = (edited / "capi").glob("onnxruntime_pybind11_state*")
    content, count = _ASKS.subn(_NEVER, library.read_bytes())
    library.write_bytes(content)
    if not count or _block_size() != 8:
        sys.exit(f"this build of onnxruntime ({onnxruntime.__version__}) asks for AVX512 in a different way")
    print(f"made {PLACE.relative_to(ROOT)}; see `python -m pydoc benchmarks.without_avx512` for its use")


def _block_size() -> int:
    """Return the block size of the NCHWc layout in the environment's onnxruntime: 8 without AVX512."""
    code = "from gradgraph.machine.hardware import nchwc_block; print(nchwc_block())"
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(PLACE / "bin" / "python"), "-c", code], capture_output=True, text=True, env=variables)
    return int(done.stdout or 0)


if __name__ == "__main__":
    main()
