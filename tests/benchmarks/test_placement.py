"""The parts of ``benchmarks.placement`` that are ours; the rest needs onnxruntime-gpu (260 MB) and is run by hand."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.placement.__main__ import report
from benchmarks.placement.observed import Observed
from benchmarks.placement.standins import HERE, do_nothing, wanted

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
CLEAN = Observed([("a", "Conv", CUDA), ("b", "Mul", CPU), ("m", "MemcpyFromHost", CUDA)], [], ["b"], ["cuda"], 4, 8, 4)


def test_what_onnxruntime_keeps_on_the_cpu_is_no_stray() -> None:
    text, strays = report(CLEAN)
    assert strays == 0
    assert text.splitlines() == [
        "2 nodes on CUDA, 1 nodes on CPU; 0 in other sessions; 2 on the CPU, or copies, by design",
        "  state and batch in cuda memory; a step copies 4 bytes to the device and 8 back",
        "  4 CUDA graphs launched in 4 steps",
    ]


def test_strays_and_the_copies_for_them_are_named() -> None:
    nodes = [*CLEAN.nodes, ("c", "Det", CPU), ("Memcpy", "MemcpyToHost", CUDA)]
    text, strays = report(replace(CLEAN, nodes=nodes, others=[("d", "Unique", CPU)], graphs="there is a Scan"))
    assert strays == 3
    assert text.splitlines()[2:] == [
        "  there is a Scan",
        "  stray: Det (node 'c')",
        "  stray: MemcpyToHost (node 'Memcpy')",
        "  stray: Unique (node 'd')",
    ]


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("nm") is None, reason="needs g++ and binutils")
def test_functions_that_a_provider_wants_do_nothing_and_succeed(tmp_path: Path) -> None:
    """A provider that wants three functions, one of them by name only, and the libraries made for it."""
    (tmp_path / "wants.cc").write_text(
        'extern "C" { long cublasCreate_v2(void**); long cuLaunch(void**); const char* later = "\\0cudnnCreate"; }\n'
        'extern "C" long go(void** out) { return cublasCreate_v2(out) + cuLaunch(out) + *later; }\n'
    )
    for name in ("cuda", "tensorrt"):
        build(tmp_path / f"libonnxruntime_providers_{name}.so", tmp_path / "wants.cc")
    found = wanted(tmp_path)
    assert found["libcuda.so.1"] >= {"cuLaunch"} and found["libcudnn.so.9"] == {"cudnnCreate"}
    (tmp_path / "made.cc").write_text(do_nothing(["cublasCreate_v2", "cublasDgeam", "mine"], "int mine() {"))
    build(tmp_path / "made.so", tmp_path / "made.cc")
    made, handle = ctypes.CDLL(str(tmp_path / "made.so")), ctypes.c_void_p()
    assert made.cublasCreate_v2(ctypes.byref(handle)) == 0 and handle.value
    assert made.cublasDgeam(None) == 0
    assert not hasattr(made, "mine")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", ["cudnn", "cublas", "cublasLt"])  # cudart.cc needs CUDA's headers
def test_handwritten_stand_ins_compile(name: str, tmp_path: Path) -> None:
    build(tmp_path / "library.so", HERE / f"{name}.cc")
    ctypes.CDLL(str(tmp_path / "library.so"))


def build(library: Path, source: Path) -> None:
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
