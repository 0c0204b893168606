"""The loops of examples/loops: each trains the same step folder and prints Python's losses."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.export import FlatWeights, save_inference

ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "examples" / "loops"
PAGE = ROOT / "docs" / "how-to" / "loops.md"
NODE_MODULES = ROOT / "examples" / "node" / "node_modules"
GO_MODULE = "github.com/yalue/onnxruntime_go"
STRICT = ["-Wall", "-Wextra", "-Werror", "-O1"]

Build = Callable[[Path, Path], list[str]]  # a folder to build in, that of the library; how to start what was built


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    runpy.run_path(str(LOOPS / "make_step.py"))["main"](folder)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shared library of onnxruntime's Python package, under the names that linkers look for."""
    found = sorted((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    if not found:
        pytest.skip("this onnxruntime brings no libonnxruntime.so (in Linux it does)")
    folder = tmp_path_factory.mktemp("library")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(found[0])
    return folder


def program(*names: str) -> str:
    """The first of these programs that is here."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no {' or '.join(names)} on the PATH")
    return found


def made(*command: str, folder: Path, **environment: str) -> None:
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def linked(library: Path) -> list[str]:
    return [f"-L{library}", "-lonnxruntime", f"-Wl,-rpath,{library}"]


def in_python(folder: Path, library: Path) -> list[str]:
    """Return a command that runs with numpy and onnxruntime alone, without onnx, sympy or gradgraph."""
    packages = folder / "packages"
    packages.mkdir()
    for package in (np, ort):
        place = Path(package.__file__).parent
        for part in (place, place.with_name(f"{place.name}.libs")):
            if part.exists():
                (packages / part.name).symlink_to(part)
    return ["env", f"PYTHONPATH={packages}", sys.executable, "-S", str(LOOPS / "plain_loop.py")]


def in_node(folder: Path, library: Path) -> list[str]:
    node = program("node")
    if not (NODE_MODULES / "onnxruntime-node").is_dir():
        pytest.skip("onnxruntime-node is not installed: make node")
    shutil.copy(LOOPS / "train.mjs", folder)
    (folder / "node_modules").symlink_to(NODE_MODULES)
    return [node, str(folder / "train.mjs")]


def in_c(folder: Path, library: Path) -> list[str]:
    made(program("cc", "gcc", "clang"), "-std=c11", *STRICT, str(LOOPS / "train.c"), "-o", "train", *linked(library),
         folder=folder)  # fmt: skip
    return [str(folder / "train")]


def in_cpp(folder: Path, library: Path) -> list[str]:
    made(program("c++", "g++", "clang++"), "-std=c++17", *STRICT, str(LOOPS / "train.cc"), "-o", "train",
         *linked(library), folder=folder)  # fmt: skip
    return [str(folder / "train")]


def in_rust(folder: Path, library: Path) -> list[str]:
    made(program("rustc"), "--edition", "2021", "-D", "warnings", str(LOOPS / "train.rs"), "-L", str(library),
         "-l", "onnxruntime", "-C", f"link-arg=-Wl,-rpath,{library}", folder=folder)  # fmt: skip
    return [str(folder / "train")]


def in_go(folder: Path, library: Path) -> list[str]:
    go = program("go")
    cache = subprocess.run([go, "env", "GOMODCACHE"], capture_output=True, text=True, check=True).stdout.strip()
    versions = sorted(Path(cache, GO_MODULE).parent.glob("onnxruntime_go@v*"))
    if not versions:
        pytest.skip(f"Go's cache of modules has no {GO_MODULE}: go get it once")
    shutil.copy(LOOPS / "train.go", folder)
    (folder / "go.mod").write_text(
        f"module train\ngo 1.19\nrequire {GO_MODULE} v0.0.0\nreplace {GO_MODULE} => {versions[-1]}\n"
    )
    made(go, "build", "-o", "train", folder=folder, GOFLAGS="-mod=mod", GOPROXY="off")
    return ["env", f"ONNXRUNTIME={library / 'libonnxruntime.so'}", str(folder / "train")]


RUN: dict[str, Build] = {
    "plain_loop.py": in_python,
    "train.mjs": in_node,
    "train.c": in_c,
    "train.cc": in_cpp,
    "train.rs": in_rust,
    "train.go": in_go,
}
NOT_RUN = ("Train.java", "train.cs", "train.swift")  # no toolchain or package of theirs where these tests are run


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("file", RUN)
def test_each_loop_trains_as_python_does(file: str, run: Path, library: Path, tmp_path: Path) -> None:
    """To the last digit but one that is printed: compilers may round a sum elsewhere."""
    data = tmp_path / "data"
    shutil.copytree(run, data)
    (tmp_path / "build").mkdir()
    command = RUN[file](tmp_path / "build", library)
    done = subprocess.run([*command, str(data / "step"), str(data)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected, found = (text.split() for text in ((run / "losses.txt").read_text(), done.stdout))
    assert len(found) == len(expected) == 22
    numbers = [[float(word) for word in words if word != "eval"] for words in (expected, found)]
    np.testing.assert_allclose(numbers[1], numbers[0], atol=2e-6)
    flat = FlatWeights.load(data / "weights.bin")  # what it wrote is a trained model
    assert not np.allclose(flat.buffer, FlatWeights.load(run / "weights.bin").buffer)
    save_inference(data / "step", data / "trained.onnx", weights=flat.arrays())
    x = np.fromfile(data / "x.bin", "<f4").reshape(-1, 4)
    session = ort.InferenceSession(data / "trained.onnx", providers=["CPUExecutionProvider"])
    scores = session.run(None, {"x": x})[0]
    assert np.mean(scores.argmax(1) == np.fromfile(data / "target.bin", "<i8")) > 0.85


def test_a_loop_says_what_is_wrong(run: Path, library: Path, tmp_path: Path) -> None:
    command = in_c(tmp_path, library)
    for words, said in ((["no"], "usage"), (["no", "no"], "cannot read no/manifest.json")):
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        assert done.returncode and said in done.stderr
    shutil.copytree(run, tmp_path / "data")
    manifest = tmp_path / "data" / "step" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-200])
    done = subprocess.run([*command, str(tmp_path / "data" / "step"), "."], capture_output=True, text=True)
    assert done.returncode and "manifest.json is cut" in done.stderr


@pytest.mark.sweep(0)
@pytest.mark.parametrize("file", [f for f in RUN if f != "train.go"])
def test_rows_that_do_not_match_are_refused(file: str, run: Path, library: Path, tmp_path: Path) -> None:
    """Not read past their end, which a sanitizer would see in C and C++."""
    data = tmp_path / "data"
    shutil.copytree(run, data)
    (tmp_path / "build").mkdir()
    command = RUN[file](tmp_path / "build", library)
    for name, rows in (("target.bin", 63 * 8), ("target.bin", 16 * 8), ("x.bin", 16 * 16), ("x.bin", 63 * 16 + 3)):
        whole = (data / name).read_bytes()
        (data / name).write_bytes(whole[:rows])
        done = subprocess.run([*command, str(data / "step"), str(data)], capture_output=True, text=True)
        assert done.returncode and "rows" in done.stderr, (name, rows, done.stderr)
        (data / name).write_bytes(whole)


def sanitized(library: Path, folder: Path, compiler: str, source: str, standard: str) -> list[str]:
    command = [compiler, standard, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    done = subprocess.run([*command, str(LOOPS / source), "-o", str(folder / "train"), *linked(library)],
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        pytest.skip("this compiler has no sanitizers")
    return ["env", "ASAN_OPTIONS=detect_leaks=0", str(folder / "train")]


@pytest.mark.sweep(0)
@pytest.mark.parametrize(("source", "standard"), [("train.c", "-std=c11"), ("train.cc", "-std=c++17")])
def test_nothing_is_read_past_its_end(source: str, standard: str, run: Path, library: Path, tmp_path: Path) -> None:
    """Under a sanitizer: a run, files that differ in length, and a manifest that is cut anywhere."""
    compiler = program("gcc", "clang") if source == "train.c" else program("g++", "clang++")
    command = sanitized(library, tmp_path, compiler, source, standard)
    data = tmp_path / "data"
    shutil.copytree(run, data)

    def trained() -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*command, str(data / "step"), str(data)], capture_output=True, text=True)
        assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
        return done

    assert trained().returncode == 0
    (data / "target.bin").write_bytes((data / "target.bin").read_bytes()[: 16 * 8])
    assert trained().returncode
    manifest = data / "step" / "manifest.json"
    text = manifest.read_bytes()
    for place in range(1, len(text) - 2, len(text) // 12):
        manifest.write_bytes(text[:place])
        assert trained().returncode
    for word in (b'"a\\', b'"a\\u12', b'{"a": t', b"[1,", b'{"a', b'{"a" ', b"-"):
        manifest.write_bytes(word)
        assert trained().returncode


def test_the_page_lists_every_loop() -> None:
    """Each with when it was run, or that it was not."""
    rows = dict(re.findall(r"^\| \[`?([\w.]+)`?\]\([^)]*\) .*\| ([^|]*) \|$", PAGE.read_text("utf-8"), re.MULTILINE))
    helpers = {"make_step.py", "json.h", "ort.h"}
    assert rows.keys() == {f.name for f in LOOPS.iterdir() if f.is_file()} - helpers == {*RUN, *NOT_RUN}
    assert {name for name, said in rows.items() if said.startswith("not run")} == {*NOT_RUN}


def test_the_losses_are_those_of_a_trainer(run: Path) -> None:
    """make_step.py itself: a Trainer from the folder gives the first loss that it wrote."""
    x, target = np.fromfile(run / "x.bin", "<f4").reshape(-1, 4), np.fromfile(run / "target.bin", "<i8")
    loss = gg.Trainer(run / "step", device="cpu").step({"x": x[:16], "target": target[:16]})["loss"]
    assert f"{float(loss):.6f}" == (run / "losses.txt").read_text().split()[0]
    trainer, batches = gg.Trainer(run / "step", device="cpu"), [slice(i, i + 16) for i in range(0, 64, 16)]
    for rows in batches * 5:
        trainer.step({"x": x[rows], "target": target[rows]})
    said = (run / "losses.txt").read_text().split()[-1]  # of averages, which are other weights
    found = [trainer.evaluate({"x": x[:16], "target": target[:16]}, averaged=a)["loss"] for a in (True, False)]
    assert f"{found[0]:.6f}" == said
    assert abs(found[1] - found[0]) > 1e-3
