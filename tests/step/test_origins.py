"""Every node of a saved step says where it comes from, and that is all that its metadata change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn
from gradgraph.step.folder import FROZEN_FILE
from gradgraph.step.origins import KEYS, Origins
from tests.kit.lowered_networks import exported

NETWORKS = ["residual", "transformer", "lstm"]


def told(node: onnx.NodeProto) -> dict[str, str]:
    return {p.key.removeprefix("gradgraph."): p.value for p in node.metadata_props if p.key in KEYS}


def built(name: str, **options: Any) -> gg.Step:
    return gg.build(exported(name, "batch"), "cross_entropy", options.pop("optimizer", "adamw"), **options)


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("backend", ["auto", "portable"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_node_says_where_it_comes_from(name: str, backend: str, optimizer: str, tmp_path: Path) -> None:
    step = built(name, backend=backend, optimizer=optimizer)
    step.save(tmp_path / "step")
    train = gg.Step.load(tmp_path / "step").train
    by_name = {node.name: told(node) for node in train.graph.node}
    assert Counter(t["part"] for t in by_name.values()).keys() == {"forward", "loss", "backward", "update"}
    for found in by_name.values():
        if found["part"] == "backward":
            role = by_name.get(found["forward"], {"part": "forward"})["part"]
            assert role == ("loss" if found["forward"].startswith("loss/") else "forward")
    moved = {t["weight"] for t in by_name.values() if "weight" in t}
    assert moved == set(step.manifest.trainable)


def test_a_gradient_has_the_module_of_what_it_is_a_gradient_of(tmp_path: Path) -> None:
    built("residual").save(tmp_path / "step")
    nodes = {n.name: told(n) for n in onnx.load(tmp_path / "step" / "train.onnx").graph.node}
    assert nodes["stem.0/Conv"] == {"part": "forward", "module": "stem.0"}
    gradient = nodes["grad/stem.0/Conv/ConvGradWeight"]
    assert gradient == {"part": "backward", "forward": "stem.0/Conv", "module": "stem.0"}
    assert {"part": "update", "module": "stem.0", "weight": "stem.0.weight"} in nodes.values()


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_but_metadata_is_other_and_little_of_it(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    step = built(name)
    step.save(tmp_path / "with")
    monkeypatch.setattr("gradgraph.step.folder.write_origins", lambda *_: None)
    step.save(tmp_path / "without")
    for file in ("init.onnx", "eval.onnx", "train.onnx", FROZEN_FILE):
        if not (tmp_path / "without" / file).exists():
            continue
        with_, without = ((tmp_path / kind / file).read_bytes() for kind in ("with", "without"))
        if file == "train.onnx":
            model = onnx.ModelProto.FromString(with_)
            for node in model.graph.node:
                kept = [p for p in node.metadata_props if p.key not in KEYS]
                del node.metadata_props[:]
                node.metadata_props.extend(kept)
            assert 0 < len(with_) - len(without) < 140 * len(model.graph.node)
            with_ = model.SerializeToString(deterministic=True)
            without = onnx.ModelProto.FromString(without).SerializeToString(deterministic=True)
        assert with_ == without, file
    assert not any(told(node) for node in step.train.graph.node)  # what was built is as it was


def test_it_is_written_once_and_runs(tmp_path: Path) -> None:
    built("residual").save(tmp_path / "one")
    gg.Step.load(tmp_path / "one").save(tmp_path / "two")
    one, two = ((tmp_path / folder / "train.onnx").read_bytes() for folder in ("one", "two"))
    assert one == two
    ort.InferenceSession(one, providers=["CPUExecutionProvider"])


def test_a_dropout_and_a_module_that_is_called_as_a_part_of_the_step() -> None:
    """Names such as ``loss`` and ``grad`` may be those of modules; a layer that became many nodes is one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss, self.grad, self.drop = nn.Linear(4, 8), nn.Linear(8, 2), nn.Dropout(0.2)

        def forward(self, x: Any) -> Any:
            return self.grad(self.drop(self.loss(x).relu()))

    step = gg.build(frontend.export(Net(), {"x": ("rows", 4)}), "mse", "sgd")
    origins = Origins.of_step(step.manifest, step.eval, step.train)
    found = {node.name: origins(node.name) for node in step.train.graph.node}
    for module in ("grad", "loss"):
        assert (found[f"{module}/Gemm"].role, found[f"{module}/Gemm"].module) == ("forward", module)
    drop = [o for name, o in found.items() if o.role == "forward" and name.startswith("drop/")]
    assert len(drop) > 10 and len({o.node for o in drop}) == 1
    assert {o.forward for o in found.values() if o.role == "backward"} >= {"grad/Gemm", "loss/Gemm"}
    assert all(o.forward for o in found.values() if o.role == "backward")


def test_of_names_too_long_to_stand_in_others(tmp_path: Path) -> None:
    long = [f"{'encoder/' * 12}{'block' * 5}_{i}/MatMul" for i in range(2)]
    graph = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[batch, 4] x) => (float[batch, 4] y) { h = MatMul (x, a) y = MatMul (h, b) }""")
    for node, name, weight in zip(graph.graph.node, long, "ab", strict=True):
        node.name = name
        graph.graph.initializer.append(onnx.helper.make_tensor(weight, 1, (4, 4), [0.1] * 16))
    step = gg.build(graph, "mse", "adam")
    origins = Origins.of_step(step.manifest, step.eval, step.train)
    backward = [o for o in (origins(node.name) for node in step.train.graph.node) if o.role == "backward"]
    assert {o.forward for o in backward} >= set(long)
    assert all(o.forward for o in backward)
