"""What a runtime can do, found out by running models of one operator in it; writes the table of its backend.

    python -m tests.runtimes.probe openvino             # gradgraph/backends/tables/openvino.toml
    python -m tests.runtimes.probe iree --few --show    # it compiles for long: fewer models; what failed
    python -m tests.runtimes.probe tvm --operators Scan MaxPool --show --dry
    python -m tests.runtimes.probe webgpu --kept found.jsonl    # goes on where it was ended before
    python -m tests.runtimes.probe onnxruntime --installed old  # from `pip install --target old`

The runtime has an environment of its own (`make runtimes`, `make all-runtimes`) and is started as a process, anew
behind each model at which it crashes or takes too long. What it gives is held against onnxruntime, and onnxruntime
against onnx's ReferenceEvaluator.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from gradgraph.backends.capability import TABLES, row_at, tomllib
from tests.runtimes import browsing
from tests.runtimes.condensed import Outcome, rows_of, with_version, written
from tests.runtimes.outcomes import Kept, outcomes_of
from tests.runtimes.probe_cases import FEW, MANY, TYPES, Trial, trials, typed_trials
from tests.runtimes.runtimes import RUNTIMES, Runtime

PACKAGES = {"iree": "iree-base-runtime", "tvm": "apache-tvm", "reference": "onnx"}
BACKENDS = {"onnxruntime": "ort-cpu"}  # where that is not what steps for it are built for
OF_VERSION = ("version", "source", "functions", "opsets", "ir_versions")  # the rest of a table's head is of them all
OPSETS, IR_VERSIONS = range(7, 27), range(3, 14)


def main() -> None:
    given = _arguments()
    if given.installed:  # for the processes that run it; this one keeps what it is installed with
        os.environ["PYTHONPATH"] = os.pathsep.join([str(given.installed.resolve()), os.environ.get("PYTHONPATH", "")])
    runtime = RUNTIMES[given.runtime]
    if missing := runtime.missing():
        sys.exit(missing)
    version = _version(given.runtime, runtime)
    kept = Kept(given.kept, f"{given.runtime} {version}")
    outcomes = _tried(given, kept)
    counts = Counter(o.kind for o in outcomes)
    print(f"{given.runtime}: {len(outcomes)} models: {dict(counts)}")
    if given.show:
        for o in outcomes:
            if o.kind != "right":
                print(f"  {o.operator} {o.label}: {o.kind} {o.words}")
    rows, unexplained = rows_of(outcomes)
    if given.runtime == "onnxruntime":
        rows |= _other_kernels()
    path = TABLES / f"{BACKENDS.get(given.runtime, runtime.backend)}.toml"
    head = _head(given.runtime, version, kept) | {"source": _source(len(outcomes), len(rows), given)}
    if given.runtime == "onnxruntime":
        text = _of_versions(path.read_text(), head, rows, unexplained)
    elif given.operators and path.exists():
        text = _merged(path.read_text(), rows, unexplained)
    else:
        text = written(head, rows, unexplained)
    if given.dry:
        print(text)
    else:
        path.write_text(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtime", choices=[name for name in RUNTIMES if name != "node"])
    parser.add_argument("--few", action="store_true", help="fewer models")
    parser.add_argument("--types", nargs="*", choices=TYPES, help="only these, and the types of the operator's cases")
    parser.add_argument("--operators", nargs="*", default=[], help="only these; the rows of all others stay")
    parser.add_argument("--kept", type=Path, help="a file of outcomes, which are not found out again")
    parser.add_argument("--installed", type=Path, help="a folder with another version of onnxruntime")
    parser.add_argument("--show", action="store_true", help="print what was refused or wrong, and why")
    parser.add_argument("--dry", action="store_true", help="do not write the table")
    return parser.parse_args()


def _tried(given: argparse.Namespace, kept: Kept) -> list[Outcome]:
    """What became of all models."""
    judge = "oracle" if given.runtime == "onnxruntime" else "onnxruntime"
    amount = FEW if given.few else MANY
    if given.types is not None:
        amount = replace(amount, types=given.types)
    tried = list(trials(amount, given.operators, judge))
    outcomes = outcomes_of(given.runtime, tried, kept)
    known = [(trial, outcome.kind == "right") for trial, outcome in zip(tried, outcomes, strict=True)]
    return outcomes + outcomes_of(given.runtime, list(typed_trials(amount, known, judge)), kept)


def _merged(before: str, rows: Mapping[str, Any], unexplained: Sequence[str]) -> str:
    """The table with these rows in place of its own; the rows and remarks of other operators stay."""
    head = tomllib.loads(before)
    others = {name: row for name, row in head.pop("operators").items() if name not in rows}
    remarks = [line.removeprefix("# ") for line in before.splitlines() if line.startswith("# ")]
    remarks = [remark for remark in remarks if remark.split()[0] in others]
    return written(head, dict(sorted({**others, **rows}.items())), sorted([*remarks, *unexplained]))


def _of_versions(before: str, head: Mapping[str, Any], rows: Mapping[str, Any], unexplained: Sequence[str]) -> str:
    """The table of a runtime that users have in several versions, with what was found of this one."""
    table, found = tomllib.loads(before), {key: head[key] for key in OF_VERSION}
    same = next((m for m in table["measured"] if m["version"] == head["version"]), None)
    if same is not None:  # rows of operators that were not tried stay
        old = {op: row_at(row, head["version"]) for op, row in table["operators"].items()}
        rows = {**{op: row for op, row in old.items() if row is not None}, **rows}
    merged = with_version(table, found, rows)
    remarks = [line.removeprefix("# ") for line in before.splitlines() if re.match(r"# \d", line)]
    remarks = [remark for remark in remarks if remark.split()[0] != head["version"]]
    return written(
        {key: value for key, value in merged.items() if key != "operators"},
        merged["operators"],
        sorted([*remarks, *(f"{head['version']} {u}" for u in unexplained)]),
    )


def _other_kernels() -> dict[str, dict[str, Any]]:
    """Operators of onnxruntime's own domains: those that it has registered."""
    program = (
        "from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def as kernels\n"
        "print(*sorted({f'{k.domain}.{k.op_name}' for k in kernels() if k.domain}))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return {name: {} for name in said.split()}


# --- the runtime as a whole -------------------------------------------------------------------------------------


def _source(models: int, operators: int, given: argparse.Namespace) -> str:
    """What was tried, in words."""
    said = f"{models} models of one operator, run in it here"
    if given.operators:
        said += f": of {operators} operators"
    return said if given.types is None else f"{said}; beside float32 the types {', '.join(given.types)}"


def _head(name: str, version: str, kept: Kept) -> dict[str, Any]:
    """All of a table but its rows."""
    models = [*(_relu(o, 10) for o in OPSETS), *(_relu(21, v) for v in IR_VERSIONS), _with_function()]
    ran = _ran(name, models, kept)
    opsets = [o for o, right in zip(OPSETS, ran, strict=False) if right]
    versions = [v for v, right in zip(IR_VERSIONS, ran[len(OPSETS) :], strict=False) if right]
    return {
        "runtime": RUNTIMES[name].title,
        "version": version,
        "source": "",
        "tested": True,
        "complete": False,
        "falls_back": False,
        "functions": ran[-1],
        "opsets": [min(opsets), max(opsets)],
        "ir_versions": [min(versions), max(versions)],
    }


def _version(name: str, runtime: Runtime) -> str:
    if name in browsing.PROVIDERS:
        return str(json.loads((browsing.PACKAGES / "onnxruntime-web" / "package.json").read_text())["version"])
    program = f"import importlib.metadata as m; print(m.version('{PACKAGES.get(name, name)}'))"
    return subprocess.run([runtime.python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _ran(name: str, models: Sequence[onnx.ModelProto], kept: Kept) -> list[bool]:
    """Does each of these, a Relu, run right?"""
    x = np.array([1.0, -1.0], np.float32)
    y = {"y": np.maximum(x, 0)}
    tried = [Trial("Relu", frozenset(), model, {"x": x}, y, "") for model in models]
    return [outcome.kind == "right" for outcome in outcomes_of(name, tried, kept)]


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
