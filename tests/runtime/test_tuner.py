"""The tuner chooses what is faster here, remembers it, and never chooses what gives other numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.forms import Form
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.rules.named_operators import DOMAIN, OPERATORS
from gradgraph.runtime.execution import tuner as tuner_module
from gradgraph.runtime.execution.session import Placement
from gradgraph.runtime.execution.tuner import Tuner
from tests.kit.convolutions import convolutions, feeds
from tests.kit.running import run

SIZES = {"batch": 3}
KEY = (DOMAIN, "ConvGradWeight")


def slow(op, *inputs, **attrs):  # type: ignore[no-untyped-def]
    """The portable form, with a long detour on the way out."""
    y = OPERATORS["ConvGradWeight"].portable(op, *inputs, **attrs)
    big = op.Expand(op.ReduceSum(y, keepdims=0), [4_000_000])  # not a constant, which onnxruntime would fold
    return y + op.ReduceMax(op.Sin(big), keepdims=0) * 0.0


def fast(op, *inputs, **attrs):  # type: ignore[no-untyped-def]
    return OPERATORS["ConvGradWeight"].portable(op, *inputs, **attrs) * 1.0


def never(op, *inputs, **attrs):  # type: ignore[no-untyped-def]
    return None


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> onnx.ModelProto:
    monkeypatch.setattr(tuner_module, "BUDGET", 0.02)  # seconds; the slow form takes a hundred times as long
    rows = [Form(w.__name__, DOMAIN, "ConvGradWeight", w, lambda call: True, ()) for w in (slow, fast, never)]
    monkeypatch.setitem(ORT_CPU.lowering.forms._rows, KEY, rows)
    return gg.build(convolutions("batch"), "mse", gg.optim.sgd(0.1)).train


def choices(tuner: Tuner) -> set[str]:
    return {v for k, v in tuner.chosen.items() if k.startswith("ConvGradWeight")}


@pytest.mark.sweep(0)
def test_the_slow_form_loses_and_the_choice_is_kept(train: onnx.ModelProto, tmp_path: Path) -> None:
    lines: list[str] = []
    cache = tmp_path / "cache" / "tuned.json"
    tuner = Tuner(ORT_CPU, Placement(("CPUExecutionProvider",)), cache=cache, report=lines.append)
    choose = tuner(train, SIZES)
    assert choices(tuner) <= {"fast", "portable"} and len(choices(tuner)) >= 1
    assert len([line for line in lines if "slow" in line]) == 2  # two kinds of weight gradients
    lowered = for_machine(train, ORT_CPU, SIZES, choose)
    assert "Sin" not in {n.op_type for n in lowered.graph.node}
    given = feeds(train)
    for a, b in zip(run(train, given).values(), run(lowered, given).values(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)

    again = Tuner(ORT_CPU, Placement(("CPUExecutionProvider",)), cache=cache, report=lambda line: pytest.fail(line))
    again(train, SIZES)
    assert again.chosen == tuner.chosen


@pytest.mark.sweep(0)
def test_a_form_that_fails_is_no_candidate(train: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(op, *inputs, **attrs):  # type: ignore[no-untyped-def]
        y = OPERATORS["ConvGradWeight"].portable(op, *inputs, **attrs)
        return y + op.Gather(op.Reshape(y, [-1]), 1_000_000)  # out of range, which onnxruntime sees when it runs

    rows = [Form(w.__name__, DOMAIN, "ConvGradWeight", w, lambda call: True, ()) for w in (failing, slow)]
    monkeypatch.setitem(ORT_CPU.lowering.forms._rows, KEY, rows)
    tuner = Tuner(ORT_CPU, Placement(("CPUExecutionProvider",)))
    tuner(train, SIZES)
    assert choices(tuner) == {"portable"}


def test_the_tables_decide_where_nothing_was_timed(train: onnx.ModelProto) -> None:
    tuner = Tuner(ORT_CPU, Placement(("CPUExecutionProvider",)))
    choose = tuner(train, {})  # the batch is unknown, so nothing can be timed alone
    assert choices(tuner) == set()
    lowered = for_machine(train, ORT_CPU, SIZES, choose)
    assert "Sin" in {n.op_type for n in lowered.graph.node}  # the table's first row


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1, 2]", b'{"x": 3}', json.dumps({"x": {"y": 1}}).encode()])
def test_a_damaged_cache_counts_as_empty(train: onnx.ModelProto, tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "tuned.json"
    cache.write_bytes(content)
    assert Tuner(ORT_CPU, Placement(("CPUExecutionProvider",)), cache=cache).chosen == {}


@pytest.mark.sweep(0)
def test_a_cache_that_cannot_be_written_does_not_matter(train: onnx.ModelProto, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tuner = Tuner(ORT_CPU, Placement(("CPUExecutionProvider",)), cache=tmp_path / "file" / "tuned.json")
    tuner(train, SIZES)
    assert choices(tuner)


@pytest.mark.sweep(0)
def test_a_tuned_trainer_trains_alike(train: onnx.ModelProto) -> None:
    step = gg.build(convolutions("batch"), "mse", gg.optim.sgd(1e-4))
    tuner = Tuner(ORT_CPU, Placement(("CPUExecutionProvider",)))
    plain, tuned = gg.Trainer(step, device="cpu"), gg.Trainer(step, device="cpu", tune=tuner)
    batch = {name: array for name, array in feeds(step.train).items() if name in ("x", "target")}
    for _ in range(3):
        np.testing.assert_allclose(tuned.step(batch)["loss"], plain.step(batch)["loss"], rtol=1e-5)
    assert choices(tuner)
