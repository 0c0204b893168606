"""Profiles: every node that runs is told by the user's node, layer and place; no loop counts twice; the shell."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run as command
from gradgraph.errors import DataError, UnknownNameError
from gradgraph.runtime.execution.profiler import PLACES, Profile, _own_times
from tests.kit.command_line import arrays, mlp
from tests.kit.lowered_networks import batches, exported

ONE = gg.RuntimeOptions(threads=1)


def profile(name: str, backend: str = "auto") -> Profile:
    step = gg.build(exported(name, "batch"), "cross_entropy", "adamw", backend=backend)
    trainer = gg.Trainer(step, device="cpu", options=ONE)
    (batch,) = batches(name, 4, 1)
    before = trainer.state_dict()
    found = trainer.profile(batch, steps=2)
    for key, value in trainer.state_dict().items():
        np.testing.assert_array_equal(value, before[key])
    return found


@pytest.mark.sweep(0.19)
@pytest.mark.parametrize("backend", ["auto", "portable"])
@pytest.mark.parametrize("name", ["residual", "transformer", "lstm"])
def test_every_node_has_its_place(name: str, backend: str) -> None:
    found = profile(name, backend)
    assert {n.place for n in found.nodes} >= {"forward", "loss", "backward", "update"}
    layers = set(found.layers())
    expected = {"residual": "stem.0", "transformer": "layers.layers.0.norm1", "lstm": "head"}[name]
    assert expected in layers
    for n in found.nodes:
        if n.place == "forward":
            assert n.node
        if n.place == "backward" and not n.node:
            assert n.name.startswith("grad/loss/")
    moved = [n for n in found.nodes if n.place == "update" and n.layer]
    assert {n.layer for n in moved} <= layers
    assert len({n.layer for n in moved}) > 1
    assert found.steps == 2


def test_bodies_of_loops_are_counted_once() -> None:
    """Of a Scan that takes 10, two nodes within it 3 and 2, and a loop in the second."""
    spans = {"scan": (0, 10), "first": (1, 3), "second": (5, 4), "inner": (6, 1), "behind": (10, 7)}
    events = [{"name": name, "ts": begin, "dur": dur} for name, (begin, dur) in spans.items()]
    found = {event["name"]: own for event, own in _own_times(events[::-1])}
    assert found == {"scan": 3, "first": 3, "second": 3, "inner": 1, "behind": 7}


def test_tables_and_data() -> None:
    found = profile("residual")
    text = str(found)
    for word in ("a step takes", "node of the model", "layer", "stem.0/Conv", *PLACES[:4]):
        assert word in text
    assert "stem.0/Conv" in found._repr_html_()
    assert len(found.table(most=3).splitlines()) < len(text.splitlines())
    data = json.loads(json.dumps(found.as_data()))
    assert set(data) == {"seconds", "steps", "places", "layers", "operators", "nodes"}
    assert sum(data["places"].values()) == pytest.approx(sum(data["operators"].values()))
    assert [n.seconds for n in found.nodes] == sorted((n.seconds for n in found.nodes), reverse=True)


def test_what_it_refuses() -> None:
    trainer = gg.Trainer(gg.build(mlp()), device="cpu")
    with pytest.raises(DataError):
        trainer.profile({"x": np.zeros((2, 5), np.float32)})
    with pytest.raises(DataError):
        trainer.profile(arrays(8), steps=0)
    with pytest.raises(UnknownNameError):
        trainer.profile(arrays(8), momentum=0.5)


def test_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays(64))
    words = ["train", str(tmp_path / "model.onnx"), "--data", str(tmp_path / "train.npz"), "--profile"]
    assert command(words) == 0
    assert "a step takes" in capsys.readouterr().out
    assert command([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["profile"]
    assert {n["layer"] for n in facts["nodes"]} >= {"first", "last"}
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "train.npz"}
