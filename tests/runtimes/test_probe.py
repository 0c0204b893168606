"""How tables are made: which sizes are left open, which facts are believed, and what is kept of a run that ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from gradgraph.graph.shapes import IR_VERSION, OPSET
from tests.runtimes.condensed import Outcome, rows_of
from tests.runtimes.open_sizes import left_open
from tests.runtimes.outcomes import Kept, outcomes_of
from tests.runtimes.probe_cases import FEW, trials
from tests.runtimes.waiting import lines_of


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]> g {text}')


def shapes(proto: onnx.ModelProto) -> list[list[int | str]]:
    return [[d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] for x in proto.graph.input]


def zeros(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    sizes = zip(proto.graph.input, shapes(proto), strict=True)
    return {x.name: np.zeros([int(s) for s in shape], np.float32) for x, shape in sizes}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "(float[2, 3, 7] x, float[4, 3, 3] w) => (float[2, 4, 5] y) { y = Conv(x, w) }",
            {
                "x[0]": [["n2", 3, 7], [4, 3, 3]],
                "x[1]": [[2, "n3", 7], [4, "n3", 3]],
                "x[2]": [[2, 3, "n7"], [4, 3, 3]],
                "w[0]": [[2, 3, 7], ["n4", 3, 3]],
                "w[2]": [[2, 3, 7], [4, 3, "n3"]],
                "all": [["n2", "n3", "n7"], ["n4", "n3", "n3"]],
            },
        ),
        (
            "(float[2, 3] x, float[2, 1] b) => (float[2, 3] y) { y = Add(x, b) }",  # a size of 1 may be repeated
            {"x[0]": [["n2", 3], ["n2", 1]], "x[1]": [[2, "n3"], [2, 1]], "all": [["n2", "n3"], ["n2", 1]]},
        ),
        (
            "(float[6, 4] x) => (float[3, 4] y, float[3, 4] z) { y, z = Split <num_outputs=2> (x) }",
            {"x[0]": [["n6", 4]], "x[1]": [[6, "n4"]], "all": [["n6", "n4"]]},
        ),
    ],
    ids=["Conv", "Add", "Split"],
)
def test_a_size_is_open_with_those_that_must_be_equal(text: str, expected: dict[str, list[list[int | str]]]) -> None:
    proto = model(text)
    assert {label: shapes(opened) for opened, label in left_open(proto, zeros(proto))} == expected


def outcome(facts: str, kind: str, magnitude: int = 0, label: str = "0") -> Outcome:
    return Outcome("Op", frozenset(facts.split(", ")), magnitude, label, kind, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcomes", "row"),
    [
        (  # the weight's size is the reason, and not that of the data
            [outcome("open, input 1 open", "refused"), outcome("open, input 0 open", "right")],
            {"refused": ["input 1 open"]},
        ),
        (  # ranks are believed only where nothing else tells
            [outcome("rank 3, input 1 negative", "refused"), outcome("rank 2", "right")],
            {"refused": ["input 1 negative"]},
        ),
        (  # wrong numbers are worth three facts
            [outcome("a=1, b=1", "wrong"), outcome("a=1", "right"), outcome("b=1", "right"),
             outcome("a=1, b=1, open", "right")],
            {"wrong": ["a=1 & b=1 & !open"]},
        ),
        (  # an unsigned type that is wrong for large numbers is wrong
            [outcome("T uint64", "right", 0, "all uint64"), outcome("T uint64", "wrong", 31, "T uint64 2^31"),
             outcome("T float32", "right")],
            {"T": "float32", "wrong": ["T uint64"]},
        ),
        ([outcome("open", "refused")], {"refused": ["*"]}),
    ],
)  # fmt: skip
def test_the_facts_that_tell_failures_from_the_rest(outcomes: list[Outcome], row: dict[str, object]) -> None:
    rows, unexplained = rows_of(outcomes)
    assert rows == {"Op": row}
    assert not unexplained


def test_what_is_kept_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list(trials(FEW, ["Relu"]))
    first = outcomes_of("reference", tried, Kept(tmp_path / "kept", "reference 1"))
    assert {o.kind for o in first} == {"right"}
    monkeypatch.setattr("tests.runtimes.outcomes._results", lambda name, missing: iter(["refused"] * len(missing)))
    assert outcomes_of("reference", tried, Kept(tmp_path / "kept", "reference 1")) == first
    newer = outcomes_of("reference", tried, Kept(tmp_path / "kept", "reference 2"))
    assert {o.kind for o in newer} == {"refused"}


@pytest.mark.sweep(0)
def test_a_process_that_hangs_is_ended() -> None:
    program = "import time; print('one', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    lines = lines_of(process, 2)
    assert next(lines) == "one\n"
    with pytest.raises(TimeoutError, match="not done in 2 s"):
        next(lines)
    assert process.poll() is not None
