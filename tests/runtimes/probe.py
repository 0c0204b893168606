"""What a runtime can do, found out by running models of one operator in it; writes the table of its backend.

    PYTHONPATH=tests python -m runtimes.probe openvino             # gradgraph/backends/tables/openvino.toml
    PYTHONPATH=tests python -m runtimes.probe iree --few --show    # it compiles for long: fewer models; what failed
    PYTHONPATH=tests python -m runtimes.probe tvm --operators Scan MaxPool --show --dry

The runtime has an environment of its own (`make runtimes`, `make all-runtimes`) and is started as a process, anew
behind each model at which it crashes or takes too long. What it gives is held against onnxruntime, and onnxruntime
against onnx's ReferenceEvaluator.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state

from gradgraph.backends.capability import FOLDER, tomllib
from runtimes import browsing
from runtimes.condensed import Outcome, rows_of, written
from runtimes.probe_cases import FEW, MANY, RANDOM, Trial, trials, typed_trials
from runtimes.runtimes import HERE, RUNTIMES, Runtime

LONGEST_S = 40.0  # for one model
AT_ONCE = 100  # models for one browser
BROWSERS = {"wasm": ("onnxruntime-web, wasm", "web"), "webgpu": ("onnxruntime-web, WebGPU", "web-gpu")}
PACKAGES = {"iree": "iree-base-runtime", "tvm": "apache-tvm", "reference": "onnx"}
BACKENDS = {"onnxruntime": "ort-cpu", "reference": "reference"}  # where that is not what steps for it are built for
TOLERANCE = {"float16": 2e-2, "bfloat16": 6e-2}
OPSETS, IR_VERSIONS = range(7, 27), range(3, 14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtime", choices=dict.fromkeys([*RUNTIMES, *BROWSERS]))
    parser.add_argument("--few", action="store_true", help="fewer models")
    parser.add_argument("--operators", nargs="*", default=[])
    parser.add_argument("--show", action="store_true", help="print what was refused or wrong, and why")
    parser.add_argument("--dry", action="store_true", help="do not write the table")
    given = parser.parse_args()
    runtime = _runtime(given.runtime)
    if missing := browsing.missing() if given.runtime in BROWSERS else runtime.missing():
        sys.exit(missing)
    judge = "oracle" if given.runtime == "onnxruntime" else "onnxruntime"
    amount = FEW if given.few else MANY
    tried = list(trials(amount, given.operators, judge))
    outcomes = outcomes_of(given.runtime, runtime, tried)
    known = [(trial, outcome.kind == "right") for trial, outcome in zip(tried, outcomes, strict=True)]
    typed = list(typed_trials(amount, known, judge))
    tried, outcomes = tried + typed, outcomes + outcomes_of(given.runtime, runtime, typed)
    counts = Counter(o.kind for o in outcomes)
    print(f"{given.runtime}: {len(tried)} models: {dict(counts)}")
    if given.show:
        for trial, outcome in zip(tried, outcomes, strict=True):
            if outcome.kind != "right":
                print(f"  {trial.operator} {trial.label}: {outcome.kind} {outcome.words}")
    rows, unexplained = rows_of(outcomes)
    if given.runtime == "onnxruntime":
        rows |= _other_kernels()
    text = written(_head(given.runtime, runtime, len(tried)), rows, unexplained)
    path = FOLDER / f"{BACKENDS.get(given.runtime, runtime.backend)}.toml"
    if given.operators and path.exists():  # the rows of all others stay
        before = tomllib.loads(path.read_text())
        head = {key: value for key, value in before.items() if key != "operators"}
        text = written(head, dict(sorted({**before["operators"], **rows}.items())), unexplained)
    if given.dry:
        print(text)
    else:
        path.write_text(text)


def _runtime(name: str) -> Runtime:
    return Runtime(*BROWSERS[name]) if name in BROWSERS else RUNTIMES[name]


def outcomes_of(name: str, runtime: Runtime, tried: Sequence[Trial]) -> list[Outcome]:
    """What became of each model."""
    if name in BROWSERS:
        return _in_browser(name, tried)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number, trial in enumerate(tried):
            _write(folder, number, trial.model, trial.feeds)
        said = dict(run_all(name, runtime, folder, len(tried)))
        return [_outcome(t, said[i], folder / f"{i}.out.npz") for i, t in enumerate(tried)]


def _in_browser(name: str, tried: Sequence[Trial]) -> list[Outcome]:
    outcomes = []
    for first in range(0, len(tried), AT_ONCE):
        some = tried[first : first + AT_ONCE]
        jobs = [browsing.runs(t.model.SerializeToString(), t.feeds) for t in some]
        for trial, result in zip(some, _jobs(jobs, name), strict=True):
            refused = isinstance(result, Exception)
            outcomes.append(_compared(trial, str(result) if refused else "done", {} if refused else result))
    return outcomes


def _jobs(jobs: Sequence[Any], name: str) -> list[Any]:
    """What each gave; where the browser ends or hangs, halves are tried alone."""
    try:
        return browsing.in_browser(jobs, name, within_s=20 + LONGEST_S * len(jobs) / 20)
    except Exception as error:
        if len(jobs) == 1:
            return [error]
        half = len(jobs) // 2
        return _jobs(jobs[:half], name) + _jobs(jobs[half:], name)


def _write(folder: Path, number: int, model: onnx.ModelProto, feeds: Mapping[str, Any]) -> None:
    onnx.save(model, folder / f"{number}.onnx")
    np.savez(folder / f"{number}.npz", **feeds)


def run_all(name: str, runtime: Runtime, folder: Path, count: int) -> Iterator[tuple[int, str]]:
    """Number, and ``done`` or why not, of each model."""
    first = 0
    while first < count:
        command = [str(runtime.python), str(HERE / "probing.py"), name, str(folder), str(first), str(count)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        begun, ended = first, False
        while True:
            try:
                line = lines.get(timeout=LONGEST_S)
            except queue.Empty:
                process.kill()
                yield begun, f"not done in {LONGEST_S:g} s"
                break
            word, _, rest = line.partition(" ")
            if word == "begin":
                begun, ended = int(rest), False
            elif word in ("done", "refused"):
                number, _, why = rest.partition(" ")
                ended = True
                yield int(number), "done" if word == "done" else why.strip() or "refused"
            elif not line:
                if not ended:
                    yield begun, f"it crashed ({process.wait()})"
                break
        process.wait()
        first = begun + 1


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _outcome(trial: Trial, said: str, results: Path) -> Outcome:
    if said != "done":
        return _compared(trial, said, {})
    with np.load(results) as found:
        return _compared(trial, said, dict(found))


def _compared(trial: Trial, said: str, found: Mapping[str, np.ndarray[Any, Any]]) -> Outcome:
    known = trial.operator, trial.facts, trial.magnitude, trial.label
    if said != "done":
        return Outcome(*known, "refused", " ".join(said.split()))
    for name, expected in trial.expected.items():
        if name not in found:
            return Outcome(*known, "wrong", f"gives no {name}, but {', '.join(found)}")
        if trial.operator not in RANDOM and not _close(expected, found[name], _tolerance(trial)):
            return Outcome(*known, "wrong", f"{name}: {_few(found[name])}, not {_few(expected)}")
    return Outcome(*known, "right", "")


def _few(array: np.ndarray[Any, Any]) -> str:
    return f"{array.shape} {np.asarray(array).ravel()[:4].tolist()}"


def _tolerance(trial: Trial) -> float:
    """By the least precise type of the node."""
    return max((TOLERANCE.get(fact.split()[-1], 1e-3) for fact in trial.facts), default=1e-3)


def _close(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any], tolerance: float = 1e-3) -> bool:
    if expected.shape != found.shape:
        return False
    if expected.dtype.kind in "iub":
        return bool((expected == found).all())
    a, b = expected.astype(np.float64), found.astype(np.float64)
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=1.0))
    return bool(np.allclose(b, a, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


def _other_kernels() -> dict[str, dict[str, Any]]:
    """Operators of onnxruntime's own domains: those that it has registered."""
    known = onnxruntime_pybind11_state.get_all_opkernel_def()
    return {f"{k.domain}.{k.op_name}": {} for k in sorted(known, key=lambda k: (k.domain, k.op_name)) if k.domain}


# --- the runtime as a whole -------------------------------------------------------------------------------------


def _head(name: str, runtime: Runtime, count: int) -> dict[str, Any]:
    """All of a table but its rows."""
    version = _browser_version() if name in BROWSERS else _version(runtime, PACKAGES.get(name, name))
    models = [*(_relu(o, 10) for o in OPSETS), *(_relu(21, v) for v in IR_VERSIONS), _with_function()]
    ran = _ran(name, runtime, models)
    opsets = [o for o, right in zip(OPSETS, ran, strict=False) if right]
    versions = [v for v, right in zip(IR_VERSIONS, ran[len(OPSETS) :], strict=False) if right]
    return {
        "runtime": runtime.title,
        "version": version,
        "source": f"{count} models of one operator, run in it here",
        "tested": True,
        "complete": False,
        "falls_back": False,
        "functions": ran[-1],
        "opsets": [min(opsets), max(opsets)],
        "ir_versions": [min(versions), max(versions)],
    }


def _version(runtime: Runtime, package: str) -> str:
    program = f"import importlib.metadata as m; print(m.version('{package}'))"
    return subprocess.run([runtime.python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _browser_version() -> str:
    return str(json.loads((browsing.PACKAGES / "onnxruntime-web" / "package.json").read_text())["version"])


def _ran(name: str, runtime: Runtime, models: Sequence[onnx.ModelProto]) -> list[bool]:
    """Does each of these, a Relu, run right?"""
    x = np.array([1.0, -1.0], np.float32)
    y = {"y": np.maximum(x, 0)}
    tried = [Trial("Relu", frozenset(), model, {"x": x}, y, "") for model in models]
    return [outcome.kind == "right" for outcome in outcomes_of(name, runtime, tried)]


def _relu(opset: int, ir_version: int) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [info("x", 1, [2])], [info("y", 1, [2])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def _with_function() -> onnx.ModelProto:
    """Two functions of one operator each, called by name."""
    model = _relu(21, 10)
    model.graph.node[0].domain, model.graph.node[0].op_type = "own", "Ramp"
    opsets = [helper.make_opsetid("", 21)]
    body = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("own", "Ramp", ["a"], ["b"], body, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


if __name__ == "__main__":
    main()
