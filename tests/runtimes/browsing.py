"""Step folders and models in onnxruntime-web, in headless Chromium.

``in_browser([trains(step_folder, batches), runs(model, feeds)], "wasm")`` gives what each job came to. The providers
are ``wasm``, ``webgpu`` (onnxruntime's own) and ``jsep`` (its predecessor in JavaScript), both on Chromium's software
renderer. One browser serves all jobs of a call, so give it many.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
PACKAGES = HERE.parents[1] / "examples" / "web" / "page" / "node_modules"
BROWSERS = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
AT_ONCE = 100  # models for one browser
PROVIDERS = ("wasm", "webgpu", "jsep")

Tensors = Mapping[str, np.ndarray]


def missing() -> str:
    """What is not installed, and how it is; empty if all is there."""
    if shutil.which("node") is None or not (PACKAGES / "playwright-core").is_dir():
        return "onnxruntime-web is not installed: make browser"
    if not any(Path(b).exists() for b in (os.environ.get("CHROMIUM", ""), *BROWSERS) if b):
        return "Chromium is not installed: apt-get install chromium, or say in CHROMIUM where it is"
    return ""


def trains(step: str | os.PathLike[str], batches: Sequence[Tensors], **options: Any) -> dict[str, Any]:
    """A job: train the step in this folder; gives the list of losses. ``options`` are those of ``load``."""
    return {"folder": Path(step), "batches": [_encoded(batch) for batch in batches], "options": options}


def runs(model: bytes, feeds: Tensors) -> dict[str, Any]:
    """A job: run a model; gives its outputs by name."""
    return {"bytes": model, "feeds": _encoded(feeds)}


def in_browser(jobs: Sequence[Mapping[str, Any]], provider: str, within_s: float = 600) -> list[Any]:
    """What each job gave: losses, outputs, or a RuntimeError with what onnxruntime said."""
    with tempfile.TemporaryDirectory() as folder:
        command = _command(folder, jobs, provider)
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [_result(json.loads(line)) for line in done.stdout.splitlines()]


def one_by_one(jobs: Sequence[Mapping[str, Any]], provider: str, longest_s: float) -> Iterator[Any]:
    """As ``in_browser``; where the browser ends or hangs, that job gives an error, and the next one gets a new one."""
    first = 0
    while first < len(jobs):
        some = jobs[first : first + AT_ONCE]
        for result in _until_it_ends(some, provider, longest_s):
            yield result
            first += 1


def _until_it_ends(jobs: Sequence[Mapping[str, Any]], provider: str, longest_s: float) -> Iterator[Any]:
    """What jobs gave, up to the first at which the browser ends or hangs."""
    from tests.runtimes.waiting import lines_of  # which scripts beside this file need not find

    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            _command(folder, jobs, provider),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        left, why = len(jobs), "the browser ended"
        try:
            for line in lines_of(process, longest_s):
                yield _result(json.loads(line))
                left -= 1
        except TimeoutError as error:
            why = str(error)
        if left:
            yield RuntimeError(why)


def _command(folder: str, jobs: Sequence[Mapping[str, Any]], provider: str) -> list[str]:
    listed = [_laid_out(Path(folder), i, job) for i, job in enumerate(jobs)]
    Path(folder, "jobs.json").write_text(json.dumps(listed))
    return ["node", str(HERE / "browser.mjs"), folder, str(PACKAGES), provider]


def _laid_out(folder: Path, number: int, job: Mapping[str, Any]) -> dict[str, Any]:
    if "folder" in job:
        shutil.copytree(job["folder"], folder / f"step{number}")
        return {"step": f"step{number}", "batches": job["batches"], "options": job["options"]}
    (folder / f"{number}.onnx").write_bytes(job["bytes"])
    return {"model": f"{number}.onnx", "feeds": job["feeds"]}


def _encoded(tensors: Tensors) -> dict[str, Any]:
    return {name: _tensor(np.asarray(value)) for name, value in tensors.items()}


def _tensor(array: np.ndarray) -> dict[str, Any]:
    if array.dtype.kind in "OUS":
        return {"dtype": "str", "dims": array.shape, "bytes": [str(x) for x in array.ravel()]}
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.name, "dims": array.shape, "bytes": content}


def _result(line: Mapping[str, Any]) -> Any:
    if "error" in line:
        return RuntimeError(line["error"])
    if "losses" in line:
        return [float("nan") if x is None else x for x in line["losses"]]
    return {name: _array(**tensor) for name, tensor in line["outputs"].items()}


def _array(dtype: str, dims: Sequence[int], bytes: Any) -> np.ndarray:
    if dtype == "str":
        return np.array(bytes, object).reshape(dims)
    return np.frombuffer(base64.b64decode(bytes), dtype).reshape(dims)


def main(provider: str) -> None:
    """What ``python in_<provider>.py STEP_FOLDER BATCHES.npz`` does: it prints one line for each step."""
    from feeding import read_batches

    [found] = in_browser([trains(sys.argv[1], read_batches(Path(sys.argv[2])))], provider)
    if isinstance(found, RuntimeError):
        sys.exit(str(found).replace("\n", " "))
    for loss in found:
        print(json.dumps({"loss": loss}))
